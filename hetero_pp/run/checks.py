"""Checks across sections of the YAML.

They are about the topology and its exchange (names, ranks, splits, links, lines, and how long it waits), and about
audits. With `audit.recompute`, every replica's round can be computed again in one process, from its checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hetero_pp.config.audit import AuditSettings
from hetero_pp.config.engine_settings import DEEPSPEED_OWNED
from hetero_pp.config.lines import LineSettings, SiteSettings, check_kind, check_sites
from hetero_pp.config.links import EXCHANGE, LAUNCHER, LinkSettings
from hetero_pp.config.topology import (
    DatacenterReplica,
    ExchangeSettings,
    GraceSettings,
    HangSettings,
    LeaseSettings,
    ParticipantsReplica,
    ReplicaSettings,
    StagesSettings,
)
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_seconds
from hetero_pp.data.settings import DataSettings
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.transformer import ModelShape
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.run.joins import lines_of_members


def check_lines(
    replicas: Sequence[ReplicaSettings],
    exchange: ExchangeSettings,
    sites: Mapping[str, SiteSettings],
    kinds: Mapping[str, LineSettings],
) -> None:
    """Raise ConfigError for unknown kinds of lines, and for invalid members of a site."""
    check_kind(exchange.line, kinds, ("exchange", "line"))
    for index, replica in enumerate(replicas):
        here = ("replicas", index)
        check_kind(replica.line, kinds, (*here, "line"))
        stages = replica.stages if isinstance(replica, ParticipantsReplica) else 0
        if isinstance(stages, StagesSettings):
            check_kind(stages.line, kinds, (*here, "stages", "line"))
        for stage, own in enumerate(stages if isinstance(stages, list) else []):
            check_kind(own.line, kinds, (*here, "stages", stage, "line"))
    check_sites(sites, list(lines_of_members(replicas, exchange)), kinds)


def check_topology(replicas: Sequence[ReplicaSettings], kinds: Mapping[str, LinkSettings], shape: ModelShape) -> None:
    """Raise ConfigError for faults across fields: names, ranks, splits and kinds of links."""
    seen: set[str] = set()
    for index, replica in enumerate(replicas):
        here = ("replicas", index)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", replica.name) or replica.name in (EXCHANGE, LAUNCHER):
            raise ConfigError(
                (*here, "name"),
                f"found `{replica.name}`, expected letters, digits, `-` and `_`, not `{EXCHANGE}` or `{LAUNCHER}`",
            )
        if replica.name in seen:
            raise ConfigError((*here, "name"), f"found a second replica named `{replica.name}`, expected unique names")
        seen.add(replica.name)
        if replica.batch_size % replica.micro_batches:
            raise ConfigError(
                (*here, "micro_batches"),
                f"found {replica.micro_batches}, expected a divisor of batch_size {replica.batch_size}",
            )
        check_kind(replica.uplink, kinds, (*here, "uplink"), "links")
        if isinstance(replica, ParticipantsReplica):
            _check_group(replica, here, kinds, shape.width, shape.layers)
        else:
            _check_engine(replica, here, shape)


_KEYS_OF_ENGINES = {
    ("precision", "torchtitan"): "`torchtitan.precision`",
    ("precision", "deepspeed"): "`deepspeed.bf16`",
    ("recompute", "torchtitan"): "`torchtitan.activation_checkpointing`",
    ("recompute", "deepspeed"): "`none`",
    ("compile", "torchtitan"): "`torchtitan.compile`",
    ("compile", "deepspeed"): "`false`",
}
"""Replacement of each key that only engine `torch` has, by engine."""


def _check_engine(replica: DatacenterReplica, here: tuple[str | int, ...], shape: ModelShape) -> None:
    for (key, engine), instead in _KEYS_OF_ENGINES.items():
        found = getattr(replica, key)
        if replica.engine == engine and found != DatacenterReplica.model_fields[key].default:
            found = str(found).lower()
            raise ConfigError((*here, key), f"found `{found}` with the engine `{engine}`, expected {instead}")
    if replica.engine == "torch" and replica.world > 1:
        raise ConfigError(
            (*here, "engine"), f"found `torch` with {replica.world} ranks, expected `torchtitan` or `deepspeed`"
        )
    if replica.nodes > 1 and replica.rendezvous is None:
        raise ConfigError(
            (*here, "rendezvous"), f"found nothing, expected HOST:PORT for the rendezvous of the {replica.nodes} nodes"
        )
    titan = replica.torchtitan
    if replica.engine == "torchtitan" and replica.world % (titan.tensor_parallel * titan.data_parallel_replicate):
        raise ConfigError(
            (*here, "torchtitan"),
            f"found tensor_parallel {titan.tensor_parallel} and data_parallel_replicate "
            f"{titan.data_parallel_replicate}, expected a product that divides {replica.world} ranks",
        )
    if replica.engine == "torchtitan" and shape.groups % titan.tensor_parallel:
        raise ConfigError(
            (*here, "torchtitan", "tensor_parallel"),
            f"found {titan.tensor_parallel}, expected a divisor of the model's {shape.groups} heads of keys and values",
        )
    rows = replica.batch_size // replica.micro_batches
    if rows % replica.data_parallel:
        raise ConfigError(
            (*here, "batch_size"),
            f"found micro-batches of {rows} sequences, expected a multiple of {replica.data_parallel}: "
            "all ranks take equal parts",
        )
    stage = replica.deepspeed.get("zero_optimization", {}).get("stage", 0)
    if any(replica.deepspeed.get(kind, {}).get("enabled") for kind in ("bf16", "fp16")) and stage == 0:
        raise ConfigError(
            (*here, "deepspeed", "zero_optimization"),
            "found stage 0 with 16 bits, expected 1, 2 or 3: without fp32 master weights replicas cannot be equal",
        )
    for key in DEEPSPEED_OWNED:
        if key in replica.deepspeed:
            raise ConfigError((*here, "deepspeed", key), "found a key that hetero-pp sets itself, expected no such key")


def _check_group(
    replica: ParticipantsReplica,
    here: tuple[str | int, ...],
    kinds: Mapping[str, LinkSettings],
    width: int,
    layers: int,
) -> None:
    count = replica.stage_count
    if not 1 <= count <= layers:
        raise ConfigError((*here, "stages"), f"found {count} stages, expected 1 to the model's {layers} layers")
    split = [one.layers for one in replica.stages] if isinstance(replica.stages, list) else []
    if any(split) and None in split:
        key = (*here, "stages", split.index(None), "layers")
        raise ConfigError(key, "found nothing, expected a number: other stages of this group have one")
    total = sum(map(len, replica.layer_ranges(layers)))
    if total != layers:
        raise ConfigError(
            (*here, "stages"), f"found {total} layers over all stages, expected the model's {layers} layers"
        )
    boundary, anchors = replica.boundary, replica.boundary.anchors
    ranks: dict[tuple[str, ...], int | None] = {("boundary", "rank"): boundary.dimensions(width)}
    if anchors is not None:
        ranks["boundary", "anchors", "rank"] = anchors.dimensions(width)
    for key, rank in ranks.items():
        if rank is not None and rank > width:
            raise ConfigError((*here, *key), f"found {rank}, expected at most the model's width {width}, or `full`")
    hops = replica.link if isinstance(replica.link, list) else [replica.link]
    if isinstance(replica.link, list) and len(hops) != count - 1:
        raise ConfigError((*here, "link"), f"found {len(hops)} entries, expected one per hop: {count - 1}")
    for hop, kind in enumerate(hops):
        check_kind(kind, kinds, (*here, "link", hop) if isinstance(replica.link, list) else (*here, "link"), "links")
    for stage in range(count):
        own = replica.stage_settings(stage)
        if own is not None:
            check_kind(own.uplink, kinds, (*here, "stages", stage, "uplink"), "links")


def check_exchange(exchange: ExchangeSettings) -> None:
    """Raise ConfigError for bounds that contradict each other."""
    windows: dict[str, GraceSettings | LeaseSettings | HangSettings] = {
        "grace": exchange.grace,
        "lease": exchange.lease,
        "hang": exchange.hang,
    }
    for name, window in windows.items():
        if window.least > window.most:
            raise ConfigError(
                ("exchange", name, "least"),
                f"found {format_seconds(window.least)}, expected at most the {format_seconds(window.most)} of "
                f"`exchange.{name}.most`",
            )
    if exchange.grace.most > exchange.limit:
        raise ConfigError(
            ("exchange", "grace", "most"),
            f"found {format_seconds(exchange.grace.most)}, expected at most the {format_seconds(exchange.limit)} of "
            "`exchange.limit`, after which a round closes",
        )
    magnitudes = exchange.magnitudes
    if magnitudes.scale > magnitudes.leave_out:
        raise ConfigError(
            ("exchange", "magnitudes", "scale"),
            f"found {magnitudes.scale:g}, expected at most the {magnitudes.leave_out:g} of "
            "`exchange.magnitudes.leave_out`",
        )


def check_audit(audit: AuditSettings, outer: OuterSettings, inner: InnerSettings, data: DataSettings) -> None:
    """Raise ConfigError for an audit that cannot work with the rest of the configuration."""
    if outer.weights == "scores" and audit.scores is None:
        raise ConfigError(("outer", "weights"), "found `scores` without scores, expected `audit.gauntlet`, too")
    if audit.by == "validators" and not audit.needs_validators:
        raise ConfigError(
            ("audit", "by"), "found nothing to audit, expected `audit.gauntlet` or `audit.recompute`, too"
        )
    if audit.scores is not None:
        try:
            check_scores(outer, inner, data)
        except ConfigError as error:
            expected = "expected `evaluated: 0`, with which only signs are compared"
            raise ConfigError(("audit", "gauntlet"), f"found scores, {expected}: {error.message}") from None


def check_scores(outer: OuterSettings, inner: InnerSettings, data: DataSettings) -> None:
    """Raise ConfigError if contributions cannot be tried on the text of their replicas."""
    if outer.source == "gradient":
        raise ConfigError((), f"with method {outer.method} the gradient of one step tells too little")
    if inner.steps is None:
        raise ConfigError((), "with `inner.seconds` the text that a replica trained on is not known")
    if data.streamed is not None:
        raise ConfigError((), "a validator cannot read a streamed corpus at any place")


_WITH = "with `audit.recompute`"


def check_recomputed(outer: OuterSettings, replicas: Sequence[ReplicaSettings], undo: bool, every: int | None) -> None:
    """Raise ConfigError for settings with which a round does not follow from theta and a member's checkpoint alone."""
    if outer.overlap:
        found = f"found {outer.overlap:g} {_WITH}, expected 0"
        raise ConfigError(("outer", "overlap"), f"{found}: a round then starts before the one before is decided")
    if outer.keep_local:
        found = f"found true {_WITH}, expected false"
        raise ConfigError(("outer", "keep_local"), f"{found}: an excluded replica then starts from its own parameters")
    if outer.source == "gradient":
        found = f"found `{outer.method}` {_WITH}, expected a method that averages differences"
        raise ConfigError(("outer", "method"), f"{found}: a checkpoint for every step would cost more than the step")
    if not undo:
        found = f"found false {_WITH}, expected true"
        raise ConfigError(("states", "undo"), f"{found}: a repeated round would start with other moments")
    if every not in (None, 1):
        found = f"found {every} {_WITH}, expected 1"
        raise ConfigError(("states", "every"), f"{found}: a member that returns begins with its last state, or fresh")
    for index, replica in enumerate(replicas):
        if isinstance(replica, DatacenterReplica) and replica.engine != "torch":
            found = f"found `{replica.engine}` for {replica.name} {_WITH}, expected `torch`"
            why = "the bits of several ranks cannot be computed again in one process"
            raise ConfigError(("replicas", index, "engine"), f"{found}: {why}")
