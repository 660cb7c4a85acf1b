"""Streams that share a line: equal shares, control messages first, and arrivals timed by their bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_clock import FakeClock
from opened_links import line

from hetero_pp.config.lines import DIRECTIONS, EXCHANGE, LinkShape, LinkSpec
from hetero_pp.link.protocol import PEER_CLOSED
from hetero_pp.link.shaping import (
    CONTROL_BYTES,
    TURN_SECONDS,
    Arrivals,
    Bucket,
    FileBucket,
    Lines,
    ShapedQueue,
    Stream,
    StreamQueue,
)

RATE = 8e6
"""Bits per second: a byte takes a microsecond."""
START = 100.0


class Sender:
    """A stream that asks for its next turn when the previous one has left, as a thread would."""

    def __init__(self, buckets: list[Bucket], n_bytes: int, ready: float = START) -> None:
        self.stream = Stream(buckets)
        self.left, self.to_go = ready, n_bytes

    def turn(self) -> None:
        portion, self.left = self.stream.turn(self.left, self.left, self.to_go)
        self.to_go -= portion


def run(*senders: Sender) -> list[float]:
    """Return the seconds after START at which each sender is done. The sender whose turn ended first asks first."""
    while waiting := [one for one in senders if one.to_go]:
        min(waiting, key=lambda one: one.left).turn()
    return [one.left - START for one in senders]


def test_streams_get_equal_shares() -> None:
    """Two streams get half each, then the longer one gets all: 2 x 0.1 s, and 0.2 s more."""
    bucket = Bucket(RATE)
    assert run(Sender([bucket], 100_000), Sender([bucket], 300_000)) == [
        pytest.approx(0.2, abs=2 * TURN_SECONDS),
        pytest.approx(0.4),
    ]


def test_who_comes_later_has_its_share_from_then_on() -> None:
    """The first stream has 0.1 s alone, then half for 2 x 0.1 s."""
    bucket = Bucket(RATE)
    ends = run(Sender([bucket], 300_000), Sender([bucket], 100_000, START + 0.1))
    assert ends == [pytest.approx(0.4), pytest.approx(0.3, abs=2 * TURN_SECONDS)]


def test_a_slow_line_leaves_the_rest_of_a_shared_one_to_others() -> None:
    """The shared line has 1 MB/s. One stream gets 0.2 MB/s, as its own line carries, and the other 0.8 MB/s."""
    shared, slow = Bucket(RATE), Bucket(RATE / 5)
    ends = run(Sender([slow, shared], 100_000), Sender([shared], 400_000))
    assert ends == [pytest.approx(0.5, rel=0.05), pytest.approx(0.5, rel=0.05)]


def test_alone_a_stream_has_the_slowest_of_what_it_passes() -> None:
    clock = FakeClock()
    began, left = Stream([Bucket(RATE), Bucket(RATE / 4)], clock).leave(100_000, START)
    assert (began, left) == (START, pytest.approx(START + 0.4))
    assert clock.time == pytest.approx(left)


def test_a_control_message_goes_first() -> None:
    """Behind one second of other bytes it takes no longer than its own time."""
    bucket, clock = Bucket(RATE), FakeClock()
    bucket.reserve(START, START, 1_000_000)
    _, left = Stream([bucket], clock).leave(CONTROL_BYTES, START)
    assert left == pytest.approx(START + CONTROL_BYTES * 1e-6)
    assert bucket.reserve(START, START, 1000) == pytest.approx(START + 1 + (CONTROL_BYTES + 1000) * 1e-6)


def test_nothing_to_pass_takes_no_time() -> None:
    clock = FakeClock()
    assert Stream([], clock).leave(1 << 40, START) == (START, START)
    assert Stream([Bucket(RATE)], clock).leave(0, START) == (START, START)


@pytest.mark.parametrize(("factor", "expected"), [(4, 1.0), (1, 1.0), (0.5, 2.0)])
def test_coming_in_overlaps_with_leaving(factor: float, expected: float) -> None:
    """A faster line adds no time. Through a slower one, arrival takes as long as that line needs."""
    arrivals = Arrivals(Bucket(factor * RATE), LinkShape(latency=0.25), RATE, "seed", FakeClock())
    assert arrivals.at(START, START + 1, 1_000_000) == pytest.approx(START + expected + 0.25)


def test_two_that_come_at_once_share_what_they_come_by() -> None:
    bucket, clock = Bucket(RATE), FakeClock()
    ends = [Arrivals(bucket, LinkShape(), RATE, seed, clock).at(START, START + 1, 1_000_000) for seed in "ab"]
    assert ends == [pytest.approx(START + 1), pytest.approx(START + 2)]


def test_what_has_just_come_began_when_its_sender_could() -> None:
    """Bytes of one second have just arrived over a line twice as fast: they arrived while they were sent."""
    clock = FakeClock()
    arrivals = Arrivals(Bucket(2 * RATE), LinkShape(), RATE, "seed", clock)
    assert arrivals.come(1_000_000) == pytest.approx(START)
    assert arrivals.come(3_000_000) == pytest.approx(START + 1.0)  # at most 0.5 s were free: 1.5 s from START - 0.5


def test_jitter_overtakes_nobody() -> None:
    arrivals = Arrivals(None, LinkShape(latency=0.1, jitter=0.5), RATE, "seed", FakeClock())
    ends = [arrivals.at(START, START + 0.01 * index, 1000) for index in range(50)]
    assert ends == sorted(ends)
    assert all(0.1 <= end - START - 0.01 * index <= 0.6 + 0.5 for index, end in enumerate(ends))


# ---- buckets of several processes ----


def test_processes_share_a_line_as_threads_do(tmp_path: Path) -> None:
    """Two processes that share only the file act as one."""
    one, two, alone = FileBucket(RATE, tmp_path / "a"), FileBucket(RATE, tmp_path / "a"), Bucket(RATE)
    for index in range(6):
        bucket = (one, two)[index % 2]
        assert bucket.reserve(START, START, 1000 * index) == alone.reserve(START, START, 1000 * index)
    assert two.overtake(START, 100) == alone.overtake(START, 100)
    assert one.reserve(START, START, 1) == alone.reserve(START, START, 1)


def test_a_file_of_an_earlier_start_of_the_machine_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    FileBucket(RATE, path).reserve(START, START + 1e6, 1000)
    assert FileBucket(RATE, path).reserve(START, START, 1000) > START + 1e6
    os.utime(path, (0, 0))
    assert FileBucket(RATE, path).reserve(START, START, 1000) == pytest.approx(START + 0.001)


def test_who_shares_a_line_decides_what_holds_it(tmp_path: Path) -> None:
    """The line of one member is held by its process alone. Lines of sites and of the exchange are in files."""
    own = line("home.0", ("home.0",), RATE, None)
    site = line("house", ("home.1", "home.2"), RATE, RATE)
    far = line(EXCHANGE, (EXCHANGE,), RATE, RATE)
    for link, files in (
        (LinkSpec("home.0-exchange", "home.0", EXCHANGE, LinkShape(), LinkShape(), own), set()),
        (LinkSpec("a", "home.1", EXCHANGE, LinkShape(), LinkShape(), site, far), {"exchange-down", "exchange-up"}),
    ):
        lines = Lines(tmp_path / link.name)
        found = [lines.buckets(link, way) for way in DIRECTIONS]
        assert len(found[0]) == (2 if files else 1)
        for buckets in found:
            for bucket in buckets:
                bucket.reserve(START, START, 1)
        there = {path.name for path in (tmp_path / link.name).glob("*") if path.suffix != ".lock"}
        assert there == (files | {"house-up", "house-down"} if files else set())
        assert all(type(bucket) is Bucket for bucket in Lines().buckets(link, "forward"))


def test_a_queue_without_lines_is_the_one_of_the_link() -> None:
    link = LinkSpec("home.0-1", "home.0", "home.1", LinkShape(), LinkShape())
    queue: ShapedQueue[str] | StreamQueue[str] = Lines().leaving(link, "forward", seed=1, is_here=True)
    queue.put("message", [1 << 40])
    assert queue.get(0) == "message"
    queue.close(PEER_CLOSED)
