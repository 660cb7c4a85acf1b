"""Turns loose participants into replicas of the YAML: the links between them, and the groups that were chosen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hetero_pp.config.lines import DIRECTIONS, WAYS, DirectionSettings, LinkSettings, SiteSettings
from hetero_pp.config.predictions import Hardware, LooseParticipant, hardware_named
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica, StageSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_names
from hetero_pp.simulator.costs import SHOWN, assumption
from hetero_pp.simulator.planner.grouping import Grouping, Pool, group
from hetero_pp.simulator.planner.split import Load, best_split, stage_seconds

TIME_LIMIT = 45.0  # longest search for groups, in seconds


@dataclass(frozen=True)
class Grouped:
    """Configuration in which every participant is in a group or left out."""

    config: RunConfig
    grouping: Grouping
    names: list[str]  # names of the new replicas
    members: list[list[str]]  # participants of each new replica, stage by stage
    left_out: list[str]


def group_participants(config: RunConfig, vocabulary: int | None) -> Grouped:
    """Make replicas of the participants of `plan`. Raises ConfigError if no group of them can hold the model."""
    plan, people = config.plan, config.plan.participants
    links = {
        (a.name, b.name): link_between(config, a, b) for a in people for b in people if a.name != b.name
    }  # each direction, as seen from the first
    bandwidth = np.full((len(people), len(people)), np.inf)
    for (row, a), (column, b) in itertools.permutations(enumerate(people), 2):
        limits = [links[a.name, b.name].shape("forward").bandwidth]
        if a.site is None or a.site != b.site:  # within a site no line is passed
            ways = zip((a, b), WAYS, strict=True)
            limits += [config.lines[one.line].limit(way) for one, way in ways if one.line is not None]
        bandwidth[row, column] = min((limit for limit in limits if limit is not None), default=np.inf)
    seconds = np.array(list(_seconds_of_participants(config, vocabulary)))
    found = group(Pool(seconds, bandwidth, plan.balance), TIME_LIMIT)
    if found is None:
        raise _no_group(config, seconds)
    kinds, replicas, members = dict(config.links), list(config.replicas), dict[int, str]()
    taken = {replica.name for replica in replicas}
    free_names = (name for number in itertools.count() if (name := f"group{number}") not in taken)
    names = list(itertools.islice(free_names, len(found.groups)))
    for name, group_ in zip(names, found.groups, strict=True):
        own, hops = [people[one] for one in group_], list[str]()
        counts, _ = best_split([seconds[one, stage] for stage, one in enumerate(group_)])
        members |= {one: f"{name}.{stage}" for stage, one in enumerate(group_)}
        joins = [(f"{a.name}-{b.name}", links[a.name, b.name]) for a, b in itertools.pairwise(own)]
        if not all(link.shape(way).is_unlimited for _, link in joins for way in DIRECTIONS):
            for kind, link in joins:  # a kind of link that has these settings, or a new one
                known = next((one for one, settings in kinds.items() if settings == link), None)
                while known is None and kind in kinds:
                    kind += "-"
                kinds[known or kind] = link
                hops.append(known or kind)
        stages = [
            StageSettings(layers=count, uplink=person.uplink, hardware=person.hardware, line=person.line)
            for person, count in zip(own, counts, strict=True)
        ]
        replicas.append(
            ParticipantsReplica(
                name=name, kind="participants", stages=stages, batch_size=plan.batch_size, link=hops or None
            )
        )
    sites = dict(config.sites)  # with one for each line that several grouped participants share
    for site in dict.fromkeys(person.site for person in people):
        here = [one for one, person in enumerate(people) if person.site == site and person.line and one in members]
        if site is not None and len(here) > 1:
            line = str(people[here[0]].line)
            sites[f"{site}-participants"] = SiteSettings(line=line, members=[members[one] for one in here])
    nobody = plan.model_copy(update={"participants": [], "pairs": [], "default": None})
    return Grouped(
        config=config.model_copy(update={"links": kinds, "sites": sites, "replicas": replicas, "plan": nobody}),
        grouping=found,
        names=names,
        members=[[people[one].name for one in group_] for group_ in found.groups],
        left_out=[person.name for index, person in enumerate(people) if index not in members],
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
    if config.plan.default is not None:
        return config.plan.default
    first, second = (LinkSettings() if one.uplink is None else config.links[one.uplink] for one in (a, b))
    ways = {}
    for direction, passed in {"forward": (first, second), "backward": (second, first)}.items():
        shapes = passed[0].shape("forward"), passed[1].shape("backward")
        ways[direction] = DirectionSettings.model_construct(
            bandwidth=min((one.bandwidth for one in shapes if one.bandwidth is not None), default=None),
            latency=sum(one.latency for one in shapes),
            jitter=sum(one.jitter for one in shapes),
        )
    return LinkSettings(**ways)


def _seconds_of_participants(config: RunConfig, vocabulary: int | None) -> Iterator[list[np.ndarray]]:
    """Yield for each participant the seconds of a micro-batch, [S][L + 1], with as many micro-batches as possible."""
    plan = config.plan
    model = RunSpec(config.model_copy(update={"replicas": []}), vocabulary)
    micro_batches = max(1, plan.batch_size // plan.smallest_micro_batch)
    sequences = plan.batch_size // micro_batches
    load = Load(plan.stages, micro_batches, sequences, config.data.sequence_length, extra_in_flight=1)
    known: dict[str, list[np.ndarray]] = {}
    for index, person in enumerate(plan.participants):
        name = person.hardware or config.simulate.machine
        machine: Hardware = hardware_named(name, config.simulate.hardware, ("plan", "participants", index, "hardware"))
        if name not in known:
            known[name] = [stage_seconds(model, machine, 1, s, load) for s in range(plan.stages)]
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
