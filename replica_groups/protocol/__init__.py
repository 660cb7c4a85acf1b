"""The rules of rounds, members and failure: what happens goes in, what is to be done comes out. No clock, no I/O."""
