"""Planner: chooses groups, layers, boundaries and outer rounds that reach a predicted utilization."""
