"""SparseLoCo in a training loop of your own, with two replicas on one machine.

    torchrun --nproc-per-node 2 --standalone docs/own_loop.py

Between two rounds the replicas do not communicate. On several machines, start torchrun on each, as for any training
with torch.distributed.
"""

import torch
import torch.distributed as dist
from torch import nn

from hetero_pp import SparseLoCo

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)  # the same task for all ranks
teacher = nn.Linear(32, 1, bias=False)
torch.manual_seed(1 + rank)  # each replica draws its own data
model = nn.Sequential(nn.Linear(32, 256, bias=False), nn.Tanh(), nn.Linear(256, 1, bias=False))
inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
outer = SparseLoCo(model, inner, sync_every=10, density=1 / 32, bits=2)

for _ in range(200):
    inputs = torch.randn(64, 32)
    loss = (model(inputs) - teacher(inputs)).square().mean()
    loss.backward()
    inner.step()
    inner.zero_grad()
    if outer.step() and rank == 0 and outer.steps % 50 == 0:
        print(f"step {outer.steps}: loss {loss.item():.4f}")
dist.destroy_process_group()
