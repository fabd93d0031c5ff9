"""The autoregressive drafter of the EAGLE-3 type; MTP-1 is its case of one token and one tap."""
