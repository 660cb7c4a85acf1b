"""Heartbeats: what a member does if the answer tells it to stop, or refuses it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest
from google.protobuf.message import Message
from members import TIMEOUT

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import LinkShape, LinkSpec
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ExchangeLost, HeteroPPError, LinkClosed, Refused, RunFailed
from hetero_pp.messages.messages_pb2 import (
    AssignRequest,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    Report,
    ReportRequest,
)
from hetero_pp.program.launch import in_process
from hetero_pp.rpc.exchange_service import Caller, ExchangeService
from hetero_pp.rpc.identities import Credentials
from hetero_pp.rpc.link_end import LinkSide
from hetero_pp.rpc.stage_link import StageLink
from hetero_pp.store.faults import FaultPhase
from replica_groups.exchange.exchange import Exchange
from replica_groups.member import session as session_module
from replica_groups.member.session import Heartbeat

SIDE = LinkSide(LinkSpec("home.0-1", "home.0", "home.1", LinkShape(), LinkShape()), Credentials("", "run"), "home.1", 1)
MIXED = Path(__file__).parents[1] / "equivalence" / "mixed.yaml"


class Heard:
    """An exchange that answers heartbeats with these answers, and then repeats the last one."""

    def __init__(self, *answers: HeartbeatReply | HeteroPPError) -> None:
        self._answers = list(answers)
        self.heartbeats = 0

    def heartbeat(self, *_: object) -> HeartbeatReply:
        return self.call()

    def call(self, request: Message | None = None, caller: Caller | None = None) -> Any:
        if isinstance(request, JoinRequest):
            return JoinReply()
        self.heartbeats += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, HeteroPPError):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "SECONDS_BETWEEN_HEARTBEATS", 0.001)


@pytest.mark.parametrize("error", [Refused("it was taken back"), RunFailed("another has failed")])
def test_who_is_let_in_no_more_waits_for_no_neighbour(error: HeteroPPError) -> None:
    """The link is still being formed, and no heartbeat has named its generation yet."""
    generations = StageLink(SIDE)
    heartbeats = Heartbeat(cast(ExchangeService, Heard(HeartbeatReply(), error)), "home.1", generations.give_up)
    heartbeats.trains(1, 4)
    with heartbeats.sending(), pytest.raises(LinkClosed, match=str(error)):
        generations.accept(TIMEOUT, 9)


def test_who_is_suspended_gives_up_the_links_of_that_generation_alone() -> None:
    given_up, told = list[tuple[int, str]](), threading.Event()

    def give_up(before: int, cause: str) -> None:
        given_up.append((before, cause))
        told.set()

    exchange = Heard(ExchangeLost("gone"), HeartbeatReply(suspended=4, cause="home.0 is gone"))
    heartbeats = Heartbeat(cast(ExchangeService, exchange), "home.1", give_up)
    heartbeats.trains(1, 4)
    with heartbeats.sending():
        assert told.wait(TIMEOUT)
    assert given_up[0] == (5, "home.0 is gone")


def test_who_leaves_cuts_no_neighbour_off(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage has left, and its heartbeat was told so, before the last stage evaluates the final parameters."""
    rounds = 2
    left, heard = threading.Event(), threading.Event()
    heartbeats, reports = list[str](), list[Report]()
    call = Exchange.call

    def watched(exchange: Exchange, request: Message, caller: Caller) -> Any:
        has_left = left.is_set()
        answer = call(exchange, request, caller)
        if isinstance(request, ReportRequest):
            if any(one.member == "home.0" and one.HasField("finished") for one in request.reports):
                left.set()
                assert heard.wait(TIMEOUT)
        elif isinstance(request, HeartbeatRequest):
            if has_left and caller.name == "home.0":
                assert answer.is_over
                heartbeats.append(caller.name)
            if len(heartbeats) > 1:  # what the first of them was answered is acted on
                heard.set()
        return answer

    class HeldBack(in_process._ThreadFaults):
        def reached(self, phase: FaultPhase, round_: int) -> None:
            if (phase, round_, threading.current_thread().name) == (FaultPhase.EVALUATING, rounds, "home.1"):
                assert heard.wait(TIMEOUT)

    monkeypatch.setattr(Exchange, "call", watched)
    monkeypatch.setattr(in_process, "_ThreadFaults", HeldBack)
    changes = [
        f"data.corpus={corpus}",
        f"outer.rounds={rounds}",
        "replicas=[{name: home, kind: participants, stages: 2}]",
    ]
    spec = RunSpec(ConfigFile(MIXED, changes).config, 256)
    in_process.run_in_process(spec, RunFolder(tmp_path), reports.append)
    assert [one.evaluation.round for one in reports if one.HasField("evaluation")] == [0, 1, 2]


def test_who_is_told_that_it_differs_says_so_until_it_has_recovered(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One heartbeat is answered so while the second round is trained. Each other round has another answer."""
    told, heard, reports = threading.Event(), threading.Event(), list[Report]()
    asked, heals = list[bool](), list[bool]()
    call = Exchange.call

    def watched(exchange: Exchange, request: Message, caller: Caller) -> Any:
        answer = call(exchange, request, caller)
        if caller.name == "home.1" and isinstance(request, HeartbeatRequest) and request.round == 2:
            if told.is_set():  # the answer before has been read
                heard.set()
            else:
                answer.differs = True
                told.set()
        elif caller.name == "home.1" and isinstance(request, AssignRequest):
            asked.append(request.differs)
            heals.append(answer.heals)
        return answer

    class HeldBack(in_process._ThreadFaults):
        def reached(self, phase: FaultPhase, round_: int) -> None:
            if (phase, round_, threading.current_thread().name) == (FaultPhase.CONTRIBUTING, 2, "home.1"):
                assert heard.wait(TIMEOUT)

    monkeypatch.setattr(Exchange, "call", watched)
    monkeypatch.setattr(in_process, "_ThreadFaults", HeldBack)
    spec = RunSpec(ConfigFile(MIXED, [f"data.corpus={corpus}", "outer.rounds=3"]).config, 256)
    in_process.run_in_process(spec, RunFolder(tmp_path), reports.append)
    assert asked == heals == [False, False, True, False]
    verified = [one.round_verified for one in reports if one.HasField("round_verified")]
    assert len({one.parameters_sha256 for one in verified if one.round == 3}) == 1
