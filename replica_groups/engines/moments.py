"""Copies of optimizer states on disk, so that a round can be restarted from its beginning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hetero_pp.core.tensor_files import Scratch

_ON_DISK = object()


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class Moments:
    """A copy of the moments, step counts and options of optimizers: on disk, 8 bytes per parameter with AdamW.

    Nothing is copied before `remember`. Later copies replace the first in its place.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], local: Callable[[Tensor], Tensor] = _itself, folder: Path | None = None
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
        self._options = [[self._options_of(group) for group in one.param_groups] for one in self._optimizers]
        self._has_states = states
        if not states:
            return
        for optimizer, kept in zip(self._optimizers, self._states, strict=True):
            for gone in kept.keys() - optimizer.state.keys():
                del kept[gone]
            for parameter, values in optimizer.state.items():
                kept[parameter] = {name: self._keep(parameter, name, value) for name, value in values.items()}

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
                self._put_back(parameter, optimizer.state[parameter], values)

    def _options_of(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: self._copy(value, None) for name, value in group.items() if name != "params"}

    def _copy(self, value: Any, room: Any) -> Any:
        """Return a copy of a value: a tensor is copied into `room` if that is a tensor, else into new CPU memory."""
        if not isinstance(value, Tensor):
            return value
        local = self._local(value)
        room = room if isinstance(room, Tensor) else torch.empty_like(local, device="cpu")
        room.copy_(local)
        return room

    def _keep(self, parameter: Tensor, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        self._tensors.keep((id(parameter), name), self._local(value))
        return _ON_DISK

    def _put_back(self, parameter: Tensor, state: dict[str, Any], kept: dict[str, Any]) -> None:
        for name, value in kept.items():
            if value is _ON_DISK:
                self._local(state[name]).copy_(self._tensors.read((id(parameter), name)))
            else:
                state[name] = value
