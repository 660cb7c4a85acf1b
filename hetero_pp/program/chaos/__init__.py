"""Faults that are done to a run on purpose, to see what it survives."""
