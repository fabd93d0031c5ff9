"""Ingress, admission, placement and the lanes that drive verifiers."""
