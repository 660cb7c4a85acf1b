"""A whole replica in one process: the uncut model, with its boundaries (if any) as operations inside it.

A crossing has the same arithmetic as two stages and a link (`stages.boundary`). This replica and a group of stages with
the same name, split and boundary therefore compute the same result; only the order of some sums differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hetero_pp.ablations import AblationSettings
from hetero_pp.coefficients import noise_key
from hetero_pp.inner import InnerOptimizer, InnerSettings
from hetero_pp.model import EMBEDDING, AfterLayer, Transformer, next_token_loss, parameters_of
from stages.anchors import Anchors
from stages.boundary import Boundary
from stages.own_parameters import OwnParameters


class WholeReplica:
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
        ablations: AblationSettings | None = None,
        anchors: Sequence[Anchors] = (),
    ) -> None:
        """`anchors`: one per entry of `cuts`, or none."""
        self.name = name
        self.module = module
        self.parameters = parameters_of(module)
        self.optimizer = InnerOptimizer(
            self.parameters, inner, total_steps, None if boundary is None else boundary.basis, ablations
        )
        self.micro_batches = micro_batches
        self.boundary = boundary
        self.anchors = anchors
        self.hops = {layer: hop for hop, layer in enumerate(cuts)}
        self.seed = seed

    def split_embedding(self) -> None:
        """Derive T_perp [V, D] from the synchronised token embedding; called after every outer round."""
        if self.boundary is not None and self.hops:
            self.boundary.split(self.parameters[EMBEDDING])
            self.boundary.discard(self.parameters[EMBEDDING])
            self.optimizer.perpendicular = self.boundary.perpendicular

    def loss(self, tokens: Tensor, step: int = 0, micro_batch: int = 0) -> Tensor:
        """Return the mean cross entropy of tokens [B, L + 1], on any device, with this replica's forward."""
        tokens = tokens.to(self.parameters[EMBEDDING].device)
        if self.boundary is None or not self.hops:
            return whole_loss(self.module, tokens)
        keys = {hop: noise_key(self.seed, self.name, hop, step, micro_batch) for hop in self.hops.values()}

        def after_layer(layer: int, x_BLD: Tensor) -> Tensor:
            hop = self.hops.get(layer)
            return x_BLD if hop is None else self.cross(hop, x_BLD, tokens[:, :-1], keys[hop])

        return whole_loss(self.module, tokens, after_layer)

    def cross(self, hop: int, x_BLD: Tensor, tokens_BL: Tensor, key: Tensor) -> Tensor:
        """Return the input of the next stage; `key` selects the noise of gradient rounding."""
        assert self.boundary is not None
        received = self.boundary.cross(x_BLD, tokens_BL, key)
        return self.anchors[hop].add(received, tokens_BL) if self.anchors else received

    def backward(self, tokens: Tensor, step: int) -> float:
        """Accumulate the gradient of one inner step's batch; return its loss. `step` counts over the whole run."""
        total = 0.0
        for index, micro_batch in enumerate(tokens.chunk(self.micro_batches)):
            loss = self.loss(micro_batch, step, index) / self.micro_batches
            loss.backward()
            total += loss.item()
        return total

    def inner_step(self, tokens: Tensor, step: int) -> tuple[float, float, float]:
        """Run one inner step; return (loss, gradient norm, learning rate)."""
        loss = self.backward(tokens, step)
        norm = self.optimizer.gradient_norm()
        rate = self.optimizer.step(step, norm)
        self.step_own(step)
        return loss, norm.item(), rate

    @property
    def own(self) -> Sequence[OwnParameters]:
        """Parameters that the replica trains beside the synchronised model."""
        return self.anchors

    def enter_round(self, round_: int) -> None:
        """Prepare for a round, before its first step. The evaluation after the round belongs to it."""
        for anchors in self.anchors:
            anchors.enter_round(round_)

    def step_own(self, step: int) -> None:
        """Run an optimizer step of the replica's own parameters, which are not part of the synchronised model."""
        for own in self.own:
            own.step(step)

    def drop(self) -> None:
        """Discard the gradients of an unfinished step."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for own in self.own:
            own.drop()

    def state(self) -> dict[str, Any]:
        """Return everything that the next step after an outer round depends on, as tensors that are still in use."""
        boundary = self.boundary
        return {
            "parameters": {name: parameter.detach() for name, parameter in self.parameters.items()},
            "optimizer": self.optimizer.state(),
            "basis": None if boundary is None else boundary.basis,
            "perpendicular": boundary.perpendicular if boundary is not None and boundary.is_stale else None,
            "own": [own.state() for own in self.own],
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state, in a replica with the same settings."""
        for name, parameter in self.parameters.items():
            parameter.copy_(state["parameters"][name])
        self.optimizer.load(state["optimizer"])
        for own, saved in zip(self.own, state.get("own", ()), strict=True):
            own.load(saved)
        embedding, boundary = self.parameters[EMBEDDING], self.boundary
        if boundary is None or not self.hops:
            return
        if state["basis"] is not None:
            boundary.move(state["basis"].to(embedding.device))
            self.optimizer.basis = boundary.basis
        if state["perpendicular"] is not None:
            boundary.perpendicular = state["perpendicular"].to(embedding.device)
        boundary.split(embedding)  # without `discard`: that was done before it was saved
        self.optimizer.perpendicular = boundary.perpendicular

    @torch.no_grad()
    def evaluate(self, validation: Sequence[Tensor]) -> float:
        """Return the mean loss over batches [b, L + 1], weighted by rows."""
        rows = sum(len(tokens) for tokens in validation)
        return sum(self.loss(tokens).item() * len(tokens) for tokens in validation) / rows


def whole_loss(module: Transformer, tokens: Tensor, after_layer: AfterLayer | None = None) -> Tensor:
    """Return the loss of a model on tokens [B, L + 1]; `after_layer` transforms the output of each layer."""
    return next_token_loss(module(tokens[:, :-1], after_layer), tokens[:, 1:])
