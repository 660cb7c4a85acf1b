"""Boundaries of others, which `beyond/boundaries` sets beside ours. Only the fast path has them."""
