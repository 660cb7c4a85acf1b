"""Engines that train a whole replica: plain PyTorch, torchtitan, DeepSpeed; one contract."""
