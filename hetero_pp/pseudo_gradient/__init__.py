"""Contributions of an outer round: error feedback, top-k per chunk, quantiser, and their format."""
