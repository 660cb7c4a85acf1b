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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero_pp.simulator.planner.split import Array, best_splits

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
        columns = np.flatnonzero(usable)
        if len(columns) < count or not self._relaxation_is_feasible(columns, count):
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

    def _relaxation_is_feasible(self, columns: Array, count: int) -> bool:
        from scipy.optimize import linprog

        ones, goal = np.ones((1, len(columns))), np.zeros(len(columns))
        limits = np.ones(self._contains.shape[0])
        options = {"time_limit": max(0.1, (self._deadline - time.monotonic()) / 3)}
        found = linprog(goal, self._contains[:, columns], limits, ones, [count], method="highs", options=options)
        return found.status != 2  # other statuses include a time-out, which proves nothing

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
