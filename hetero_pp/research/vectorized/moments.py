"""Averages of the moments of replicas' inner AdamW: an experiment of DiLoCo (section 6.1).

Only the vectorized trainer has it. Over the network it would triple the bytes, and contributions hold no moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from replica_groups.engines.whole import WholeReplica
from replica_groups.outer.ranks import Ranks

KINDS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def average_moments(replicas: Sequence[WholeReplica], weights: Mapping[str, float], ranks: Ranks) -> None:
    """Replace each moment of each parameter by its weighted mean over the replicas of all ranks."""
    states = [_states(replica) for replica in replicas]
    for name in replicas[0].parameters:
        for kind in KINDS:
            total = torch.zeros_like(states[0][name][kind])
            for replica, own in zip(replicas, states, strict=True):
                total += own[name][kind] * weights[replica.name]
            ranks.sum(total)
            total /= sum(weights.values())
            for own in states:
                own[name][kind].copy_(total)


def _states(replica: WholeReplica) -> dict[str, dict[str, Tensor]]:
    """Return the optimizers' state of each parameter, by the parameter's name."""
    kept = {id(tensor): state for one in replica.optimizer.optimizers for tensor, state in one.state.items()}
    return {name: kept[id(parameter)] for name, parameter in replica.parameters.items()}
