"""Recomputation of a replica's round from its checkpoint, and its comparison with what the replica contributed."""
