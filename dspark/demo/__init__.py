"""`dspark demo`: the whole system on this machine, measured against plain decoding."""
