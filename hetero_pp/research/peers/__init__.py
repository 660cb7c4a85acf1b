"""Published boundary methods that `beyond/boundaries` compares with ours. Only the vectorized trainer has them."""
