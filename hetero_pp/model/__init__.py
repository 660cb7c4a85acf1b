"""The language model, the inner optimizer and its learning rates."""
