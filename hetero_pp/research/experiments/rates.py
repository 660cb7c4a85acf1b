"""Learning rate of each method: a scale's `rates`, found by its search, apply to rows that set no rate themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.research.settings import ResearchConfig

Method = Literal[
    "adamw_ddp",
    "adamw",
    "diloco",
    "diloco_one_worker",
    "diloco_sgd",
    "diloco_momentum",
    "diloco_adam",
    "diloco_lom",
    "sparseloco",
    "muon",
    "demo",
    "pp_compress",
    "pp_compress_free",
    "het_pp_compress",
    "het_pp_compress_free",
]
"""Methods that have a learning rate of their own.

`adamw` is one worker. `diloco` has Nesterov momentum, `diloco_sgd` none. `pp_compress` has only compressed replicas,
`het_pp_compress` also others. `_free` trains the whole embedding, which Het-PP (2.4) keeps in the subspace.
"""


def method_of(config: ResearchConfig) -> Method:
    """Return the method of a row. It depends on nothing but settings that determine the row's outcome."""
    outer, is_alone = config.outer, len(config.replicas) == 1
    if outer.source == "gradient":
        return "adamw" if is_alone else "adamw_ddp"
    if outer.aggregation == "sign":
        return "demo"
    if config.inner.optimizer == "muon":
        return "muon"
    groups = [one for one in config.replicas if isinstance(one, ParticipantsReplica)]
    if compressed := [one for one in groups if _compresses(config, one)]:
        return _compressed(compressed, len(compressed) == len(config.replicas))
    if outer.compression.memory == "momentum":
        return "diloco_lom"
    if outer.compression.density < 1 and outer.compression.error_feedback_decay > 0:
        return "sparseloco"
    return _diloco(outer, is_alone)


def rate_cell(config: ResearchConfig) -> tuple[str, str]:
    """Return the section and the key of the rate: the outer one of DeMo, whose inner steps are plain SGD of rate 1."""
    return "outer" if method_of(config) == "demo" else "inner", "learning_rate"


def rate_of(config: ResearchConfig) -> float:
    section, key = rate_cell(config)
    return float(getattr(getattr(config, section), key))


def _compresses(config: ResearchConfig, replica: ParticipantsReplica) -> bool:
    """Return whether boundaries lose anything but the digits of their type."""
    boundary = replica.boundary
    return boundary.rank != "full" or boundary.bits is not None or config.research.ablations.peer is not None


def _compressed(replicas: Sequence[ParticipantsReplica], are_all: bool) -> Method:
    if replicas[0].boundary.embedding == "free":
        return "pp_compress_free" if are_all else "het_pp_compress_free"
    return "pp_compress" if are_all else "het_pp_compress"


def _diloco(outer: OuterSettings, is_alone: bool) -> Method:
    if outer.optimizer == "adam":
        return "diloco_adam"
    if outer.momentum == 0:
        return "diloco_sgd"
    if not outer.nesterov:
        return "diloco_momentum"
    return "diloco_one_worker" if is_alone else "diloco"
