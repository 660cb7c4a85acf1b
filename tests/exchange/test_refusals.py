"""Refused calls are counted one by one and reported at a bounded rate."""

from __future__ import annotations

from collections import Counter

import pytest

from hetero_pp.messages.messages_pb2 import Failure, MembershipEvent, Refusal, Report
from hetero_pp.messages.refusals import SECONDS_BETWEEN, TOLD_AT_ONCE, Kind, Refusals
from hetero_pp.rpc.limits import MOST_CHARACTERS, make_plain, plain


class Told:
    """A clock, and the refusals that were reported."""

    def __init__(self) -> None:
        self.time, self.told = 7.0, list[Refusal]()
        self.refusals = Refusals(self.told.append, lambda: self.time)

    def counts(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for refusal in self.told:
            found[refusal.kind] += refusal.count
        return found


def test_few_are_told_as_they_come() -> None:
    told = Told()
    for kind in Kind:
        told.refusals.add("home.0", f"a reason: {kind}", kind)
    assert told.told == [Refusal(sender="home.0", reason=f"a reason: {kind}", kind=kind, count=1) for kind in Kind]


def test_many_are_counted_and_told_together() -> None:
    told = Told()
    for number in range(100_000):
        told.refusals.add(f"mallory:{number}", "a stranger", Kind.STRANGER)
    told.refusals.add("home.0", "too long", Kind.MALFORMED)
    assert len(told.told) == TOLD_AT_ONCE
    assert told.refusals.counts == {Kind.STRANGER: 100_000, Kind.MALFORMED: 1}
    told.time += SECONDS_BETWEEN
    told.refusals.add("mallory:last", "a stranger", Kind.STRANGER)
    assert len(told.told) == TOLD_AT_ONCE + 1
    assert told.told[-1] == Refusal(
        sender="mallory:last", reason="a stranger", kind=Kind.STRANGER, count=100_001 - TOLD_AT_ONCE
    )
    told.refusals.flush()
    assert told.counts() == told.refusals.counts
    told.refusals.flush()
    assert told.counts() == told.refusals.counts


def test_after_a_while_they_are_told_one_by_one_again() -> None:
    told = Told()
    for _ in range(TOLD_AT_ONCE + 5):
        told.refusals.add("a", "b", Kind.FORBIDDEN)
    told.time += 1000 * SECONDS_BETWEEN
    for _ in range(TOLD_AT_ONCE):
        told.refusals.add("a", "b", Kind.FORBIDDEN)
    assert [one.count for one in told.told] == [1] * TOLD_AT_ONCE + [6] + [1] * (TOLD_AT_ONCE - 1)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a cause: 3 of 4, ünïcode → 你好", "a cause: 3 of 4, ünïcode → 你好"),
        ("\x1b]0;title\x07\x1b[2J", "\\x1b]0;title\\x07\\x1b[2J"),
        ("one\nexchange: all is well\r\ttwo", "one exchange: all is well  two"),
        ("\u202eabc\u200b", "\\u202eabc\\u200b"),
        ("\x9b31m", "\\x9b31m"),
        ("a" * (MOST_CHARACTERS + 1), "a" * MOST_CHARACTERS + "…"),
    ],
)
def test_text_for_a_terminal(text: str, shown: str) -> None:
    assert plain(text) == shown
    assert plain(shown) == shown or len(shown) > MOST_CHARACTERS


def test_every_text_of_a_report_is_made_plain() -> None:
    report = Report(time=3.0, member="a\x1b", failure=Failure(cause="b\n", consequence=True))
    make_plain(report)
    assert report == Report(time=3.0, member="a\\x1b", failure=Failure(cause="b ", consequence=True))
    membership_event = Report(membership_event=MembershipEvent(slot="\x07", round=3))
    make_plain(membership_event)
    assert membership_event.membership_event == MembershipEvent(slot="\\x07", round=3)
