"""Splitting a model into pipeline stages: subspace, coefficients and the schedule of micro-batches."""
