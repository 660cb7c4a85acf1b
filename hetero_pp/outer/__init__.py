"""The outer round, which brings all replicas back to identical weights."""
