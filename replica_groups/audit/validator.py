"""Validator: follows a run's log round by round, and judges each round by the checks that the run's audit asks for.

It runs as a thread beside the exchange or in a process of its own. No round waits for it: one that falls behind skips
its checks of old rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hetero_pp.config.checkpoint import RunCheckpoint
from hetero_pp.config.member_inputs import round_optimizer
from hetero_pp.config.spec import RunSpec
from hetero_pp.data.sources import Source
from hetero_pp.messages.messages_pb2 import Judgement, RoundRecord
from hetero_pp.outer.apply_round import FetchBlob
from replica_groups.audit.gauntlet import GauntletCheck, ValidatedRun
from replica_groups.audit.recomputation import Recomputation
from replica_groups.exchange.replay import Follower, newest_sound

MOST_BEHIND = 8  # closed rounds after a round from which the round is applied without being checked


class RoundCheck(Protocol):
    """A check of closed rounds."""

    def check(self, record: RoundRecord, theta: Mapping[str, Tensor], fetch: FetchBlob) -> Iterator[Judgement]:
        """Yield what was found about a round's contributions.

        `theta`: all parameters before the round, which must not be changed. `fetch` reads the round's blobs.
        """

    def finish(self) -> Iterator[Judgement]:
        """Yield what is found after the last round, within some seconds."""


def checks_of(
    spec: RunSpec, run: ValidatedRun, source: Source, device: torch.device, folder: Path | None = None
) -> list[RoundCheck]:
    """Return the checks that the run's audit asks for.

    `folder` holds theta of rounds whose files are on their way (Recomputation).
    """
    audit, checks = spec.config.audit, list[RoundCheck]()
    if audit.scores is not None:
        checks.append(GauntletCheck(spec, audit.scores, source, run, device))
    if audit.recompute is not None:
        checks.append(Recomputation(spec, audit.recompute, run.log, source, device, folder))
    return checks


class Validator:
    """Follows one run from a run checkpoint on, and judges its rounds after `judged`."""

    def __init__(
        self,
        spec: RunSpec,
        run: ValidatedRun,
        checks: Sequence[RoundCheck],
        checkpoint: RunCheckpoint,
        judged: int = 0,
        folder: Path | None = None,
    ) -> None:
        """`folder` holds theta between rounds (Follower)."""
        self._spec, self._run, self._checks, self._folder = spec, run, checks, folder
        self._judged = judged
        self._follower = self._follow(checkpoint)

    def _follow(self, checkpoint: RunCheckpoint) -> Follower:
        return Follower(self._spec.run, checkpoint, round_optimizer(self._spec, checkpoint.basis), self._folder)

    def run(self, on_round: Callable[[int, int], None] = lambda round_, count: None) -> None:
        """Follow the run until its last round. `on_round` gets each round, and the number of judgements about it.

        Raises RunFailed if the run fails, and whatever a check raises.
        """
        while not self._is_over(self._follower.round):
            round_ = self._follower.round + 1
            record = self._run.record(round_)
            read = self._run.log.blobs_of(record)

            def fetch(replica: str, block: str, read: FetchBlob = read) -> bytes:
                return self._run.retry(lambda: read(replica, block))

            try:
                count = self._judge(record, fetch)
                self._follower.apply(record, fetch)
            except FileNotFoundError:  # the log keeps only the newest contributions
                newest = self._run.retry(lambda: newest_sound(self._run.log, self._run.last_round(), []))
                if newest.round < round_:
                    raise
                self._follower = self._follow(newest)
                continue
            on_round(round_, count)
        for check in self._checks:
            for judgement in check.finish():
                self._run.take([judgement])

    def _is_over(self, round_: int) -> bool:
        outer, log = self._spec.latest.outer, self._run.log
        tokens = 0 if outer.tokens is None else self._run.retry(lambda: log.tokens_after(round_))
        return outer.is_over(round_, tokens)

    def _judge(self, record: RoundRecord, fetch: FetchBlob) -> int:
        """Check a round, unless it is long closed; return the number of judgements."""
        if record.round <= self._judged or self._run.last_round() - record.round > MOST_BEHIND:
            return 0
        theta, count = self._follower.theta(), 0
        for check in self._checks:
            found = list(check.check(record, theta, fetch))
            for _, of_round in groupby(found, key=lambda one: one.round):  # an old one may come too late
                self._run.take(list(of_round))
            count += len(found)
        return count
