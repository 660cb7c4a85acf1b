"""Metrics, health and traces of a run for its operator, all derived from the run's reports."""
