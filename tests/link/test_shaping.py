"""Bandwidth, latency and jitter on a simulated clock that only advances when code waits."""

from __future__ import annotations

import threading

import pytest
from fake_clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from hetero_pp.config.lines import LinkShape
from hetero_pp.core.errors import LinkClosed, LinkTimeout
from hetero_pp.link.shaping import Bucket, DelayLine, ShapedQueue, Shaper

RATE = 8e6
"""Bits per second: a byte takes a microsecond."""


class ForbiddenClock:
    def now(self) -> float:
        raise AssertionError("an unlimited link asked for the time")

    def wait(self, condition: threading.Condition, seconds: float | None) -> None:
        raise AssertionError("an unlimited link waited")


# ---- the bucket -----------------------------------------------------------------------------------------------


def test_a_small_message_on_an_idle_link_takes_its_serialisation_time() -> None:
    bucket = Bucket(RATE)
    assert bucket.reserve(50.0, 50.0, 1000) == pytest.approx(50.001)
    assert bucket.reserve(90.0, 90.0, 1000) == pytest.approx(90.001), "idle time was saved up"


def test_frames_queue_behind_each_other() -> None:
    bucket = Bucket(RATE)
    assert [bucket.reserve(0.0, 0.0, 1000) for _ in range(3)] == pytest.approx([0.001, 0.002, 0.003])


def test_a_late_sender_catches_up_within_the_credit() -> None:
    bucket = Bucket(RATE, credit_bytes=5000)
    bucket.reserve(0.0, 0.0, 1000)
    assert bucket.reserve(0.004, 0.0, 1000) == pytest.approx(0.002)
    assert bucket.reserve(1.0, 0.0, 1000) == pytest.approx(1.0 - 0.005 + 0.001)


def test_nothing_leaves_before_it_was_ready() -> None:
    bucket = Bucket(RATE, credit_bytes=5000)
    assert bucket.reserve(1.0, 0.999, 1000) == pytest.approx(1.0)


@pytest.mark.parametrize(("rate", "credit"), [(8e6, 0.131072), (1e9, 0.010)])
def test_the_credit_is_128_kib_or_10_milliseconds(rate: float, credit: float) -> None:
    assert Bucket(rate).reserve(50.0, 0.0, 0) == pytest.approx(50.0 - credit)


@given(st.lists(st.tuples(st.floats(0, 0.1), st.integers(0, 1 << 20)), min_size=1, max_size=30))
def test_a_ready_backlog_has_exactly_the_rate_if_wake_ups_are_late_by_less_than_the_credit(
    frames: list[tuple[float, int]],
) -> None:
    bucket, left, total = Bucket(RATE), 0.0, 0
    for lateness, n_bytes in frames:
        left = bucket.reserve(left + lateness, 0.0, n_bytes)
        total += n_bytes
    assert left == pytest.approx(total / 1e6)


# ---- the delay line -------------------------------------------------------------------------------------------


def test_latency_costs_no_throughput() -> None:
    line = DelayLine(LinkShape(bandwidth=RATE, latency=0.5), "seed")
    arrivals = [line.arrival(0.0, 1000) for _ in range(1000)]
    assert arrivals == pytest.approx([0.5 + 0.001 * (i + 1) for i in range(1000)])


def test_jitter_is_within_bounds_in_order_and_repeats() -> None:
    shape = LinkShape(latency=1.0, jitter=0.1)
    line, again, other = DelayLine(shape, "a"), DelayLine(shape, "a"), DelayLine(shape, "b")
    times = [0.001 * i for i in range(500)]
    arrivals = [line.arrival(time, 1) for time in times]
    assert all(time + 1.0 <= arrival for time, arrival in zip(times, arrivals, strict=True))
    assert arrivals == sorted(arrivals)
    assert max(arrivals) <= times[-1] + 1.1
    assert arrivals == [again.arrival(time, 1) for time in times]
    assert arrivals != [other.arrival(time, 1) for time in times]


# ---- the queue ------------------------------------------------------------------------------------------------


def test_items_come_out_when_their_last_frame_arrives() -> None:
    clock = FakeClock()
    queue: ShapedQueue[str] = ShapedQueue(LinkShape(bandwidth=RATE, latency=0.2), clock=clock)
    queue.put("large", [10_000, 10_000, 5_000])
    queue.put("small", [1_000])
    assert queue.get() == "large"
    assert clock.time == pytest.approx(100.225)
    assert queue.get() == "small"
    assert clock.time == pytest.approx(100.226)


def test_a_timeout_ends_when_it_should_and_loses_nothing() -> None:
    clock = FakeClock()
    queue: ShapedQueue[str] = ShapedQueue(LinkShape(latency=2.0), clock=clock)
    queue.put("late")
    with pytest.raises(LinkTimeout, match=r"0\.5 s"):
        queue.get(timeout=0.5)
    assert clock.time == pytest.approx(100.5)
    assert queue.get(timeout=5.0) == "late"
    assert clock.time == pytest.approx(102.0)


def test_what_is_there_is_had_without_any_time() -> None:
    queue: ShapedQueue[str] = ShapedQueue(LinkShape())
    queue.put("here")
    assert queue.get(timeout=0.0) == "here"
    with pytest.raises(LinkTimeout):
        queue.get(timeout=0.0)


def test_an_unlimited_queue_asks_no_clock() -> None:
    queue: ShapedQueue[int] = ShapedQueue(LinkShape(), clock=ForbiddenClock())
    for item in range(3):
        queue.put(item, [1 << 30])
    assert [queue.get() for _ in range(3)] == [0, 1, 2]


def test_close_drains_and_abort_does_not() -> None:
    clock = FakeClock()
    queue: ShapedQueue[int] = ShapedQueue(LinkShape(latency=1.0), clock=clock)
    queue.put(1)
    queue.put(2)
    queue.close("done")
    with pytest.raises(LinkClosed, match="done"):
        queue.put(3)
    assert queue.get() == 1
    queue.abort("broken")
    queue.abort("later")
    with pytest.raises(LinkClosed, match="broken"):
        queue.get()


@pytest.mark.parametrize("end", [ShapedQueue.close, ShapedQueue.abort])
def test_who_waits_is_woken(end) -> None:  # type: ignore[no-untyped-def]
    queue: ShapedQueue[int] = ShapedQueue(LinkShape())
    seen: list[str] = []

    def wait() -> None:
        with pytest.raises(LinkClosed) as error:
            queue.get(timeout=60)
        seen.append(str(error.value))

    waiter = threading.Thread(target=wait)
    waiter.start()
    end(queue, "over")
    waiter.join(30)
    assert seen == ["over"]


# ---- the shaper ------------------------------------------------------------------------------------------------


def test_a_shaped_message_takes_its_latency_once() -> None:
    clock = FakeClock()
    transmit = Shaper(LinkShape(bandwidth=RATE, latency=0.25), clock=clock).start_message()
    assert clock.time == pytest.approx(100.25)
    assert sum(transmit(1000) for _ in range(4)) == pytest.approx(0.004)
    assert clock.time == pytest.approx(100.254)


def test_a_shaped_sender_that_is_slow_for_a_moment_keeps_the_rate() -> None:
    clock = FakeClock()
    transmit = Shaper(LinkShape(bandwidth=RATE), clock=clock).start_message()
    for _ in range(10):
        clock.time += 0.002
        transmit(10_000)
    assert clock.time == pytest.approx(100.1)


def test_shaped_messages_share_the_rate() -> None:
    clock = FakeClock()
    shaper = Shaper(LinkShape(bandwidth=RATE), clock=clock)
    one, two = shaper.start_message(), shaper.start_message()
    for _ in range(5):
        one(1000)
        two(1000)
    assert clock.time == pytest.approx(100.010)


def test_an_unlimited_shaper_does_not_wait() -> None:
    clock = FakeClock()
    transmit = Shaper(LinkShape(), clock=clock).start_message()
    assert transmit(1 << 40) == 0.0
    assert clock.time == 100.0
