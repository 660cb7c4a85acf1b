"""Attacks by a member that exceeds its rights. Each attack is one function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grpc
from attack_calls import (
    LARGE_A_SECOND,
    REPORTS_A_SECOND,
    TIMEOUT,
    Call,
    Stretch,
    Target,
    asked,
    attack,
    channel_to,
    code_of,
    flood,
    in_session,
)

from hetero_pp.link.framing import header_and_payload_frames
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.callers import shown
from hetero_pp.rpc.identities import Credentials
from hetero_pp.rpc.services import EXCHANGE_SERVICE as SERVICE
from hetero_pp.rpc.services import call_path


@attack
def anothers_place(target: Target, stretch: Stretch) -> None:
    """Act in another member's name, upload another member's blob, and report another member's death.

    The exchange must take the caller's name from its certificate.
    """
    with in_session(target) as session:
        named = shown(Credentials(target.honest), target.run, 1)
        blob = pb.BlobHeader(
            round=1, replica=target.honest, block=target.blocks[0], size=9, generation=1, steps=1, sha256=bytes(32)
        )
        died = pb.DiedRequest(member=target.honest, cause="it is mine now")
        calls = [
            asked("Died", died, named, target.guest),
            asked("Heartbeat", pb.HeartbeatRequest(), (*named, ("token", "made up")), target.guest),
            session.asked("Died", died),
            session.asked("Uploaded", blob),
        ]
        flood(target.address, stretch, calls)


@attack
def old_term(target: Target, stretch: Stretch) -> None:
    """Make calls with the incarnation of a former holder of the slot."""
    with in_session(target) as former:
        former.client.died(target.guest.name, "another takes its place")
        with in_session(target):
            blob = pb.BlobHeader(
                round=1,
                replica=target.guest.name,
                block=target.blocks[0],
                size=9,
                generation=1,
                steps=1,
                sha256=bytes(32),
            )
            calls = [
                former.asked("Assign", pb.AssignRequest()),
                former.asked("Record", pb.RecordRequest(round=1 << 20)),
                former.asked("Uploaded", blob),
                former.asked("Broken", pb.BrokenRequest(generation=former.incarnation, cause="it is mine")),
            ]
            flood(target.address, stretch, calls)


@attack
def slow_readers(target: Target, stretch: Stretch) -> None:
    """Open as many report streams as allowed, read none of them, and send reports."""
    with in_session(target) as session, channel_to(target.address, target.guest) as channel:
        watch: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(call_path(SERVICE, "Watch"))
        watched = [watch(b"", metadata=session.metadata) for _ in range(12)]
        reports = [pb.Report(member_round=pb.MemberRound(round=number)) for number in range(20)]
        told = session.asked("Report", pb.ReportRequest(reports=reports))
        flood(target.address, stretch, [told], REPORTS_A_SECOND)
        for one in watched:
            one.cancel()
        stretch.codes["not read"] += len(watched)


@attack
def abandoned_waits(target: Target, stretch: Stretch) -> None:
    """Ask for a record that does not exist yet, and cancel the call."""
    with in_session(target) as session, channel_to(target.address, target.guest) as channel:
        record: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call_path(SERVICE, "Record"))
        request = pb.RecordRequest(round=1 << 20).SerializeToString()
        for _ in stretch.paced():
            call = record.future(request, metadata=session.metadata, timeout=TIMEOUT)
            if not stretch.is_over.wait(0.005) and not call.done():
                call.cancel()
            stretch.codes[code_of(call)] += 1


@attack
def forged_reports(target: Target, stretch: Stretch) -> None:
    """Send reports that only the exchange may send, or that are about another replica."""
    other = target.honest
    forged = [
        pb.Report(round_verified=pb.RoundVerified(round=1, replica=other, parameters_sha256=bytes(32))),
        pb.Report(inner_step=pb.InnerStep(replica=other, round=1, loss=0.0)),
        pb.Report(membership_event=pb.MembershipEvent(what=pb.GIVEN_UP, slot=other)),
        pb.Report(member=other, joined=pb.Joined(incarnation=9)),
    ]
    with in_session(target) as session:
        flood(target.address, stretch, [session.asked("Report", pb.ReportRequest(reports=[one])) for one in forged])


@attack
def forged_hashes(target: Target, stretch: Stretch) -> None:
    """Confirm hashes that no member holds: wrong or too long ones, of an unknown parameter, of one parameter, none."""
    names = target.parameters
    forged: Sequence[Mapping[str, bytes]] = [
        dict.fromkeys(names, b"\1" * 31),
        dict.fromkeys(names, b"\1" * 1_000),
        {"nothing.weight": bytes(32)},
        dict.fromkeys(names, b"\1" * 32),
        {names[0]: b"\1" * 32},
        {},
    ]
    with in_session(target) as session:
        flood(target.address, stretch, [session.asked("Confirm", pb.HashReport(round=1, sha256=one)) for one in forged])


@attack
def oversized(target: Target, stretch: Stretch) -> None:
    """Announce contributions of up to 2^63 bytes, and send messages that are larger than any valid one."""
    deposit, megabytes = call_path(SERVICE, "Deposit"), bytes(1 << 20)
    with in_session(target) as session:
        own, calls = session.metadata, []
        header = pb.BlobHeader(
            round=1, replica=target.guest.name, block=target.blocks[0], generation=session.incarnation
        )
        for size in (1 << 24, 1 << 40, 1 << 63):
            header.size = size
            frames = [next(header_and_payload_frames(header, [megabytes])), *[megabytes] * 3]
            calls.append(Call(deposit, frames, own, target.guest))
        calls += [Call(call_path(SERVICE, "Heartbeat"), [bytes(9 << 20)], own, target.guest)]
        calls += [session.asked("Agree", pb.AgreeRequest(configuration="[" * (1 << 20)))]
        flood(target.address, stretch, calls, LARGE_A_SECOND)
