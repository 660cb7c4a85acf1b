"""Admission to a run by a ticket, over gRPC and TLS: real certificates, and attempts by tickets and former holders."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from unittest import mock

import grpc
import pytest
from members import TIMEOUT
from open_house import HOUR, SECRET, Served
from small_run import Run

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.core.errors import HeteroPPError, LinkTimeout, Refused, RunFailed, RunOver
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import Failure, Nothing, Report
from hetero_pp.messages.refusals import Kind
from hetero_pp.program.join import command as join_command
from hetero_pp.program.join import membership as membership_module
from hetero_pp.program.join.command import JoiningHost, join
from hetero_pp.program.join.membership import Membership, read_membership, renew_once, renewed, take_slot
from hetero_pp.program.join.status import status as status_of
from hetero_pp.rpc import admission_client, identities
from hetero_pp.rpc.admission_client import ask, be_probed, enrol
from hetero_pp.rpc.channels import make_channel
from hetero_pp.rpc.identities import (
    Identity,
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
from replica_groups.exchange.memberships import GONE, LEFT, MOST_BLAMED
from replica_groups.exchange.server import serve_exchange
from replica_groups.exchange.waiting_room import WaitingRoom


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(tmp_path, stack)


def test_tickets_of_all_lengths_are_read() -> None:
    """As pasted from a chat, too. Base64 padding is restored for lengths that are no multiple of four."""
    lengths = set()
    for number in range(60):
        ticket = make_ticket("r" * number, "address:1", SECRET.authority, "0123456789abcdef", time.time() + HOUR)
        text = ticket.to_text()
        assert len(text) < 1500 and text.replace("-", "").replace("_", "").replace(".", "").isalnum()
        for pasted in (
            f' "{text[:40]}\n{text[40:]}" ',
            f"\u200b{text[:3]}\ufeff{text[3:]}.",
            f"> Here is your ticket: {text[:76]}\n> {text[76:]}",
            f"{text} See you!",
        ):
            assert Ticket.from_text(pasted) == ticket
        lengths.add(len(text.removeprefix("hpp1.")) % 4)
    assert lengths == {0, 2, 3}
    assert ticket_of(ticket.identity.shown.name) == ticket.id
    assert [ticket_of(name) for name in ("ticket.0", "ticket.1234567890", "dc")] == [None] * 3


def test_what_is_no_ticket(served: Served) -> None:
    """It is cut off, changed, of another format or content, too large unpacked, or its address is no host and port."""
    ticket = served.ticket()
    text, content = ticket.to_text(), asdict(ticket)
    addresses = ["unix:/run/docker.sock", "unix:1", "dns:1", "host", 7, None, "a/b:1", "a:65536"]
    contents = [b"[" * 15_000, b"[]", b"7", b'{"run": 1}', b"{" * 9, b"\xff", b"9" * 5000]
    contents += [json.dumps(content | {"address": address}).encode() for address in addresses]
    changed = text[:200] + ("A" if text[200] != "A" else "B") + text[201:]
    for spoilt in (text[:-1], changed, *map(_sealed, contents)):
        with pytest.raises(Refused, match="incomplete"):
            Ticket.from_text(spoilt)
    for spoilt in (text.replace("hpp1.", "hpp9."), "", "hpp1." + "A" * 40_000):
        with pytest.raises(Refused, match="expected a ticket"):
            Ticket.from_text(spoilt)
    with pytest.raises(Refused):
        Ticket.from_text(_sealed(b" " * 100_000 + json.dumps(content).encode()))
    content["identity"]["kept_in"] = "/dev/zero"  # a ticket names no file of the host that reads it
    assert Ticket.from_text(_sealed(json.dumps(content).encode())).identity.kept_in == ""


def _sealed(content: bytes) -> str:
    """Return text with the format and the checksum of a ticket around any content."""
    data = zlib.compress(content)
    body = base64.urlsafe_b64encode(hashlib.sha256(data).digest()[:4] + data).decode().rstrip("=")
    return f"hpp1.{body}"


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


def test_the_same_host_may_ask_again_and_nobody_else(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may do so after the ticket is over, too."""
    ticket = served.ticket()
    first = served.takes(ticket)
    with pytest.raises(Refused, match="used already"):
        served.takes(ticket, "another host")
    assert served.run.exchange.runner.refusals.counts == {Kind.FORBIDDEN: 1}
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * HOUR)
    assert replace(served.takes(ticket), identity=first.identity) == first  # with another certificate
    with pytest.raises(Refused, match="the ticket has expired"):
        served.takes(ticket, "another host")


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


def test_who_was_taken_back_is_out_at_its_next_call_and_watches_no_more(served: Served) -> None:
    membership = served.takes(served.ticket("b"))
    client = served.client(membership.credentials)
    assert client.agree("b", "{}") == "run"
    told = client.watch()
    assert next(told).HasField("joined")
    slots = ask(served.address, SECRET.authority.identity("launcher"), "Status").slots
    assert [(slot.name, slot.held, slot.incarnation, slot.holder) for slot in slots] == [
        ("a", True, 1, 0),
        ("b", True, 1, 1),
    ]
    served.memberships.revoke("b")
    for call in (lambda: list(told), lambda: client.agree("b", "{}"), lambda: renew_once(membership)):
        with pytest.raises(Refused, match="b: it was taken back"):
            call()
    assert not served.run.exchange.reports.watchers._watchers
    assert served.run.exchange.runner.refusals.counts[Kind.FORBIDDEN] == 2
    assert served.takes(served.ticket("b"), "another host").identity.shown.holder == 2
    with pytest.raises(Refused, match="given to another holder since"):
        client.agree("b", "{}")


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
        ask(served.address, ticket.identity, "Give")


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
    with served.waiting() as threads:
        first = threads.submit(served.takes, served.ticket(), "anna")
        served.wait_until(lambda: served.waiting_room.here == 1)
        assert not first.done()
        reply = ask(served.address, SECRET.authority.identity("a"), "Status")
        assert (reply.in_waiting_room, reply.needed_in_lobby, len(reply.guests)) == (1, 2, 1)
        second = threads.submit(served.takes, served.ticket(), "ben")
        assert {first.result(TIMEOUT).slot, second.result(TIMEOUT).slot} == {"a", "b"}
    assert "run: waiting for a group to form: 1 of 2 hosts are waiting" in capsys.readouterr().out


@pytest.mark.parametrize("named", [None, "a"])
def test_who_waits_gets_the_slot_of_a_host_that_does_not_return(
    named: str | None, served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that has lost its slot waits in its turn, also if its ticket names that slot, and has expired."""
    anna, clara, vacant = served.ticket(named), served.ticket(), list[str]()
    first, second = served.takes(anna, "anna"), served.takes(served.ticket(), "ben")
    assert (first.slot, second.slot) == ("a", "b")
    monkeypatch.setattr(served.run.exchange, "vacant", lambda: vacant)
    preview = ask(served.address, clara.identity, "Preview")
    assert (list(preview.slots), preview.lost) == (["a", "b"], "")
    taken = "every slot of the run is taken, and this host waits for one; the operator of the run may free one"
    assert preview.refusal.startswith(taken)
    with served.waiting() as threads:
        waits = threads.submit(served.takes, clara, "clara")
        served.wait_until(lambda: taken in capsys.readouterr().out)
        vacant.append("a")
        assert not waits.done()  # anna may come to join yet
        for slot in "ab":
            served.memberships.joined(slot, 1)
        served.wait_until(lambda: "waiting for the slot of a host that is gone: a" in capsys.readouterr().out)
        assert served.takes(anna, "anna").slot == "a"  # as it returns in time
        assert not waits.done()
        monkeypatch.setattr(admission, "GONE_SECONDS", 0.0)
        assert waits.result(TIMEOUT).slot == "a"
        held = [(one.slot, one.number, one.ended) for one in served.memberships.holders()]
        assert held == [("a", 1, GONE), ("a", 2, None), ("b", 1, None)]
        vacant.clear()
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 2 * HOUR)
        assert anna.is_over
        waits = threads.submit(served.takes, anna, "anna")
        served.wait_until(lambda: taken in capsys.readouterr().out)
        assert ask(served.address, anna.identity, "Preview").lost == GONE
        served.memberships.end("b", 1, LEFT)
        vacant.append("b")
        assert waits.result(TIMEOUT).slot == "b"
        assert ask(served.address, anna.identity, "Preview").lost == ""


def test_who_waits_outlasts_an_exchange_that_is_started_again(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_client, "SECONDS", 1.0)
    served.waiting_room = WaitingRoom({"home": ["a", "b"]}, group_spares)
    served.serve_again()
    with served.waiting() as threads:
        first = threads.submit(served.takes, served.ticket(), "anna")
        served.wait_until(lambda: served.waiting_room.here == 1)
        served.stop()
        said = list[str]()
        served.wait_until(lambda: said.append(capsys.readouterr().out) or "answered before" in "".join(said))  # type: ignore[func-returns-value]
        served.waiting_room = WaitingRoom({"home": ["a", "b"]}, group_spares)
        served.serve()
        second = threads.submit(served.takes, served.ticket(), "ben")
        assert {first.result(TIMEOUT).slot, second.result(TIMEOUT).slot} == {"a", "b"}


# ---- the end of the run ----


def test_hosts_that_wait_for_a_group_hear_that_the_run_is_over(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.waiting_room = WaitingRoom({"home": ["a", "b"]}, group_spares)
    served.serve_again()
    given = served.takes(served.ticket("b"), "in")
    ask(given.address, given.identity, "Give")
    with served.waiting() as threads:
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
        assert len(taken) <= 2
        if len(taken) == 1:
            for _count in range(MOST_BLAMED):
                served.memberships.part({membership.slot: 1, "home.1": 0})
        raise RunFailed(f"{membership.slot}: its process ended (output: a file)")

    monkeypatch.setattr(join_command, "_train", trains)
    with pytest.raises(RunFailed, match="its process ended"):  # the second time, when it still has its slot
        join(served.ticket().to_text(), JoiningHost(served.folder / "host"))
    assert taken == ["a", "a"]
    why = f"was parted from its neighbour home.1 after {MOST_BLAMED} malformed messages"
    assert [(one.number, one.ended) for one in served.memberships.holders()] == [(1, why), (2, None)]
    assert f"run: a {why}: this host takes another slot\n" in capsys.readouterr().out


def test_join_takes_another_slot_if_its_own_goes_to_a_host_that_waited_while_it_prepares(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepares(_: object, __: object, slot: str, **___: object) -> mock.Mock:
        if slot == "b":
            raise RunFailed("the second time")
        served.memberships.end(slot, 1, GONE)
        served.takes(served.ticket(slot), "spare")
        return mock.Mock(**{"notes": (), "devices": {}, "spec.agreed": "{}"})

    for name in ("_configure", "ConfigFile"):
        monkeypatch.setattr(join_command, name, mock.Mock())
    monkeypatch.setattr(join_command, "prepare", prepares)
    monkeypatch.setattr(join_command, "tokens_digest", lambda _: "text")
    with pytest.raises(RunFailed, match="the second time"):
        join(served.ticket().to_text(), JoiningHost(served.folder / "host"))
    assert f"run: a {GONE}: this host takes another slot\n" in capsys.readouterr().out


# ---- which slots a ticket is good for ----


def test_a_ticket_that_names_no_slot_is_for_groups_alone(served: Served) -> None:
    served.unnamed = frozenset({"b"})
    served.serve_again()
    assert served.takes(served.ticket()).slot == "b"
    preview = ask(served.address, served.ticket().identity, "Preview")
    assert (list(preview.slots), preview.refusal) == (
        ["b"],
        "every stage of a group is taken; a is free for a ticket that names it: "
        "ask the operator of the run for `hetero-pp invite run --slot a`, or wait",
    )
    assert served.takes(served.ticket("a"), "datacenter").slot == "a"
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
