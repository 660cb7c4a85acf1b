"""Checks across sections of the YAML.

They are about the topology and its exchange (names, ranks, splits, links, lines, and how long it waits), and about
audits. With `audit.recompute`, every replica's round can be computed again in one process, from its checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from hetero_pp.config.audit import AuditSettings
from hetero_pp.config.lines import EXCHANGE, LAUNCHER, LineSettings, LinkSettings, SiteSettings, check_kind, members_at
from hetero_pp.config.predictions import PlanSettings, SimulateSettings, check_participants
from hetero_pp.config.topology import (
    DEEPSPEED_OWNED,
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
from hetero_pp.core.settings import Duration, NotPartOf, Settings, WhomItConcerns
from hetero_pp.core.units import format_seconds
from hetero_pp.data.settings import DataSettings
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.transformer import ModelSettings, ModelShape
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.store.settings import StoreSettings


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
    members, elsewhere = [*(member for replica in replicas for member in replica.members), EXCHANGE], set[str]()
    for name, site in sites.items():
        key = ("sites", name)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            raise ConfigError(key, f"found the site `{name}`, expected a name of letters, digits, `-` and `_`")
        if name in members:
            raise ConfigError(key, f"found `{name}`, which is a member's name, expected another name for the site")
        check_kind(site.line, kinds, (*key, "line"))
        for named in site.members:
            at = set(members_at([named], members))
            if not at:
                raise ConfigError((*key, "members"), f"found `{named}`, expected members or replicas of this file")
            if both := elsewhere & at:
                raise ConfigError((*key, "members"), f"found {min(both)} at two sites, expected it at one")
            elsewhere |= at


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
        uplink, key = replica.setting(stage, "uplink")
        check_kind(uplink, kinds, (*here, *key), "links")


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


# Complete YAML of a run: the sections of all parts, and the checks across them.


REHEARSAL_SUFFIX = "-rehearsal"
"""End of the name of every rehearsal, so that its folder, its tickets and all that shows it say what it is."""

LONGEST_RUN_NAME = 100
"""Most characters of a run's name. File systems allow 255 for a folder; a number or a suffix may follow the name."""

_RUN_NAME = rf"^[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_RUN_NAME - 1}}}$"


def valid_run_name(value: Any) -> Any:
    """Raise ValueError for a name that is not a valid folder below runs/ on every system; return the value."""
    if isinstance(value, str) and not re.fullmatch(_RUN_NAME, value):
        shown = value if len(value) <= LONGEST_RUN_NAME else f"{value[:20]}... ({len(value)} characters)"
        expected = "expected letters, digits, `-`, `_` and `.`, the first a letter or a digit"
        raise ValueError(f"found `{shown}`, {expected}, at most {LONGEST_RUN_NAME}")
    return value


MOST_GROUPS = 1000  # most groups for which one entry of `replicas` may stand


def counted(entries: Any) -> Any:
    """Expand the entries of `replicas` to one for every possible group.

    `{name: home, count: 2..50}` becomes home-1 to home-50; the run requires the first two. The first takes the position
    of the entry, and the others follow all entries, so every entry keeps its index in the YAML. Raises ValueError for
    an invalid count.
    """
    if not isinstance(entries, list):
        return entries
    found, more = [], []
    for entry in entries:
        if isinstance(entry, dict) and entry.get("count") is not None:
            text = str(entry["count"])
            match = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4}))?", text)
            least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if not least <= most <= MOST_GROUPS or most == 0:
                expected = f"expected a number, or a range such as `0..50`, up to {MOST_GROUPS}"
                raise ValueError(f"found count `{text}`, {expected}")
            own, name = {key: value for key, value in entry.items() if key != "count"}, entry.get("name", "")
            groups = [{**own, "name": f"{name}-{one}", "optional": one > least} for one in range(1, most + 1)]
            found.append(groups[0])
            more += groups[1:]
        else:
            found.append(entry)
    return [*found, *more]


class CheckpointSettings(Settings):
    """Schedule and retention of run checkpoints of the synchronized model."""

    every: Annotated[int, NotPartOf.PAST] = Field(
        10, ge=1, description="rounds between run checkpoints; the last round always has one"
    )
    keep: Annotated[int, NotPartOf.EITHER] = Field(
        2, ge=2, description="number of newest run checkpoints to keep, in addition to the first one of the run"
    )


class StateSettings(Settings):
    """Schedule and location of saved states: each member's own state, which no run checkpoint has."""

    every: Annotated[int | None, NotPartOf.EITHER] = Field(
        None,
        ge=1,
        description="rounds between saved states; by default `checkpoints.every`, with `audit.recompute` 1",
    )
    to: Annotated[Literal["folder", "store"], NotPartOf.EITHER] = Field(
        "folder",
        description="`store`: copy saved states to `store.url` in the background, too, so that "
        "a replacement machine can restore them",
    )
    undo: Annotated[bool, NotPartOf.EITHER] = Field(
        True,
        description="copy Adam's moments at the start of each round (8 bytes per parameter, in a file without a name "
        "in the run's folder), so that a replica can repeat the round. Without it, a replica that repeats a round "
        "continues with its current moments, and a datacenter replica may send twice the difference",
    )


class RestartSettings(Settings):
    """Restarts by `launch` of a process that ends unexpectedly on its machine."""

    count: int = Field(
        3, ge=0, description="restarts per process within `within`; afterwards the run continues without it"
    )
    within: Duration = Field(600.0, gt=0)


class Rehearsal(Settings):
    """Mark of a rehearsal: a run with real links, messages and rounds, and with timed waits in place of compute.

    `hetero-pp rehearse` sets it; no YAML may set it. `outer.rounds` and `inner.steps` of its configuration are those
    that are rehearsed. This section holds those of the run that it stands for. Costs of compute and hardware are those
    of the section `simulate`.
    """

    rounds: int = Field(ge=1, description="outer rounds of the run that is rehearsed")
    steps: int | None = Field(ge=1, description="inner steps a round of that run; null with `inner.seconds`")


class RunConfig(Settings):
    """Configuration of one training run."""

    name: Annotated[
        str,
        BeforeValidator(valid_run_name),
        WithJsonSchema({"type": "string", "pattern": _RUN_NAME}),
        NotPartOf.OUTCOME,
    ] = Field(
        description=f"name of the run's folder under runs/: at most {LONGEST_RUN_NAME} letters, "
        "digits, `-`, `_` and `.`"
    )
    seed: int = Field(0, ge=0)
    threads: Annotated[int, NotPartOf.EITHER] = Field(
        1, ge=1, description="threads per process; results depend on it in the last bits"
    )
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    inner: InnerSettings = InnerSettings()
    outer: OuterSettings
    links: Annotated[dict[str, LinkSettings], NotPartOf.OUTCOME] = Field(
        default_factory=dict, description="kinds of links, by name"
    )
    lines: Annotated[dict[str, LineSettings], NotPartOf.EITHER] = Field(
        default_factory=dict, description="kinds of access lines, by name; all links of a machine share its line"
    )
    sites: Annotated[dict[str, SiteSettings], NotPartOf.EITHER, WhomItConcerns()] = Field(
        default_factory=dict, description="members that share one access line, by name of the site"
    )
    replicas: Annotated[list[ReplicaSettings], BeforeValidator(counted)] = Field(
        [], description="at least one replica, unless `plan` has participants to group"
    )
    exchange: Annotated[ExchangeSettings, NotPartOf.EITHER] = ExchangeSettings()
    audit: Annotated[AuditSettings, NotPartOf.EITHER] = AuditSettings()
    checkpoints: Annotated[CheckpointSettings, NotPartOf.OUTCOME] = CheckpointSettings()
    store: Annotated[StoreSettings, NotPartOf.EITHER] = StoreSettings()
    states: Annotated[StateSettings, NotPartOf.EITHER] = StateSettings()
    restarts: Annotated[RestartSettings, NotPartOf.EITHER] = RestartSettings()
    simulate: Annotated[SimulateSettings, NotPartOf.EITHER] = SimulateSettings()
    plan: Annotated[PlanSettings, NotPartOf.EITHER] = PlanSettings()
    rehearsal: SkipJsonSchema[Rehearsal | None] = None
    """Set by the program. It changes the id of the run, so that a rehearsal cannot be taken for a run."""

    def check(self) -> None:
        """Raise ConfigError for faults across fields. Reads no files."""
        self.inner.check()
        values = self.model.resolve(self.model.vocabulary or 256)
        if not self.replicas and not self.plan.participants:
            raise ConfigError(("replicas",), "found nothing, expected at least one replica")
        check_topology(self.replicas, self.links, values)
        check_lines(self.replicas, self.exchange, self.sites, self.lines)
        check_exchange(self.exchange)
        check_audit(self.audit, self.outer, self.inner, self.data)
        check_participants(self.plan, self.links, self.lines, values.layers)
        if self.states.to == "store" and self.store.url is None:
            raise ConfigError(
                ("states", "to"), "found `store` without a `store.url`, expected `folder`, or a `store.url`, too"
            )
        if self.audit.recompute is not None:
            check_recomputed(self.outer, self.replicas, self.states.undo, self.states.every)
        is_other, instead = self.inner.optimizer != "adamw", f"found `{self.inner.optimizer}`, expected `adamw` with"
        if is_other and self.outer.source == "gradient":
            raise ConfigError(("inner", "optimizer"), f"{instead} method {self.outer.method}")
        if self.outer.overlap and self.inner.steps is None:
            why = "a round's seconds count from its opening"
            found = f"found 1 with `inner.seconds`, expected 0, or `inner.steps`: {why}"
            raise ConfigError(("outer", "overlap"), found)
        for index, replica in enumerate(self.replicas):
            boundary = ("replicas", index, "boundary")
            if isinstance(replica, DatacenterReplica):
                if is_other and replica.engine != "torch":
                    engine = f"the engine `{replica.engine}` of {replica.name}"
                    raise ConfigError(("inner", "optimizer"), f"{instead} {engine}")
            elif self.outer.overlap and replica.boundary.embedding != "free":
                found = f"found `{replica.boundary.embedding}` with `outer.overlap: 1`, expected `free`"
                why = "a round then starts before the embedding is split again"
                raise ConfigError((*boundary, "embedding"), f"{found}: {why}")
            elif self.outer.keep_local and replica.stage_count > 1 and replica.boundary.rank != "full":
                # the embedding is split by values that replicas share, not by local ones
                found = f"found {replica.boundary.rank:g} with `outer.keep_local`, expected `full`"
                raise ConfigError((*boundary, "rank"), found)

    @property
    def states_every(self) -> int:
        """Rounds between saved states (`states`). A run that is audited by recomputation loses no state."""
        return 1 if self.audit.recompute is not None else self.states.every or self.checkpoints.every

    @property
    def rehearsal_name(self) -> str:
        """Name of this run's rehearsal."""
        return self.name[: LONGEST_RUN_NAME - len(REHEARSAL_SUFFIX)] + REHEARSAL_SUFFIX

    def require_grouped(self) -> None:
        """Raise ConfigError if some participants belong to no replica yet, because there is nothing to run."""
        if self.plan.participants:
            raise ConfigError(
                ("plan", "participants"),
                f"found {len(self.plan.participants)} participants without a group, expected none: "
                "`hetero-pp plan --write FILE` groups them",
            )

    def as_rehearsal(self, rounds: int, steps: int) -> RunConfig:
        """Return the rehearsal of this run: at most this many rounds, of at most this many inner steps each.

        It has a name of its own. Nothing is trained, so it needs no weights, audits, scores, store or copies of member
        checkpoints, and a tokenizer only for the size of the vocabulary. Optional replicas are left out, and so are
        parts of `simulate` that do not take place, so that the prediction is for the same members and links. Raises
        ConfigError if all are optional.
        """
        own = Rehearsal(rounds=self.outer.rounds, steps=self.inner.steps)
        shorter = {} if own.steps is None else {"steps": min(steps, own.steps)}
        reads = {} if self.model.vocabulary is None else {"tokenizer": "bytes"}
        needed = [replica for replica in self.replicas if not replica.optional]
        if self.replicas and not needed:
            why = "a rehearsal has only those: set a number, such as `--set replicas.home.count=2`"
            raise ConfigError(("replicas", 0), f"found only optional replicas, expected required ones: {why}")
        weights = "equal" if self.outer.weights == "scores" else self.outer.weights
        absent = {one for replica in self.replicas if replica.optional for one in (replica.name, *replica.members)}
        others = SimulateSettings()
        real = {key: getattr(others, key) for key in ("fleets", "exchange")}
        real["measured"] = {name: cost for name, cost in self.simulate.measured.items() if name not in absent}
        return self.model_copy(
            update={
                "name": self.rehearsal_name,
                "rehearsal": own,
                "replicas": needed,
                "outer": self.outer.model_copy(update={"rounds": min(rounds, own.rounds), "weights": weights}),
                "inner": self.inner.model_copy(update=shorter),
                "model": self.model.model_copy(update={"weights": None}),
                "data": self.data.model_copy(update=reads),
                "audit": AuditSettings(),
                "store": StoreSettings(),
                "states": StateSettings(),
                "simulate": self.simulate.model_copy(update=real),
                "sites": {
                    name: site.model_copy(update={"members": there})
                    for name, site in self.sites.items()
                    if (there := [one for one in site.members if one not in absent])
                },
            }
        )

    def with_absolute_paths(self) -> RunConfig:
        """Return the same configuration with absolute paths, valid from any folder."""
        return self.model_copy(
            update={
                "data": self.data.with_absolute_paths(),
                "model": self.model.with_absolute_paths(),
                "store": self.store.with_absolute_paths(),
            }
        )
