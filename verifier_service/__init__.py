"""Verifying: engines, acceptance, feature projection, the replica."""
