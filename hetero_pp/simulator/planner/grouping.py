"""Select the participants of each group and their order: a set packing whose columns are paths.

A *path* is an ordered choice of S participants. Two of its properties decide, and both are known exactly: the seconds
of its slowest stage under the best split of layers, and its link, the slowest of its hops. Disjoint paths are chosen to
maximize, in this order:

1. the number of groups divided by the seconds of the slowest group. Every round waits for that group, so a machine that
   would hold up all others stays out;
2. the link of the worst group, while no group gets slower than `balance` allows. Links decide how much a boundary has
   to lose;
3. the sum of the logarithms of all groups' links.

Steps 1 and 2 search for the best threshold that still leaves a packing; step 3 is one integer program. HiGHS solves
them, through scipy. Cheaper checks come first: random partitions (they succeed where there are many packings), the
linear relaxation (it usually shows that there is none), and a sample of the columns.

All paths are considered if there are at most `PATHS`. Otherwise about `SAMPLED_PATHS` are considered, along each
participant's best links, and random ones. The answer is then the best of these, not proven to be the best of all.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from hetero_pp.config.lines import DIRECTIONS, WAYS, DirectionSettings, LinkSettings, SiteSettings
from hetero_pp.config.predictions import Hardware, LooseParticipant, hardware_named
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica, StageSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_names
from hetero_pp.model.part_settings import BoundarySettings
from hetero_pp.model.transformer import EMBEDDING, LAYERS, block_of
from hetero_pp.simulator.costs import NOTHING, SHOWN, StagePart, assumption, boundary_numbers, cost_on
from hetero_pp.simulator.memory import Trains, memory_of_part

# ---- the split of layers over the stages of a group: the slowest stage is as fast as possible, and all fit ----
# Shapes: N groups, S stages, L layers. A table of costs [N, S, L + 1] holds the seconds of a micro-batch on each stage
# with that number of layers; infinity if they do not fit its memory.

Array = np.ndarray
NOT_COMPRESSED = BoundarySettings()


@dataclass(frozen=True)
class Load:
    """Schedule and shapes of a group: they decide the time and memory of a stage, together with its layers."""

    stages: int
    micro_batches: int
    sequences: int  # sequences of one micro-batch
    length: int
    extra_in_flight: int
    boundary: BoundarySettings = NOT_COMPRESSED

    def in_flight(self, stage: int) -> int:
        """Return the largest number of micro-batches whose activations the stage holds."""
        return min(self.micro_batches, (self.stages - 1 - stage) * (1 + self.extra_in_flight) + 1)


@lru_cache(maxsize=4)
def _sizes(spec: RunSpec) -> tuple[int, int, int]:
    """Return the numbers of parameters of the embedding, of one layer, and of the head. All layers are alike."""
    numbers = {name: math.prod(shape) for name, shape in spec.parameter_shapes.items()}
    layer = sum(size for name, size in numbers.items() if block_of(name) == f"{LAYERS}0")
    head = sum(size for name, size in numbers.items() if not name.startswith(LAYERS) and name != EMBEDDING)
    return numbers[EMBEDDING], layer, head


def part_of_stage(spec: RunSpec, stage: int, load: Load, layers: int) -> StagePart:
    """Return the part of the run's model that a stage with that number of layers has."""
    first, last, (embedding, layer, head) = stage == 0, stage == load.stages - 1, _sizes(spec)
    own = boundary_numbers(spec.shape, load.boundary, first) if load.stages > 1 else NOTHING
    return StagePart(layers, last, layers * layer + first * embedding + last * head, own)


def stage_bytes(spec: RunSpec, stage: int, load: Load, layers: int, hardware: Hardware) -> float:
    """Return the bytes that a stage needs for its part, in the memory of its hardware."""
    trains = Trains(
        load.sequences,
        load.length,
        load.micro_batches,
        load.in_flight(stage),
        value_bytes=2 if hardware.is_accelerator else 4,
        accelerated=hardware.is_accelerator,
    )
    memory = memory_of_part(spec.shape, part_of_stage(spec, stage, load, layers), trains)
    return memory.n_bytes(memory.computing_place)


def stage_seconds(spec: RunSpec, hardware: Hardware, accelerators: int, stage: int, load: Load) -> Array:
    """Return the seconds of a micro-batch by number of layers, [L + 1], with its share of the optimizer step.

    Infinity if the layers do not fit the memory.
    """
    found = np.full(spec.shape.layers + 1, np.inf)
    for layers in range(1, spec.shape.layers - load.stages + 2):
        if stage_bytes(spec, stage, load, layers, hardware) <= hardware.memory * accelerators:
            part = part_of_stage(spec, stage, load, layers)
            cost = cost_on(spec.shape, part, hardware, accelerators, load.sequences, load.length)
            found[layers] = cost.forward + cost.backward + cost.update / load.micro_batches
    return found


def best_splits(costs: Array) -> tuple[Array, Array]:
    """Return the layers of each stage [N, S] and the seconds of the slowest stage [N], for costs [N, S, L + 1].

    Seconds are infinite if no split fits. Dynamic programming over stages and layers, exact: best(s, l) = min over k of
    max(best(s-1, l-k), cost(s, k)).
    """
    groups, stages, columns = costs.shape
    best = costs[:, 0, :].copy()
    taken = np.zeros((stages, groups, columns), dtype=int)
    taken[0] = np.arange(columns)
    for stage in range(1, stages):
        before, best = best, np.full((groups, columns), np.inf)
        for layers in range(stage + 1, columns):
            own = np.arange(1, layers)
            slowest = np.maximum(before[:, layers - own], costs[:, stage, own])
            choice = slowest.argmin(axis=1)
            best[:, layers] = slowest[np.arange(groups), choice]
            taken[stage, :, layers] = own[choice]
    counts = np.zeros((groups, stages), dtype=int)
    left = np.full(groups, columns - 1)
    for stage in reversed(range(stages)):
        counts[:, stage] = taken[stage, np.arange(groups), left]
        left -= counts[:, stage]
    return counts, best[:, -1]


def best_split(costs: Sequence[Array]) -> tuple[list[int], float]:
    """Return the split of one group, and the seconds of its slowest stage.

    Prefers the even split, whose earlier stages take the remainder, if no other is faster.
    """
    counts, seconds = best_splits(np.stack(costs)[None])
    share, more = divmod(len(costs[0]) - 1, len(costs))
    even = [share + (stage < more) for stage in range(len(costs))]
    if max(float(cost[count]) for cost, count in zip(costs, even, strict=True)) <= seconds[0]:
        return even, float(seconds[0])
    return counts[0].tolist(), float(seconds[0])


# ---- groups of participants ----

PATHS = 300_000
SAMPLED_PATHS = 60_000
"""Approximate number of paths along the best links, used where there are more than `PATHS` in total."""
RANDOM_PARTITIONS = 200
SAMPLES = (1000, 4000)  # numbers of columns that are tried before all of them
LARGEST_LINK = 1e13  # bits per second that stand for an unlimited link
SPARES_SECONDS = 1.0  # longest search for groups of waiting machines, which need an answer meanwhile


@dataclass(frozen=True)
class Pool:
    """Pool of n participants to choose from, for S stages and L layers."""

    seconds: Array
    """Seconds of a micro-batch if the participant were that stage with that number of layers, [n, S, L + 1]."""
    bandwidth: Array  # bits per second from the first participant to the second, [n, n]
    balance: float


@dataclass(frozen=True)
class Grouping:
    """Chosen groups, each in the order of its stages."""

    groups: list[list[int]]
    seconds: list[float]  # seconds of the slowest stage of each group
    links: list[float]  # bits per second of the slowest hop of each group
    proven: bool  # Whether no better choice exists. False if the time or the number of paths was limited.
    considered: int  # number of paths that were considered


def group_spares(lines: Sequence[Any], stages: int) -> list[list[int]]:
    """Return groups of `stages` waiting machines, each in the order of its stages, fastest links first.

    `lines`: bits per second `up` and `down` of each machine's line. All machines count as equal, because only their
    lines are known.
    """
    up, down = (np.array([getattr(line, way) for line in lines]) for way in ("up", "down"))
    seconds = np.broadcast_to(np.arange(stages + 1.0), (len(lines), stages, stages + 1))
    found = group(Pool(seconds, np.minimum(up[:, None], down[None, :]), balance=1.0), SPARES_SECONDS)
    assert found is not None
    best = sorted(range(len(found.groups)), key=lambda one: -found.links[one])
    return [found.groups[one] for one in best]


@dataclass(frozen=True)
class _Paths:
    order: Array  # participants of each path, [N, S]
    sets: Array  # index of the set of participants that each path orders, [N]
    members: Array  # participants of each set, [sets, S]
    seconds: Array
    link: Array
    complete: bool

    def best_of_sets(self, values: Array, usable: Array) -> Array:
        """Return the largest value among the usable orders of each set, [sets]; -infinity for a set without one."""
        found = np.full(len(self.members), -np.inf)
        np.maximum.at(found, self.sets[usable], values[usable])
        return found


def group(pool: Pool, time_limit: float) -> Grouping | None:
    """Return the best groups within `time_limit` seconds; None if no S participants can hold the model together."""
    paths = _paths_of(pool)
    solver = _Solver(paths, len(pool.seconds), time.monotonic() + time_limit)
    # 1. The most groups per second of the slowest one, from the largest number of groups down.
    speed = paths.best_of_sets(1 / paths.seconds, paths.seconds < np.inf)
    levels = np.unique(speed[speed > 0])
    chosen, rate = list[int](), 0.0
    for count in range(len(pool.seconds) // pool.seconds.shape[1], 0, -1):
        worth_it = levels[count * levels > rate * (1 + 1e-9)]
        if not len(worth_it):
            break
        level, found = solver.best_threshold(speed, count, worth_it)
        if found:
            chosen, rate = found, count * level
    if not chosen:
        return None
    # 2. The best link of the worst group, and 3. the best links of all.
    usable = paths.seconds <= len(chosen) / rate / pool.balance
    link = paths.best_of_sets(paths.link, usable)
    _, linked = solver.best_threshold(link, len(chosen), np.unique(link[np.isfinite(link)]))
    chosen = linked or chosen
    good = link >= link[chosen].min()
    chosen = solver.improve(good, np.log(np.where(good, link, 1.0)), chosen)
    rows = []
    for one in chosen:  # the usable order of a set with the best link; among equal links, the fastest
        orders = np.flatnonzero((paths.sets == one) & usable)
        rows.append(int(orders[np.lexsort((paths.seconds[orders], -paths.link[orders]))[0]]))
    return Grouping(
        groups=[paths.order[row].tolist() for row in rows],
        seconds=[float(paths.seconds[row]) for row in rows],
        links=[float(paths.link[row]) for row in rows],
        proven=solver.proven and paths.complete,
        considered=len(paths.order),
    )


class _Solver:
    """Finds packings of disjoint sets, with HiGHS."""

    def __init__(self, paths: _Paths, participants: int, deadline: float) -> None:
        from scipy.sparse import csc_array  # half a second to import, and needed only here

        sets, size = paths.members.shape
        rows, columns = paths.members.ravel(), np.repeat(np.arange(sets), size)
        self._contains = csc_array((np.ones(sets * size), (rows, columns)), shape=(participants, sets))
        self._deadline = deadline
        self._random = np.random.default_rng(0)
        known = {tuple(row): one for one, row in enumerate(paths.members.tolist())}
        self._partitions = [
            np.array([known[own] for row in np.sort(partition, axis=1).tolist() if (own := tuple(row)) in known])
            for partition in _partitions(participants, size)
        ]
        self.proven = True

    def best_threshold(self, values: Array, count: int, levels: Array) -> tuple[float, list[int]]:
        """Return the largest level that leaves `count` disjoint sets of at least that value, and these sets.

        `levels` are sorted. Returns -infinity and no sets if no level does.
        """
        low, high = -1, len(levels) - 1
        found: list[int] = []
        while low < high:
            middle = (low + high + 1) // 2
            packed = self.pack(values >= levels[middle], count)
            if packed is None:
                high = middle - 1
            else:  # the worst set found may be better than the level that was tried
                found, low = packed, int(np.searchsorted(levels, values[packed].min()))
        return (float(levels[low]) if found else -math.inf), found

    def pack(self, usable: Array, count: int) -> list[int] | None:
        """Return `count` disjoint usable sets; None if none were found."""
        for partition in self._partitions:
            if np.count_nonzero(usable[partition]) >= count:
                return partition[usable[partition]][:count].tolist()
        from scipy.optimize import linprog

        columns = np.flatnonzero(usable)
        if len(columns) < count:
            return None
        # Without a solution of the linear relaxation there is none. Other statuses include a time-out.
        ones, goal, limits = np.ones((1, len(columns))), np.zeros(len(columns)), np.ones(self._contains.shape[0])
        options = {"time_limit": max(0.1, (self._deadline - time.monotonic()) / 3)}
        relaxed = linprog(goal, self._contains[:, columns], limits, ones, [count], method="highs", options=options)
        if relaxed.status == 2:
            return None
        for size in SAMPLES:
            if len(columns) > size:
                found, _ = self._solve(self._random.choice(columns, size, replace=False), count, None)
                if found is not None:
                    return found
        found, is_certain = self._solve(columns, count, None)
        self.proven &= found is not None or is_certain
        return found

    def improve(self, usable: Array, gain: Array, found: list[int]) -> list[int]:
        """Return as many disjoint usable sets as were found, with the largest sum of gains."""
        better, is_certain = self._solve(np.flatnonzero(usable), len(found), gain)
        self.proven &= is_certain
        return found if better is None or gain[better].sum() < gain[found].sum() else better

    def _solve(self, columns: Array, count: int, gain: Array | None) -> tuple[list[int] | None, bool]:
        """Return sets, and whether the solver is certain: that there are none, or none with a larger gain."""
        from scipy.optimize import LinearConstraint, milp

        left = self._deadline - time.monotonic()
        if left <= 0:
            return None, False
        one_each = LinearConstraint(self._contains[:, columns], ub=1)
        all_of_them = LinearConstraint(np.ones((1, len(columns))), lb=count, ub=count)
        found = milp(
            np.zeros(len(columns)) if gain is None else -gain[columns],
            integrality=np.ones(len(columns)),
            bounds=(0, 1),
            constraints=[one_each, all_of_them],
            options={"time_limit": max(0.1, left / 3)},
        )
        chosen = None if found.x is None else columns[found.x > 0.5].tolist()
        return chosen, found.status in (0, 2)


def _paths_of(pool: Pool) -> _Paths:
    count, stages = pool.seconds.shape[:2]
    links = np.minimum(pool.bandwidth, pool.bandwidth.T)
    complete = math.perm(count, stages) <= PATHS
    if complete:
        order = np.array(list(itertools.permutations(range(count), stages)))
    else:  # along each participant's best links, and random ones
        neighbours = int((SAMPLED_PATHS / count) ** (1 / (stages - 1)))
        best_first = links.copy()
        np.fill_diagonal(best_first, -1)
        nearest = np.argsort(-best_first, axis=1, kind="stable")[:, :neighbours]
        order = np.arange(count)[:, None]
        for _ in range(stages - 1):
            longer = np.repeat(order, nearest.shape[1], axis=0)
            following = nearest[order[:, -1]].reshape(-1, 1)
            order = np.hstack([longer, following])[~(longer == following).any(axis=1)]
        order = np.unique(np.vstack([order, *_partitions(count, stages)]), axis=0)
    members, sets = np.unique(np.sort(order, axis=1), axis=0, return_inverse=True)
    link = np.minimum(links[order[:, :-1], order[:, 1:]].min(axis=1, initial=np.inf), LARGEST_LINK)
    # The slowest stage of each path is computed once for each sequence of equal machines.
    kinds: dict[bytes, int] = {}
    kind = np.array([kinds.setdefault(row.tobytes(), len(kinds)) for row in pool.seconds])
    sample = np.array([int(np.flatnonzero(kind == one)[0]) for one in range(len(kinds))])
    sequences, which = np.unique(kind[order], axis=0, return_inverse=True)
    slowest = []
    for some in np.array_split(sequences, 1 + len(sequences) // 20_000):
        costs = [pool.seconds[sample[some[:, stage]], stage] for stage in range(stages)]
        slowest.append(best_splits(np.stack(costs, axis=1))[1])
    seconds = np.concatenate(slowest)[which.reshape(-1)]
    return _Paths(order, sets.reshape(-1), members, seconds, link, complete)


def _partitions(count: int, stages: int) -> list[Array]:
    """Return random partitions of the participants into groups, [groups, S] each."""
    random = np.random.default_rng(0)
    whole = count // stages * stages
    return [random.permutation(count)[:whole].reshape(-1, stages) for _ in range(RANDOM_PARTITIONS)]


# ---- loose participants as replicas of the YAML: the links between them, and the groups that were chosen ----

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
            limits += [config.lines[one.line].bandwidth_of(way) for one, way in ways if one.line is not None]
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
    load = Load(plan.stages, plan.batch_size, 1, config.data.sequence_length, extra_in_flight=1)
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
