"""Replicas of each kind, the exchange of contributions, and the outer round."""
