"""The outer round: what brings all replicas back to identical weights."""
