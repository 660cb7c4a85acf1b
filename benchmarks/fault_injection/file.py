"""Reads a file of faults and validates it against its run; errors name file, line and key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fault_injection.schedule import missed
from fault_injection.settings import (
    FAULTS,
    AnyFault,
    AtRate,
    Corrupt,
    Cut,
    Delay,
    Fault,
    FaultFile,
    Fill,
    Kill,
    Miss,
    kind_of,
)
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.overrides import Key
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import DatacenterReplica
from hetero_pp.config.yaml_file import YamlLines, complaint
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.settings import Settings
from hetero_pp.store.faults import FaultPhase
from replica_groups.exchange.host import rules_of

T = TypeVar("T", bound=Settings)


def read_faults(path: Path, spec: RunSpec, in_process: bool = False) -> FaultFile:
    """Return the faults of a file. Raises ConfigError with file, line and key if this run cannot have them."""
    lines = YamlLines(path)
    root = lines.root
    try:
        file = _validated(root)
        for index, fault in enumerate(file.faults):
            with _below("faults", index):
                _check(fault, spec, in_process)
        _require_quorum(file, spec)
    except ConfigError as error:
        raise lines.located(error, FaultFile) from None
    return file


def _validated(root: Mapping[str, Any]) -> FaultFile:
    """Validate each entry with the model that its first known key selects. Raises ConfigError with its key."""
    entries, faults = root.get("faults"), []
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        key = kind_of(entry)
        if key is None:
            raise ConfigError(("faults", index), f"found no fault, expected one of the keys {', '.join(FAULTS)}")
        with _below("faults", index):
            faults.append(_parsed(FAULTS[key], entry))
    return _parsed(FaultFile, dict(root) | ({"faults": faults} if faults else {}))


def _parsed(model: type[T], value: Any) -> T:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise complaint(error, model) from None


@contextmanager
def _below(*key: str | int) -> Iterator[None]:
    """Prefix the keys of errors raised in the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError((*key, *error.key), error.message) from None


# ---- one fault ----


def _check(fault: AnyFault, spec: RunSpec, in_process: bool) -> None:
    kind = kind_of(fault.model_dump()) or ""
    if in_process and not isinstance(fault, Miss):
        found = "found a fault that needs processes, expected only `miss` with --in-process"
        raise ConfigError((kind,), f"{found}; remove --in-process or the fault")
    match fault:
        case Miss():
            _expect("miss", fault.miss, [replica.name for replica in spec.config.replicas])
            for place, round_ in enumerate(fault.rounds):
                _expect_round(("rounds", place), round_, spec)
        case AtRate():
            for place, member in enumerate(fault.members):
                with _below("members"):
                    _expect(place, member, _processes(spec))
        case Cut() | Delay():
            link = getattr(fault, kind)
            _expect(kind, link, spec.links)
            _check_moment(fault, spec.links[link].source, spec)
        case _:
            member = getattr(fault, kind)
            _expect(kind, member, _processes(spec))
            if isinstance(fault, Kill):
                _check_rank(fault, spec)
            elif isinstance(fault, Fill):
                _require_one_process(kind, member, spec)
            elif isinstance(fault, Corrupt):
                _check_corrupt(fault, spec)
            _check_moment(fault, member, spec)


def _check_corrupt(fault: Corrupt, spec: RunSpec) -> None:
    if (fault.what == "checkpoint") != (fault.corrupt == EXCHANGE):
        raise ConfigError(
            ("what",),
            f"found `{fault.what}` of {fault.corrupt}, expected `theta` or `state` of a member, `checkpoint` of "
            "the exchange",
        )
    if fault.what == "theta":
        _require_one_process("corrupt", fault.corrupt, spec)
    if fault.what == "checkpoint" and spec.config.store.url is not None:
        raise ConfigError(
            ("what",), "found `checkpoint` of a run with a `store.url`, expected a log in the run's folder"
        )


def _check_rank(fault: Kill, spec: RunSpec) -> None:
    if fault.rank is None:
        return
    ranks = ranks_of(fault.kill, spec)
    if fault.rank >= ranks:
        raise ConfigError(("rank",), f"found {fault.rank}, expected less than {fault.kill}'s {ranks} ranks")


def _require_one_process(key: str, member: str, spec: RunSpec) -> None:
    if ranks_of(member, spec):
        raise ConfigError((key,), f"found {member}, which trains on several ranks, expected a member with one process")


def _check_moment(fault: Fault, member: str, spec: RunSpec) -> None:
    if fault.at is None:
        return
    _expect_round(("at", "round"), fault.at.round, spec)
    if ranks_of(member, spec) and fault.at.phase != FaultPhase.TRAINING:
        raise ConfigError(
            ("at", "phase"), f"found `{fault.at.phase}` of {member}, which trains on several ranks, expected `training`"
        )
    if fault.at.step is not None and (member not in spec.members or spec.members[member].stage is None):
        raise ConfigError(("at", "step"), f"found {fault.at.step} of {member}, which is no stage, expected none")
    every, last = spec.latest.states_every, spec.latest.rounds
    if fault.at.phase == FaultPhase.SAVING and fault.at.round % every and fault.at.round != last:
        raise ConfigError(
            ("at", "round"),
            f"found {fault.at.round}, expected a round after which states are saved: a multiple of {every}, or {last}",
        )


def _expect(key: str | int, found: str, names: Mapping[str, object] | list[str]) -> None:
    if found not in names:
        raise ConfigError((key,), f"found `{found}`, expected one of {', '.join(names)}")


def _expect_round(key: Key, round_: int, spec: RunSpec) -> None:
    rounds = spec.latest.rounds
    if round_ > rounds:
        raise ConfigError(key, f"found {round_}, expected at most the {rounds} of `outer.rounds`")


def _processes(spec: RunSpec) -> list[str]:
    return [EXCHANGE, *spec.needed]


def ranks_of(member: str, spec: RunSpec) -> int:
    """Return the number of a member's ranks that are separate processes; 0 if the member is one process."""
    replica = spec.members[member].replica if member in spec.members else None
    return replica.ranks if isinstance(replica, DatacenterReplica) and replica.engine != "torch" else 0


def _require_quorum(file: FaultFile, spec: RunSpec) -> None:
    """Raise ConfigError if a round could never close.

    A contribution that `miss` holds back arrives only after its round has closed, so it does not count for the quorum.
    """
    rules = rules_of(spec)
    without = missed(file)
    for index, fault in enumerate(file.faults):
        for place, round_ in enumerate(fault.rounds if isinstance(fault, Miss) else ()):
            replicas, needed = len(rules.replicas) - len(rules.optional), rules.needed
            left = replicas - sum(round_ in rounds for rounds in without.values())
            if left < needed:
                raise ConfigError(
                    ("faults", index, "rounds", place),
                    f"found {round_}, for which {left} of {replicas} replicas remain; expected at least "
                    f"{needed} (`exchange.quorum`)",
                )
