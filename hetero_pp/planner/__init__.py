"""Chooses groups, layers, boundaries and outer rounds that reach a utilization, by prediction."""
