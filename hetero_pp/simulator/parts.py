"""Part of the model that one member owns."""

from __future__ import annotations

import math

from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.model.transformer import EMBEDDING, block_of
from hetero_pp.run.spec import MemberSpec, RunSpec
from hetero_pp.simulator.costs import NOTHING, Part, beside


def part_of(spec: RunSpec, member: MemberSpec) -> Part:
    """Return the part of the model that a member owns."""
    parameters = sum(math.prod(spec.parameter_shapes[name]) for name in member.owned)
    layers = len({block_of(name) for name in member.owned if name.startswith("layers.")})
    predicts = any(name.startswith("lm_head") for name in member.owned)
    own = NOTHING
    if member.stage is not None and member.stage.count > 1 and isinstance(member.replica, ParticipantsReplica):
        own = beside(spec.shape, member.replica.boundary, member.stage.is_first)
    return Part(layers, EMBEDDING in member.owned, predicts, parameters, own)
