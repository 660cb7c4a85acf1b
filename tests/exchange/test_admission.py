"""Admission to a run by a ticket, over gRPC and TLS: real certificates, and attempts by tickets and former holders."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from unittest import mock

import grpc
import pytest
from members import TIMEOUT
from small_run import Clock, Run

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.core.errors import HeteroPPError, LinkTimeout, Refused, RunFailed, RunOver
from hetero_pp.core.steady_clock import steady_clock
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import Failure, Nothing, Report
from hetero_pp.messages.refusals import Kind
from hetero_pp.program.join import command as join_command
from hetero_pp.program.join import membership as membership_module
from hetero_pp.program.join.command import JoiningHost, join
from hetero_pp.program.join.membership import Membership, read_membership, renew_once, renewed, take_slot
from hetero_pp.program.join.status import status as status_of
from hetero_pp.rpc import admission_client, identities
from hetero_pp.rpc.admission_client import _FRAME_BYTES, _FRAMES, BUSY, be_probed, enrol, give, measure, preview, status
from hetero_pp.rpc.channels import PROTOCOL_VERSION, make_channel
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.identities import (
    Credentials,
    Identity,
    Secret,
    Ticket,
    as_text,
    make_ticket,
    new_key,
    signing_request,
    ticket_of,
)
from hetero_pp.rpc.services import ADMISSION_SERVICE, call_path
from hetero_pp.simulator.planner.grouping import group_spares
from replica_groups.exchange import admission
from replica_groups.exchange.admission import RunForGuests
from replica_groups.exchange.memberships import MOST_BLAMED, PARTED, Memberships
from replica_groups.exchange.server import OpenHouse, serve_exchange
from replica_groups.exchange.waiting_room import FORGET_SECONDS, WaitingRoom

SECRET = Secret("the run's secret")
HOUR = 3600.0


class Served:
    """A run of members `a` and `b` whose server admits hosts by tickets."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.run = Run(folder / "log", {"a": 1, "b": 1}, quorum=1.0)
        # No member has joined without a ticket.
        self.run.exchange.vacant = lambda: ["a", "b"]  # type: ignore[method-assign]
        self.date_is_off = 0.0
        """Error of the date on the exchange's machine, in seconds."""
        self.memberships = Memberships(folder / "members.sqlite", steady_clock(lambda: time.time() + self.date_is_off))
        stack.callback(self.memberships.close)
        told = RunForGuests('{"name": "run"}', {"tokenizer.json": b"{}"})
        self.waiting_room = WaitingRoom({}, group_spares)
        self.unnamed: frozenset[str] | None = None
        self.spare = self.memberships.invite("a", HOUR)
        self.told, self.port = told, 0
        self.serve()

    def serve(self) -> None:
        """Start the server. A later call uses the same port."""
        listen, exchange = f"127.0.0.1:{self.port}", self.run.exchange
        house = OpenHouse(self.memberships, self.told, self.waiting_room, self.unnamed)
        self.server, self.port = serve_exchange(exchange, SECRET, listen, encrypted=True, open_house=house)
        self.address = f"127.0.0.1:{self.port}"
        self._stack.callback(self.stop)

    def stop(self) -> None:
        self.server.stop(None).wait(TIMEOUT)

    def serve_again(self) -> None:
        self.stop()
        self.serve()

    def refusals(self) -> dict[Kind, int]:
        return dict(self.run.exchange.runner.refusals.counts)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        over = threading.Event()
        for _ in range(int(TIMEOUT / 0.05)):
            if is_so():
                return
            over.wait(0.05)
        raise AssertionError("it did not come to that")

    def ticket(self, slot: str | None = None, seconds: float = HOUR) -> Ticket:
        found = self.memberships.invite(slot, seconds)
        return make_ticket("run", self.address, SECRET.authority, found, time.time() + seconds)

    def client(self, credentials: Credentials) -> ExchangeClient:
        client = ExchangeClient(self.address, credentials, "run", timeout=TIMEOUT)
        self._stack.callback(client.close)
        return client

    def takes(self, ticket: Ticket, host: str = "host") -> Membership:
        """Redeem the ticket on a host with its own folder."""
        return take_slot(ticket, self.folder / host)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(tmp_path, stack)


def test_a_ticket_is_a_line_of_text(served: Served) -> None:
    ticket = served.ticket()
    text = ticket.to_text()
    assert Ticket.from_text(f"  {text[:50]}\n{text[50:]}\n") == ticket
    assert len(text) < 1500
    assert text.replace("-", "").replace("_", "").replace(".", "").isalnum()
    assert ticket_of(ticket.identity.shown.name) == ticket.id


def test_tickets_of_all_lengths_are_read() -> None:
    """Base64 padding is restored for every length, also for those that are no multiple of four."""
    lengths = set()
    for number in range(60):
        ticket = make_ticket("r" * number, "address:1", SECRET.authority, "0123456789abcdef", time.time() + HOUR)
        text = ticket.to_text()
        for pasted in (
            text,
            f' "{text[:40]}\n{text[40:]}" ',
            f"\u200b{text[:3]}\ufeff{text[3:]}.",
            f"> Here is your ticket: {text[:76]}\n> {text[76:]}",
            f"{text} See you!",
        ):
            assert Ticket.from_text(pasted) == ticket
        lengths.add(len(text.removeprefix("hpp1.")) % 4)
    assert lengths == {0, 2, 3}


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda text: text[:-1], "incomplete"),
        (lambda text: text[:200] + ("A" if text[200] != "A" else "B") + text[201:], "incomplete"),
        (lambda text: text.replace("hpp1.", "hpp9."), r"found 'hpp9\..*expected a ticket, which begins with hpp1\."),
        (lambda text: "", "expected a ticket"),
        (lambda text: "hpp1." + "A" * 40_000, "expected a ticket"),
    ],
)
def test_what_is_no_ticket(served: Served, spoil: object, told: str) -> None:
    assert callable(spoil)
    with pytest.raises(Refused, match=told):
        Ticket.from_text(spoil(served.ticket().to_text()))


def _sealed(content: bytes) -> str:
    """Return text with the format and the checksum of a ticket around any content."""
    data = zlib.compress(content)
    body = base64.urlsafe_b64encode(hashlib.sha256(data).digest()[:4] + data).decode().rstrip("=")
    return f"hpp1.{body}"


def test_a_ticket_names_no_file_of_the_host_that_reads_it(served: Served) -> None:
    content = asdict(served.ticket())
    content["identity"]["kept_in"] = "/dev/zero"
    assert Ticket.from_text(_sealed(json.dumps(content).encode())).identity.kept_in == ""


def test_a_ticket_is_decompressed_to_a_bounded_size(served: Served) -> None:
    content = json.dumps(asdict(served.ticket())).encode()
    assert Ticket.from_text(_sealed(content))
    with pytest.raises(Refused):
        Ticket.from_text(_sealed(b" " * 100_000 + content))


@pytest.mark.parametrize("address", ["unix:/run/docker.sock", "unix:1", "dns:1", "host", 7, None, "a/b:1", "a:65536"])
def test_a_ticket_names_only_host_and_port(served: Served, address: object) -> None:
    with pytest.raises(Refused, match="the ticket is incomplete"):
        Ticket.from_text(_sealed(json.dumps(asdict(served.ticket()) | {"address": address}).encode()))


@pytest.mark.parametrize("content", [b"[" * 15_000, b"[]", b"7", b'{"run": 1}', b"{" * 9, b"\xff", b"9" * 5000])
def test_a_ticket_that_holds_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(Refused, match="the ticket is incomplete"):
        Ticket.from_text(_sealed(content))


def test_stages_of_a_replica_that_is_called_ticket_are_no_tickets() -> None:
    assert ticket_of("ticket.0") is None
    assert ticket_of("ticket.1234567890") is None
    assert ticket_of("dc") is None


def test_who_shows_a_ticket_takes_a_slot_and_is_its_member(served: Served) -> None:
    membership = served.takes(served.ticket("b"))
    assert (membership.slot, membership.run, membership.address) == ("b", "run", served.address)
    assert json.loads(membership.configuration) == {"name": "run"}
    assert membership.tokenizer is not None
    assert membership.tokenizer.read_text() == "{}"
    shown = membership.identity.shown
    assert (shown.name, shown.holder) == ("b", 1)
    assert shown.until == pytest.approx(time.time() + admission.CERTIFICATE_SECONDS, abs=60)
    client = served.client(membership.credentials)
    assert client.agree("b", "{}") == "run"
    client._incarnation = 1
    assert not client.heartbeat("b").is_over
    with pytest.raises(Refused, match="b did not start a"):
        client.died("a", "nothing")
    key = Path(membership.identity.kept_in).with_name("key.pem")
    assert key.stat().st_mode & 0o777 == 0o600
    assert membership.identity.key not in served.ticket().to_text()


@pytest.mark.parametrize("slot", ["../../up", "/etc", ".."])
def test_a_slot_by_any_other_name_is_no_file(
    served: Served, slot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot name from the exchange cannot make a host write outside its folder."""
    key, host = new_key(), tmp_path / "host"
    named = SECRET.authority.sign(key.public_key(), slot, 1, time.time() + HOUR)
    monkeypatch.setattr(membership_module, "enrol", lambda *_, **__: pb.EnrolReply(slot=slot, certificate=named))
    with pytest.raises(Refused, match="expected the name of a slot"):
        take_slot(served.ticket(), host)
    assert {path.name for path in host.rglob("*") if path.is_file()} == {"key.pem"}


def test_the_same_host_may_ask_again_and_nobody_else(served: Served) -> None:
    ticket = served.ticket()
    first = served.takes(ticket)
    assert served.takes(ticket).slot == first.slot
    with pytest.raises(Refused, match="used already"):
        served.takes(ticket, "another host")
    assert served.run.exchange.runner.refusals.counts == {Kind.FORBIDDEN: 1}
    assert served.takes(served.ticket(), "another host").slot not in (first.slot, None)


def test_who_was_given_a_slot_goes_on_after_its_ticket_is_over(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = served.ticket()
    first = served.takes(ticket)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * HOUR)
    assert served.takes(ticket) == first
    with pytest.raises(Refused, match="the ticket has expired"):
        served.takes(ticket, "another host")


def test_a_ticket_is_good_for_a_certificate_alone(served: Served) -> None:
    ticket = served.ticket("a")
    with pytest.raises(Refused, match="Agree is not allowed with a ticket"):
        served.client(Credentials("a", identity=ticket.identity)).agree("a", "{}")
    with pytest.raises(Refused, match="Status is not allowed with a ticket"):
        status(served.address, ticket.identity)
    with pytest.raises(Refused, match="Give is not allowed with a ticket"):
        give(served.address, ticket.identity)
    assert served.run.exchange.refusals == 3
    assert served.memberships.held_by("a") is None


def test_members_have_no_need_of_a_ticket_and_get_nothing_for_another(served: Served) -> None:
    own = SECRET.authority.identity("a")
    with pytest.raises(Refused, match="Enrol is not allowed without a ticket"):
        enrol(served.address, own, signing_request(new_key()))
    with pytest.raises(Refused, match="Give is only for members that joined by a ticket, and a did not"):
        give(served.address, own)


def test_a_certificate_is_for_who_has_the_key(served: Served) -> None:
    ticket = served.ticket()
    request = bytearray(signing_request(new_key()))
    request[-1] ^= 1  # a key that another host requested, or one that was substituted on the way
    with pytest.raises(Refused, match="found no certificate request"):
        enrol(served.address, ticket.identity, bytes(request))
    with pytest.raises(Refused, match="found no certificate request"):
        enrol(served.address, ticket.identity, b"made up")
    version = b"\x02\x01"  # an INTEGER of one byte
    with pytest.raises(Refused, match="found no certificate request"):
        other = signing_request(new_key()).replace(version + b"\x00", version + b"\x04", 1)
        enrol(served.address, ticket.identity, other)
    key = new_key()
    reply = enrol(served.address, ticket.identity, signing_request(key))
    assert Identity(reply.certificate, as_text(key), "").shown.name == reply.slot


def test_a_version_that_is_another(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_client, "PROTOCOL_VERSION", 99)
    with pytest.raises(Refused, match=r"found version 99 of the protocol, expected .*: install the hetero-pp"):
        served.takes(served.ticket())


def test_who_was_taken_back_is_out_at_its_next_call(served: Served) -> None:
    membership = served.takes(served.ticket("b"))
    client = served.client(membership.credentials)
    assert client.agree("b", "{}") == "run"
    served.memberships.revoke("b")
    with pytest.raises(Refused, match="b: it was taken back"):
        client.agree("b", "{}")
    with pytest.raises(Refused, match="b: it was taken back"):
        renew_once(membership)
    assert served.run.exchange.runner.refusals.counts[Kind.FORBIDDEN] == 2
    assert served.takes(served.ticket("b"), "another host").identity.shown.holder == 2
    with pytest.raises(Refused, match="given to another holder since"):
        client.agree("b", "{}")


def test_who_was_taken_back_watches_no_more(served: Served) -> None:
    membership = served.takes(served.ticket("b"))
    told = served.client(membership.credentials).watch()
    assert next(told).HasField("joined")
    served.memberships.revoke("b")
    with pytest.raises(Refused, match="b: it was taken back"):
        list(told)
    assert not served.run.exchange.reports.watchers._watchers


def test_who_was_invited_and_fails_ends_its_own_part_alone(served: Served) -> None:
    """A member that was started with the run's secret fails the run once no quorum is left without it.

    A guest does not.
    """
    client = served.client(served.takes(served.ticket("b")).credentials)
    client._incarnation = 1
    failed = Report(failure=Failure(cause="made up"))
    client.report([failed, Report(finished=Nothing())])
    found = {slot.name: slot.held for slot in served.run.exchange.status().slots}
    assert found == {"a": True, "b": False}
    other = served.client(SECRET.credentials("a", encrypted=True))
    other._incarnation = 1
    assert not other.heartbeat("a").is_over
    other.report([failed])
    with pytest.raises(RunFailed, match="made up"):
        other.heartbeat("a")


def test_a_guest_that_sends_oversized_requests_again_and_again_loses_its_ticket(served: Served) -> None:
    """Nothing of them is parsed, and others go on. A ticket that took no slot is revoked alike."""
    ticket = served.ticket("a")
    own = served.takes(ticket).credentials
    guest = served.client(own)
    served.run.exchange.died("a", "it has ended")
    guest.join("a", "")
    names = {f"{number:x}": b"" for number in range(10_000)}
    for count in range(1, MOST_BLAMED + 1):
        with pytest.raises(Refused, match=r"^found \d+ bytes of HashReport, expected at most \d+$"):
            guest.confirm("a", 1, names)
        assert (served.memberships.held_by("a") is None) == (count == MOST_BLAMED)
    with pytest.raises(Refused, match=f"a: it sent {MOST_BLAMED} requests that no honest member sends"):
        guest.last_round()
    assert not served.run.exchange.coordinator.slots["a"].is_heard
    with pytest.raises(Refused, match="the ticket was revoked"):
        served.takes(ticket)
    other = served.ticket("b")
    for _ in range(MOST_BLAMED):
        with pytest.raises(Refused, match="bytes of EnrolRequest, expected at most"):
            enrol(served.address, other.identity, bytes(100_000))
    with pytest.raises(Refused, match="the ticket was revoked"):
        served.takes(other)


def test_who_leaves_gives_its_slot_to_the_next(served: Served) -> None:
    membership = served.takes(served.ticket("b"))
    give(membership.address, membership.identity)
    with pytest.raises(Refused, match="it has left"):
        served.client(membership.credentials).agree("b", "{}")
    assert served.takes(served.ticket("b"), "another host").slot == "b"


def test_who_is_where(served: Served) -> None:
    served.takes(served.ticket("b"))
    reply = status(served.address, SECRET.authority.identity("launcher"))
    assert [(slot.name, slot.held, slot.incarnation, slot.holder) for slot in reply.slots] == [
        ("a", True, 1, 0),
        ("b", True, 1, 1),
    ]
    assert (reply.last_round, reply.rounds) == (0, 9)


def test_a_certificate_is_renewed_before_it_ends(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The admitted member then uses the new certificate, also over a new connection."""
    monkeypatch.setattr(admission, "CERTIFICATE_SECONDS", 6.0)
    membership, said = served.takes(served.ticket("b")), list[str]()
    client = served.client(membership.credentials)
    client._incarnation = 1
    client.stay()
    with renewed(membership, said.append):
        until = membership.identity.shown.until
        served.wait_until(lambda: membership.identity.latest.shown.until > until + 6.0)
        assert time.time() > until
        assert client.last_round() == 0  # over the existing connection
        served.stop()
        served.serve()
        assert client.last_round() == 0  # over a new connection, which would reject the first certificate
    assert said == []
    assert (
        read_membership(Path(membership.identity.kept_in).parent).identity.certificate
        != membership.identity.certificate
    )


def test_who_does_not_renew_is_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection was made while the certificate was valid."""
    membership = served.takes(served.ticket("b"))
    client = served.client(membership.credentials)
    client.agree("b", "{}")
    later = time.time() + admission.CERTIFICATE_SECONDS + 1.0
    monkeypatch.setattr(served.memberships, "_clock", lambda: later)
    with pytest.raises(Refused, match="was not renewed in time"):
        client.agree("b", "{}")


@pytest.mark.parametrize("days", [1.5, -1.5])
def test_a_clock_that_is_set_costs_no_member_its_slot(
    days: float, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The date of the exchange's machine changes between two calls."""
    membership = served.takes(served.ticket("b"))
    client = served.client(membership.credentials)
    client.agree("b", "{}")
    now, served.date_is_off = time.time(), days * 24 * HOUR

    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(days=days)

    monkeypatch.setattr(identities, "datetime", Wrong)
    client.agree("b", "{}")
    renew_once(membership)
    renewed = read_membership(Path(membership.identity.kept_in).parent).identity.shown
    assert renewed.signed == pytest.approx(now, abs=60)  # hosts with correct clocks accept it at once
    assert renewed.until == pytest.approx(now + admission.CERTIFICATE_SECONDS, abs=60)
    client.agree("b", "{}")


def test_an_exchange_that_is_gone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = served.ticket()
    served.stop()
    monkeypatch.setattr(admission_client, "SECONDS", 0.3)
    with pytest.raises(LinkTimeout, match="did not answer within 300 ms"):
        served.takes(ticket)
    with pytest.raises(LinkTimeout, match=r"the exchange at \S+ does not answer$"):  # no time: it is refused at once
        give(served.address, ticket.identity)


def test_a_run_without_tickets(tmp_path: Path) -> None:
    """The exchange is served by TLS without admission by tickets."""
    run = Run(tmp_path, {"a": 1, "b": 1}, quorum=1.0)
    server, port = serve_exchange(run.exchange, SECRET, "127.0.0.1:0", encrypted=True)
    ticket = make_ticket("run", f"127.0.0.1:{port}", SECRET.authority, "0123456789abcdef", time.time() + HOUR)
    with pytest.raises(HeteroPPError, match="does not admit hosts by tickets"):
        take_slot(ticket, tmp_path / "host")
    server.stop(None).wait(TIMEOUT)


def test_who_finds_no_group_waits_until_enough_are_there(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.waiting_room = WaitingRoom({"home": ["a", "b"]}, group_spares)
    served.serve_again()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(served.takes, served.ticket(), "anna")
        served.wait_until(lambda: served.waiting_room.here == 1)
        assert not first.done()
        status_of(served.folder / "anna", "run", None, None)
        said = capsys.readouterr().out
        assert re.search(r"run: this host waits for a group to form, for .*: 1 of 2 hosts are waiting, 1 more", said)
        assert "run: the run has finished round 0 of 9; the exchange answered " in said
        asked = served.client(SECRET.credentials("a", encrypted=True))
        reply = status(served.address, SECRET.authority.identity("a"))
        assert (reply.in_waiting_room, reply.needed_in_lobby, len(reply.guests)) == (1, 2, 1)
        asked.close()
        second = threads.submit(served.takes, served.ticket(), "ben")
        assert {first.result(TIMEOUT).slot, second.result(TIMEOUT).slot} == {"a", "b"}
    assert "run: waiting for a group to form: 1 of 2 hosts are waiting" in said + capsys.readouterr().out
    with pytest.raises(Refused, match="every slot of the run is taken"):
        served.takes(served.ticket(), "clara")


def test_a_line_is_measured_by_who_is_dialled(served: Served) -> None:
    lines = _lines(served)
    ticket = served.ticket()
    assert be_probed(served.address, ticket.identity) == ""
    ((found, up, down),) = lines
    assert found == ticket.id
    assert 1e6 < up < 1e12
    assert 1e6 < down < 1e12


def test_one_line_is_measured_at_a_time(served: Served) -> None:
    lines, ticket, over = _lines(served), served.ticket(), threading.Event()
    with closing(make_channel(served.address, ticket.identity, EXCHANGE)) as channel:
        answers = _probe(channel, _until(over, HALF))
        served.wait_until(lambda: bool(served.waiting_room._probing))
        second = served.ticket()
        assert be_probed(served.address, second.identity) == BUSY
        over.set()
        with pytest.raises(grpc.RpcError):
            next(answers)
    served.wait_until(lambda: not served.waiting_room._probing)
    assert lines == []
    assert be_probed(served.address, ticket.identity) == "a line is measured at most once in 120 seconds"
    assert be_probed(served.address, second.identity) == ""


def test_who_says_nothing_keeps_nobody_from_being_measured(served: Served) -> None:
    over = threading.Event()
    with closing(make_channel(served.address, served.ticket().identity, EXCHANGE)) as channel:
        _silent = [_probe(channel, _until(over)) for _ in range(2)]
        assert be_probed(served.address, served.ticket().identity) == ""
        over.set()


@pytest.mark.parametrize("said", [0, 1, _FRAMES - 1, _FRAMES])
def test_a_probe_without_end_is_over_after_a_while(served: Served, monkeypatch: pytest.MonkeyPatch, said: int) -> None:
    monkeypatch.setattr(admission, "PROBE_SECONDS", 0.3)
    over, frames = threading.Event(), [bytes(_FRAME_BYTES)] * said
    with closing(make_channel(served.address, served.ticket().identity, EXCHANGE)) as channel:
        with pytest.raises(grpc.RpcError) as error:
            for _ in _probe(channel, _until(over, frames)):
                pass
        assert isinstance(error.value, grpc.Call)
        assert error.value.code() is grpc.StatusCode.CANCELLED
        served.wait_until(lambda: not served.waiting_room._probing)
        over.set()


def test_what_is_compressed_is_no_measure(served: Served) -> None:
    lines, frames = _lines(served), [bytes(_FRAME_BYTES)] * _FRAMES
    channel = make_channel(served.address, served.ticket().identity, EXCHANGE)
    with closing(channel), pytest.raises(grpc.RpcError) as error:
        next(_probe(channel, iter(frames), grpc.Compression.Gzip))
    assert isinstance(error.value, grpc.Call)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert lines == []


def test_who_waits_outlasts_an_exchange_that_is_started_again(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_client, "SECONDS", 1.0)
    served.waiting_room = WaitingRoom({"home": ["a", "b"]}, group_spares)
    served.serve_again()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(served.takes, served.ticket(), "anna")
        served.wait_until(lambda: served.waiting_room.here == 1)
        served.stop()
        said = list[str]()
        served.wait_until(lambda: said.append(capsys.readouterr().out) or "answered before" in "".join(said))  # type: ignore[func-returns-value]
        served.waiting_room = WaitingRoom({"home": ["a", "b"]}, group_spares)
        served.serve()
        second = threads.submit(served.takes, served.ticket(), "ben")
        assert {first.result(TIMEOUT).slot, second.result(TIMEOUT).slot} == {"a", "b"}


HALF = [bytes(_FRAME_BYTES)] * (_FRAMES // 2)


@pytest.mark.parametrize(
    "frames", [[], [b"a"], [*HALF, b""], HALF, [*HALF, *HALF, bytes(16)], [*HALF, *HALF, bytes(17)]],
    ids=["nothing", "small", "empty", "half", "before it has got anything", "a longer word"],
)  # fmt: skip
def test_who_cheats_is_refused_and_not_measured(served: Served, frames: list[bytes]) -> None:
    lines = _lines(served)
    channel = make_channel(served.address, served.ticket().identity, EXCHANGE)
    with closing(channel), pytest.raises(grpc.RpcError) as error:
        list(_probe(channel, iter(frames)))
    assert isinstance(error.value, grpc.Call)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (lines, served.refusals()) == ([], {Kind.MALFORMED: 1})


def _lines(served: Served) -> list[tuple[str, float, float]]:
    """Return a list that receives every line that the waiting room is told about from now on."""
    told = list[tuple[str, float, float]]()
    served.waiting_room.probed = lambda *line: told.append(line)  # type: ignore[method-assign]
    return told


def _probe(
    channel: grpc.Channel, frames: Iterator[bytes], compression: grpc.Compression | None = None
) -> Iterator[bytes]:
    call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(call_path(ADMISSION_SERVICE, "Probe"))
    return iter(call(frames, wait_for_ready=True, timeout=TIMEOUT, compression=compression))


def _until(over: threading.Event, frames: Sequence[bytes] = ()) -> Iterator[bytes]:
    """Yield these frames, then send nothing until `over` is set."""
    yield from frames
    over.wait(TIMEOUT)


# ---- a host looks before it joins ----


def test_a_preview_takes_no_slot(served: Served) -> None:
    ticket = served.ticket("b")
    found = preview(served.address, ticket.identity, TIMEOUT)
    assert (found.version, found.slots, found.refusal) == (PROTOCOL_VERSION, ["b"], "")
    assert abs(found.clock - time.time()) < TIMEOUT
    assert preview(served.address, served.ticket().identity, TIMEOUT).slots == ["a", "b"]
    assert [one.is_used for one in served.memberships.tickets()] == [False, False, False]
    other = served.ticket("b")
    member = served.takes(ticket)
    assert preview(served.address, member.identity, TIMEOUT).slots == ["b"]
    for refused, said in ((ticket, "the ticket was used already"), (other, "b is taken by another host")):
        found = preview(served.address, refused.identity, TIMEOUT)
        assert (found.slots, found.refusal.startswith(said), found.neighbours) == ([], True, {})


def test_a_host_looks_a_bounded_number_of_times(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PREVIEWS_AT_ONCE", 2)
    served.serve_again()
    ticket = served.ticket()
    for _ in range(2):
        preview(served.address, ticket.identity, TIMEOUT)
    with pytest.raises(Refused, match=r"asked too often; it may again in \d+ s"):
        preview(served.address, ticket.identity, TIMEOUT)


def test_a_line_is_measured_by_its_host_for_a_bounded_time_and_not_too_often(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = served.ticket()
    for rate in measure(served.address, ticket.identity):
        assert rate.bits_per_second > 1e6
    monkeypatch.setattr(admission_client, "MEASURE_BYTES", 1 << 30)
    monkeypatch.setattr(admission_client, "_OWN_SECONDS", 0.1)
    up, down = measure(served.address, ticket.identity)
    assert up.is_limited
    assert down.is_limited
    with pytest.raises(Refused, match=r"measured a moment ago; it can be measured again in \d+ s"):
        measure(served.address, ticket.identity)
    assert (served.waiting_room.here, served.refusals()) == (0, {})


def test_many_tickets_measure_no_more_than_a_few(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "ALL_MEASUREMENTS_AT_ONCE", 4)
    served.serve_again()
    for _ in range(2):
        measure(served.address, served.ticket().identity)
    with pytest.raises(Refused, match=r"many hosts have measured their lines; this one can be measured in \d+ s"):
        measure(served.address, served.ticket().identity)


def test_a_measurement_has_few_bytes_and_no_other_beside_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(make_channel(served.address, served.ticket().identity, EXCHANGE)) as channel:
        path = call_path(ADMISSION_SERVICE, "Measure")
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
        with pytest.raises(grpc.RpcError) as error:
            list(call(iter([bytes(1 << 20)] * 5), wait_for_ready=True, timeout=TIMEOUT))
        assert "in a measurement" in str(error.value)
        with pytest.raises(grpc.RpcError) as error:
            list(call(iter([b""] * 5000), wait_for_ready=True, timeout=TIMEOUT))
        assert "in a measurement" in str(error.value)
        monkeypatch.setattr(admission, "MEASURE_SECONDS", TIMEOUT)
        over, frames = threading.Event(), [bytes(1)]
        first = call(_until(over, frames), wait_for_ready=True, timeout=TIMEOUT)
        assert next(first) == b""
        monkeypatch.setattr(admission, "MEASURE_SECONDS", 0.1)
        with pytest.raises(Refused, match=BUSY):
            measure(served.address, served.ticket().identity)
        over.set()
        assert list(first) == []


# ---- the end of the run ----


def test_hosts_that_wait_for_a_group_hear_that_the_run_is_over(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.waiting_room = WaitingRoom({"home": ["a", "b"]}, group_spares)
    served.serve_again()
    given = served.takes(served.ticket("b"), "in")
    give(given.address, given.identity)
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(served.takes, served.ticket(), "anna")
        served.wait_until(lambda: served.waiting_room.here == 1)
        told = threads.submit(served.waiting_room.wait_until_told, TIMEOUT)
        served.run.exchange.coordinator.last_round = 9
        served.run.exchange.coordinator.open = None
        with pytest.raises(RunOver, match=r"the run is over \(round 9 of 9\); no round was left to train"):
            waits.result(TIMEOUT)
        assert told.result(2 * TIMEOUT)
    assert served.waiting_room.here == 0
    assert be_probed(served.address, served.ticket().identity).startswith("the run is over")
    join(served.ticket().to_text(), JoiningHost(served.folder / "late"))  # it returns without an error
    assert capsys.readouterr().out.endswith("run: the run is over (round 9 of 9); no round was left to train\n")
    status_of(served.folder / "late", "run", None, None)
    assert capsys.readouterr().out.startswith("run: the run is over (round 9 of 9), as reported 20")


def test_join_takes_another_slot_for_a_host_that_was_parted_from_its_neighbour(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = list[str]()

    def trains(membership: Membership, *_: object) -> None:
        taken.append(membership.slot)
        if len(taken) == 1:
            served.memberships.end(membership.slot, 1, f"{PARTED} home.1")
            raise RunFailed(f"{membership.slot}: {PARTED} home.1 (output: a file)")

    monkeypatch.setattr(join_command, "_train", trains)
    join(served.ticket().to_text(), JoiningHost(served.folder / "host"))
    assert taken == ["a", "a"]
    assert [(one.number, one.ended) for one in served.memberships.holders()] == [(1, f"{PARTED} home.1"), (2, None)]
    assert "run: a was parted from its neighbour: this host takes another slot\n" in capsys.readouterr().out


def test_a_host_whose_line_is_measured_hears_that_the_run_is_over(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls = threading.Event()
    monkeypatch.setattr(admission_client, "_said", lambda _: _until(stalls, HALF))  # a line slower than any limit
    for module in (admission, admission_client):
        monkeypatch.setattr(module, "PROBE_SECONDS", 10 * TIMEOUT)
    served.waiting_room = WaitingRoom({"home": ["a", "b"]}, group_spares)
    served.serve_again()
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(join, served.ticket().to_text(), JoiningHost(served.folder / "anna"))
        served.wait_until(lambda: bool(served.waiting_room._probing))
        served.run.exchange.coordinator.last_round = 9
        served.run.exchange.coordinator.open = None
        assert served.waiting_room.wait_until_told(TIMEOUT)
        waits.result(TIMEOUT)  # it returns exit code 0
        stalls.set()
    said = capsys.readouterr().out.splitlines()
    ended = "run: the exchange stopped measuring this line"
    assert said[-2:] == [ended, "run: the run is over (round 9 of 9); no round was left to train"]


def test_hosts_that_wait_for_a_group_hear_that_the_run_has_failed(served: Served) -> None:
    served.run.exchange.fail("made up")
    with pytest.raises(RunFailed, match="made up"):
        served.takes(served.ticket())


def test_nobody_who_is_gone_keeps_the_end_waiting(served: Served) -> None:
    clock = Clock()
    waiting_room = WaitingRoom({"home": ["a", "b"]}, group_spares, clock)
    waiting_room.slot_for("gone", ["a", "b"])
    waiting_room.slot_for("seated", ["a", "b"])
    waiting_room.has_slot("seated")
    clock.time += FORGET_SECONDS + 1.0
    assert waiting_room.wait_until_told(0.0)


# ---- which slots a ticket is good for ----


def test_a_ticket_that_names_no_slot_is_for_groups_alone(served: Served) -> None:
    served.unnamed = frozenset({"b"})
    served.serve_again()
    assert served.takes(served.ticket()).slot == "b"
    free = r"every stage of a group is taken; a is free for a ticket that names it: "
    with pytest.raises(Refused, match=free + "ask the operator of the run for `hetero-pp invite run --slot a`"):
        served.takes(served.ticket(), "another host")
    assert served.takes(served.ticket("a"), "datacenter").slot == "a"
    with pytest.raises(Refused, match=r"every slot of the run is taken: ask the operator of the run to free one"):
        served.takes(served.ticket(), "another host")
    ticket = make_ticket("run", served.address, SECRET.authority, served.spare, time.time() + HOUR)
    with pytest.raises(Refused, match=r"a is taken by another host: ask the operator of the run to free it"):
        served.takes(ticket, "a second datacenter")


def test_any_number_of_tickets_that_send_nothing_keep_no_member_waiting(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call occupies a thread of the server. All calls by tickets together may occupy only some of the threads."""
    monkeypatch.setattr("replica_groups.exchange.server.MOST_OPEN_OF_TICKETS", 3)
    monkeypatch.setattr("hetero_pp.rpc.services.REQUEST_SECONDS", 1.0)
    with mock.patch("replica_groups.exchange.server.MOST_CARRIED", 1):
        served.serve_again()
    refused, cut, is_over = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def asks_nothing(channel: grpc.Channel) -> None:
        def nothing() -> Iterator[bytes]:
            is_over.wait()
            yield from ()

        begin: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(call_path(ADMISSION_SERVICE, "Enrol"))
        with pytest.raises(grpc.RpcError) as error:
            begin(nothing(), timeout=TIMEOUT)
        (refused if error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else cut).release()

    with ExitStack() as channels, ThreadPoolExecutor(80) as pool:
        channels.callback(is_over.set)
        for _ in range(40):
            channel = channels.enter_context(make_channel(served.address, served.ticket().identity, EXCHANGE))
            for _ in range(2):
                pool.submit(asks_nothing, channel)
        # On a busy machine some arrive after the first ones were cut, and are cut, too.
        assert refused.acquire(timeout=TIMEOUT)
        member = served.client(SECRET.credentials("a", encrypted=True))
        assert member.last_round() == 0
        for _ in range(3):
            assert cut.acquire(timeout=TIMEOUT)  # because no request has arrived
        channels.pop_all().close()
