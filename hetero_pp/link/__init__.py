"""Links between neighbouring stages: messages, shaping, the byte ledger, the in-process link."""
