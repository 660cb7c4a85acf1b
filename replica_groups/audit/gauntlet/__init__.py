"""Scores of contributions by the loss before and after each is applied (Gauntlet, arXiv:2505.21684)."""
