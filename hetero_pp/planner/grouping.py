"""Which participants form a group, in which order: a set packing whose columns are paths.

A *path* is an ordered choice of S participants. What matters of it is known exactly: the seconds of its slowest stage
under the best split of layers, and its link, the slowest of its hops. Of all ways to choose disjoint paths we want

1. the most groups per second of the slowest one, as every round waits for it (a machine that would hold all others up
   stays out);
2. then, while no group gets slower than `balance` allows, the best link of the worst group, as links decide how much
   a boundary has to lose;
3. then the best links of all groups: the largest sum of their logarithms.

1 and 2 are searches for the best threshold that still leaves a packing, 3 is one integer program. They go to HiGHS by
way of scipy, which is imported here only, unless something cheaper decides: random partitions, where there are many
packings; the relaxation, which mostly tells where there are none; a sample of the columns. Up to `PATHS` paths are all
considered; of more, `SAMPLED_PATHS` along each participant's best links and random ones, and then the answer is the
best of these, not proven to be the best of all.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero_pp.planner.split import Array, best_splits

PATHS = 300_000
SAMPLED_PATHS = 60_000
"""Where there are more than that."""
RANDOM_PARTITIONS = 200
SAMPLES = (1000, 4000)
"""Columns that are tried before all of them."""
LARGEST_LINK = 1e13
"""Bits per second that an unlimited link counts as."""


@dataclass(frozen=True)
class Pool:
    """n participants to choose from; S stages, L layers."""

    seconds: Array
    """[n, S, L + 1]: of a micro-batch, if the participant were that stage with so many layers."""
    bandwidth: Array
    """[n, n] bits per second from the first to the second."""
    balance: float

    @property
    def count(self) -> int:
        return len(self.seconds)

    @property
    def stages(self) -> int:
        return self.seconds.shape[1]


@dataclass(frozen=True)
class Grouping:
    """The groups that were chosen, each in the order of its stages."""

    groups: list[list[int]]
    seconds: list[float]
    """Of the slowest stage of each."""
    links: list[float]
    """Of the slowest hop of each, bits per second."""
    proven: bool
    """Whether no better choice exists (else the time or the number of paths was limited)."""
    considered: int
    """Paths."""


@dataclass(frozen=True)
class _Paths:
    order: Array
    """[N, S] participants."""
    sets: Array
    """[N] which set of participants it is an order of."""
    members: Array
    """[sets, S]"""
    seconds: Array
    link: Array
    complete: bool

    def best_of_sets(self, values: Array, usable: Array) -> Array:
        """[sets] the largest value of usable orders of each set; -infinity if there is none."""
        found = np.full(len(self.members), -np.inf)
        np.maximum.at(found, self.sets[usable], values[usable])
        return found


def group(pool: Pool, time_limit: float) -> Grouping | None:
    """The best groups; None if no S participants can hold the model together. `time_limit` is in seconds."""
    deadline = time.monotonic() + time_limit
    paths = _paths_of(pool)
    solver = _Solver(paths, pool.count, deadline)
    fastest, slowest = _fastest(paths, solver, pool.count // pool.stages)
    if not fastest:
        return None
    count = len(fastest)
    usable = paths.seconds <= slowest / pool.balance
    link = paths.best_of_sets(paths.link, usable)
    _, chosen = solver.best_threshold(link, count, np.unique(link[np.isfinite(link)]))
    chosen = chosen or fastest
    good = link >= link[chosen].min()
    chosen = solver.improve(good, np.log(np.where(good, link, 1.0)), chosen)
    rows = [_best_order(paths, one, usable) for one in chosen]
    return Grouping(
        groups=[paths.order[row].tolist() for row in rows],
        seconds=[float(paths.seconds[row]) for row in rows],
        links=[float(paths.link[row]) for row in rows],
        proven=solver.proven and paths.complete,
        considered=len(paths.order),
    )


def _fastest(paths: _Paths, solver: _Solver, most: int) -> tuple[list[int], float]:
    """The most groups per second of the slowest one: their sets, and its seconds."""
    speed = paths.best_of_sets(1 / paths.seconds, paths.seconds < np.inf)
    levels = np.unique(speed[speed > 0])
    best: list[int] = []
    rate = 0.0
    for count in range(most, 0, -1):
        worth_it = levels[count * levels > rate * (1 + 1e-9)]
        if not len(worth_it):
            break
        level, found = solver.best_threshold(speed, count, worth_it)
        if found:
            best, rate = found, count * level
    return best, len(best) / rate if best else math.inf


def _best_order(paths: _Paths, chosen: int, usable: Array) -> int:
    """Of a set's usable orders the one with the best link, then the fastest."""
    rows = np.flatnonzero((paths.sets == chosen) & usable)
    return int(rows[np.lexsort((paths.seconds[rows], -paths.link[rows]))[0]])


class _Solver:
    """Packings of disjoint sets, by HiGHS."""

    def __init__(self, paths: _Paths, participants: int, deadline: float) -> None:
        from scipy.sparse import csc_array  # half a second to import, needed here alone

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
        """The largest of the (sorted) levels at which sets of at least that value leave so many disjoint ones, and
        these; -infinity and none if there is no such level."""
        low, high = -1, len(levels) - 1
        found: list[int] = []
        while low < high:
            middle = (low + high + 1) // 2
            packed = self.pack(values >= levels[middle], count)
            if packed is None:
                high = middle - 1
            else:  # the worst of what was found may be better than what was asked for
                found, low = packed, int(np.searchsorted(levels, values[packed].min()))
        return (float(levels[low]) if found else -math.inf), found

    def pack(self, usable: Array, count: int) -> list[int] | None:
        """So many disjoint usable sets; None if none were found."""
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
        """As many disjoint usable sets as were found, with the largest sum of gains."""
        better, is_certain = self._solve(np.flatnonzero(usable), len(found), gain)
        self.proven &= is_certain
        return found if better is None or gain[better].sum() < gain[found].sum() else better

    def _relaxation_is_feasible(self, columns: Array, count: int) -> bool:
        from scipy.optimize import linprog

        ones, goal = np.ones((1, len(columns))), np.zeros(len(columns))
        limits = np.ones(self._contains.shape[0])
        options = {"time_limit": max(0.1, (self._deadline - time.monotonic()) / 3)}
        found = linprog(goal, self._contains[:, columns], limits, ones, [count], method="highs", options=options)
        return found.status != 2  # or the time ran out

    def _solve(self, columns: Array, count: int, gain: Array | None) -> tuple[list[int] | None, bool]:
        """Sets, and whether it is certain that there are none, or none with a larger gain."""
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
    order, complete = _orders(pool)
    members, sets = np.unique(np.sort(order, axis=1), axis=0, return_inverse=True)
    hops = np.minimum(pool.bandwidth, pool.bandwidth.T)[order[:, :-1], order[:, 1:]]
    link = np.minimum(hops.min(axis=1, initial=np.inf), LARGEST_LINK)
    return _Paths(order, sets.reshape(-1), members, _seconds_of(pool, order), link, complete)


def _orders(pool: Pool) -> tuple[Array, bool]:
    """[N, S] paths to consider, and whether these are all."""
    if math.perm(pool.count, pool.stages) <= PATHS:
        return np.array(list(itertools.permutations(range(pool.count), pool.stages))), True
    neighbours = int((SAMPLED_PATHS / pool.count) ** (1 / (pool.stages - 1)))
    links = np.minimum(pool.bandwidth, pool.bandwidth.T)
    np.fill_diagonal(links, -1)
    nearest = np.argsort(-links, axis=1, kind="stable")[:, :neighbours]
    paths = np.arange(pool.count)[:, None]
    for _ in range(pool.stages - 1):
        longer = np.repeat(paths, nearest.shape[1], axis=0)
        following = nearest[paths[:, -1]].reshape(-1, 1)
        paths = np.hstack([longer, following])[~(longer == following).any(axis=1)]
    return np.unique(np.vstack([paths, *_partitions(pool.count, pool.stages)]), axis=0), False


def _partitions(count: int, stages: int) -> list[Array]:
    """[groups, S] each: everybody in a group, at random."""
    random = np.random.default_rng(0)
    whole = count // stages * stages
    return [random.permutation(count)[:whole].reshape(-1, stages) for _ in range(RANDOM_PARTITIONS)]


def _seconds_of(pool: Pool, order: Array) -> Array:
    """[N] of the slowest stage; found once for each sequence of equal machines."""
    kinds: dict[bytes, int] = {}
    kind = np.array([kinds.setdefault(row.tobytes(), len(kinds)) for row in pool.seconds])
    sample = np.array([int(np.flatnonzero(kind == one)[0]) for one in range(len(kinds))])
    sequences, which = np.unique(kind[order], axis=0, return_inverse=True)
    found = []
    for some in np.array_split(sequences, 1 + len(sequences) // 20_000):
        chosen: Sequence[Array] = [pool.seconds[sample[some[:, stage]], stage] for stage in range(pool.stages)]
        found.append(best_splits(np.stack(chosen, axis=1))[1])
    return np.concatenate(found)[which.reshape(-1)]
