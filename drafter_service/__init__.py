"""Drafting: checkpoints, backbone and heads, sessions, the replica, training."""
