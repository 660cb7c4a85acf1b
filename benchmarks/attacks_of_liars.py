"""Attacks by real members that train while their calls are changed on the way. Each attack is one function."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import count

import grpc
import torch
from attack_calls import LARGE_A_SECOND, TIMEOUT, Call, Stretch, Target, attack, channel_to, code_of, flood, in_session
from lies import Call as Said
from lies import Change, lies_about, link_lies, lying

from hetero_pp.core.errors import HeteroPPError
from hetero_pp.link.framing import header_and_payload_frames
from hetero_pp.link.shaping import Lines
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.program.launch.supervisor import tell_died
from hetero_pp.pseudo_gradient.contribution import BlobAddress, encode_blob, join_blobs, split_blobs
from hetero_pp.pseudo_gradient.error_feedback import select
from hetero_pp.rpc.admission_client import ask
from hetero_pp.rpc.channels import PROTOCOL_VERSION
from hetero_pp.rpc.connections import NetworkConnections
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.identities import Credentials
from hetero_pp.rpc.services import EXCHANGE_SERVICE as SERVICE
from hetero_pp.rpc.services import call_path
from hetero_pp.rpc.stage_link import SERVICE as LINK_SERVICE
from replica_groups.member.take_part import take_part

LIES_A_SECOND = 20
TOGETHER = 14
"""Oversized requests at a time, as many as a member may have open beside its own two."""
MADE_UP = 300_000
"""Names in an oversized confirmation: 4 MB."""
RESETS_A_SECOND = 1000
HEADER_BYTES = 1 << 20
LOOK_SECONDS = 0.1
SECONDS_TO_RESTART = 2.0
"""Seconds before a failed member restarts. They are long enough for the exchange's bound on joins."""
HASHED_ROUNDS = 6
"""Made-up hashes are sent for rounds before the last closed round plus this number."""
MOST_STEPS = 2**32
FORMER_A_SECOND = 50
GROWTH = 4.0
"""Factor by which a contribution is larger than that of the round before."""


# ---- real members, whose calls are changed ----


class _Ended(HeteroPPError):
    """The attack is over."""


def members(
    target: Target,
    stretch: Stretch,
    own: Sequence[Credentials],
    change: Change = lambda call: call,
    stream: Callable[[Iterator[bytes]], Iterator[bytes]] = lambda frames: frames,
) -> None:
    """Run members until the stretch is over. A member that fails starts again.

    The first member lies: `change` alters its calls to the exchange, and `stream` alters its frames on stage links.
    """

    def changed(call: Said) -> Said:
        if stretch.is_over.is_set() and call.name != "Leave":
            raise _Ended("the attack is over")
        stretch.is_under_way.set()
        stretch.codes[call.name] += 1
        return change(call)

    with lying(own[0].name, changed, stream):
        threads = [threading.Thread(target=_member, args=(target, stretch, one), daemon=True) for one in own]
        for thread in threads:
            thread.start()
        stretch.is_over.wait()
        for thread in threads:
            thread.join(TIMEOUT)


def _member(target: Target, stretch: Stretch, own: Credentials) -> None:
    torch.set_num_threads(1)
    while not stretch.is_over.is_set():
        member = target.spec.members[own.name]
        with (
            suppress(HeteroPPError, ValueError),  # a call on a connection that was closed at the end
            NetworkConnections(target.spec, member, target.address, own, Lines()) as connections,
        ):
            ends = threading.Thread(target=_close_when_over, args=(stretch, connections.exchange), daemon=True)
            ends.start()
            take_part(target.spec, member, connections, target.folder)
        tell_died(target.address, own, own.name, "it has failed", None)  # else its slot stays held until the lease ends
        stretch.codes["failed"] += 1
        stretch.is_under_way.set()  # a member that is refused attacks, too
        stretch.is_over.wait(SECONDS_TO_RESTART)


def _close_when_over(stretch: Stretch, client: ExchangeClient) -> None:
    stretch.is_over.wait()
    client.close()


# ---- contributions, which are included ----


def _with_steps(call: Said, steps: int) -> Said:
    if not isinstance(call.message, pb.BlobHeader):
        return call
    header = pb.BlobHeader.FromString(call.message.SerializeToString())
    header.steps = steps
    return call.saying(header)


@attack
def claimed_steps(target: Target, stretch: Stretch) -> None:
    """Claim that each contribution comes from 4 billion inner steps."""
    members(target, stretch, [target.guest], lambda call: _with_steps(call, MOST_STEPS))


@attack
def claimed_weights(target: Target, stretch: Stretch) -> None:
    """Double the claimed inner steps of a contribution every eight calls, so as to weigh more."""
    steps, most = count(1), 31
    members(target, stretch, [target.guest], lambda call: _with_steps(call, 2 ** min(next(steps) // 8, most)))


@attack
def growing_contributions(target: Target, stretch: Stretch) -> None:
    """Contribute noise that is four times as large in each round as in the round before."""
    blocks, rounds = shapes_by_block(target.spec.parameter_shapes), dict[int, float]()

    def change(call: Said) -> Said:
        header = call.message
        if not isinstance(header, pb.BlobHeader):
            return call
        size = rounds.setdefault(header.round, GROWTH ** len(rounds) * 1e-3)
        compression = target.spec.config.outer.compression
        blobs = list[tuple[str, bytes]]()
        for one, _ in split_blobs(header, b""):
            noise = [
                (name, shape, select(torch.zeros(shape), size * torch.randn(shape), compression))
                for name, shape in blocks[one.block].items()
            ]
            data = encode_blob(BlobAddress(target.run, one.round, one.replica, one.block), noise, compression)
            blobs.append((one.block, data))
        common = pb.BlobHeader()
        common.CopyFrom(header)
        common.ClearField("following")
        lie, data = join_blobs(common, blobs)
        return replace(call, message=lie, frames=list(header_and_payload_frames(lie, [data])))

    members(target, stretch, [target.guest], change)


@attack
def takes_rounds(target: Target, stretch: Stretch) -> None:
    """Ask for every round, report that it is being computed, and contribute nothing."""

    members(target, stretch, [target.guest], partial(_without_deposits, stretch))


def _without_deposits(stretch: Stretch, call: Said) -> Said:
    if call.name == "Deposit":
        stretch.is_over.wait()
        raise _Ended("it contributes nothing")
    return call


# ---- members that hold a slot and do not train ----


@attack
def heartbeats_only(target: Target, stretch: Stretch) -> None:
    """Hold a slot and send heartbeats that report progress, but ask for no round."""
    with in_session(target) as session:
        heartbeats = (
            pb.HeartbeatRequest(round=1, generation=session.incarnation, progress=number, computes=True)
            for number in range(1, 1001)
        )
        flood(target.address, stretch, [session.asked("Heartbeat", one) for one in heartbeats])


@attack
def absurd_reports(target: Target, stretch: Stretch) -> None:
    """Report invalid values of steps, evaluations, links and times."""
    name, link = target.guest.name, f"{target.guest.name}-exchange"
    honest = [
        pb.Report(inner_step=pb.InnerStep(replica=name, round=1, step=1, loss=3.0, tokens=64)),
        pb.Report(evaluation=pb.Evaluation(replica=name, round=1, loss=3.0, tokens=64)),
        pb.Report(link_use=pb.LinkUse(link=link, direction="forward", round=1)),
        pb.Report(member_round=pb.MemberRound(round=1, compute_seconds=1.0)),
    ]
    with in_session(target) as session:
        absurd = [
            pb.Report.FromString(lie.message.SerializeToString())
            for one in honest
            for lie in lies_about(one)
            if lie.path.startswith(one.WhichOneof("event") or "")
        ]
        flood(target.address, stretch, [session.asked("Report", pb.ReportRequest(reports=[one])) for one in absurd])


@attack
def made_up_hashes(target: Target, stretch: Stretch) -> None:
    """Confirm hashes of parameters that no member holds, as several guests that agree, for recent and future rounds."""
    with ExitStack() as stack:
        calls = []
        for one in (target.guest, *target.ends):
            session = stack.enter_context(in_session(replace(target, guest=one)))
            held = target.spec.roster.holds(one.name)
            names = [name for block in held for name in shapes_by_block(target.spec.parameter_shapes).get(block, {})]
            last = session.client.last_round()
            for round_ in range(max(1, last - 1), last + HASHED_ROUNDS):
                hashes = pb.HashReport(round=round_, sha256=dict.fromkeys(names, b"\1" * 32))
                calls.append(session.asked("Confirm", hashes))
        flood(target.address, stretch, calls, LIES_A_SECOND)


@attack
def places_in_a_loop(target: Target, stretch: Stretch) -> None:
    """Take a slot and leave it, again and again."""
    for _ in stretch.paced(LIES_A_SECOND):
        with suppress(HeteroPPError), in_session(target):
            stretch.codes["taken"] += 1


# ---- calls that cost the exchange more than the caller ----


@attack
def rapid_resets(target: Target, stretch: Stretch) -> None:
    """Begin calls, and reset each of them before it is answered."""
    with in_session(target) as session, channel_to(target.address, target.guest) as channel:
        request = pb.HeartbeatRequest().SerializeToString()
        heartbeat: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call_path(SERVICE, "Heartbeat"))
        for _ in stretch.paced(RESETS_A_SECOND):
            call = heartbeat.future(request, metadata=session.metadata, timeout=TIMEOUT)
            call.cancel()
            stretch.codes[code_of(call)] += 1


@attack
def huge_headers(target: Target, stretch: Stretch) -> None:
    """Send a megabyte of metadata with each call."""
    with in_session(target) as session:
        large = replace(session, metadata=(*session.metadata, ("made-up", "x" * HEADER_BYTES)))
        flood(target.address, stretch, [large.asked("Heartbeat", pb.HeartbeatRequest())], LARGE_A_SECOND)


@attack
def unread_checkpoints(target: Target, stretch: Stretch) -> None:
    """Ask for run checkpoints as often as allowed, and read none of them."""
    with in_session(target) as session, channel_to(target.address, target.guest) as channel:
        request = pb.CheckpointRequest(names=target.parameters).SerializeToString()
        ask: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(call_path(SERVICE, "RunCheckpoint"))
        held: list[grpc.Call] = []
        for _ in stretch.paced(LIES_A_SECOND):
            held.append(ask(request, metadata=session.metadata))
            stretch.codes["not read"] += 1
            if len(held) > 12:
                held.pop(0).cancel()


@attack
def unsent_deposits(target: Target, stretch: Stretch) -> None:
    """Begin contributions, and send no frame of them."""
    with in_session(target) as session, channel_to(target.address, target.guest) as channel:

        def nothing() -> Iterator[bytes]:
            stretch.is_over.wait()
            yield from ()

        send: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(call_path(SERVICE, "Deposit"))
        for _ in stretch.paced(LIES_A_SECOND):
            call = send.future(nothing(), metadata=session.metadata, timeout=TIMEOUT)
            call.add_done_callback(lambda one: stretch.codes.update([code_of(one)]))


@attack
def oversized_requests(target: Target, stretch: Stretch) -> None:
    """Confirm made-up names and report empty entries, in requests of megabytes, always 14 at a time."""
    names = {f"{number:x}": b"" for number in range(MADE_UP)}
    calls = {"Confirm": pb.HashReport(round=1, sha256=names).SerializeToString(), "Report": b"\x0a\x00" * 2_000_000}
    room, numbers = threading.Semaphore(TOGETHER), count()

    def done(call: grpc.Future[bytes]) -> None:
        stretch.codes[code_of(call)] += 1
        room.release()

    with in_session(target) as session, channel_to(target.address, target.guest) as channel:
        while not stretch.is_over.is_set():
            if not room.acquire(timeout=LOOK_SECONDS):
                continue
            name = tuple(calls)[next(numbers) % len(calls)]
            send: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call_path(SERVICE, name))
            send.future(calls[name], metadata=session.metadata, timeout=TIMEOUT).add_done_callback(done)
            stretch.is_under_way.set()


# ---- links between stages ----


@attack
def malformed_to_neighbour(target: Target, stretch: Stretch) -> None:
    """Train as two stages of which the first one changes every eighth message header to the second.

    Each change is made once. There are no more changes when all have been made.
    """
    lied = set[tuple[str, str]]()
    said = count()

    def change(message: pb.LinkHello | pb.LinkHeader) -> pb.LinkHello | pb.LinkHeader:
        if isinstance(message, pb.LinkHello) or next(said) % 8:
            return message
        lie = next((one for one in lies_about(message) if (one.path, one.what) not in lied), None)
        if lie is None:
            return message
        lied.add((lie.path, lie.what))
        stretch.codes["malformed"] += 1
        return lie.message  # type: ignore[return-value]  # of the same type

    members(target, stretch, target.ends, stream=lambda frames: link_lies(frames, change))  # type: ignore[arg-type]


@attack
def former_holder(target: Target, stretch: Stretch) -> None:
    """Dial a stage that trains, in each generation of its group so far, as a former holder of the slot before it.

    The group contributes nothing, so that no round closes with it and without an honest replica.
    """
    former, listener = target.tickets["former"], target.ends[1]
    change = partial(_without_deposits, stretch)
    trains = threading.Thread(target=members, args=(target, stretch, target.ends, change), daemon=True)
    trains.start()
    address, newest = _group_of(target, listener, stretch)
    hello = pb.LinkHello(version=PROTOCOL_VERSION, link=target.own_link, sender=former.name, session=b"former")
    path, calls = call_path(LINK_SERVICE, "Open"), []
    for generation in range(1, newest + 1):
        hello.generation = generation
        calls.append(Call(path, [hello.SerializeToString(), bytes(1 << 10)], (), former))
    flood(address, stretch, calls, FORMER_A_SECOND, listener.name)
    trains.join(TIMEOUT)


def _group_of(target: Target, member: Credentials, stretch: Stretch) -> tuple[str, int]:
    """Return where a stage listens, and the generation of its group, once the group trains."""
    assert member.identity is not None
    replica = target.spec.members[member.name].replica.name
    while not stretch.is_over.wait(0.1):
        group = [slot for slot in ask(target.address, member.identity, "Status").slots if slot.replica == replica]
        if all(slot.held and slot.round for slot in group):
            (address,) = (slot.address for slot in group if slot.name == member.name)
            return address, sum(slot.incarnation for slot in group)
    return "", 0
