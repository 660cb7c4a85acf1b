"""Outer optimizers around another one: on this rank's rows, or computed by the host for all members alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from hetero_pp.model.transformer import Shapes
from hetero_pp.outer.step import RoundOptimizer
from replica_groups.member.rank_rows import RankRows


class _Wrapped:
    """Does what the wrapped optimizer does. Implements RoundOptimizer."""

    def __init__(self, whole: RoundOptimizer) -> None:
        self.settings, self._whole = whole.settings, whole

    def begin(self, round_: int, weights: Mapping[str, float]) -> None:
        self._whole.begin(round_, weights)

    def needs(self, theta: Mapping[str, Tensor]) -> Shapes:
        return self._whole.needs(theta)

    def rows(self, name: str, shape: tuple[int, ...]) -> range:
        return self._whole.rows(name, shape)

    def take(self, theta: Mapping[str, Tensor], name: str, mean: Tensor) -> None:
        self._whole.take(theta, name, mean)

    def finish(self, theta: Mapping[str, Tensor]) -> None:
        self._whole.finish(theta)

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The state of the wrapped optimizer: of this rank's rows, in host memory."""
        return self._whole.state

    def load(self, state: Mapping[str, Tensor], rounds: int) -> None:
        self._whole.load(state, rounds)


class ByRows(_Wrapped):
    """Works on this rank's rows of theta."""

    def __init__(self, whole: RoundOptimizer, rows: RankRows) -> None:
        super().__init__(whole)
        self._rows = rows

    def needs(self, theta: Mapping[str, Tensor]) -> Shapes:
        return {name: self._rows.shapes[name] for name in theta}

    def rows(self, name: str, shape: tuple[int, ...]) -> range:
        return self._rows.of[name]


class OnHost(_Wrapped):
    """Copies theta to the host one tensor at a time, and back, so that all members get equal bits."""

    def take(self, theta: Mapping[str, Tensor], name: str, mean: Tensor) -> None:
        copies = _TensorCopies(theta)
        super().take(copies, name, mean)
        copies.put_back()

    def finish(self, theta: Mapping[str, Tensor]) -> None:
        copies = _TensorCopies(theta)
        super().finish(copies)
        copies.put_back()


class _TensorCopies(Mapping[str, Tensor]):
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
