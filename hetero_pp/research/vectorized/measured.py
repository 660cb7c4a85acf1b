"""Measurements during training: similarity of contributions, their size on the wires, and the outer gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch

from hetero_pp.core.errors import ConfigError
from hetero_pp.model.transformer import block_of
from hetero_pp.outer.volume import RoundVolume
from hetero_pp.pseudo_gradient.contribution import BlobAddress, DecodedTensor, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import Selection
from hetero_pp.research.participation import replicas_in
from hetero_pp.research.settings import Every, research_of
from hetero_pp.research.vectorized.outer_gradients import OuterGradients
from hetero_pp.research.vectorized.similarity import Similarities
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.traffic import blob_sizes
from replica_groups.engines.ranks import CPU


class Measured:
    """Measurements at intervals over a run; they do not affect training."""

    def __init__(self, spec: RunSpec, every: Every, device: torch.device = CPU, world: int = 1) -> None:
        """Raises ConfigError if contributions are not visible: they are on other ranks, or gradients are averaged."""
        self._spec, self._every = spec, every
        for name in (f"{kind}_every" for kind in ("similarity", "volume", "outer") if getattr(every, kind) is not None):
            if world > 1:
                raise ConfigError(
                    (name,), f"found {world} ranks, expected one process: `{name}` needs all contributions"
                )
            if spec.config.outer.source == "gradient":
                told = f"found {spec.config.outer.method} with `{name}`, expected one that contributes differences"
                raise ConfigError(("outer", "method"), told)
        if every.volume is not None and device.type != "cpu":
            raise ConfigError(
                ("volume_every",), f"found {device.type}, expected --device cpu, which encodes contributions"
            )
        self.similarity: list[tuple[int, float, float]] = []
        """(round, mean of the cosines of all pairs, their standard deviation)"""
        self.volume: list[tuple[int, float, float, float | None, float]] = []
        """(round, bytes that a replica sends in it with each collective of Volume)"""
        self._blocks = frozenset(map(block_of, spec.parameter_shapes))
        self._alike: Similarities | None = None
        self._volume: RoundVolume | None = None
        self._device = device
        self.outer = None if every.outer is None else OuterGradients(spec.config.outer.compression, every.outer)

    def begin(self, round_: int) -> None:
        """Begin a round; the calls below are about it."""
        self._round = round_
        self._senders: set[str] = set()
        self._alike = Similarities() if _is_due(self._every.similarity, round_) else None
        self._volume = RoundVolume() if _is_due(self._every.volume, round_) else None
        if self.outer is not None:
            self.outer.begin(round_)

    def contribution(self, replica: str, name: str, selection: Selection) -> None:
        """Add a replica's contribution of one parameter, with its size in a blob of its block."""
        if self._volume is not None:
            self._senders.add(replica)
            own = (name, self._spec.parameter_shapes[name], selection)
            address = BlobAddress(self._spec.run, self._round, replica, block_of(name))
            self._volume.contribute(self._size(address, [own]) - self._size(address))

    def parameter(self, name: str, sent: Sequence[DecodedTensor], counted: float) -> None:
        """Add every replica's contribution of one parameter, in the same order every time.

        `counted` is the sum of the weights of the replicas that the round includes.
        """
        shape = self._spec.parameter_shapes[name]
        if self.outer is not None:
            self.outer.parameter(name, counted)
        if self._alike is not None:
            self._alike.add(sent, shape)
        if self._volume is not None and sent:
            self._volume.add(shape, sent)

    def finish(self) -> None:
        if self.outer is not None:
            self.outer.finish()
        if self._alike is not None and (found := self._alike.of_pairs()) is not None:
            self.similarity.append((self._round, *found))
        if self._volume is not None:
            for replica in self._senders:
                for block in self._blocks:
                    self._volume.contribute(self._size(BlobAddress(self._spec.run, self._round, replica, block)))
            if (volume := self._volume.volume()) is not None:
                self.volume.append((self._round, *astuple(volume)))

    def _size(self, address: BlobAddress, tensors: Sequence[tuple[str, tuple[int, ...], Selection]] = ()) -> int:
        return len(encode_blob(address, tensors, self._spec.config.outer.compression))

    def state(self) -> dict[str, Any]:
        outer = {} if self.outer is None else self.outer.state()
        return {"similarity": self.similarity, "volume": self.volume, **outer}

    def load(self, state: Mapping[str, Any]) -> None:
        self.similarity, self.volume = state.get("similarity", []), state.get("volume", [])
        if self.outer is not None:
            self.outer.load(state, self._device)


def contribution_bytes(spec: RunSpec, rounds: int) -> int:
    """Return the bytes of all contributions to the first `rounds` rounds, with averaged moments if there are any."""
    averages = research_of(spec.config).averages_moments
    moments = 8 * sum(map(math.prod, spec.parameter_shapes.values())) if averages else 0
    sizes = {replica: sum(blobs.values()) + moments for replica, blobs in blob_sizes(spec).items()}
    return sum(sizes[replica.name] for round_ in range(1, rounds + 1) for replica in replicas_in(spec.config, round_))


def _is_due(every: int | None, round_: int) -> bool:
    return every is not None and round_ % every == 0
