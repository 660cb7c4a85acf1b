"""The link between two stages over the network: one bidirectional gRPC stream of raw frames (see link_end).

The downstream stage serves, its upstream neighbour dials. Each direction begins with a LinkHello. A stage that takes
part for long has many links to each neighbour, one after the other: one for each epoch of its group.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import grpc

from hetero_pp.errors import LinkClosed, LinkTimeout, Refused
from hetero_pp.link.epochs import Epochs
from hetero_pp.link.ledger import Ledger
from hetero_pp.link.shared_lines import Lines
from hetero_pp.links import LinkSpec
from hetero_pp.messages.messages_pb2 import DESCRIPTOR, LinkHello
from hetero_pp.messages.messages_pb2_grpc import StageLinkServicer
from hetero_pp.rpc.channels import make_channel, make_server
from hetero_pp.rpc.link_end import GrpcLinkEnd, OnRefusal
from hetero_pp.rpc.link_hello import first_frame, judge, make_hello
from hetero_pp.rpc.services import call_path, service_handler

SERVICE = DESCRIPTOR.services_by_name["StageLink"]
HELLO_SECONDS = 10.0
STOP_SECONDS = 1.0
"""How long a link that has ended here may take to tell its peer why, once the server stops."""

_WORKERS = 8
"""Of a server: for a link, for what is left of those before and one that is to come, and to refuse strangers."""


class StageLinkDialer:
    """Reaches the stage after this one, by a link for each epoch."""

    def __init__(self, spec: LinkSpec, run: str, member: str, seed: int, lines: Lines | None = None) -> None:
        self.ledger = Ledger()
        """Of all its links."""
        self.target = spec.target
        self._spec, self._run, self._member, self._seed = spec, run, member, seed
        self._lines = lines or Lines()
        self._epochs: Epochs[GrpcLinkEnd] = Epochs(spec.target)

    def dial(self, address: str, epoch: int, timeout: float) -> GrpcLinkEnd:
        """The end that sends forward. The neighbour may not be listening yet; links of older epochs are over.

        Raises LinkTimeout if nobody answers within `timeout` seconds, LinkClosed if this epoch is over, for the
        neighbour or here; Refused if the two do not belong together.
        """
        end = self._epochs.come(epoch, self._make_end)
        with ExitStack() as undo:
            undo.callback(self._epochs.leave, end)
            undo.callback(end.abort, f"could not connect to {address}")
            channel = make_channel(address)
            undo.callback(channel.close)
            stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(call_path(SERVICE, "Open"))
            hello = make_hello(self._run, self._spec.name, self._member, epoch)
            call = stream(itertools.chain([hello], end.frames()), wait_for_ready=True)
            end.hang_up_by(call.cancel)
            try:
                answer = first_frame(call, timeout, call.cancel)
            except grpc.RpcError as error:
                raise _open_error(error, end, address, timeout) from error
            _, reason = judge(answer, self._run, self._spec.name, self._spec.target)
            if reason is not None:
                raise Refused(f"the listener at {address} is not the other end of {self._spec.name}: {reason}")
            end.start(call, channel.close)
            undo.pop_all()
            return end

    def give_up(self, before: int, cause: str) -> None:
        """Links of epochs before this one are over; one that is being dialled, too."""
        self._epochs.give_up(before, cause)

    def _make_end(self) -> GrpcLinkEnd:
        return GrpcLinkEnd(self._spec, "forward", self._seed, self.ledger, self._lines)


def open_stage_link(
    address: str,
    spec: LinkSpec,
    run: str,
    member: str,
    seed: int,
    timeout: float,
    lines: Lines | None = None,
    epoch: int = 0,
) -> GrpcLinkEnd:
    """One link to the downstream neighbour, for who needs no other after it; see StageLinkDialer."""
    return StageLinkDialer(spec, run, member, seed, lines).dial(address, epoch, timeout)


def _open_error(error: grpc.RpcError, end: GrpcLinkEnd, address: str, timeout: float) -> Exception:
    """Why a stream could not be opened."""
    code, details = error.code(), error.details()
    if end.failure is not None:
        return LinkClosed(end.failure)
    if code is grpc.StatusCode.CANCELLED:
        return LinkTimeout(f"{address} did not answer within {timeout:g} s")
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return Refused(f"{address} refused: {details}")
    return LinkClosed(f"{address} closed the link: {details}")


class StageLinkServer(StageLinkServicer):
    """Waits for the upstream neighbour of one stage: takes it once in each epoch, and refuses everybody else.

    A neighbour that is at a newer epoch than this member waits; the link in use is then over, as it is for it.
    Whoever has the server `listen` must `close` it, or the process cannot end.
    """

    def __init__(
        self,
        spec: LinkSpec,
        run: str,
        member: str,
        seed: int,
        on_refusal: OnRefusal | None = None,
        lines: Lines | None = None,
    ) -> None:
        self.refusals = 0
        self.ledger = Ledger()
        """Of all its links."""
        self._spec, self._run, self._member, self._seed = spec, run, member, seed
        self._on_refusal, self._lines = on_refusal, lines or Lines()
        self._epochs: Epochs[GrpcLinkEnd] = Epochs(spec.source)
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None

    def listen(self, address: str) -> int:
        """Listen on HOST:PORT; returns the port (PORT 0 takes any free one). OSError if it cannot be had."""
        handler = service_handler(SERVICE, self, _anybody)
        self._server, port = make_server(address, [handler], _WORKERS)
        return port

    def close(self, grace: float = STOP_SECONDS) -> None:
        """Listen no more. To be called when the link is closed or aborted: after `grace` seconds it is cut."""
        if self._server is not None:
            self._server.stop(grace).wait()

    def accept(self, timeout: float | None = None, epoch: int = 0) -> GrpcLinkEnd:
        """The end that sends backward, once the neighbour is here; links of older epochs are over.

        Raises LinkTimeout after `timeout` seconds, LinkClosed if this epoch is over, for the neighbour or here.
        """
        return self._epochs.take(epoch, timeout)

    def give_up(self, before: int, cause: str) -> None:
        """Links of epochs before this one are over; one that is waited for, too."""
        self._epochs.give_up(before, cause)

    def Open(  # type: ignore[override]  # a Frame is raw bytes
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        first = first_frame(requests, HELLO_SECONDS, context.cancel)
        hello, reason = judge(first, self._run, self._spec.name, self._spec.source)
        if reason is not None:
            self._refuse(hello.sender, reason)
            context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        end = self._admit(hello, context)
        end.start(requests)
        if not context.add_callback(end.lost):
            end.lost()
        yield make_hello(self._run, self._spec.name, self._member, hello.epoch)
        yield from end.frames()
        failure = end.wait_until_delivered()
        if failure is not None and context.is_active():
            context.abort(grpc.StatusCode.ABORTED, failure)

    def _admit(self, hello: LinkHello, context: grpc.ServicerContext) -> GrpcLinkEnd:
        """This member's end of the link that a neighbour asks for; ends the call if it gets none."""
        try:
            return self._epochs.come(hello.epoch, self._make_end)
        except LinkClosed as error:  # no stranger, only late
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except Refused as error:
            self._refuse(hello.sender, str(error))
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))

    def _make_end(self) -> GrpcLinkEnd:
        return GrpcLinkEnd(self._spec, "backward", self._seed, self.ledger, self._lines, self._refuse)

    def _refuse(self, sender: str, reason: str) -> None:
        with self._lock:
            self.refusals += 1
        if self._on_refusal is not None:
            self._on_refusal(sender, reason)


def _anybody(context: grpc.ServicerContext) -> None:
    """Lets everybody open a stream: who they are is in its first frame."""
