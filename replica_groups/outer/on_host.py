"""The outer step of parameters that lie on an accelerator. The host computes it, so that all members get equal bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from hetero_pp.model.transformer import Shapes
from hetero_pp.outer.step import RoundOptimizer


class OnHost:
    """Outer optimizer whose theta is copied to the host one tensor at a time, and back. Implements RoundOptimizer."""

    def __init__(self, whole: RoundOptimizer) -> None:
        self.settings = whole.settings
        self._whole = whole

    def begin(self, round_: int) -> None:
        self._whole.begin(round_)

    def needs(self, theta: Mapping[str, Tensor]) -> Shapes:
        return self._whole.needs(theta)

    def rows(self, name: str, shape: tuple[int, ...]) -> range:
        return self._whole.rows(name, shape)

    def take(self, theta: Mapping[str, Tensor], name: str, mean: Tensor) -> None:
        copies = _Copies(theta)
        self._whole.take(copies, name, mean)
        copies.put_back()

    def finish(self, theta: Mapping[str, Tensor]) -> None:
        copies = _Copies(theta)
        self._whole.finish(copies)
        copies.put_back()

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The state, in host memory."""
        return self._whole.state

    def load(self, state: Mapping[str, Tensor], rounds: int) -> None:
        self._whole.load(state, rounds)


class _Copies(Mapping[str, Tensor]):
    """Copies in host memory, made when they are asked for."""

    def __init__(self, theta: Mapping[str, Tensor]) -> None:
        self._theta = theta
        self._copies: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._copies:
            self._copies[name] = self._theta[name].cpu()
        return self._copies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._theta)

    def __len__(self) -> int:
        return len(self._theta)

    def put_back(self) -> None:
        """Write the copies to the device."""
        for name, copy in self._copies.items():
            self._theta[name].copy_(copy)
