"""A whole replica of a table's row: the uncut model, with the boundaries of its stages as operations inside it.

A crossing has the same arithmetic as two stages and a link (`stages.boundary`). This replica and a group of stages with
the same name, split and boundary therefore compute the same result; only the order of some sums differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.subspace_optimizer import SubspaceOptimizer
from hetero_pp.model.transformer import EMBEDDING, Transformer
from hetero_pp.pipeline.coefficients import noise_key
from hetero_pp.research.ablations import AblatedBoundary
from hetero_pp.research.peers.peer import Peer
from replica_groups.engines.plain import WholeReplica, whole_loss
from stages.anchors import Anchors
from stages.boundary import Boundary
from stages.own_parameters import OwnParameters


class TableReplica(WholeReplica):
    """A model, its inner optimizer, and its boundaries: `boundary` applies after each layer of `cuts`."""

    def __init__(
        self,
        name: str,
        module: Transformer,
        inner: InnerSettings,
        total_steps: int | None,
        micro_batches: int = 1,
        boundary: Boundary | None = None,
        cuts: Sequence[int] = (),
        seed: int = 0,
        anchors: Sequence[Anchors] = (),
        peer: Peer | None = None,
    ) -> None:
        """`anchors`: one per entry of `cuts`, or none.

        `peer`: a published method's boundaries, used instead of `boundary`.
        """
        super().__init__(name, module, inner, total_steps, micro_batches)
        self.boundary = boundary
        self.anchors = anchors
        self.peer = peer
        self.hops = {layer: hop for hop, layer in enumerate(cuts)}
        self.seed = seed

    @property
    def trains_otherwise(self) -> bool:
        """Whether its inner steps differ from those that its settings determine, because it is hostile."""
        return False

    def split_embedding(self) -> None:
        """Derive T_perp [V, D] from the synchronised token embedding; called after every outer round."""
        if self.boundary is not None and self.hops:
            self.boundary.split(self.parameters[EMBEDDING])
            if isinstance(self.boundary, AblatedBoundary):
                self.boundary.discard(self.parameters[EMBEDDING])
            self.optimizer.perpendicular = self.boundary.perpendicular

    def loss(self, tokens: Tensor, step: int = 0, micro_batch: int = 0) -> Tensor:
        if self.boundary is None or not self.hops:
            return super().loss(tokens, step, micro_batch)
        tokens = tokens.to(self.parameters[EMBEDDING].device)
        keys = {hop: noise_key(self.seed, self.name, hop, step, micro_batch) for hop in self.hops.values()}

        def after_layer(layer: int, x_BLD: Tensor) -> Tensor:
            hop = self.hops.get(layer)
            if hop is None:
                return x_BLD
            return self._cross(hop, x_BLD.float(), tokens[:, :-1], keys[hop]).to(x_BLD.dtype)

        return whole_loss(self.module, tokens, after_layer)

    def _cross(self, hop: int, x_BLD: Tensor, tokens_BL: Tensor, key: Tensor) -> Tensor:
        """Return the next stage's input for an output, both fp32; `key` selects the noise of gradient rounding."""
        assert self.boundary is not None
        if self.peer is not None:
            return self.peer.cross(hop, x_BLD, tokens_BL, key)
        received = self.boundary.cross(x_BLD, tokens_BL, key)
        return self.anchors[hop].add(received, tokens_BL) if self.anchors else received

    def inner_step(self, tokens: Tensor, step: int) -> tuple[float, float, float]:
        found = super().inner_step(tokens, step)
        self.step_own(step)
        return found

    @property
    def own(self) -> list[OwnParameters]:
        """Parameters that the replica trains beside the synchronised model."""
        return [*self.anchors, *([self.peer] if isinstance(self.peer, OwnParameters) else [])]

    def enter_round(self, round_: int) -> None:
        """Prepare for a round, before its first step. The evaluation after the round belongs to it."""
        for anchors in self.anchors:
            anchors.enter_round(round_)

    def step_own(self, step: int) -> None:
        """Run an optimizer step of the replica's own parameters, which are not part of the synchronised model."""
        for own in self.own:
            own.step(step)

    def drop(self) -> None:
        super().drop()
        for own in self.own:
            own.drop()

    def state(self) -> dict[str, Any]:
        boundary = self.boundary
        is_stale = isinstance(boundary, AblatedBoundary) and boundary.is_stale
        return super().state() | {
            "basis": None if boundary is None else boundary.basis,
            "perpendicular": boundary.perpendicular if boundary is not None and is_stale else None,
            "own": [own.state() for own in self.own],
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        for own, saved in zip(self.own, state.get("own", ()), strict=True):
            own.load(saved)
        embedding, boundary = self.parameters[EMBEDDING], self.boundary
        if boundary is None or not self.hops:
            return
        if state["basis"] is not None:
            boundary.move(state["basis"].to(embedding.device))
            if isinstance(self.optimizer, SubspaceOptimizer) and boundary.basis is not None:
                self.optimizer.basis = boundary.basis
        if state["perpendicular"] is not None:
            boundary.perpendicular = state["perpendicular"].to(embedding.device)
        boundary.split(embedding)  # without `discard`: that was done before it was saved
        self.optimizer.perpendicular = boundary.perpendicular
