"""The interface of a whole replica's trainer, and what engines share: parameters, copies of moments, learning rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hetero_pp.core.tensor_files import Scratch
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.learning_rates import LearningRates

# ---- parameters that an outer round reads and writes, in this process or sharded over ranks ----

Shape = tuple[int, ...]


class ParameterStore(Protocol):
    """Parameters by name. On several ranks, all ranks make every call in the same order."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The whole shape of every parameter."""

    def read(self, name: str, rows: range) -> Tensor:
        """Return these rows of a parameter's current value, fp32; ranks may ask for different rows."""

    def read_gradient(self, name: str) -> Tensor:
        """Return and clear the whole gradient of a parameter; zeros if there is none."""

    def write(self, name: str, whole: Tensor) -> None:
        """Overwrite a parameter; all ranks pass the same whole tensor."""

    def finish_writing(self) -> None:
        """Complete a series of writes."""


class LocalParameters:
    """Parameters in this process. Implements ParameterStore."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}

    def read(self, name: str, rows: range) -> Tensor:
        return self.parameters[name].detach()[rows.start : rows.stop]

    def read_gradient(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        gradient, parameter.grad = parameter.grad, None
        return torch.zeros_like(parameter) if gradient is None else gradient

    @torch.no_grad()
    def write(self, name: str, whole: Tensor) -> None:
        self.parameters[name].copy_(whole)

    def finish_writing(self) -> None:
        """Do nothing: writes take effect immediately."""


# ---- the interface ----


class Engine(ParameterStore, Protocol):
    """A whole replica in one process or on the ranks of one torchrun. Every rank makes every call, in the same order.

    Each rank is given the whole replica's tokens and takes its own share. A replica's training data therefore does not
    depend on its number of ranks. Losses and norms are the whole replica's, on every rank.
    """

    @property
    def done(self) -> int:
        """Number of micro-batches that it has finished. Safe to read from another thread."""

    def follow(self, rates: LearningRates) -> None:
        """Use other learning rates from the next step on."""

    def inner_step(self, tokens: Tensor, step: int) -> tuple[float, float, float]:
        """Take step `step` of the run on tokens [B, L + 1]; return (loss, gradient norm, learning rate)."""

    def remember(self, moments: bool) -> None:
        """Copy what the next steps depend on beside the parameters; copy Adam's moments only if `moments` is set."""

    def undo(self) -> None:
        """Return, between two steps, to the copied state. The caller writes the parameters."""

    def evaluate(self, validation: Sequence[Tensor]) -> float:
        """Return the mean loss over batches [b, L + 1], weighted by rows."""

    def save(self, folder: Path) -> None:
        """Write everything that the next step depends on, including the parameters, to a folder of its own."""

    def load(self, folder: Path) -> None:
        """Resume from a folder that `save` wrote."""


Parameters = Mapping[str, Tensor]  # initial parameters of the whole model by name, fp32


# ---- copies of optimizer states on disk, so that a round can be restarted from its beginning ----

_ON_DISK = object()


class Moments:
    """A copy of the moments, step counts and options of optimizers: on disk, 8 bytes per parameter with AdamW.

    Nothing is copied before `remember`. Later copies replace the first in its place.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        local: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        folder: Path | None = None,
    ) -> None:
        """`local` returns the part of a sharded tensor that this process holds. `folder` holds the copies (Scratch)."""
        self._optimizers = optimizers
        self._local = local
        self._tensors = Scratch(folder)
        self._has_states = False
        self._states: list[dict[Tensor, dict[str, Any]]] = [{} for _ in optimizers]
        """Parameter -> its state, in which `_ON_DISK` stands for a tensor."""
        self._options: list[list[dict[str, Any]]] = []

    @torch.no_grad()
    def remember(self, states: bool = True) -> None:
        """Copy the current state. Without `states`, copy only the options, which are a few numbers."""
        self._options = [
            [{name: self._copy(value, None) for name, value in group.items() if name != "params"} for group in groups]
            for groups in (optimizer.param_groups for optimizer in self._optimizers)
        ]
        self._has_states = states
        if not states:
            return
        for optimizer, kept in zip(self._optimizers, self._states, strict=True):
            for gone in kept.keys() - optimizer.state.keys():
                del kept[gone]
            for parameter, values in optimizer.state.items():
                kept[parameter] = dict(values)
                for name, value in values.items():
                    if isinstance(value, Tensor):
                        self._tensors.keep((id(parameter), name), self._local(value))
                        kept[parameter][name] = _ON_DISK

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copied state; the copy is kept."""
        for optimizer, options in zip(self._optimizers, self._options, strict=True):
            for group, before in zip(optimizer.param_groups, options, strict=True):
                group.update({name: self._copy(value, group.get(name)) for name, value in before.items()})
        if not self._has_states:
            return
        for optimizer, kept in zip(self._optimizers, self._states, strict=True):
            for gone in optimizer.state.keys() - kept.keys():
                del optimizer.state[gone]
            for parameter, values in kept.items():
                state = optimizer.state[parameter]
                for name, value in values.items():
                    if value is _ON_DISK:
                        self._local(state[name]).copy_(self._tensors.read((id(parameter), name)))
                    else:
                        state[name] = value

    def _copy(self, value: Any, room: Any) -> Any:
        """Return a copy of a value: a tensor is copied into `room` if that is a tensor, else into new CPU memory."""
        if not isinstance(value, Tensor):
            return value
        local = self._local(value)
        room = room if isinstance(room, Tensor) else torch.empty_like(local, device="cpu")
        room.copy_(local)
        return room


# ---- learning rates of engines that use torch's schedulers ----


class RateSchedule:
    """Share of the first peak learning rate at each step, by settings that may change during the run."""

    def __init__(self, inner: InnerSettings, total_steps: int | None) -> None:
        self._peak = inner.learning_rate
        self._rates = inner.first_rates(total_steps)

    def share(self, step: int) -> float:
        """Return the share at step `step`, which counts over the run."""
        return self._rates.at(step) / self._peak

    def follow(self, rates: LearningRates, schedulers: Iterable[LRScheduler]) -> None:
        """Use other rates from the next step on; correct the rate that schedulers have already set for that step."""
        self._rates = rates
        for scheduler in schedulers:
            told = [base * self.share(scheduler.last_epoch) for base in scheduler.base_lrs]
            for group, rate in zip(scheduler.optimizer.param_groups, told, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            scheduler._last_lr = told
