"""One stage's share of the model: forward and backward of one micro-batch, without links or schedule.

Shapes: B sequences, L positions, D width. `tokens` are always the ids [B, L + 1]; inputs are all but the last, targets
all but the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hetero_pp.model.inner import InnerSettings, inner_optimizer
from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.model.part_settings import EmbeddingTraining, StageSpec
from hetero_pp.model.transformer import EMBEDDING, Transformer, parameters_of
from hetero_pp.pipeline.coefficients import Symbols
from stages.anchors import Anchors
from stages.boundary import Boundary

_ANCHORS = "anchors."  # prefix of the names of anchors' tensors


class _Followed(torch.autograd.Function):
    """A scalar that stands for the loss after later stages: its gradient at the output [B, L, D] is the one that came.

    `torch.autograd.backward(output, gradient)` would import SymPy to compare two shapes, in half a second.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *of_loss: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


class Stage:
    """Part of the model that computes one micro-batch at a time."""

    def __init__(
        self,
        spec: StageSpec,
        module: Transformer,
        boundary: Boundary,
        inner: InnerSettings,
        total_steps: int | None,
        anchors: Anchors | None = None,
        embedding: EmbeddingTraining = "free",
    ) -> None:
        """Create a stage. `anchors` are those of the boundary before it; `embedding`: see BoundarySettings."""
        self.spec = spec
        self.module = module
        self.boundary = boundary
        self.anchors = anchors
        self.parameters = parameters_of(module)
        basis = boundary.basis if spec.count > 1 else None
        self.optimizer = inner_optimizer(self.parameters, inner, total_steps, basis, embedding)
        self._in_flight: dict[int, tuple[Tensor | None, Tensor]] = {}
        """Received input and output of each micro-batch in flight, which its backward needs."""

    @property
    def device(self) -> torch.device:
        """Device of activations and loss, and of the parameters unless the layers lie on several devices."""
        return self.module.devices[0] if self.module.devices else next(iter(self.parameters.values())).device

    @property
    def follows_embedding(self) -> bool:
        """Whether this stage needs T_perp of an embedding that another stage owns."""
        return self.boundary.basis is not None and not self.spec.is_first

    def split_embedding(self, embedding: Tensor) -> None:
        """Derive T_perp [V, D] from the synchronized token embedding, after every outer round."""
        if self.follows_embedding:
            self.boundary.split(embedding)
        elif self.boundary.basis is not None and EMBEDDING in self.parameters and self.spec.count > 1:
            self.boundary.split(embedding)
            self.optimizer.perpendicular = self.boundary.perpendicular

    def forward(self, micro_batch: int, tokens: Tensor, came: Symbols | None, micro_batches: int) -> Tensor:
        """Run the forward of one micro-batch; return the output [B, L, D], or the loss on the last stage.

        `came` is from the stage before (None on the first). The loss is divided by `micro_batches`.
        """
        received = None
        if came is not None:
            received = self.boundary.decode_activation(came, tokens[:, :-1]).requires_grad_()
        output = self._compute(self._input(received, tokens[:, :-1]), tokens)
        if self.spec.is_last:
            output = output / micro_batches
        self._in_flight[micro_batch] = received, output
        return output.detach()

    def backward(self, micro_batch: int, came: Symbols | None, key: Tensor) -> Symbols | None:
        """Run the backward of one micro-batch; return the message to the stage before (None on the first).

        `came` is from the stage after (None on the last); `key` selects the rounding noise of the message.
        """
        received, output = self._in_flight.pop(micro_batch)
        loss = output
        if came is not None:
            loss = _Followed.apply(output, self.boundary.decode_gradient(came).to(output.dtype))
        loss.backward()
        if received is None or received.grad is None:
            return None
        return self.boundary.encode_gradient(received.grad, key)

    def enter_round(self, round_: int) -> None:
        """Prepare for a round, before its first step and before its evaluation."""
        if self.anchors is not None:
            self.anchors.enter_round(round_)

    def _input(self, received: Tensor | None, tokens: Tensor) -> Tensor:
        if received is None:
            return tokens
        return received if self.anchors is None else self.anchors.add(received, tokens)

    def _compute(self, inputs: Tensor, tokens: Tensor) -> Tensor:
        """Return the output [B, L, D] in the dtype of the products, or the loss on the last stage."""
        return self.module.loss(inputs, tokens[:, 1:]) if self.spec.is_last else self.module(inputs)

    def step(self, step: int, replica_norm: Tensor) -> float:
        """Step the optimizer and the anchors; return the learning rate."""
        if self.anchors is not None:
            self.anchors.step(step)
        return self.optimizer.step(step, replica_norm)

    def follow(self, rates: LearningRates) -> None:
        """Use other learning rates from the next step on."""
        self.optimizer.follow(rates)
        if self.anchors is not None:
            self.anchors.follow(rates)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All optimizers with moments."""
        return self.optimizer.optimizers + ([] if self.anchors is None else self.anchors.optimizer.optimizers)

    def drop(self) -> None:
        """Drop the micro-batches and gradients of an unfinished step."""
        self._in_flight.clear()
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.anchors is not None:
            self.anchors.drop()

    def moments(self) -> dict[str, Tensor]:
        """Return what the next step needs beside the synchronized parameters, as tensors that are still in use.

        These are moments, and the anchors with theirs, by name.
        """
        anchors = {} if self.anchors is None else self.anchors.tensors()
        return self.optimizer.moments() | {f"{_ANCHORS}{name}": tensor for name, tensor in anchors.items()}

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Load the result of `moments`; the embedding has to be split after that. Raises as InnerOptimizer does."""
        own = {name: tensor for name, tensor in moments.items() if not name.startswith(_ANCHORS)}
        self.optimizer.load_moments(own)
        anchors = {name.removeprefix(_ANCHORS): moments[name] for name in moments.keys() - own.keys()}
        if self.anchors is not None:
            self.anchors.load_tensors(anchors)
        elif anchors:
            raise ValueError("found anchors, expected none")

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, came: Symbols | None) -> Tensor:
        """Run a forward without keeping anything; return the output [B, L, D], or the loss on the last stage."""
        inputs = tokens[:, :-1]
        received = None if came is None else self.boundary.decode_activation(came, inputs)
        return self._compute(self._input(received, inputs), tokens)
