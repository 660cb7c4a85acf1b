"""`hetero-pp check`: what a YAML describes, and whether this machine, and the exchange behind a ticket, can run it."""
