"""Load against a running server, and what comes of it. Neither torch nor Ray behind it."""
