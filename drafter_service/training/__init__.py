"""Training a drafter for a target (paper sections 3.3 and 5.1)."""
