"""What joins two neighbouring stages: messages, shaping, the byte ledger, the in-process link."""
