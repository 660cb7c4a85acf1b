"""Permissions of members, launcher and hosts, by call, also with names, incarnations and reports of others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from members import TIMEOUT
from small_run import Run

from hetero_pp.config.lines import EXCHANGE, LAUNCHER, LinkShape, LinkSpec
from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import Forbidden, Refused, WrongToken
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.callers import (
    CALLS,
    REPORTS,
    Callers,
    Guests,
    RemoteCaller,
    require_call,
    require_process,
    require_report,
    shown,
)
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.identities import Credentials, Secret, new_key
from hetero_pp.rpc.relay import SERVICE as RELAY
from hetero_pp.rpc.services import ADMISSION_SERVICE as ADMISSION
from hetero_pp.rpc.services import EXCHANGE_SERVICE as SERVICE
from replica_groups.exchange.server import serve_exchange

SECRET = Secret("a secret")
ROSTER = Roster(
    {"dc": "dc", "home.0": "home", "home.1": "home"},
    {"dc": frozenset(), "home.0": frozenset(), "home.1": frozenset()},
    {("home.0-1", "forward"): "home.0", ("home.0-1", "backward"): "home.1", ("dc-exchange", "backward"): "dc"},
)

_EVERYBODY = "LastRound NewestCheckpoint RunCheckpoint Watch Died Status Preview Measure"
_MEMBERS = "Agree Join Fetch Report Stay Carry"
_MEMBERS_IN_A_INCARNATION = "Assign Heartbeat Broken Deposit UploadUrl Uploaded Record Confirm Show"

MAY: dict[tuple[str, bool], str] = {
    ("dc", True): f"{_EVERYBODY} {_MEMBERS} {_MEMBERS_IN_A_INCARNATION}",
    ("dc", False): f"{_EVERYBODY} {_MEMBERS}",
    ("home.1", True): f"{_EVERYBODY} {_MEMBERS} {_MEMBERS_IN_A_INCARNATION}",
    ("home.1", False): f"{_EVERYBODY} {_MEMBERS}",
    ("home", True): _EVERYBODY,
    ("home", False): _EVERYBODY,
    (LAUNCHER, True): _EVERYBODY,
    (LAUNCHER, False): _EVERYBODY,
    ("validator.first", True): f"{_EVERYBODY} Judge",
    ("validator.first", False): f"{_EVERYBODY} Judge",
    (EXCHANGE, True): _EVERYBODY,
    (EXCHANGE, False): _EVERYBODY,
}
"""Allowed calls by (caller, whether it names an incarnation). STARTED says which members' death `Died` may report."""

TICKET = "ticket.0123456789abcdef"
BY_TICKET: dict[tuple[str, bool], str] = {
    ("dc", True): f"{MAY['dc', True]} Renew Give",
    ("dc", False): f"{MAY['dc', False]} Renew Give",
    ("home.1", True): f"{MAY['home.1', True]} Renew Give",
    ("home.1", False): f"{MAY['home.1', False]} Renew Give",
    (TICKET, True): "Enrol Probe Preview Measure",
    (TICKET, False): "Enrol Probe Preview Measure",
}
"""The same table for callers that show a ticket, and for members that were admitted by a ticket."""

STARTED: dict[str, set[str]] = {
    "dc": {"dc"},
    "home.1": {"home.1"},
    "home": {"home.0", "home.1"},
    LAUNCHER: {"dc", "home.0", "home.1"},
    EXCHANGE: set(),
    "validator.first": set(),
}

STEP = pb.InnerStep(replica="home", round=1, step=1, loss=3.0)
TOLD: dict[str, tuple[pb.Report, set[str]]] = {
    "step": (pb.Report(inner_step=STEP), {"home.0", "home.1"}),
    "evaluation": (pb.Report(evaluation=pb.Evaluation(replica="dc")), {"dc"}),
    "evaluation of nobody": (pb.Report(evaluation=pb.Evaluation(replica="away")), set()),
    "forward": (pb.Report(link_use=pb.LinkUse(link="home.0-1", direction="forward")), {"home.0"}),
    "backward": (pb.Report(link_use=pb.LinkUse(link="home.0-1", direction="backward")), {"home.1"}),
    "from the exchange": (pb.Report(link_use=pb.LinkUse(link="dc-exchange", direction="backward")), {"dc"}),
    "no direction": (pb.Report(link_use=pb.LinkUse(link="home.0-1", direction="")), set()),
    "no link": (pb.Report(link_use=pb.LinkUse(link="home.1-2", direction="forward")), set()),
    "times": (pb.Report(member_round=pb.MemberRound()), set(ROSTER.members)),
    "saving": (pb.Report(state_saving=pb.StateSaving(round=1)), set(ROSTER.members)),
    "device": (pb.Report(computes=pb.Computes(device="cpu")), set(ROSTER.members)),
    "line": (pb.Report(measured_line=pb.MeasuredLine(up=2e7, down=1e8)), set(ROSTER.members)),
    "activity": (pb.Report(activity=pb.Activity(doing=pb.FORWARD)), set(ROSTER.members)),
    "failure": (pb.Report(failure=pb.Failure(cause="a cause")), set(ROSTER.members)),
    "refusal": (pb.Report(refusal=pb.Refusal()), set(ROSTER.members)),
    "finished": (pb.Report(finished=pb.Nothing()), set(ROSTER.members)),
    "closed": (pb.Report(round_closed=pb.RoundRecord(round=1)), set()),
    "verified": (pb.Report(round_verified=pb.RoundVerified(round=1)), set()),
    "joined": (pb.Report(joined=pb.Joined(incarnation=9)), set()),
    "begun": (pb.Report(begun=pb.Begun()), set()),
    "waiting": (pb.Report(waiting=pb.Waiting()), set()),
    "over": (pb.Report(over=pb.Over(round=9, rounds=9)), set()),
    "reading": (pb.Report(reading=pb.Reading(what="text")), set()),
    "membership_event": (pb.Report(membership_event=pb.MembershipEvent(what=pb.INCARNATION_OVER)), set()),
    "scores": (pb.Report(scores=pb.Scores(round=1)), set()),
    "counters": (pb.Report(so_far=pb.SoFar(last_round=9)), set()),
    "judgement": (pb.Report(judged=pb.Judgement(round=1)), set()),
    "nothing": (pb.Report(), set()),
}
"""Reports by name, each with the callers that may send it."""


def _is_allowed(ask: object, *arguments: object) -> bool:
    assert callable(ask)
    try:
        ask(*arguments)
    except Forbidden:
        return False
    return True


class _Call:
    """The context of a call with this metadata."""

    def __init__(self, metadata: Sequence[tuple[str, str]]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata


def _caller(name: str, incarnation: int | None = None) -> RemoteCaller:
    context = _Call(shown(SECRET.credentials(name), "run", incarnation))
    return Callers(SECRET, ROSTER).of(context)  # type: ignore[arg-type]


class _EncryptedCall(_Call):
    """The context of a call over TLS."""

    def __init__(self, metadata: Sequence[tuple[str, str]], certificate: str, tls: str = "TLSv1.3") -> None:
        super().__init__(metadata)
        self._shown = {"ssl_tls_version": [tls.encode()], "x509_pem_cert": [certificate.encode()]}

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._shown


class _Everybody:
    """Guests that are all admitted. Implements Guests."""

    def require_in(self, slot: str, number: int) -> None: ...

    def require_open(self, ticket: str) -> None: ...


def _certified(name: str, holder: int, guests: Guests | None, incarnation: int | None = None) -> RemoteCaller:
    """Let in a caller with a certificate for `name` whose metadata claims another name."""
    certificate = SECRET.authority.sign(new_key().public_key(), name, holder, time.time() + 60)
    metadata = (("name", LAUNCHER), *([] if incarnation is None else [("incarnation", str(incarnation))]))
    context = _EncryptedCall(metadata, certificate)
    return Callers(SECRET, ROSTER, encrypted=True, guests=guests).let_in(context)  # type: ignore[arg-type]


def test_every_call_is_in_the_table() -> None:
    assert CALLS.keys() == {call for service in (SERVICE, ADMISSION, RELAY) for call in service.methods_by_name}
    may = [*MAY.values(), *BY_TICKET.values()]
    assert {call for calls in may for call in calls.split()} == set(CALLS)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("who", "names_incarnation"), BY_TICKET)
def test_who_may_make_a_call_by_a_ticket(who: str, names_incarnation: bool, call: str) -> None:
    caller = _certified(who, 0 if who == TICKET else 2, _Everybody(), 1 if names_incarnation else None)
    assert _is_allowed(require_call, call, caller) == (call in BY_TICKET[who, names_incarnation].split())
    assert caller.members == (frozenset() if who == TICKET else frozenset([who]))


def test_nobody_is_let_in_by_a_ticket_where_nobody_was_invited() -> None:
    for name, holder in ((TICKET, 0), ("dc", 1)):
        with pytest.raises(WrongToken):
            _certified(name, holder, None)
    with pytest.raises(WrongToken):
        _certified("away", 0, _Everybody())
    assert _certified("dc", 0, None).name == "dc"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("who", "names_incarnation"), MAY)
def test_who_may_make_a_call(who: str, names_incarnation: bool, call: str) -> None:
    caller = _caller(who, 1 if names_incarnation else None)
    assert _is_allowed(require_call, call, caller) == (call in MAY[who, names_incarnation].split())


@pytest.mark.parametrize("member", ROSTER.members)
@pytest.mark.parametrize("who", STARTED)
def test_only_who_has_started_a_member_tells_its_death(who: str, member: str) -> None:
    assert _is_allowed(require_process, _caller(who), member) == (member in STARTED[who])


@pytest.mark.parametrize("member", ROSTER.members)
@pytest.mark.parametrize(("report", "members"), TOLD.values(), ids=TOLD)
def test_what_a_member_may_tell(report: pb.Report, members: set[str], member: str) -> None:
    assert _is_allowed(require_report, report, member, ROSTER) == (member in members)


def test_every_event_is_tried() -> None:
    events = {field.name for field in pb.Report.DESCRIPTOR.oneofs_by_name["event"].fields}
    assert events == {report.WhichOneof("event") for report, _ in TOLD.values()} - {None}
    assert events > REPORTS


@pytest.mark.parametrize("incarnation", ["-1", "1.0", "²", "1" * 10, "", "one"])
def test_a_incarnation_is_a_number(incarnation: str) -> None:
    context = _Call((*shown(SECRET.credentials("dc")), ("incarnation", incarnation)))
    assert Callers(SECRET, ROSTER).of(context).incarnation is None  # type: ignore[arg-type]


def test_credentials_give_nobody_elses_away() -> None:
    """Every caller has a different token, and another one in the next run."""
    names = ["dc", "home", "home.0", "home.1", LAUNCHER, EXCHANGE]
    tokens = {SECRET.credentials(name).token for name in names}
    tokens |= {Secret("another").credentials(name).token for name in names}
    assert len(tokens) == 2 * len(names)


def test_a_links_token_is_known_to_its_two_ends() -> None:
    first, second = (
        LinkSpec(f"home.{i}-{i + 1}", f"home.{i}", f"home.{i + 1}", LinkShape(), LinkShape()) for i in (0, 1)
    )
    known = {name: SECRET.credentials(name, [first, second]).links for name in ("dc", "home.0", "home.1", "home.2")}
    assert {name: set(links) for name, links in known.items()} == {
        "dc": set(),
        "home.0": {first.name},
        "home.1": {first.name, second.name},
        "home.2": {second.name},
    }
    assert known["home.0"][first.name] == known["home.1"][first.name] != known["home.1"][second.name]
    assert known["home.1"][second.name] == known["home.2"][second.name]
    assert Credentials.from_json(SECRET.credentials("home.1", [first]).to_json()).links == {
        first.name: known["home.1"][first.name]
    }


# ---- over the wire ----


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, {"a": 1, "b": 1}, quorum=1.0)
    yield run


class _Served:
    """A run of members `a` and `b` behind a server."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.server, port = serve_exchange(run.exchange, SECRET, "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        self._clients: list[ExchangeClient] = []

    def client(self, credentials: Credentials, incarnation: int | None = None) -> ExchangeClient:
        client = ExchangeClient(self.address, credentials, "run")
        client._incarnation = incarnation
        self._clients.append(client)
        return client

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        self.server.stop(None).wait(TIMEOUT)


@pytest.fixture
def served(run: Run) -> Iterator[_Served]:
    served = _Served(run)
    yield served
    served.stop()


def _refusals(run: Run) -> dict[str, int]:
    return {str(kind): count for kind, count in run.exchange.runner.refusals.counts.items()}


def _reports(run: Run) -> list[pb.Report]:
    run.exchange.end_watching()
    return list(run.exchange.watch())


def test_a_member_that_tells_of_anothers_death_is_refused(served: _Served) -> None:
    run = served.run
    run.assign(0, "a", "b")
    with pytest.raises(Refused, match="a did not start b"):
        served.client(SECRET.credentials("a"), 1).died("b", "it is mine now")
    assert run.exchange.coordinator.holds("b", 1)
    assert _refusals(run) == {Kind.FORBIDDEN: 1}
    served.client(SECRET.credentials(LAUNCHER)).died("b", "killed")
    assert not run.exchange.coordinator.holds("b", 1)


def test_a_forged_report_changes_nothing(served: _Served) -> None:
    run = served.run
    run.assign(0, "a", "b")
    client = served.client(SECRET.credentials("a"), 1)
    for forged in (
        pb.Report(round_verified=pb.RoundVerified(round=1, replica="b")),
        pb.Report(inner_step=pb.InnerStep(replica="b", round=1, loss=0.0)),
        pb.Report(membership_event=pb.MembershipEvent(what=pb.GIVEN_UP, slot="b")),
    ):
        with pytest.raises(Refused, match="a may not report"):
            client.report([pb.Report(finished=pb.Nothing()), forged])
    told = [one.WhichOneof("event") for one in _reports(run)]
    assert told.count("refusal") == 3
    assert not set(told) & {"round_verified", "inner_step", "membership_event", "finished"}
    assert run.exchange.coordinator.holds("a", 1), "what was told beside a forged report was taken for true"


def test_text_of_a_member_reaches_no_terminal_as_it_is(served: _Served) -> None:
    served.run.assign(0, "a", "b")
    hostile = pb.Failure(cause="\x1b[2J\nall is well\x07" + "!" * 10_000, consequence=True)
    served.client(SECRET.credentials("a"), 1).report([pb.Report(failure=hostile)])
    [cause] = [one.failure.cause for one in _reports(served.run) if one.HasField("failure")]
    assert cause.startswith("\\x1b[2J all is well\\x07!!!")
    assert len(cause) < 2_020


def test_what_no_report_has_is_not_remembered(served: _Served) -> None:
    """The report has a field that is unknown here, which protobuf would keep. The address has 60 KiB."""
    served.run.assign(0, "a", "b")
    client, unknown = served.client(SECRET.credentials("a"), 1), b"\xfa\x3f\x80\x80\x01" + bytes(1 << 14)
    told = pb.Report(finished=pb.Nothing()).SerializeToString() + unknown
    client.report([pb.Report.FromString(told)])
    served.run.exchange.died("b", "it has ended")
    served.client(SECRET.credentials("b")).join("b", "x" * (60 << 10))
    assert max(one.ByteSize() for one in _reports(served.run)) < 2_000


@pytest.mark.parametrize("configuration", ["", "no JSON", "[" * 60_000, "[]", "null"])
def test_a_configuration_that_is_none(configuration: str, served: _Served) -> None:
    with pytest.raises(Refused, match="not a JSON object"):
        served.client(SECRET.credentials("a")).agree("a", configuration)
    assert _refusals(served.run) == {Kind.MALFORMED: 1}


@pytest.mark.parametrize(
    ("names", "digest", "kind"),
    [
        (["norm.weight"], b"\1" * 31, Kind.MALFORMED),
        (["norm.weight"], b"\1" * 1_000_000, Kind.MALFORMED),
        (["nothing.weight"], b"\1" * 32, Kind.UNEXPECTED),
    ],
)
def test_a_forged_hash(names: list[str], digest: bytes, kind: Kind, served: _Served) -> None:
    served.run.assign(0, "a", "b")
    with pytest.raises(Refused):
        served.client(SECRET.credentials("a"), 1).confirm("a", 1, dict.fromkeys(names, digest))
    assert _refusals(served.run) == {kind: 1}


def test_a_member_confirms_what_it_holds_only(tmp_path: Path) -> None:
    run = Run(tmp_path, {"a": 1}, quorum=1.0)
    run.assign(0, "a")
    block = sorted(run.exchange.roster.blocks["a"])[0]
    run.exchange.roster = Roster({"a": "a"}, {"a": run.exchange.roster.blocks["a"] - {block}})
    [name] = [name for name in run.checkpoint.parameters if name.startswith(block)][:1]
    with pytest.raises(Refused, match="another member's"):
        run.exchange.confirm("a", 1, {name: bytes(32)})
    assert _refusals(run) == {Kind.FORBIDDEN: 1}
