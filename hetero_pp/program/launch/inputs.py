"""Checks before anything starts what a run needs: tokenizer, corpus, engines, memory, free ports, and a folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hetero_pp.config.audit import LEAST_SEQUENCES
from hetero_pp.config.checkpoint import require_weights
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.member_inputs import devices_of, replica_batches, require_own_steps
from hetero_pp.config.overrides import Key
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import DatacenterReplica
from hetero_pp.config.yaml_file import ConfigFile, needed_vocabulary
from hetero_pp.core.device import name_of
from hetero_pp.core.errors import ConfigError, HeteroPPError, StoreError
from hetero_pp.core.progress import OnProgress, untold
from hetero_pp.data.sources import Source, open_source
from hetero_pp.program.defences import defended
from hetero_pp.program.launch.hosts import fixed_addresses, members_named, require_reachable, require_relay
from hetero_pp.program.launch.this_machine import Limit, limits_of
from replica_groups.audit.gauntlet import AssignedTexts
from replica_groups.audit.replica_scores import require_openskill
from replica_groups.engines.build import require_engine
from replica_groups.member.saved_states import SavedStates


@dataclass(frozen=True)
class Prepared:
    """A run with checked inputs."""

    spec: RunSpec
    names: Sequence[str]  # names of the members to start here, including the exchange if it starts here
    source: Source | None  # the corpus, if a process started here reads it
    limits: Sequence[Limit] = ()  # limits of this machine: what would take unreasonably long
    devices: Mapping[str, str] = field(default_factory=dict)  # name of the device of each member that starts here
    given: Sequence[Key] = ()  # keys that were given beside the YAML
    located: Callable[[ConfigError], ConfigError] = lambda error: error  # adds file and line to an error about a key
    on_weights: Sequence[str] = ()  # notes on the weights that the run starts from

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on corpus and weights that the user has to see before training begins."""
        return (*self.on_weights, *(() if self.source is None else self.source.notes))


def prepare(
    file: ConfigFile,
    runs: Path,
    only: str | None = None,
    resume: bool = False,
    checks: bool = False,
    on_progress: OnProgress = untold,
) -> Prepared:
    """Check this machine, load the tokenizer, encode or open the corpus, and try the ports.

    A rehearsal computes nothing and reads no text, so only its ports are tried.

    `only`: check what the named members need; None means all members. `resume`: the weights are in the run's log, so
    `model.weights` is not needed. `checks`: `hetero-pp check` looks at the machine and its ports by itself.

    Raises ConfigError with file and line.
    """
    try:
        spec, names, on_weights = settled(file.config, only, resume)
        config, source = spec.config, None
        limits, devices = list[Limit](), dict[str, str]()
        if config.rehearsal is None:
            if not checks:
                limits = limits_of(spec, names)
                for limit in (one for one in limits if one.is_final):
                    raise ConfigError(limit.key, limit.message)
                devices = {name: name_of(device) for name, device in devices_of(spec, names).items()}
                _require_meeting_places(config, names, only)
            # The corpus is encoded or opened if a member that starts here reads it, or a validator beside the exchange.
            readers = [spec.members[name] for name in names if name in spec.members and spec.members[name].reads_data]
            scores = config.audit.scores if EXCHANGE in names and config.audit.by == "exchange" else None
            if readers or scores is not None:
                source = open_source(config.data, RunFolder(runs / config.name).cache, on_progress)
                for member in readers:
                    replica_batches(spec, member, source)
                if scores is not None and config.data.streamed is None:
                    AssignedTexts(spec, source, scores.sequences or LEAST_SEQUENCES)
        for one in () if checks else fixed_addresses(config):
            if one.member in names:
                one.try_to_listen()
    except ConfigError as error:
        raise file.located(error) from None
    return Prepared(spec, names, source, limits, devices, file.given, file.located, on_weights)


def settled(config: RunConfig, only: str | None, resume: bool) -> tuple[RunSpec, Sequence[str], Sequence[str]]:
    """Return the run of a configuration, the members to start here, and notes on the weights. Reads no corpus.

    Arguments as of `prepare`. Raises ConfigError for settings that cannot run, without file and line.
    """
    config = config.with_absolute_paths()
    config.require_grouped()
    require_launchable(config)
    spec = defended(RunSpec(config, needed_vocabulary(config)), is_served=only is not None)
    on_weights = () if resume else require_weights(spec)
    names = [EXCHANGE, *spec.needed] if only is None else members_named(config, only)
    if only is None and not spec.needed:
        why = "expected at least one required replica: `launch` starts only required replicas"
        raise ConfigError(("replicas", 0), f"found only optional replicas, {why}")
    if only is not None:
        require_reachable(config, names)
    if config.rehearsal is None:
        for index, replica in enumerate(config.replicas):
            if isinstance(replica, DatacenterReplica) and replica.name in names:
                try:
                    require_engine(replica.engine)
                except ConfigError as error:
                    raise ConfigError(("replicas", index, "engine"), error.message) from None
        config.outer.compression.require_accelerator()
    if spec.config.audit.scores is not None and EXCHANGE in names:
        require_openskill()
    require_relay(config)
    return spec, names, on_weights


def require_same_ranks(spec: RunSpec, config: RunConfig, names: Sequence[str], folder: RunFolder) -> None:
    """Raise ConfigError for a replica of `config` whose checkpoints in a folder only fit another number of ranks.

    DeepSpeed splits the optimizer over the ranks from ZeRO 1 on, and cannot split it anew.
    """
    for index, replica in enumerate(config.replicas):
        if not isinstance(replica, DatacenterReplica) or replica.name not in names or replica.engine != "deepspeed":
            continue
        stage = replica.deepspeed.get("zero_optimization", {}).get("stage", 0)
        wrote = SavedStates(folder.state(replica.name), spec.run, spec.latest.states_every).written_by()
        if stage and wrote not in (None, replica.world):
            expected = f"expected {wrote / replica.nodes:g}: {wrote} ranks wrote its checkpoints of ZeRO {stage}"
            told = f"found {replica.ranks}, {expected}, which DeepSpeed reads on the same number only"
            raise ConfigError(("replicas", index, "ranks"), told)


def _require_meeting_places(config: RunConfig, names: Sequence[str], only: str | None) -> None:
    """Raise ConfigError for a multi-node replica that cannot meet: without `only`, or with a bad `rendezvous`."""
    for index, replica in enumerate(config.replicas):
        if not isinstance(replica, DatacenterReplica) or replica.nodes == 1 or replica.name not in names:
            continue
        if only is None:
            expected = "expected 1 without --only; `launch --print-commands` prints the command for each machine"
            raise ConfigError(("replicas", index, "nodes"), f"found {replica.nodes}, {expected}")
        from hetero_pp.program.launch.ranks import meeting_place  # with torch's, which few runs need

        try:
            meeting_place(replica.rendezvous or "")
        except HeteroPPError as error:
            raise ConfigError(("replicas", index, "rendezvous"), str(error)) from None


def require_launchable(config: RunConfig) -> None:
    """Raise ConfigError for averaged gradients where rounds have other than one step, or engines apply steps."""
    if config.outer.source == "gradient" and config.inner.steps != 1:
        key, found = ("steps", config.inner.steps) if config.inner.seconds is None else ("seconds", config.inner.length)
        expected = f"expected 1: with method {config.outer.method} every step is an outer round"
        raise ConfigError(("inner", key), f"found {found}, {expected}")
    for index, replica in enumerate(config.replicas):
        if isinstance(replica, DatacenterReplica) and replica.engine != "torch" and config.outer.source == "gradient":
            found = f"found `{replica.engine}`, expected `torch` with method {config.outer.method}"
            raise ConfigError(("replicas", index, "engine"), found)
    require_own_steps(config)


@contextmanager
def new_run_folder(runs: Path, name: str) -> Iterator[None]:
    """Make an empty runs/<name> for the block; an earlier run moves to the first free runs/<name>.1, .2, ...

    If this or the block raises OSError or StoreError, the new folder is removed and the earlier run moves back.
    """
    folder, aside = runs / name, None
    if folder.exists():
        number = 1
        while (runs / f"{name}.{number}").exists():
            number += 1
        aside = folder.rename(runs / f"{name}.{number}")
    try:
        folder.mkdir(parents=True)
        yield
    except (OSError, StoreError):
        shutil.rmtree(folder, ignore_errors=True)
        if aside is not None:
            aside.rename(folder)
        raise
