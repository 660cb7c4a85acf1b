"""Watching a run: a watcher gets all reports from the start, in order, or only those that concern some members."""

from __future__ import annotations

from members import TIMEOUT, in_thread

from hetero_pp.messages.messages_pb2 import LATE, Report, Standing
from replica_groups.exchange.reports import Watchers


def _step(member: str, step: int) -> Report:
    report = Report(member=member)
    report.inner_step.step = step
    return report


def test_everybody_sees_everything_in_order_whenever_it_comes() -> None:
    watchers = Watchers()
    told = [_step(member, step) for step in range(3) for member in ("a", "b")]
    watchers.tell(told[:2])
    early = watchers.watch()
    found = [next(early)]
    watchers.tell(told[2:])
    late = in_thread(lambda: list(watchers.watch()))
    found += [next(early) for _ in told[1:]]
    watchers.end()
    assert found == told
    assert list(early) == []
    assert late.result(TIMEOUT) == told
    assert watchers.reported == len(told)


def test_who_comes_when_all_is_told_does_not_wait_for_ever() -> None:
    watchers = Watchers()
    watchers.tell([_step("a", 0)])
    watchers.end()
    assert in_thread(lambda: list(watchers.watch())).result(TIMEOUT) == [_step("a", 0)]


def test_of_some_members_what_they_tell_and_what_concerns_all() -> None:
    watchers = Watchers()
    standing = Report(member="exchange", standing=Standing(what=LATE, replica="b"))
    watchers.tell([_step("a", 0), _step("b", 0), standing])
    watchers.end()
    assert list(watchers.watch(["b"])) == [_step("b", 0), standing]
