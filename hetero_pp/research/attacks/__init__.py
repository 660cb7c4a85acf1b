"""Attacks of hostile replicas, for tables: each is a short function with its source."""
