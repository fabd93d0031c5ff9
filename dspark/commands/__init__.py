"""Subcommands of `dspark`, one module each."""
