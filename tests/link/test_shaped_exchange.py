"""A member's shaped link to the exchange: uploads take the uplink's time, and downloads that of the downlink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple

import pytest
import torch
from fake_clock import FakeClock
from torch import Tensor

from hetero_pp.changed_keys import NO_CHANGES, Changes
from hetero_pp.link.shared_lines import Lines
from hetero_pp.links import LinkShape, LinkSpec
from hetero_pp.messages.messages_pb2 import Report, RoundRecord
from hetero_pp.outer import exchange_service
from hetero_pp.outer.exchange_service import Assignment, AvailableStates, Standing
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from replica_groups.exchange.shaped import ShapedExchange

BLOB = bytes(1000)
WIRE = 1000 + 5 + 9
"""Bytes of one gRPC message of 1000 bytes in one HTTP/2 frame."""
UP, DOWN = LinkShape(bandwidth=8e3, latency=3.0), LinkShape(bandwidth=8e6, latency=0.25)
"""A byte takes a millisecond up and a microsecond down."""
UP_SECONDS, DOWN_SECONDS = WIRE / 1e3, WIRE / 1e6
ADDRESS = BlobAddress("run", 4, "home", "norm")

Counts = tuple[object, ...]
"""A tuple of messages, payload bytes, wire bytes and seconds that the link was busy."""


class Far:
    """The far end, which records calls and their times. Implements ExchangeService."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.asked: list[tuple[float, object]] = []

    def _ask(self, what: object) -> None:
        self.asked.append((self.clock.time, what))

    def agree(self, member: str, configuration: str, tokens: str = "") -> str:
        self._ask((member, configuration, tokens))
        return "run"

    def changes(self) -> Changes:
        self._ask("changes")
        return NO_CHANGES

    def join(
        self,
        member: str,
        address: str,
        available: AvailableStates = exchange_service.NO_STATES,
        process: str | None = None,
    ) -> int:
        self._ask((member, address, available, process))
        return 2

    def last_round(self) -> int:
        self._ask("last round")
        return 4

    def newest_snapshot(self) -> tuple[int, Sequence[str]]:
        self._ask("newest snapshot")
        return 3, ["a"]

    def snapshot(self, names: Sequence[str], round_: int | None = None) -> dict[str, Tensor]:
        self._ask((round_, list(names)))
        return {name: torch.zeros(125) for name in names}

    def assign(self, member: str, holds: int, address: str = "", trained: int = 0) -> Assignment:
        self._ask((member, holds, address, trained))
        return Assignment(5, 2)

    def beat(
        self, member: str, round_: int | None = None, epoch: int = 0, progress: int = 0, computes: bool = False
    ) -> Standing:
        self._ask((member, round_, epoch, progress, computes))
        return Standing(is_over=True)

    def broken(self, member: str, epoch: int, cause: str, blames: str = "") -> None:
        self._ask((member, epoch, cause))

    def deposit(self, member: str, address: BlobAddress, data: bytes, epoch: int | None = None, steps: int = 0) -> None:
        self._ask((member, address, data, epoch, steps))

    def record(self, round_: int, member: str | None = None) -> RoundRecord:
        self._ask((round_, member))
        return RoundRecord(round=round_)

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes:
        self._ask((member, round_, replica, block))
        return BLOB

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None:
        self._ask((member, round_, sha256))

    def report(self, reports: Sequence[Report]) -> None:
        self._ask(list(reports))


class Shaped:
    """A member's shaped link on a simulated clock that only advances when code waits."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.far = Far(clock)
        link = LinkSpec("home.0-exchange", "home.0", "exchange", UP, DOWN)
        self.exchange = ShapedExchange(self.far, link, seed=1, lines=Lines(clock=clock))

    def counts(self, round_: int) -> list[Counts]:
        """Return the counts of both directions, up and down."""
        return [astuple(ledger.of_round(round_)) for ledger in (self.exchange.forward, self.exchange.backward)]


@pytest.fixture
def shaped() -> Shaped:
    return Shaped(FakeClock())


def _count(messages: int, seconds: float) -> Counts:
    return messages, messages * len(BLOB), messages * WIRE, pytest.approx(seconds)


NOTHING = (0, 0, 0, 0.0)


def test_a_deposit_goes_up(shaped: Shaped) -> None:
    """It arrives when the uplink has carried it."""
    shaped.exchange.deposit("home.0", ADDRESS, BLOB, 2, 50)
    assert shaped.far.asked == [(pytest.approx(100 + 3 + UP_SECONDS), ("home.0", ADDRESS, BLOB, 2, 50))]
    assert shaped.clock.time == pytest.approx(100 + 3 + UP_SECONDS)
    assert shaped.counts(4) == [_count(1, UP_SECONDS), NOTHING]


def test_a_fetched_blob_comes_down(shaped: Shaped) -> None:
    """The request is sent at once. The blob arrives when the downlink has carried it."""
    assert shaped.exchange.fetch("home.0", 4, "dc", "norm") == BLOB
    assert shaped.far.asked == [(100.0, ("home.0", 4, "dc", "norm"))]
    assert shaped.clock.time == pytest.approx(100 + 0.25 + DOWN_SECONDS)
    assert shaped.counts(4) == [NOTHING, _count(1, DOWN_SECONDS)]


def test_a_snapshot_comes_down_before_the_first_round(shaped: Shaped) -> None:
    assert list(shaped.exchange.snapshot(["a", "b"], 3)) == ["a", "b"]  # two tensors of 125 fp32 numbers
    assert shaped.far.asked == [(100.0, (3, ["a", "b"]))]
    assert shaped.clock.time == pytest.approx(100 + 0.25 + DOWN_SECONDS)
    assert shaped.counts(0) == [NOTHING, _count(1, DOWN_SECONDS)]


def test_both_ways_are_free_of_each_other(shaped: Shaped) -> None:
    """Each round has its own bytes. A slow upload does not delay downloads."""
    for round_ in (1, 2):
        shaped.exchange.deposit("home.0", BlobAddress("run", round_, "home", "norm"), BLOB)
        for replica in ("a", "b", "c"):
            shaped.exchange.fetch("home.0", round_, replica, "norm")
    assert shaped.clock.time == pytest.approx(100 + 2 * (3 + UP_SECONDS) + 6 * (0.25 + DOWN_SECONDS))
    for round_ in (1, 2):
        assert shaped.counts(round_) == [_count(1, UP_SECONDS), _count(3, 3 * DOWN_SECONDS)]


def test_what_is_small_is_passed_on_at_once_and_not_counted(shaped: Shaped) -> None:
    reports = [Report(member="home.0")]
    held = AvailableStates(frozenset({4}))
    assert shaped.exchange.agree("home.0", "{}", "of a text") == "run"
    assert shaped.exchange.changes() == NO_CHANGES
    assert shaped.exchange.join("home.0", "here", held, "me") == 2
    assert shaped.exchange.newest_snapshot() == (3, ["a"])
    assert shaped.exchange.assign("home.0", 4, "here", trained=5) == Assignment(5, 2)
    assert shaped.exchange.beat("home.0", 5, 2, 9, True) == Standing(is_over=True)
    shaped.exchange.broken("home.0", 2, "a cause")
    assert shaped.exchange.last_round() == 4
    assert shaped.exchange.record(4, "home.0").round == 4
    shaped.exchange.confirm("home.0", 4, {"norm.weight": b"x"})
    shaped.exchange.report(reports)
    joined = [("home.0", "{}", "of a text"), "changes", ("home.0", "here", held, "me"), "newest snapshot"]
    works = [("home.0", 4, "here", 5), ("home.0", 5, 2, 9, True), ("home.0", 2, "a cause"), "last round"]
    asked = [*joined, *works, (4, "home.0"), ("home.0", 4, {"norm.weight": b"x"}), reports]
    assert shaped.far.asked == [(100.0, what) for what in asked]
    assert shaped.counts(0) == shaped.counts(4) == [NOTHING, NOTHING]
