"""Checks across sections of the YAML.

They are about the topology and its exchange (names, ranks, splits, links, lines, and how long it waits), and about
audits. With `audit.recompute`, every replica's round can be computed again in one process, from its checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic.json_schema import SkipJsonSchema

from hetero_pp.config.audit import AuditSettings
from hetero_pp.config.lines import (
    EXCHANGE,
    LAUNCHER,
    LineSettings,
    LinkSettings,
    Rule,
    SiteSettings,
    members_at,
    of_kind,
    require,
)
from hetero_pp.config.predictions import PlanSettings, SimulateSettings, rules_of_participants
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
from hetero_pp.core.units import format_count, format_seconds
from hetero_pp.data.settings import DataSettings
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.transformer import LAYERS, ModelSettings, ModelShape
from hetero_pp.outer.fragments import Fragments
from hetero_pp.outer.methods import OuterSettings, with_embeddings
from hetero_pp.store.settings import StoreSettings

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")

_KEYS_OF_ENGINES = {
    ("precision", "torchtitan"): "`torchtitan.precision`",
    ("precision", "deepspeed"): "`deepspeed.bf16`",
    ("recompute", "torchtitan"): "`torchtitan.activation_checkpointing`",
    ("recompute", "deepspeed"): "`none`",
    ("compile", "torchtitan"): "`torchtitan.compile`",
    ("compile", "deepspeed"): "`false`",
}
"""Replacement of each key that only engine `torch` has, by engine."""


def _rules_of_lines(
    replicas: Sequence[ReplicaSettings],
    exchange: ExchangeSettings,
    sites: Mapping[str, SiteSettings],
    kinds: Mapping[str, LineSettings],
) -> Iterator[Rule]:
    yield of_kind(exchange.line, kinds, ("exchange", "line"))
    for index, replica in enumerate(replicas):
        here = ("replicas", index)
        yield of_kind(replica.line, kinds, (*here, "line"))
        stages = replica.stages if isinstance(replica, ParticipantsReplica) else 0
        if isinstance(stages, StagesSettings):
            yield of_kind(stages.line, kinds, (*here, "stages", "line"))
        for stage, own in enumerate(stages if isinstance(stages, list) else []):
            yield of_kind(own.line, kinds, (*here, "stages", stage, "line"))
    members, elsewhere = [*(member for replica in replicas for member in replica.members), EXCHANGE], set[str]()
    for name, site in sites.items():
        key = ("sites", name)
        yield not _NAME.fullmatch(name), key, f"the site `{name}`", "a name of letters, digits, `-` and `_`"
        yield name in members, key, f"`{name}`, which is a member's name", "another name for the site"
        yield of_kind(site.line, kinds, (*key, "line"))
        for named in site.members:
            at = set(members_at([named], members))
            yield not at, (*key, "members"), f"`{named}`", "members or replicas of this file"
            both = elsewhere & at
            yield both, (*key, "members"), f"{min(both, default='')} at two sites", "it at one"
            elsewhere |= at


def _rules_of_replicas(
    replicas: Sequence[ReplicaSettings], kinds: Mapping[str, LinkSettings], shape: ModelShape
) -> Iterator[Rule]:
    seen: set[str] = set()
    for index, replica in enumerate(replicas):
        here, name, rows = ("replicas", index), replica.name, replica.batch_size // replica.micro_batches
        expected = f"letters, digits, `-` and `_`, not `{EXCHANGE}` or `{LAUNCHER}`"
        yield not _NAME.fullmatch(name) or name in (EXCHANGE, LAUNCHER), (*here, "name"), f"`{name}`", expected
        yield name in seen, (*here, "name"), f"a second replica named `{name}`", "unique names"
        seen.add(name)
        expected = f"a divisor of batch_size {replica.batch_size}"
        yield replica.batch_size % replica.micro_batches, (*here, "micro_batches"), replica.micro_batches, expected
        yield of_kind(replica.uplink, kinds, (*here, "uplink"), "links")
        if isinstance(replica, ParticipantsReplica):
            yield from _rules_of_group(replica, here, kinds, shape.width, shape.layers)
            continue
        for (key, engine), instead in _KEYS_OF_ENGINES.items():
            found = getattr(replica, key)
            is_wrong = replica.engine == engine and found != DatacenterReplica.model_fields[key].default
            yield is_wrong, (*here, key), f"`{str(found).lower()}` with the engine `{engine}`", instead
        world, titan = replica.world, replica.torchtitan
        is_wrong = replica.engine == "torch" and world > 1
        yield is_wrong, (*here, "engine"), f"`torch` with {world} ranks", "`torchtitan` or `deepspeed`"
        expected = f"HOST:PORT for the rendezvous of the {replica.nodes} nodes"
        yield replica.nodes > 1 and replica.rendezvous is None, (*here, "rendezvous"), "nothing", expected
        if replica.engine == "torchtitan":
            tensor, copies = titan.tensor_parallel, titan.data_parallel_replicate
            degrees = f"tensor_parallel {tensor} and data_parallel_replicate {copies}"
            yield world % (tensor * copies), (*here, "torchtitan"), degrees, f"a product that divides {world} ranks"
            expected = f"a divisor of the model's {shape.groups} heads of keys and values"
            yield shape.groups % tensor, (*here, "torchtitan", "tensor_parallel"), tensor, expected
        expected = f"a multiple of {replica.data_parallel}: all ranks take equal parts"
        yield rows % replica.data_parallel, (*here, "batch_size"), f"micro-batches of {rows} sequences", expected
        is_16_bit = any(replica.deepspeed.get(kind, {}).get("enabled") for kind in ("bf16", "fp16"))
        is_wrong = is_16_bit and replica.deepspeed.get("zero_optimization", {}).get("stage", 0) == 0
        expected = "1, 2 or 3: without fp32 master weights replicas cannot be equal"
        yield is_wrong, (*here, "deepspeed", "zero_optimization"), "stage 0 with 16 bits", expected
        for key in DEEPSPEED_OWNED:
            found = "a key that hetero-pp sets itself"
            yield key in replica.deepspeed, (*here, "deepspeed", key), found, "no such key"


def _rules_of_group(
    replica: ParticipantsReplica,
    here: tuple[str | int, ...],
    kinds: Mapping[str, LinkSettings],
    width: int,
    layers: int,
) -> Iterator[Rule]:
    count = replica.stage_count
    yield not 1 <= count <= layers, (*here, "stages"), f"{count} stages", f"1 to the model's {layers} layers"
    split = [one.layers for one in replica.stages] if isinstance(replica.stages, list) else []
    if any(split) and None in split:
        key = (*here, "stages", split.index(None), "layers")
        yield True, key, "nothing", "a number: other stages of this group have one"
    total = sum(map(len, replica.layer_ranges(layers)))
    yield total != layers, (*here, "stages"), f"{total} layers over all stages", f"the model's {layers} layers"
    for stage, of_stage in enumerate(replica.layer_ranges(layers)):
        device, key = replica.setting(stage, "device")
        if isinstance(device, list):
            is_mixed = len({one.partition(":")[0] for one in device}) > 1
            is_wrong = is_mixed or bool({"auto", "cuda", "xpu"}.intersection(device))
            yield is_wrong, (*here, *key), f"`[{', '.join(device)}]`", "devices of one kind, each with its number"
            expected = f"at most the {len(of_stage)} of the stage's layers"
            yield len(device) > len(of_stage), (*here, *key), f"{len(device)} devices", expected
    boundary, anchors = replica.boundary, replica.boundary.anchors
    ranks: dict[tuple[str, ...], int | None] = {("boundary", "rank"): boundary.dimensions(width)}
    if anchors is not None:
        ranks["boundary", "anchors", "rank"] = anchors.dimensions(width)
    for path, rank in ranks.items():
        expected = f"at most the model's width {width}, or `full`"
        yield rank is not None and rank > width, (*here, *path), rank, expected
    is_list = isinstance(replica.link, list)
    hops = replica.link if isinstance(replica.link, list) else [replica.link]
    yield is_list and len(hops) != count - 1, (*here, "link"), f"{len(hops)} entries", f"one per hop: {count - 1}"
    for hop, kind in enumerate(hops):
        yield of_kind(kind, kinds, (*here, "link", hop) if is_list else (*here, "link"), "links")
    for stage in range(count):
        uplink, own = replica.setting(stage, "uplink")
        yield of_kind(uplink, kinds, (*here, *own), "links")


def _rules_of_exchange(exchange: ExchangeSettings, store: StoreSettings) -> Iterator[Rule]:
    found, expected = f"{len(exchange.hosts)} hosts without a `store.url`", "a store that all of them reach, too"
    yield len(exchange.hosts) > 1 and store.url is None, ("exchange", "hosts"), found, expected
    windows: dict[str, GraceSettings | LeaseSettings | HangSettings] = {
        "grace": exchange.grace,
        "lease": exchange.lease,
        "hang": exchange.hang,
    }
    for name, window in windows.items():
        expected = f"at most the {format_seconds(window.most)} of `exchange.{name}.most`"
        yield window.least > window.most, ("exchange", name, "least"), format_seconds(window.least), expected
    most, limit = exchange.grace.most, exchange.limit
    expected = f"at most the {format_seconds(limit)} of `exchange.limit`, after which a round closes"
    yield most > limit, ("exchange", "grace", "most"), format_seconds(most), expected
    scale, leave_out = exchange.magnitudes.scale, exchange.magnitudes.leave_out
    expected = f"at most the {leave_out:g} of `exchange.magnitudes.leave_out`"
    yield scale > leave_out, ("exchange", "magnitudes", "scale"), f"{scale:g}", expected


def _rules_of_audit(audit: AuditSettings, outer: OuterSettings) -> Iterator[Rule]:
    is_wrong = outer.weights == "scores" and audit.scores is None
    yield is_wrong, ("outer", "weights"), "`scores` without scores", "`audit.gauntlet`, too"
    is_wrong = audit.by == "validators" and not audit.needs_validators
    yield is_wrong, ("audit", "by"), "nothing to audit", "`audit.gauntlet` or `audit.recompute`, too"
    if audit.scores is not None:
        try:
            check_scores(outer)
        except ConfigError as error:
            expected = f"`evaluated: 0`, with which only signs are compared: {error.message}"
            yield True, ("audit", "gauntlet"), "scores", expected


def check_scores(outer: OuterSettings) -> None:
    """Raise ConfigError if contributions cannot be tried on the text of their replicas."""
    if outer.source == "gradient":
        raise ConfigError((), f"with method {outer.method} the gradient of one step tells too little")


def _rules_of_recomputation(
    outer: OuterSettings, replicas: Sequence[ReplicaSettings], states: StateSettings
) -> Iterator[Rule]:
    """Yield the rules with which a round follows from theta and a member's checkpoint alone."""
    own = "with `audit.recompute`"
    expected = "0: a round then starts before the one before is decided"
    yield outer.overlap, ("outer", "overlap"), f"{outer.overlap:g} {own}", expected
    expected = "false: an excluded replica then starts from its own parameters"
    yield outer.keep_local, ("outer", "keep_local"), f"true {own}", expected
    expected = "a method that averages differences: a checkpoint for every step would cost more than the step"
    yield outer.source == "gradient", ("outer", "method"), f"`{outer.method}` {own}", expected
    expected = "true: a repeated round would start with other moments"
    yield not states.undo, ("states", "undo"), f"false {own}", expected
    expected = "1: a member that returns begins with its last state, or fresh"
    yield states.every not in (None, 1), ("states", "every"), f"{states.every} {own}", expected
    expected = "`torch`: the bits of several ranks cannot be computed again in one process"
    for index, replica in enumerate(replicas):
        if isinstance(replica, DatacenterReplica):
            found = f"`{replica.engine}` for {replica.name} {own}"
            yield replica.engine != "torch", ("replicas", index, "engine"), found, expected


def _rules_of_audited_fragments(fragments: Fragments, replicas: Sequence[ReplicaSettings]) -> Iterator[Rule]:
    """Yield the rules with which every member contributes to every round: it commits to its round with that."""
    expected = "fragments of which every stage has a part, because it commits to its round with its contribution"
    for replica in replicas:
        stages = replica.layer_ranges(fragments.layers) if isinstance(replica, ParticipantsReplica) else []
        for layers in stages:
            own = {fragments.of(f"{LAYERS}{layer}") for layer in layers}
            own |= {0} if layers.start == 0 else set()
            own |= {fragments.count - 1} if layers.stop == fragments.layers else set()
            is_wrong = len(own) < fragments.count
            yield is_wrong, ("outer", "fragments"), f"{fragments.count} with `audit` for {replica.name}", expected


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

    @model_validator(mode="before")
    @classmethod
    def _groups_train_as_the_method_says(cls, values: Any) -> Any:
        return with_embeddings(values) if isinstance(values, dict) else values

    def check(self) -> None:
        """Raise ConfigError for the first fault across fields. Reads no files."""
        self.inner.check()
        require(self._rules())

    def _rules(self) -> Iterator[Rule]:
        """Yield the rules in an order in which each may rely on those before it."""
        values, outer, inner = self.model.resolve(self.model.vocabulary or 256), self.outer, self.inner
        yield not self.replicas and not self.plan.participants, ("replicas",), "nothing", "at least one replica"
        yield from _rules_of_replicas(self.replicas, self.links, values)
        yield from _rules_of_lines(self.replicas, self.exchange, self.sites, self.lines)
        yield from _rules_of_exchange(self.exchange, self.store)
        yield from _rules_of_audit(self.audit, outer)
        yield from rules_of_participants(self.plan, self.links, self.lines, values.layers)
        is_wrong = self.states.to == "store" and self.store.url is None
        yield is_wrong, ("states", "to"), "`store` without a `store.url`", "`folder`, or a `store.url`, too"
        if self.audit.recompute is not None:
            yield from _rules_of_recomputation(outer, self.replicas, self.states)
        yield from self._rules_of_the_end()
        blocks = min(values.layers + 1, self.rounds)
        expected = f"at most {blocks}: each of them needs a layer, the embedding or the head, and a round"
        yield outer.fragments > blocks, ("outer", "fragments"), outer.fragments, expected
        if self.audit.recompute is not None or self.commits_to_text:
            yield from _rules_of_audited_fragments(outer.fragments_of(values.layers), self.replicas)
        is_other, optimizer, key = inner.optimizer != "adamw", f"`{inner.optimizer}`", ("inner", "optimizer")
        yield is_other and outer.source == "gradient", key, optimizer, f"`adamw` with method {outer.method}"
        expected = "0, or `inner.steps`: a round's seconds count from its opening"
        yield outer.overlap and inner.steps is None, ("outer", "overlap"), "1 with `inner.seconds`", expected
        for index, replica in enumerate(self.replicas):
            most = inner.steps if self.rehearsal is None else self.rehearsal.steps
            expected = f"at most the {most} of `inner.steps`" if most else "none with `inner.seconds`: as many as fit"
            is_wrong = replica.steps is not None and replica.steps > (most or 0)
            yield is_wrong, ("replicas", index, "steps"), replica.steps, expected
            if isinstance(replica, DatacenterReplica):
                expected = f"`adamw` with the engine `{replica.engine}` of {replica.name}"
                yield is_other and replica.engine != "torch", key, optimizer, expected
                continue
            here, boundary = ("replicas", index, "boundary"), replica.boundary
            is_split = boundary.rank != "full" and boundary.embedding != "free"
            found = f"`{boundary.embedding}` with `outer.overlap: 1`"
            expected = "`free`: a round then starts before the embedding is split again"
            yield outer.overlap and is_split, (*here, "embedding"), found, expected
            found = f"`{boundary.embedding}` with `outer.mixing: {outer.mixing:g}`"
            expected = "`free`: a part of the embedding that is mixed lies outside the subspace"
            yield outer.mixing > 0 and is_split, (*here, "embedding"), found, expected
            # The embedding is split by values that replicas share, not by local ones.
            is_wrong = outer.keep_local and replica.stage_count > 1 and boundary.rank != "full"
            found = (
                f"{boundary.rank if isinstance(boundary.rank, str) else f'{boundary.rank:g}'} with `outer.keep_local`"
            )
            yield is_wrong, (*here, "rank"), found, "`full`"

    def _rules_of_the_end(self) -> Iterator[Rule]:
        """Yield the rules of `outer.rounds` and `outer.tokens`, of which a run has one."""
        tokens, rounds, least = self.outer.tokens, self.outer.rounds, self.tokens_of_a_round
        if tokens is None:
            yield rounds is None, ("outer", "rounds"), "nothing", "a number of `rounds`, or of `tokens`"
            return
        key = ("outer", "tokens")
        yield rounds is not None, key, f"{tokens:,} and {rounds} `rounds`", "one of them: leave out the other"
        expected = f"at least the {least:,} of one round"
        yield bool(self.replicas) and tokens < least, key, f"{tokens:,}", expected
        expected = "`rounds`, because a round is one step"
        yield self.outer.source == "gradient", key, f"{tokens:,} with method {self.outer.method}", expected
        expected = "`rounds`, by which anchors fade: how many rounds of a given time are needed is not known"
        for one in self.replicas if self.inner.steps is None else ():
            anchors = one.boundary.anchors if isinstance(one, ParticipantsReplica) else None
            yield anchors is not None and anchors.fade is not None, key, f"{tokens:,}", expected

    @property
    def commits_to_text(self) -> bool:
        """Whether members commit to their text, because validators cannot tell it from the round alone.

        They do so also if scores are left out by default on their host: the exchange may have scores.
        """
        return self.audit.compares is not None and (self.inner.steps is None or self.data.streamed is not None)

    @property
    def tokens_of_a_round(self) -> int:
        """Tokens of a round with all required replicas, or all if none is; of one step each with `inner.seconds`."""
        taking_part = [one for one in self.replicas if not one.optional] or self.replicas
        steps = self.inner.steps or 1
        return self.data.sequence_length * sum(one.batch_size * (one.steps or steps) for one in taking_part)

    @property
    def rounds(self) -> int:
        """Number of rounds: `outer.rounds`, or as many as `outer.tokens` need with `tokens_of_a_round`."""
        return self.outer.rounds or ceil((self.outer.tokens or 0) / max(1, self.tokens_of_a_round))

    def in_rounds(self, rounds: int) -> str:
        """Return a number of the run's rounds in words, such as `about 20 outer rounds` if it is an estimate."""
        estimate = "" if self.outer.tokens is None else "about " if self.inner.steps is not None else "at most "
        return estimate + format_count(rounds, "outer round")

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
            found = f"found {len(self.plan.participants)} participants without a group"
            expected = "expected none: `hetero-pp plan --write FILE` groups them"
            raise ConfigError(("plan", "participants"), f"{found}, {expected}")

    def as_rehearsal(self, rounds: int, steps: int) -> RunConfig:
        """Return the rehearsal of this run: at most this many rounds, of at most this many inner steps each.

        With fragments it has at least the rounds of each of them, and the first and last, which are not timed. It has a
        name of its own. Nothing is trained, so it needs no weights, audits, scores, store or copies of member
        checkpoints, and a tokenizer only for the size of the vocabulary. Optional replicas are left out, and so are
        parts of `simulate` that do not take place, so that the prediction is for the same members and links. Raises
        ConfigError if all are optional.
        """
        own, outer = Rehearsal(rounds=self.rounds, steps=self.inner.steps), self.outer
        if outer.fragments > 1:
            rounds = max(rounds, outer.fragments + 1 + outer.overlap)
        shorter = {} if own.steps is None else {"steps": min(steps, own.steps)}
        reads = {} if self.model.vocabulary is None else {"tokenizer": "bytes"}
        needed = [replica for replica in self.replicas if not replica.optional]
        if self.replicas and not needed:
            why = "a rehearsal has only those: set a number, such as `--set replicas.home.count=2`"
            raise ConfigError(("replicas", 0), f"found only optional replicas, expected required ones: {why}")
        weights = "equal" if outer.weights == "scores" else outer.weights
        absent = {one for replica in self.replicas if replica.optional for one in (replica.name, *replica.members)}
        others = SimulateSettings()
        real = {key: getattr(others, key) for key in ("fleets", "exchange")}
        real["measured"] = {name: cost for name, cost in self.simulate.measured.items() if name not in absent}
        return self.model_copy(
            update={
                "name": self.rehearsal_name,
                "rehearsal": own,
                "replicas": needed,
                "outer": outer.model_copy(
                    update={"rounds": min(rounds, own.rounds), "tokens": None, "weights": weights}
                ),
                "inner": self.inner.model_copy(update=shorter),
                "model": self.model.model_copy(update={"weights": None}),
                "data": self.data.model_copy(update=reads),
                "audit": AuditSettings(),
                "store": StoreSettings(),
                "states": StateSettings(),
                "exchange": self.exchange.model_copy(update={"hosts": []}),
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
