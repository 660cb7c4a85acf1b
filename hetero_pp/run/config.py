"""Complete YAML of a run: the sections of all parts, and the checks across them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from hetero_pp.config.audit import AuditSettings
from hetero_pp.config.lines import LineSettings, SiteSettings
from hetero_pp.config.links import LinkSettings
from hetero_pp.config.settings import AddedLater, Duration, NotPartOf, Settings, WhomItConcerns
from hetero_pp.config.topology import DatacenterReplica, ExchangeSettings, ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.settings import DataSettings
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.transformer import ModelSettings
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.run.checks import check_audit, check_exchange, check_lines, check_recomputed, check_topology
from hetero_pp.run.plan_section import PlanSettings, check_participants
from hetero_pp.run.simulate_section import SimulateSettings
from hetero_pp.store.settings import StoreSettings

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


MOST_GROUPS = 1000
"""Most groups for which one entry of `replicas` may stand."""


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
            least, most = _bounds(entry["count"])
            first, *others = [_copy(entry, number, number > least) for number in range(1, most + 1)]
            found.append(first)
            more += others
        else:
            found.append(entry)
    return [*found, *more]


def _bounds(count: Any) -> tuple[int, int]:
    text = str(count)
    match = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4}))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not least <= most <= MOST_GROUPS or most == 0:
        raise ValueError(f"found count `{text}`, expected a number, or a range such as `0..50`, up to {MOST_GROUPS}")
    return least, most


def _copy(entry: dict[str, Any], number: int, is_optional: bool) -> dict[str, Any]:
    own = {key: value for key, value in entry.items() if key != "count"}
    return {**own, "name": f"{entry.get('name', '')}-{number}", "optional": is_optional}


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
    rehearsal: Annotated[SkipJsonSchema[Rehearsal | None], AddedLater()] = None
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
        if self.inner.optimizer != "adamw":
            self._require_no_adamw()
        if self.outer.overlap:
            self._require_rounds_that_overlap()
        if self.outer.keep_local:
            self._require_whole_boundaries()

    def _require_no_adamw(self) -> None:
        """Raise ConfigError for settings that only AdamW supports."""
        found = f"found `{self.inner.optimizer}`, expected `adamw`"
        if self.outer.source == "gradient":
            raise ConfigError(("inner", "optimizer"), f"{found} with method {self.outer.method}")
        for replica in self.replicas:
            if isinstance(replica, DatacenterReplica) and replica.engine != "torch":
                raise ConfigError(
                    ("inner", "optimizer"), f"{found} with the engine `{replica.engine}` of {replica.name}"
                )

    def _require_rounds_that_overlap(self) -> None:
        """Raise ConfigError for settings that need the previous round to be complete."""
        if self.inner.steps is None:
            raise ConfigError(
                ("outer", "overlap"),
                "found 1 with `inner.seconds`, expected 0, or `inner.steps`: a round's seconds count from its opening",
            )
        for index, replica in enumerate(self.replicas):
            if isinstance(replica, ParticipantsReplica) and replica.boundary.embedding != "free":
                found = f"found `{replica.boundary.embedding}` with `outer.overlap: 1`, expected `free`"
                why = "a round then starts before the embedding is split again"
                raise ConfigError(("replicas", index, "boundary", "embedding"), f"{found}: {why}")

    def _require_whole_boundaries(self) -> None:
        """Raise ConfigError for a subspace: the embedding is split by values that replicas share, not by local ones."""
        for index, replica in enumerate(self.replicas):
            if isinstance(replica, ParticipantsReplica) and replica.stage_count > 1 and replica.boundary.rank != "full":
                here = ("replicas", index, "boundary", "rank")
                raise ConfigError(here, f"found {replica.boundary.rank:g} with `outer.keep_local`, expected `full`")

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
        real = {key: getattr(others, key) for key in ("fleets", "sites", "exchange", "exchange_bandwidth")}
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
