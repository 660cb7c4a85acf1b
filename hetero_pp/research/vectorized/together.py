"""Steps of synchronous methods (`outer.source: gradient`): one mean gradient, and the mean of all own steps.

Het-PP (section 2.4) constrains the embedding of a compressed replica between two synchronizations: T_perp is fixed, and
T_S may be kept in the subspace. Equations 3 and 4 then move what the mean of all replicas has outside of the subspace
into T_perp. A synchronous method is read as the special case H = 1: each replica takes one step from the same
parameters by the mean gradient, within its own constraint. The parameters of all replicas are then averaged, as in a
round with outer learning rate 1. Table 4 of the paper leaves this open. A constraint on all replicas would freeze
T_perp, and no constraint would let compressed replicas leave the subspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_pp.config.topology import ParticipantsReplica, ReplicaSettings
from hetero_pp.research.vectorized.replica import TableReplica
from replica_groups.engines.ranks import Ranks


def constraint_of(replica: ReplicaSettings) -> object:
    """Return a key that is equal for replicas that take equal steps from equal parameters and gradients."""
    if isinstance(replica, ParticipantsReplica) and replica.stage_count > 1 and replica.boundary.rank != "full":
        return replica.boundary.rank, replica.boundary.embedding
    return None


@dataclass(frozen=True)
class _Kind:
    """Replicas with one constraint; the first of them steps for all, so one optimizer state is enough."""

    first: int
    """Index over the replicas of all ranks."""
    share: float
    """Share of the replicas."""


class StepsTogether:
    """Steps of the replicas on this rank, together with those on the other ranks."""

    def __init__(self, settings: Sequence[ReplicaSettings], replicas: Sequence[TableReplica], ranks: Ranks) -> None:
        """`settings` are those of all replicas of the run, `replicas` those on this rank."""
        self._replicas, self._ranks, self._count = replicas, ranks, len(settings)
        self._here = ranks.mine(self._count)
        keys = [constraint_of(one) for one in settings]
        self._kinds = [_Kind(keys.index(key), keys.count(key) / self._count) for key in dict.fromkeys(keys)]

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Average the gradients of all replicas, and step.

        All replicas then have the same parameters, and no gradients. Clips by the norm of the mean gradient.
        """
        self._average_gradients()
        steppers = [self._replicas[self._here.index(kind.first)] for kind in self._kinds if kind.first in self._here]
        mean = {name: parameter.grad for name, parameter in self._replicas[0].parameters.items()}
        for replica in steppers:
            for name, parameter in replica.parameters.items():
                gradient = mean[name]
                assert gradient is not None
                parameter.grad = gradient.clone() if len(steppers) > 1 else gradient  # clipped in place
            replica.optimizer.step(step, replica.optimizer.gradient_norm())
        for name, parameter in self._replicas[0].parameters.items():
            stepped = self._mean_step(name)
            for replica in self._replicas:
                replica.parameters[name].copy_(stepped)
            parameter.grad = None

    def _average_gradients(self) -> None:
        """Set the gradients of the first replica here to the mean over all replicas; clear those of the others."""
        first, *others = self._replicas
        for name, parameter in first.parameters.items():
            assert parameter.grad is not None
            for other in others:
                theirs = other.parameters[name].grad
                assert theirs is not None
                parameter.grad += theirs
                other.parameters[name].grad = None
            self._ranks.sum(parameter.grad)
            parameter.grad /= self._count

    def _mean_step(self, name: str) -> Tensor:
        """Return the mean of a parameter over all replicas after their own steps; equal values keep their bits."""
        first, *others = self._kinds
        start = self._stepped(first, name)
        mean = start
        for kind in others:
            mean = mean + (self._stepped(kind, name) - start) * kind.share
        return mean

    def _stepped(self, kind: _Kind, name: str) -> Tensor:
        """Return a kind's parameter after its own step, on every rank."""
        is_here = kind.first in self._here
        own = self._replicas[self._here.index(kind.first) if is_here else 0].parameters[name].detach()
        stepped = own if is_here else torch.empty_like(own)
        self._ranks.broadcast(stepped, self._ranks.owner(kind.first, self._count))
        return stepped
