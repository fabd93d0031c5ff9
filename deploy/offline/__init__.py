"""The pair in one process, without Ray or sockets: rounds for evaluation and calibration."""
