"""Engines that train a whole replica behind one interface: plain PyTorch, torchtitan, DeepSpeed."""
