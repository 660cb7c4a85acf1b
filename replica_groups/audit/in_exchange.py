"""Audits of a run in the process of its exchange: the judgements, and a validator if it runs beside the exchange."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import HeteroPPError, Refused, RunFailed
from hetero_pp.data.sources import open_source
from hetero_pp.messages.messages_pb2 import Judgement, RoundRecord
from replica_groups.audit.gauntlet import SignCheck
from replica_groups.audit.judgements import Judgements
from replica_groups.audit.showing import shows_of
from replica_groups.exchange.auditor import Auditor
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.replay import newest_sound

BESIDE_EXCHANGE = "exchange"  # name of the validator beside the exchange, which no other has
_SECONDS_BETWEEN_LOOKS, _MOST_SECONDS_BETWEEN_LOOKS = 0.1, 2.0
_SECONDS_TO_JUDGE = 30.0  # seconds that the end of a run waits for the judgements of its last rounds

T = TypeVar("T")


@dataclass(frozen=True)
class _InExchange:
    """The run of a validator beside the exchange. Implements ValidatedRun."""

    exchange: Exchange
    judgements: Judgements

    @property
    def log(self) -> ContributionLog:
        return self.exchange.log

    def record(self, round_: int) -> RoundRecord:
        return self.exchange.record(round_)

    def last_round(self) -> int:
        return self.exchange.coordinator.last_round

    def retry(self, do: Callable[[], T]) -> T:
        return self.exchange.runner.retry(do)

    def wait_for(self, find: Callable[[], T]) -> T:
        pause = _SECONDS_BETWEEN_LOOKS
        while (cause := self.exchange.runner.failure) is None:
            with suppress(FileNotFoundError):
                return self.retry(find)
            time.sleep(pause)  # a text may take two rounds, and each look asks the store
            pause = min(2 * pause, _MOST_SECONDS_BETWEEN_LOOKS)
        raise RunFailed(cause)

    def take(self, judgements: Sequence[Judgement]) -> None:
        with suppress(Refused):  # it is counted and told; the next one may be right
            self.judgements.take(judgements, BESIDE_EXCHANGE)


class Followers:
    """Threads that follow the rounds of a run beside its exchange: the auditor, and a validator."""

    def __init__(
        self, auditor: Auditor, judgements: Judgements | None = None, validator: threading.Thread | None = None
    ) -> None:
        self._auditor, self._judgements, self._validator = auditor, judgements, validator

    def join(self, seconds: float | None = None) -> None:
        """Wait until the last round is replayed or the run has failed, for at most `seconds`.

        The judgements of the last rounds are awaited for half a minute at most.
        """
        self._auditor.join(seconds)
        seconds = _SECONDS_TO_JUDGE if seconds is None else min(seconds, _SECONDS_TO_JUDGE)
        if self._validator is not None:
            self._validator.join(seconds)
        elif self._judgements is not None:
            self._judgements.wait_until_judged(seconds)


def audited(exchange: Exchange, spec: RunSpec) -> Exchange:
    """Return the exchange, which takes judgements from now on if the run's configuration asks for audits."""
    audit = spec.config.audit
    if (compares := audit.compares) is not None or audit.recompute is not None:
        weighs = spec.config.outer.weights == "scores"
        signs = None if compares is None or compares.agreement is None else SignCheck(spec, compares.agreement)

        def overlap(record: RoundRecord) -> Collection[tuple[str, str]]:
            from replica_groups.audit.gauntlet import decoded, overlapping

            assert compares is not None, "only validators that score tell of copies"
            fetch = exchange.log.blobs_of(record)
            with suppress(HeteroPPError, FileNotFoundError):  # the log keeps only the newest contributions
                sent = {one.replica: decoded(spec, record, one.replica, fetch) for one in record.contributions}
                return overlapping(sent, compares.overlap)
            return []

        own = exchange.runner, exchange.reports, exchange.held_by
        exchange.runner.audits = Judgements(*own, audit, weighs, overlap, signs, shows_of(spec))
    return exchange


def followed(auditor: Auditor, exchange: Exchange, spec: RunSpec, folder: RunFolder) -> Followers:
    """Start the validator of a run that has begun, if it runs beside the exchange; return all followers of its log."""
    judgements = exchange.runner.audits
    if not isinstance(judgements, Judgements) or not spec.config.audit.needs_validators:
        return Followers(auditor)  # no judgement will come
    if spec.config.audit.by != "exchange":
        return Followers(auditor, judgements)
    from replica_groups.audit.validator import Validator, checks_of

    run, since = _InExchange(exchange, judgements), exchange.runner.begun_after
    spec = spec.with_changes(exchange.runner.changes)

    def validate() -> None:
        torch.set_num_threads(spec.config.threads)
        try:
            checkpoint = run.retry(lambda: newest_sound(exchange.log, since, []))
            source = open_source(spec.config.data, folder.cache)
            checks = checks_of(spec, run, source, torch.device("cpu"), folder.path)
            validator = Validator(spec, run, checks, checkpoint, since, folder.path)
            del checkpoint  # its memory
            validator.run()
        except RunFailed:
            return
        except Exception as error:  # noqa: BLE001 (a run goes on without its validator)
            judgements.unaudited(f"the validator has ended ({type(error).__name__}: {error}); the run goes on")

    validator = threading.Thread(target=validate, name="validator", daemon=True)
    validator.start()
    return Followers(auditor, judgements, validator)
