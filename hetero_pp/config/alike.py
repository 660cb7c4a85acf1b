"""Classes of replicas that differ only in their name: predictions time them once, and tables show them in one row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Protocol, TypeVar

from hetero_pp.config.lines import exchange_link_name, stage_link_name
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica, ReplicaSettings
from hetero_pp.core.units import format_count, format_names


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_Named)  # line or link, or a result about one
MOST_CLASSES = 8  # most classes of equally shaped replicas that tables show separately
_NAMED_AT_MOST = 3  # names that are listed separately if they are not numbered consecutively


@lru_cache(maxsize=8)  # predictions, tables and charts of one run ask for it
def alike(spec: RunSpec) -> Sequence[Sequence[ReplicaSettings]]:
    """Group the replicas of a run into classes with equal settings, lines and links, in the order of the run.

    Names of one class differ only in their numbers: `home-1` and `home-2` may be in one class, `anna` and `ben` may
    not. A replica is a class of its own if it shares a line with another member, or if `simulate` names it.
    """
    simulate = spec.config.simulate
    named = {*simulate.fleets, *simulate.measured}
    lines = {member: line for line in spec.lines.values() for member in line.members}
    classes: dict[Hashable, list[ReplicaSettings]] = {}
    for replica in spec.config.replicas:
        own = [lines.get(member) for member in replica.members]
        is_named = not named.isdisjoint({replica.name, *replica.members})
        is_apart = is_named or any(len(line.members) > 1 for line in own if line)
        settings = replica.model_dump_json(exclude={"name", "optional"})
        family = re.sub(r"\d+", "#", replica.name)
        key = replica.name if is_apart else (family, settings, *(line and line.kind for line in own))
        classes.setdefault(key, []).append(replica)
    return list(classes.values())


@lru_cache(maxsize=8)
def table_rows(spec: RunSpec) -> Sequence[Sequence[ReplicaSettings]]:
    """Return the replicas of each row of a table: the classes of `alike`, combined if many have the same shape.

    Replicas have the same shape if their kind and their number of stages are equal. If one shape has more than
    MOST_CLASSES classes, they form a row for each family of names. If it has more than MOST_CLASSES families, they form
    one row.
    """
    classes = alike(spec)
    for with_family in (True, False):
        shapes = Counter(_shape(replicas[0], with_family) for replicas in classes)
        rows: dict[Hashable, list[ReplicaSettings]] = {}
        for place, replicas in enumerate(classes):
            shape = _shape(replicas[0], with_family)
            is_fleet = replicas[0].name in spec.config.simulate.fleets
            rows.setdefault(shape if shapes[shape] > MOST_CLASSES and not is_fleet else place, []).extend(replicas)
        classes = list(rows.values())
    return classes


def _shape(replica: ReplicaSettings, with_family: bool) -> Hashable:
    family = re.sub(r"\d+", "#", replica.name) if with_family else ""
    return replica.kind, len(replica.members), family


def equal_replicas(spec: RunSpec) -> Iterator[Sequence[ReplicaSettings]]:
    """Yield the classes, split into parts whose names are equally long.

    The name is part of every contribution, so replicas of one part send and receive the same number of bytes.
    """
    for replicas in alike(spec):
        for _, same in groupby(sorted(replicas, key=_name_bytes), _name_bytes):
            yield list(same)


def _name_bytes(replica: ReplicaSettings) -> int:
    return len(replica.name.encode())


def label_of(replicas: Sequence[ReplicaSettings]) -> str:
    """Name a class: `home-1 .. home-250 (250 groups x 4 stages)`, or the replica's own name if it is the only one."""
    if len(replicas) == 1:
        return replicas[0].name
    names, first = range_of([replica.name for replica in replicas]), replicas[0]
    if not isinstance(first, ParticipantsReplica):
        return f"{names} ({len(replicas):,} replicas)"
    return f"{names} ({len(replicas):,} groups x {format_count(first.stage_count, 'stage')})"


def range_of(names: Sequence[str]) -> str:
    """Abbreviate names: `home-1 .. home-250` if they are numbered consecutively, else the first few and a count."""
    if len(names) == 1:
        return names[0]
    parts = [part.groups() for name in names if (part := re.fullmatch(r"(.*?)(\d+)((?:\.\d.*)?)", name)) is not None]
    numbers = [int(number) for _, number, _ in parts]
    is_same = len({(before, after) for before, _, after in parts}) == 1 and len(parts) == len(names) > 2
    if is_same and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{names[0]} .. {names[-1]}"
    return format_names(names, _NAMED_AT_MOST)


Classes = Sequence[Sequence[ReplicaSettings]]


def each_alike(spec: RunSpec, found: Iterable[Named], classes: Classes | None = None) -> list[list[Named]]:
    """Group lines or links, or results about them, by the classes of their members' replicas; others stay alone.

    `classes` are the classes of replicas, by default those of `alike`.
    """
    places = {}
    for replicas in classes or alike(spec):
        for replica in replicas:
            hops = [stage_link_name(replica.name, hop) for hop in range(len(replica.members) - 1)]
            names = [*replica.members, *hops, *map(exchange_link_name, replica.members)]
            places.update({name: (replicas[0].name, place) for place, name in enumerate(names)})
    groups: dict[Hashable, list[Named]] = {}
    for one in found:
        groups.setdefault(places.get(one.name, one.name), []).append(one)
    return list(groups.values())
