"""A new exchange replaces one that has ended: watchers miss no round, and get no report twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from control_groups import use_groups
from made_up_run import made_up_spec
from mixed_run import MIXED
from test_ended_early import ROUNDS

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE, LAUNCHER
from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import LinkClosed, Refused, RunFailed, RunOver
from hetero_pp.messages.messages_pb2 import RESTARTED, Begun, Joined, Nothing, Over, Report
from hetero_pp.program.launch import supervisor as supervisor_module
from hetero_pp.program.launch.command import run_topology
from hetero_pp.program.launch.supervisor import Supervisor
from hetero_pp.rpc.connections import reports_of, reports_to_members
from hetero_pp.rpc.exchange_service import IsAsked
from hetero_pp.rpc.identities import Secret, SecretKeys
from hetero_pp.rpc.limits import RequestBounds
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.runner import AuditHook
from replica_groups.exchange.server import serve_exchange

SECRET = Secret("a secret")
WATCHER = SECRET.credentials(LAUNCHER)
TIMEOUT = 60.0

JOINED = Report(time=1, member="dc", joined=Joined(incarnation=1))
BEGUN = Report(time=2, member=EXCHANGE, begun=Begun())
AGAIN = Report(time=3, member=EXCHANGE, begun=Begun(last_round=3))
FINISHED = Report(time=4, member="dc", finished=Nothing())


def test_rounds_of_which_nobody_heard_are_told_from_the_log(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Exchange.watch

    def as_if_it_had_died_with_every_second_round(exchange: Exchange) -> Iterator[Report]:
        for report in watch(exchange):
            if report.HasField("round_closed") and report.round_closed.round in (2, ROUNDS):
                begun = Begun(last_round=report.round_closed.round)
                yield Report(time=report.time, member=EXCHANGE, begun=begun)
            else:
                yield report

    monkeypatch.setattr(Exchange, "watch", as_if_it_had_died_with_every_second_round)
    given = [f"data.corpus={corpus}", f"outer.rounds={ROUNDS}"]
    run_topology(MIXED, given, tmp_path, in_process=True)
    folder = tmp_path / "mixed"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rounds"] == ROUNDS
    assert all(one["bytes"] > 0 for one in summary["contributions"]["per_round"])
    assert "failed" not in summary
    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sorted(line["round"] for line in told if line["event"] == "round_closed") == list(range(1, ROUNDS + 1))
    assert len([line for line in told if line["event"] == "begun"]) == 1


class Telling:
    """An exchange that only sends reports, and then ends or waits until it is stopped."""

    def __init__(self, reports: Sequence[Report], ends: bool) -> None:
        self.run, self.roster = "run", Roster({"dc": "dc"}, {"dc": frozenset()})
        self._reports, self._stopped, self.runner = reports, threading.Event(), self
        self.requests = RequestBounds(self.roster, (), 0)
        self.audits = AuditHook(lambda sender, reason: Refused(f"{sender}: {reason}"))
        if ends:
            self._stopped.set()

    def watch(self, members: Collection[str], is_asked: IsAsked, most_unread: float, so_far: bool) -> Iterator[Report]:
        yield from self._reports
        self._stopped.wait(TIMEOUT)

    def heard(self, member: str, incarnation: int | None = None) -> None:
        pass

    def serve(self, listen: str = "127.0.0.1:0") -> tuple[grpc.Server, str]:
        server, port = serve_exchange(cast(Exchange, self), SECRET, listen)
        return server, f"127.0.0.1:{port}"

    def stop(self, server: grpc.Server) -> None:
        server.stop(None).wait(TIMEOUT)
        self._stopped.set()


def _watched_over_two(first: Sequence[Report], second: Sequence[Report], watch: Any) -> list[Report]:
    """Return the reports that a watcher gets from two exchanges in turn.

    The first one is stopped after all of its reports have arrived. The second one uses its address.
    """
    before, after = Telling(first, ends=False), Telling(second, ends=True)
    server, address = before.serve()
    told: list[Report] = []
    for report in watch(address):
        told.append(report)
        if len(told) == len(first):
            before.stop(server)
            server, _ = after.serve(address)
    after.stop(server)
    return told


def test_who_watches_hears_of_both_and_nothing_twice() -> None:
    # Who watches hears of both and nothing twice.
    silence: list[bool] = []
    told = _watched_over_two(
        [JOINED, BEGUN],
        [JOINED, AGAIN, FINISHED],
        lambda address: reports_of(address, WATCHER, silence.append),
    )
    assert told == [JOINED, BEGUN, AGAIN, FINISHED]
    assert silence == [True, False]

    # So do other hosts until their members are through.
    told = _watched_over_two(
        [JOINED, BEGUN],
        [AGAIN, FINISHED, BEGUN],
        lambda address: reports_to_members(address, WATCHER, ["dc"], TIMEOUT, lambda *_: None),
    )
    assert told == [JOINED, BEGUN, AGAIN, FINISHED]


def test_a_host_hears_that_the_run_is_over() -> None:
    # An exchange that ends the run is no reason to wait for another.
    exchange = Telling([JOINED], ends=True)
    server, address = exchange.serve()
    with pytest.raises(LinkClosed, match="has ended the run"):
        list(reports_to_members(address, WATCHER, ["dc"], TIMEOUT, lambda *_: None))
    exchange.stop(server)

    # A host whose members are not through hears that the run is over. The exchange may end the stream or
    # disappear. The host does not wait for another exchange.
    over = Report(time=5.0, member=EXCHANGE, over=Over(round=9, rounds=9, finishing=["dc"]))
    for ends in (True, False):
        exchange = Telling([JOINED, over], ends=ends)
        server, address = exchange.serve()
        told = reports_to_members(address, WATCHER, ["dc"], TIMEOUT, lambda *_: None)
        assert [next(told), next(told)] == [JOINED, over]
        if not ends:
            exchange.stop(server)
        with pytest.raises(RunOver, match=r"the run is over \(round 9 of 9\)"):
            next(told)
        if ends:
            exchange.stop(server)


@pytest.mark.starts_processes
def test_members_that_have_nothing_left_to_train_are_ended_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end without a failure of the run wherever they wait, here for the launcher's first message."""
    monkeypatch.setattr(supervisor_module, "_SECONDS_TO_NOTICE", 0.1)
    reports: list[Report] = []
    keys = SecretKeys(SECRET, encrypted=False)
    with Supervisor(made_up_spec(), RunFolder(tmp_path), reports.append, "home", keys) as supervisor:
        supervisor.start(["home.0", "home.1"])
        over = Report(time=5.0, member=EXCHANGE, over=Over(round=9, rounds=9, finishing=["dc"]))
        supervisor.on_report(over)
        supervisor.wait()
    assert reports == [over]


class KilledAtEachRestart(Supervisor):
    """A supervisor of processes that are killed as soon as they are restarted, for the reason of `counts`."""

    counts: Path
    """File in which the kernel counts processes that it has killed for memory."""
    is_for_memory = False

    def start(self, members: Sequence[str], again: bool = False) -> None:
        super().start(members, again)
        for member in members:
            if self.is_for_memory:
                killed = int(self.counts.read_text().split()[-1])
                self.counts.write_text(f"low 0\noom_kill {killed + 1}\n")
            self._processes[member].kill()
            self._processes[member].join()


@pytest.mark.starts_processes
@pytest.mark.parametrize(("member", "for_memory"), [(EXCHANGE, False), ("home.0", True)])
def test_a_process_that_is_killed_while_it_restarts_is_restarted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str, for_memory: bool
) -> None:
    """A process that the kernel kills because the job's memory is used up is named so each time."""
    monkeypatch.setattr(supervisor_module, "tell_died", lambda *_: None)  # no exchange listens
    counts = use_groups(monkeypatch, tmp_path, "cgroup2", {"/job": 900 * 10**6}, "/job")
    reports: list[Report] = []
    keys = SecretKeys(SECRET, encrypted=False)
    with KilledAtEachRestart(made_up_spec(), RunFolder(tmp_path), reports.append, "home", keys) as supervisor:
        supervisor.counts, supervisor.is_for_memory = counts, for_memory
        supervisor.start([member])
        supervisor.join_exchange([], "127.0.0.1:1")
        with pytest.raises(RunFailed) as failed:
            supervisor.wait()
    why = " because memory was used up: this machine has 900 MB of memory (the limit of its control group /job)"
    cause = f"{member} was killed by SIGKILL{why if for_memory else ''}"
    assert str(failed.value) == cause
    assert [report.membership_event.what for report in reports] == [RESTARTED] * made_up_spec().config.restarts.count
    assert all(report.membership_event.cause.startswith(f"{cause}; restarting it") for report in reports)
