"""Turns loose participants into replicas of the YAML: the links between them, and the groups that were chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetero_pp.config.lines import WAYS, SiteSettings
from hetero_pp.config.links import DIRECTIONS, DirectionSettings, LinkSettings, LinkShape
from hetero_pp.config.topology import ParticipantsReplica, StageSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_names
from hetero_pp.run.config import RunConfig
from hetero_pp.run.hardware import Hardware, hardware_named
from hetero_pp.run.plan_section import LooseParticipant, PlanSettings
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.costs import SHOWN, assumption
from hetero_pp.simulator.planner.grouping import Grouping, Pool, group
from hetero_pp.simulator.planner.split import Load, Sizes, best_split, stage_seconds

TIME_LIMIT = 45.0
"""Longest search for groups, in seconds."""


@dataclass(frozen=True)
class Grouped:
    """Configuration in which every participant is in a group or left out."""

    config: RunConfig
    grouping: Grouping
    names: list[str]
    """Names of the new replicas."""
    members: list[list[str]]
    """Participants of each new replica, stage by stage."""
    left_out: list[str]


def group_participants(config: RunConfig, vocabulary: int | None) -> Grouped:
    """Make replicas of the participants of `plan`. Raises ConfigError if no group of them can hold the model."""
    plan, people = config.plan, config.plan.participants
    links = {
        (a.name, b.name): link_between(config, a, b) for a in people for b in people if a.name != b.name
    }  # each direction, as seen from the first
    bandwidth = np.array([[_bandwidth(config, links, a, b) for b in people] for a in people])
    seconds = np.array(list(_seconds_of_participants(config, vocabulary)))
    found = group(Pool(seconds, bandwidth, plan.balance), TIME_LIMIT)
    if found is None:
        raise _no_group(config, seconds)
    kinds = dict(config.links)
    names = [name for name, _ in zip(_free_names(config), found.groups, strict=False)]
    replicas = list(config.replicas)
    for name, group_ in zip(names, found.groups, strict=True):
        own = [people[one] for one in group_]
        counts, _ = best_split([seconds[one, stage] for stage, one in enumerate(group_)])
        joins = [links[a.name, b.name] for a, b in pairwise(own)]
        is_free = all(join.shape(way).is_unlimited for join in joins for way in DIRECTIONS)
        named = [f"{a.name}-{b.name}" for a, b in pairwise(own)]
        hops = None if is_free else [_kind(kinds, name, join) for name, join in zip(named, joins, strict=True)]
        replicas.append(_replica(plan, name, own, counts, hops))
    places = {person: (group, stage) for group, own in enumerate(found.groups) for stage, person in enumerate(own)}
    members = {people[person].name: f"{names[group]}.{stage}" for person, (group, stage) in sorted(places.items())}
    nobody = plan.model_copy(update={"participants": [], "pairs": [], "default": None})
    taken = {one for group_ in found.groups for one in group_}
    return Grouped(
        config=config.model_copy(
            update={"links": kinds, "sites": config.sites | _sites(plan, members), "replicas": replicas, "plan": nobody}
        ),
        grouping=found,
        names=names,
        members=[[people[one].name for one in group_] for group_ in found.groups],
        left_out=[person.name for index, person in enumerate(people) if index not in taken],
    )


def link_between(config: RunConfig, a: LooseParticipant, b: LooseParticipant) -> LinkSettings:
    """Return the link between two participants; `forward` starts at the first.

    It is the entry of `pairs` that names most of them, else the default, else both uplinks one after the other.
    """
    best: tuple[int, LinkSettings] | None = None
    for pair in config.plan.pairs:
        link = LinkSettings.model_construct(**{name: getattr(pair, name) for name in LinkSettings.model_fields})
        turned = link.model_copy(update={"forward": link.backward, "backward": link.forward})
        for ends, settings in ((pair.between, link), (pair.between[::-1], turned)):
            if ends[0] in (a.name, a.site) and ends[1] in (b.name, b.site):
                named = (ends[0] == a.name) + (ends[1] == b.name)
                if best is None or named > best[0]:
                    best = (named, settings)
    if best is not None:
        return best[1]
    return config.plan.default or _through_uplinks(config, a, b)


def _through_uplinks(config: RunConfig, a: LooseParticipant, b: LooseParticipant) -> LinkSettings:
    first, second = (LinkSettings() if one.uplink is None else config.links[one.uplink] for one in (a, b))
    ways = {
        "forward": _one_after_the_other(first.shape("forward"), second.shape("backward")),
        "backward": _one_after_the_other(second.shape("forward"), first.shape("backward")),
    }
    return LinkSettings(**ways)


def _one_after_the_other(one: LinkShape, other: LinkShape) -> DirectionSettings:
    known = [shape.bandwidth for shape in (one, other) if shape.bandwidth is not None]
    return DirectionSettings.model_construct(
        bandwidth=min(known, default=None), latency=one.latency + other.latency, jitter=one.jitter + other.jitter
    )


def _bandwidth(
    config: RunConfig, links: Mapping[tuple[str, str], LinkSettings], a: LooseParticipant, b: LooseParticipant
) -> float:
    """Return the bits per second from `a` to `b`, limited by their link and by the lines that it passes."""
    if a is b:
        return np.inf
    limits = [links[a.name, b.name].shape("forward").bandwidth]
    if a.site is None or a.site != b.site:
        for one, way in zip((a, b), WAYS, strict=True):
            limits += [] if one.line is None else [config.lines[one.line].limit(way)]
    return min((limit for limit in limits if limit is not None), default=np.inf)


def _sites(plan: PlanSettings, members: Mapping[str, str]) -> dict[str, SiteSettings]:
    """Return a site for each line that several grouped participants share. `members` maps participants to stages."""
    found: dict[str, SiteSettings] = {}
    for site in dict.fromkeys(person.site for person in plan.participants):
        own = [one for one in plan.participants if one.site == site and one.line is not None and one.name in members]
        if site is not None and len(own) > 1:
            found[f"{site}-participants"] = SiteSettings(
                line=str(own[0].line), members=[members[one.name] for one in own]
            )
    return found


def _seconds_of_participants(config: RunConfig, vocabulary: int | None) -> Iterator[list[np.ndarray]]:
    """Yield for each participant the seconds of a micro-batch, [S][L + 1], with as many micro-batches as possible."""
    plan = config.plan
    model = RunSpec(config.model_copy(update={"replicas": []}), vocabulary)
    micro_batches = max(1, plan.batch_size // plan.smallest_micro_batch)
    sequences = plan.batch_size // micro_batches
    load = Load(plan.stages, micro_batches, sequences, config.data.sequence_length, extra_in_flight=1)
    sizes = Sizes.of(model.parameter_shapes)
    known: dict[str, list[np.ndarray]] = {}
    for index, person in enumerate(plan.participants):
        name = person.hardware or config.simulate.machine
        machine: Hardware = hardware_named(name, config.simulate.hardware, ("plan", "participants", index, "hardware"))
        if name not in known:
            known[name] = [stage_seconds(model.shape, sizes, machine, 1, s, load) for s in range(plan.stages)]
        yield known[name]


def _no_group(config: RunConfig, seconds: np.ndarray) -> ConfigError:
    """Return the error for participants without a group that holds the model, with the layers that fit each."""
    plan, people = config.plan, config.plan.participants
    layers = seconds.shape[2] - 1
    most = [max(int(np.isfinite(stage).sum()) for stage in own) for own in seconds]
    held = [
        f"{person.name} ({person.hardware or config.simulate.machine}) {number}"
        for number, person in sorted(zip(most, people, strict=True), key=lambda one: -one[0])
    ]
    told = (
        f"found {len(people)} participants, but no {plan.stages} of them have enough memory for the "
        f"model's {layers} layers; most layers that fit: {format_names(held, SHOWN)}; expected machines with "
        "more memory, or more stages per group (`plan.stages`)"
    )
    assumed = assumption(config.simulate, [person.name for person in people if person.hardware is None])
    return ConfigError(("plan", "participants"), "; ".join(filter(None, [told, assumed])))


def _free_names(config: RunConfig) -> Iterator[str]:
    taken = {replica.name for replica in config.replicas}
    return (
        name for number in range(len(taken) + len(config.plan.participants)) if (name := f"group{number}") not in taken
    )


def _kind(kinds: dict[str, LinkSettings], name: str, link: LinkSettings) -> str:
    """Return the name of the kind of link with these settings. Adds the kind to `kinds` if there is none yet."""
    for known, settings in kinds.items():
        if settings == link:
            return known
    while name in kinds:
        name += "-"
    kinds[name] = link
    return name


def _replica(
    plan: PlanSettings, name: str, own: list[LooseParticipant], counts: list[int], hops: list[str] | None
) -> ParticipantsReplica:
    stages = [
        StageSettings(layers=count, uplink=person.uplink, hardware=person.hardware, line=person.line)
        for person, count in zip(own, counts, strict=True)
    ]
    return ParticipantsReplica(name=name, kind="participants", stages=stages, batch_size=plan.batch_size, link=hops)
