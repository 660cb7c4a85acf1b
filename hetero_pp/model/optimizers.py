"""AdamW, SGD and Muon of torch.optim, without what only torch.compile needs of them: no optimizer is compiled here.

torch wraps their methods for torch.compile. The first call of a wrapper imports torch._dynamo and SymPy, which takes
more than a second of CPU time in each process. The arithmetic is torch's.
"""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer


class _Eager(Optimizer):
    """Optimizer with the methods below the wrappers."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


class AdamW(_Eager, torch.optim.AdamW):
    """AdamW."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class SGD(_Eager, torch.optim.SGD):
    """SGD with or without momentum."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class Muon(_Eager, torch.optim.Muon):
    """Muon, for matrices."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Muon.step))
