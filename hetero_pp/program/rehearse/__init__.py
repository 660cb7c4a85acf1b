"""Rehearsals: their start, what they measured, and how it compares with the prediction."""
