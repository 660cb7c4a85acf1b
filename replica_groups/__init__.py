"""Replicas of each kind, the exchange of contributions, the outer round."""
