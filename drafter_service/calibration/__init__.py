"""Confidence calibration: held-out rounds in, temperatures per regime and position out."""
