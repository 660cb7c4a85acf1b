"""Watching a run: a watcher gets all reports in order, or those that concern some members, or the state of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from members import TIMEOUT, in_thread
from small_run import Run

from hetero_pp.messages.messages_pb2 import INCARNATION_OVER, LATE, SUSPENDED, MembershipEvent, Report, SoFar
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.exchange import reports
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


def test_of_some_members_what_they_tell_and_what_concerns_all() -> None:
    watchers = Watchers()
    membership_event = Report(member="exchange", membership_event=MembershipEvent(what=LATE, replica="b"))
    watchers.tell([_step("a", 0), _step("b", 0), membership_event])
    watchers.end()
    assert list(watchers.watch(["b"])) == [_step("b", 0), membership_event]


def _tells(run: Run, member: str, **event: object) -> None:
    run.exchange.report([Report(member=member, **event)], Caller(member))  # type: ignore[arg-type]


def _state(run: Run, *members: str) -> tuple[list[Report], SoFar]:
    """Return what a watcher of these members, or of all, gets first: reports, and the counters behind them."""
    found, watching = list[Report](), run.exchange.watch(members, so_far=True)
    while sum(one.HasField("so_far") for one in found) < (1 if members else 2):
        found.append(next(watching))
    return found[:-1], found[-1].so_far


def _credits(told: SoFar) -> dict[str, tuple[int, int, int]]:
    return {one.replica: (one.included, one.missed, one.tokens) for one in told.credits}


@pytest.fixture
def forgetful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a run of five rounds whose exchange remembers three reports: a group lost a member in the fourth."""
    monkeypatch.setattr(reports, "REMEMBERED_REPORTS", 3)
    run = Run(tmp_path / "log", {"dc": 1, "home": 2}, optional=["home"], so_far=tmp_path / "so_far")
    homes = ("home.0", "home.1")
    for round_ in range(1, 6):
        run.assign(round_ - 1, "dc", *(() if round_ == 5 else homes))
        run.deposit(round_, "dc")
        for bytes_ in (100, 400):
            use = {"link": "home.0-exchange", "direction": "forward", "round": round_, "wire_bytes": bytes_}
            _tells(run, "home.0", link_use=use)
        if round_ == 4:
            run.exchange.died("home.1", "was killed", None)
        if round_ < 4:
            run.deposit(round_, *homes)
        run.passes(50.0, ("dc", *homes))
    assert run.exchange.coordinator.last_round == 5
    return run


def test_who_comes_late_is_told_the_state_and_not_the_history(forgetful: Run) -> None:
    """The exchange has forgotten the reports of which its counters are made."""
    newest, told = _state(forgetful, "dc")
    assert told.last_round == 5
    assert _credits(told) == {"dc": (5, 0, 3500), "home": (3, 2, 2100)}
    assert [(use.link, use.wire_bytes) for use in told.carried] == [("home.0-exchange", 5 * 400)]
    kinds = [one.membership_event.what or one.WhichOneof("event") for one in newest]
    assert kinds == ["joined", "joined", "joined", "begun", INCARNATION_OVER, SUSPENDED]
    everything, last = _state(forgetful)
    assert _credits(everything[0].so_far) == _credits(last) == _credits(told)
    assert len(everything) == 1 + len(newest) + 3  # the state, and the reports that the exchange remembers


def test_counters_outlive_the_process_of_the_exchange(forgetful: Run, tmp_path: Path) -> None:
    told = _state(forgetful, "dc")[1]
    forgetful.exchange.reports.keep_so_far()
    forgetful.take_over()
    newest, again = _state(forgetful, "dc")
    assert (_credits(again), list(again.carried)) == (_credits(told), list(told.carried))
    assert again.seconds >= told.seconds
    assert [one.WhichOneof("event") for one in newest] == [*["joined"] * 3, *["membership_event"] * 2, "begun"]
    (tmp_path / "so_far").unlink()  # the log has the rounds and who was late, not who was there
    forgetful.take_over()
    assert _credits(_state(forgetful, "dc")[1]) == {"dc": (5, 0, 3500), "home": (3, 1, 2100)}
