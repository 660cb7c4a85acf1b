"""Predictions for a YAML: from its topology and machines to times, bytes and memory."""
