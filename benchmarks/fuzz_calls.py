"""Send messages to every call of messages.proto (benchmarks/fuzz_messages.py), in order and out of order.

The seed, the call and the kind of caller determine the messages, in blocks of a thousand.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import grpc
import psutil
import torch
from attack_calls import NICENESS, TIMEOUT, Call, Target, channel_to, credentials_of, status_of
from attacks_of_strangers import ANSWERED, as_http2, knock, signed_by, strange_context
from fuzz_messages import CALLS, TEXTS, Known, metadata, request
from google.protobuf.message import Message

from hetero_pp.config.lines import EXCHANGE as PEER
from hetero_pp.config.lines import LinkSpec
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import HeteroPPError
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.program.launch.fork_server import safe_path
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import select
from hetero_pp.rpc.admission_client import enrol
from hetero_pp.rpc.callers import shown
from hetero_pp.rpc.channels import PROTOCOL_VERSION
from hetero_pp.rpc.identities import Credentials, Identity, as_text, new_key, signing_request
from hetero_pp.rpc.limits import BULK_CALLS_MAX, CALLS_A_SECOND, Pace
from hetero_pp.rpc.link_end import LinkSide
from hetero_pp.rpc.relay import SERVICE as RELAY
from hetero_pp.rpc.services import ADMISSION_SERVICE as ADMISSION
from hetero_pp.rpc.services import EXCHANGE_SERVICE as EXCHANGE
from hetero_pp.rpc.services import call_path
from hetero_pp.rpc.stage_link import SERVICE as LINKS
from hetero_pp.rpc.stage_link import StageLink
from replica_groups.exchange.server import MOST_OPEN

BY = ("stranger", "ticket", "member")
STREAMS = ("Deposit", "Show", "Fetch", "RunCheckpoint", "Carry", "Open")
"""Streaming calls, of which a caller may have only a few open."""
CELLS = [f"{call} by a {caller}" for caller in BY for call in CALLS]
SHARE_OF_STRANGERS = 0.05
"""Share of a call's messages that strangers send. Only TLS sees these messages, and each takes a connection."""
A_BLOCK = 1000
"""Messages drawn from one state of the random generator. A resumed run begins with a new block."""
CHANNELS = 3
AT_ONCE = MOST_OPEN - 4
"""Calls under way at once. They are fewer than a member may have open, so that more than this limit is tested."""
MESSAGES_A_SECOND = 0.8 * CALLS_A_SECOND
"""Rate below the limit of a caller. Above the limit the server closes the connection, and no other check is reached."""
LONGEST_CHUNK = 10.0
PATIENCE = {
    "Assign": 0.1,
    "Record": 0.1,
    "Stay": 0.05,
    "Watch": 0.5,
    "Join": 1.0,
    "Carry": 0.2,
    "Probe": 0.2,
    "Measure": 0.2,
}
"""Timeouts in seconds of calls that wait."""
ESCAPED = {"UNKNOWN", "INTERNAL", "UNAVAILABLE", ANSWERED, "NOT CLOSED"}
"""Statuses of calls that nothing has refused.

They stand for an unexpected exception, for an exchange that is gone, or for an answer to a stranger.
"""
NO_CONTRIBUTIONS = "this exchange does not have the contributions"
"""Start of the answer to `Record` with the name of another exchange process. This answer is UNAVAILABLE on purpose."""
MOST_KEPT = 10
REJOINED, LEFT = 0.01, 0.005
"""Probabilities before each message: that the guest's slot changes, and that it becomes vacant."""


def most_of(name: str, messages: int) -> int:
    """Return the number of messages for a call."""
    return messages if not name.endswith("stranger") else max(2, round(SHARE_OF_STRANGERS * messages))


def left_of(cells: Mapping[str, Any], messages: int) -> Sequence[str]:
    """Return the calls that still need messages."""
    return [name for name in CELLS if cells.get(name, {}).get("sent", 0) < most_of(name, messages)]


class Fuzzer:
    """Sends messages from a process of its own, and serves a stage link in another one. Use it as a context manager."""

    def __init__(self, target: Target, spec: RunSpec, seed: int) -> None:
        context = multiprocessing.get_context("forkserver")
        far, theirs = context.Pipe()
        self._far = context.Process(target=far_end_main, args=(theirs, target.link, target.listener), daemon=True)
        with safe_path():
            self._far.start()
        self._parent, child = context.Pipe()
        block = shapes_by_block(spec.parameter_shapes)[target.blocks[0]]
        given = (child, target, far.recv(), seed, block, spec.config.outer.compression)
        self._process = context.Process(target=fuzz_main, args=given, daemon=True)
        self._process.start()

    def __enter__(self) -> Fuzzer:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._process, self._far):
            process.kill()
            process.join()

    def far_size(self) -> tuple[int, int]:
        """Return the bytes of memory and the threads of the stage that listens for hostile frames."""
        process = psutil.Process(self._far.pid)
        return process.memory_info().rss, process.num_threads()

    def some(self, name: str, own: dict[str, Any], most: int, last_round: int) -> None:
        """Send more messages of a call, and add their outcomes to `own`."""
        self._parent.send((name, own["sent"], most, last_round))
        sent, seconds, codes, escaped = self._parent.recv()
        own["sent"], own["seconds"] = own["sent"] + sent, own["seconds"] + seconds
        own["codes"] = dict(Counter(own["codes"]) + codes)
        own["escaped"] = (own["escaped"] + escaped)[:MOST_KEPT]
        own["messages_a_second"] = own["sent"] / own["seconds"]


def far_end_main(parent: Connection, link: LinkSpec, own: Credentials) -> None:
    """Listen as a stage for whatever the neighbour sends."""
    server = StageLink(LinkSide(link, own.of_link(link.name), link.target, seed=1), expected=None)
    parent.send(f"127.0.0.1:{server.listen('127.0.0.1:0')}")
    threading.Event().wait()


def fuzz_main(
    parent: Connection,
    target: Target,
    far: str,
    seed: int,
    block: Mapping[str, tuple[int, ...]],
    compression: CompressionSettings,
) -> None:
    """Send the messages that the parent asks for."""
    os.nice(NICENESS)
    torch.set_num_threads(1)
    sender = Sender(target, far, seed)
    while True:
        name, first, most, last_round = parent.recv()
        sender.known.round = last_round + 1
        sender.known.blob = honest_blob(target, last_round + 1, block, compression)
        parent.send(sender.some(name, first, most))


def honest_blob(
    target: Target, round_: int, block: Mapping[str, tuple[int, ...]], compression: CompressionSettings
) -> bytes:
    """Return what the guest would contribute for its first block."""
    selections = [
        (name, shape, select(torch.zeros(shape), torch.randn(shape), compression)) for name, shape in block.items()
    ]
    return encode_blob(BlobAddress(target.run, round_, target.guest.name, target.blocks[0]), selections, compression)


class Sender:
    """Makes the calls of one process: many at once, over several connections of each caller to each address."""

    def __init__(self, target: Target, far: str, seed: int) -> None:
        self.known, self._seed, self._far, self._key = Known(target), seed, far, new_key()
        self.known.request = signing_request(self._key)
        self._channels: dict[str, list[grpc.Channel]] = {}
        self._pool, self._few = ThreadPoolExecutor(AT_ONCE), ThreadPoolExecutor(1)
        self._streams, self._pace = ThreadPoolExecutor(BULK_CALLS_MAX - 1), Pace(MESSAGES_A_SECOND, AT_ONCE)
        self._texts = [*TEXTS, *target.blocks, *target.parameters, target.guest.name, target.honest, target.link.name]
        self._texts += [target.run, target.neighbour.name, "forward", "backward", json.dumps({"seed": 1})]
        strangers = [None, *(credentials_of(name, target) for name in (target.honest, "exchange", "away"))]
        strangers += [target.expired, signed_by(target.guest, target.honest)]
        self._strange = [None, *(strange_context(target, one) for one in strangers)]

    def _channels_to(self, call: str, caller: str) -> list[grpc.Channel]:
        """Return channels from a kind of caller to the server of a call."""
        service, target = CALLS[call], self.known.target
        key = f"{service.name} {caller}"
        if key not in self._channels:
            address, peer, callers = target.address, PEER, [target.guest] * CHANNELS
            if service is LINKS:
                address, peer = self._far if caller == "member" else target.link_address, target.link.target
                callers = [target.neighbour] * CHANNELS
            if service is ADMISSION:
                callers = [self._let_in()]
            if service is RELAY:
                callers = [*target.ends]
            if caller == "ticket":
                callers = [target.tickets["open"]] * CHANNELS
            self._channels[key] = [channel_to(address, one, peer) for one in callers]
        return self._channels[key]

    def _let_in(self) -> Credentials:
        """Enrol with the ticket again, because the guest may have left, and return its credentials."""
        ticket, key = self.known.target.tickets["invited"].identity, self._key
        assert ticket is not None
        with suppress(HeteroPPError):
            reply = enrol(self.known.target.address, ticket, signing_request(key))
            identity = Identity(reply.certificate, as_text(key), ticket.authority)
            return Credentials(reply.slot, identity=identity)
        return self.known.target.guest

    def some(self, name: str, first: int, most: int) -> tuple[int, float, Counter[str], list[str]]:
        """Send messages of one call from number `first` on, in blocks, up to `most` or until the time is over.

        Returns their number, the seconds, the statuses, and the messages that let something escape.
        """
        call, _, caller = name.replace(" by a ", " ").rpartition(" ")
        codes, escaped, begun = Counter[str](), list[str](), time.monotonic()
        sent = 0
        while first + sent < most and (sent == 0 or time.monotonic() - begun < LONGEST_CHUNK):
            if caller == "member":
                self._take_slot()
                self._forget_invited()
            calls = list(self._block(call, caller, first + sent, most))
            pool = self._few if CALLS[call] is ADMISSION else self._streams if call in STREAMS else self._pool
            for code, said in pool.map(partial(self._send, call, caller), calls):
                codes[code] += 1
                escaped += [said] if said else []
            sent += len(calls)
        return sent, time.monotonic() - begun, codes, escaped[:MOST_KEPT]

    def _block(self, call: str, caller: str, first: int, most: int) -> Iterator[Call]:
        """Yield the messages up to the end of a block."""
        dice = random.Random(f"{self._seed} {call} {caller} {first}")
        path = call_path(CALLS[call], call)
        for _ in range(min(most, first - first % A_BLOCK + A_BLOCK) - first):
            frames = request(call, dice, self.known, self._texts)
            by = self.known.target.guest  # not used here: `_send` selects the connection
            yield Call(path, frames, metadata(caller, call, dice, self.known), by)

    def _forget_invited(self) -> None:
        for channel in self._channels.pop(f"{ADMISSION.name} member", []):
            channel.close()

    def _send(self, name: str, caller: str, call: Call) -> tuple[str, str]:
        """Make a call. Return its outcome, and the message with its error if something escaped."""
        if caller == "stranger":
            address = self.known.target.link_address if CALLS[name] is LINKS else self.known.target.address
            code = knock(address, random.choice(self._strange), as_http2(call))
            return code, f"{[frame[:200].hex() for frame in call.frames[:3]]}" if code in ESCAPED else ""
        self._disturb(caller, name)
        time.sleep(self._pace.due_in(caller, 1))
        channel = random.choice(self._channels_to(name, caller))
        try:
            self._make(channel, name, call)
            return "OK", ""
        except grpc.RpcError as error:
            code = status_of(error)
            said = f"{error.details()}: {[frame[:200].hex() for frame in call.frames[:3]]}"
            return code, said if code in ESCAPED and not said.startswith(NO_CONTRIBUTIONS) else ""

    @staticmethod
    def _make(channel: grpc.Channel, name: str, call: Call) -> None:
        """Make one call to its end, or to its first answer if it may have no end. Raises grpc.RpcError."""
        kind, timeout = CALLS[name].methods_by_name[name], PATIENCE.get(name, TIMEOUT)
        if not kind.client_streaming and not kind.server_streaming:  # three times as fast: it needs no thread
            one: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call.path)
            one(call.frames[0], metadata=call.metadata, timeout=timeout)
            return
        many: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(call.path)
        answers = many(iter(call.frames), metadata=call.metadata, timeout=timeout)
        for _ in answers:
            if name in ("Watch", "Open", "Carry"):
                break
        answers.cancel()

    def _disturb(self, caller: str, name: str) -> None:
        """Vacate or take again the guest's slot now and then, so that some messages come too late or too early."""
        if caller == "member" and CALLS[name] is ADMISSION:
            if random.random() < (0.5 if name == "Give" else REJOINED):
                self._forget_invited()  # one call at a time
            return
        if caller == "member" and (chance := random.random()) < REJOINED:
            (self._leave if chance < LEFT else self._take_slot)()

    def _leave(self) -> None:
        name = self.known.target.guest.name
        with suppress(grpc.RpcError):
            self._ask("Died", pb.DiedRequest(member=name, cause="it has ended"))

    def _take_slot(self) -> None:
        """Take the slot with a new incarnation, as a new process."""
        self._leave()
        process = random.randbytes(8).hex()
        with suppress(grpc.RpcError):
            reply = self._ask("Join", pb.JoinRequest(version=PROTOCOL_VERSION, process=process))
            self.known.incarnation = pb.JoinReply.FromString(reply).incarnation

    def _ask(self, call: str, message: Message) -> bytes:
        own = shown(self.known.target.guest, self.known.target.run)
        channel = self._channels_to("Join", "member")[0]
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call_path(EXCHANGE, call))
        return ask(message.SerializeToString(), metadata=own, timeout=TIMEOUT)
