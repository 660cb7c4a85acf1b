"""Predicts the time and bytes of a topology; trains nothing."""
