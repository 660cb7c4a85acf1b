"""Simulator: predicts the time and bytes of a topology, without training."""
