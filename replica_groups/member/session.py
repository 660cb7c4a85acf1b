"""Session of a member with its run: every request that it makes to the exchange, and its links to other stages.

All ranks of a member have a session, and make the calls together; the first rank has the exchange and speaks for all.
The steps between a call and the wire are done here, in this order:

    fault injection -> one call for all ranks -> the round carried in the background -> stop -> the line

Once a second a heartbeat tells the member's progress, and returns whether it has to stop its work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from safetensors.torch import load, save
from torch import Tensor

from hetero_pp.config.checkpoint import MOMENTUM, momentum_of
from hetero_pp.config.lines import DIRECTIONS, Direction, LinkSpec, exchange_link_name, stage_link_name
from hetero_pp.config.spec import MemberSpec
from hetero_pp.core.errors import (
    ExchangeLost,
    HeteroPPError,
    IncarnationOver,
    LinkClosed,
    LinkError,
    Refused,
    RunFailed,
    Stopped,
    Suspended,
)
from hetero_pp.link.protocol import FRAME_BYTES, NOT_KNOWN, Holders, Ledger, LinkEnds, raw_frames, wire_bytes
from hetero_pp.link.shaping import Lines, Shaper, busy_seconds
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.pseudo_gradient.contribution import BlobAddress, batches, join_blobs, split_blobs
from hetero_pp.rpc.exchange_service import NO_STATES, Arrived, AvailableStates, Caller, ExchangeService, call_of, untold
from hetero_pp.store.faults import NO_FAULTS, FaultPhase, Faults
from replica_groups.engines.ranks import ALONE, Ranks
from replica_groups.member.stopping import NEVER_STOPPED, SECONDS_TO_FETCH, Stopping

SECONDS_BETWEEN_HEARTBEATS = 1.0

EVERY_GENERATION = 1 << 62
"""A generation after all others, including one that is being formed and that no heartbeat has named."""

LedgerOf = tuple[str, Direction, Ledger]  # (link, direction, this member's byte counts)

GiveUp = Callable[[int, str], None]
"""(before, cause): ends links of generations before this one, and wakes threads that wait for them."""

_ANSWER = b"\0"

_ERRORS: tuple[type[HeteroPPError], ...] = (RunFailed, IncarnationOver, Suspended, ExchangeLost, Stopped)
"""Errors that all ranks have to handle alike; any other error of the first rank is RunFailed on the others."""

_Blob = tuple[pb.BlobHeader, bytes]

_Fetched = dict[tuple[str, str], bytes]  # blobs of a round, by replica and block


class Connections(Protocol):
    """Connections of a member to the rest of its run."""

    @property
    def exchange(self) -> ExchangeService:
        """The exchange, without traffic shaping. If several ranks form one member, only the first rank uses it."""

    @property
    def lines(self) -> Lines:
        """The access lines that all links of the member share."""

    def listen(self) -> str:
        """Start to listen for the neighbouring stages; return the address (empty if there is none)."""

    def open(self, generation: int, upstream: str, downstream: str, holders: Holders = NOT_KNOWN) -> LinkEnds:
        """Open the links to the neighbouring stages in this generation of the group. The member must have joined.

        `upstream` and `downstream` are the addresses to dial; an empty one means that the neighbour dials or does not
        exist. A neighbour whose holder number differs from `holders` is refused. A call for a newer generation aborts
        the links of older ones; the byte counts continue.

        Raises LinkClosed if the generation is over, and LinkTimeout if a neighbour does not connect.
        """

    def give_up(self, before: int, cause: str) -> None:
        """Close links of generations before this one; their users, and callers waiting in `open`, get LinkClosed.

        May be called from any thread. From then on `open` raises for these generations.
        """


class ExchangeLine:
    """A member's link to the exchange: delays and counts blobs, run checkpoints and files like any other link.

    Control messages and reports, some hundred bytes each, are neither delayed nor counted.
    """

    def __init__(self, spec: LinkSpec, seed: int, lines: Lines | None = None) -> None:
        """`lines`: the member's access lines, which its stage links share."""
        lines = lines or Lines()
        up, down = (lines.buckets(spec, way) for way in DIRECTIONS)
        self._up = Shaper(spec.forward, f"{seed}/{spec.name}/forward", lines.clock, up)
        self._down = Shaper(spec.backward, f"{seed}/{spec.name}/backward", lines.clock, down)
        self.forward, self.backward = Ledger(), Ledger()

    def send(self, round_: int, size: int) -> None:
        """Wait as long as the line takes for a message to the exchange."""
        wire = wire_bytes(raw_frames(size))
        self.forward.add(round_, size, wire, self._up.start_message()(wire))

    def receive(self, round_: int, size: int) -> None:
        wire = wire_bytes(raw_frames(size))
        self.backward.add(round_, size, wire, self._down.start_message()(wire))

    def send_file(self, round_: int, size: int) -> None:
        """Wait frame by frame, as a checkpoint may take longer than a round, whose contribution goes in between."""
        transmit = self._up.start_message()
        for start in range(0, size, FRAME_BYTES):
            transmit(wire_bytes(raw_frames(min(FRAME_BYTES, size - start))))
        wire = wire_bytes(raw_frames(size))
        self.forward.add(round_, size, wire, busy_seconds(self._up.shape, wire))

    def receive_frames(self, arrived: Arrived) -> Arrived:
        """Return a function that delays each frame of a run checkpoint as it comes: a model takes long to come."""
        transmit: Callable[[int], float] | None = None

        def frame(n_bytes: int) -> None:
            nonlocal transmit
            transmit = transmit or self._down.start_message()
            transmit(wire_bytes(raw_frames(n_bytes)))
            arrived(n_bytes)

        return frame

    def received(self, size: int) -> None:
        """Count a run checkpoint whose frames were delayed."""
        wire = wire_bytes(raw_frames(size))
        self.backward.add(0, size, wire, busy_seconds(self._down.shape, wire))


class Heartbeat:
    """Heartbeats of one member, in a thread of its own, so that neither compute nor a busy line delays them."""

    def __init__(self, exchange: ExchangeService, member: str, give_up: GiveUp) -> None:
        self._exchange, self._member, self._give_up = exchange, member, give_up
        self._work: tuple[int | None, int, pb.Resumption | None] = None, 0, None  # replaced whole: a thread reads it
        self._progress = 0
        self._activity: Callable[[], tuple[int, bool]] = lambda: (0, False)
        self.differs = False  # whether the exchange says that the member's bits differ, until the member recovers
        self.finished = False  # once its part is over, its links stay until its neighbours have read everything
        self._ended = threading.Event()

    def trains(self, round_: int | None, generation: int, resumption: pb.Resumption | None = None) -> None:
        """Note the round and generation that the member trains from now on, and where its group resumed within it."""
        self._work = round_, generation, resumption
        self.progressed()

    def progressed(self) -> None:
        self._progress += 1

    @contextmanager
    def computing(self, activity: Callable[[], tuple[int, bool]]) -> Iterator[None]:
        """While the block runs, `activity` returns the amount of work done and whether the member is busy."""
        self._activity = activity
        try:
            yield
        finally:
            self._activity = lambda: (0, False)
            self.progressed()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Send heartbeats while the block runs."""
        thread = threading.Thread(target=self._run, name=f"heartbeat {self._member}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_HEARTBEATS):
            round_, generation, resumption = self._work
            try:
                done, is_busy = self._activity()
                progress = (self._progress << 32) + done
                reply = self._exchange.heartbeat(self._member, round_, generation, progress, is_busy, resumption)
            except LinkError:
                continue  # the exchange is gone, or late: calls that need it wait for it
            except HeteroPPError as error:
                # The member is out: threads that wait for a neighbour get the cause.
                self._say(EVERY_GENERATION, str(error))
                return
            if reply.differs:  # only then: the member takes it back, in another thread
                self.differs = True
            if reply.is_over or (reply.HasField("suspended") and reply.suspended == generation):
                self._say(generation + 1, reply.cause or "its incarnation is over")

    def _say(self, before: int, cause: str) -> None:
        if not self.finished:
            self._give_up(before, cause)


class MemberSession(ExchangeService):
    """The exchange as one member sees it, on each of its ranks."""

    def __init__(
        self,
        exchange: ExchangeService | None,
        member: str,
        replica: str,
        run: str = "",
        line: ExchangeLine | None = None,
        ranks: Ranks = ALONE,
        stopping: Stopping = NEVER_STOPPED,
        faults: Faults = NO_FAULTS,
        overlaps: bool = False,
    ) -> None:
        """`exchange` is set on the first rank. `stopping` may interrupt calls that wait. `faults` are injected.

        `overlaps`: a round is carried in the background while the member trains the next one (`carry`).
        """
        self.member, self.replica, self.run, self.ranks, self.overlaps = member, replica, run, ranks, overlaps
        self.blocked = 0.0  # seconds that the outer round has waited for the exchange; the training loop resets it to 0
        self.commitment: pb.Commitment | None = None
        """The commitment of the member, sent with its next blobs; None if no audit may ask it to show something."""
        self._exchange, self.line, self.stopping, self.faults = exchange, line, stopping, faults
        self._deferred: HeteroPPError | None = None
        """Error of a deposit of the first rank, which the other ranks have not heard of yet."""
        self._contributed: int | None = None  # round of the contribution in progress
        self._missed: list[_Blob] = []  # blobs that `faults` deliver after the record of their round
        self._waiting: list[_Blob] = []  # with `overlaps`, blobs of a contribution that were not deposited yet
        self._carried: tuple[int, Future[tuple[pb.RoundRecord, _Fetched]]] | None = None
        """The round that a thread carries. The thread of a round that was given up may still wait, unread."""
        self._fetched: tuple[int, _Fetched] = 0, {}
        self.resumption: pb.Resumption | None = None  # of the newest assignment
        self._address, self._available = "", NO_STATES
        self._generation: int | None = None

    # ---- a slot in the run ----

    @contextmanager
    def joined(self, member: MemberSpec, connections: Connections, available: AvailableStates) -> Iterator[None]:
        """Listen for other stages, take the slot, and send heartbeats while the block runs.

        `available`: the states that the member holds.
        """
        self._spec, self._connections, self._ends = member, connections, LinkEnds()
        self._address, self._available = connections.listen(), available
        self.heartbeats = Heartbeat(self, self.member, connections.give_up)
        self.join(self.member, self._address, available)
        with self.heartbeats.sending():
            yield

    def ask(self, holds: int, trained: int = 0, kept: pb.KeptSteps | None = None) -> pb.AssignReply:
        """Return the next assignment, for a member with theta after round `holds`; join again if the slot was lost.

        `trained` and `kept`: as in `ExchangeService.assign`.
        """
        self._contributed = None  # a round that is trained again has another contribution
        while True:
            try:
                work = self.assign(self.member, holds, self._address, trained, kept, self.heartbeats.differs)
                self.resumption = work.resumption if work.HasField("resumption") else None
                return work
            except IncarnationOver:
                self._generation = None
                self.join(self.member, self._address, self._available)

    def form(self, work: pb.AssignReply) -> LinkEnds | None:
        """Return new links for an assignment's generation; None if the current links belong to it. Raises LinkError.

        From now on a heartbeat's answer that this generation is over ends the links, also while they are formed.
        """
        if work.generation == self._generation:
            return None
        self._generation = work.generation
        self.heartbeats.trains(None, work.generation)
        upstream = work.upstream_holder if work.HasField("upstream_holder") else None
        downstream = work.downstream_holder if work.HasField("downstream_holder") else None
        holders = upstream, downstream
        try:
            self._ends = self._connections.open(work.generation, work.upstream, work.downstream, holders)
        except Refused as error:  # the word of a neighbour alone must not end this member
            raise LinkClosed(str(error)) from error
        return self._ends

    @property
    def ledgers(self) -> Sequence[LedgerOf]:
        """The member's byte counts: both directions of its exchange link, and what it sends to neighbouring stages."""
        assert self.line is not None
        own, stage, replica = exchange_link_name(self.member), self._spec.stage, self.replica
        ledgers: list[LedgerOf] = [(own, "forward", self.line.forward), (own, "backward", self.line.backward)]
        if stage is not None and self._ends.downstream is not None:
            ledgers.append((stage_link_name(replica, stage.index), "forward", self._ends.downstream.ledger))
        if stage is not None and self._ends.upstream is not None:
            ledgers.append((stage_link_name(replica, stage.index - 1), "backward", self._ends.upstream.ledger))
        return ledgers

    def leave_links(self, cause: str) -> int | None:
        """Give up the current links, and tell waiting neighbours the cause; return their generation, if any."""
        generation, self._generation = self._generation, None
        if generation is not None:
            self._connections.give_up(generation + 1, cause)
        return generation

    def newest_tensors(
        self, parameters: Collection[str], others: Sequence[str] = ()
    ) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
        """Return the round of the newest run checkpoint, its tensors of these names, and the parameters' momentum."""
        while True:
            round_, names = self.newest_checkpoint()
            kept = momentum_of(names, parameters)
            try:
                tensors = self.checkpoint([*parameters, *others, *kept], round_)
                break
            except Refused:  # it was removed while it came, if there is a newer one
                if self.newest_checkpoint()[0] == round_:
                    raise
        return round_, tensors, {name.removeprefix(MOMENTUM): tensors.pop(name) for name in kept}

    def allowed_to_stop(self, round_: int | None = None) -> AbstractContextManager[None]:
        """Allow Stopped at any instruction of a block; not on several ranks, which have to leave it together.

        With `round_` the block trains ahead of that round; see Stopping.allowed.
        """
        return nullcontext() if self.ranks.in_group else self.stopping.allowed(round_)

    # ---- an outer round ----

    def address_of(self, round_: int, block: str) -> BlobAddress:
        return BlobAddress(self.run, round_, self.replica, block)

    def contribute(
        self,
        round_: int,
        blobs: Iterable[tuple[str, bytes]],
        generation: int | None,
        steps: int,
        before_last: Callable[[], object] = lambda: None,
    ) -> None:
        """Deposit the member's blobs, by block, as they are made. Small ones go together.

        `before_last` is called once all are made, and before the last are sent: then the contribution is complete.
        """

        common = pb.BlobHeader(round=round_, replica=self.replica, generation=generation or 0, steps=steps)
        if self.resumption is not None:
            common.resumption.CopyFrom(self.resumption)

        def send(batch: Sequence[tuple[str, bytes]]) -> None:
            with self._blocking():
                self.deposit_blob(*join_blobs(common, batch), Caller(self.member))

        last = None
        for batch in batches(blobs):
            if last is not None:
                send(last)
            last = batch
        before_last()
        if last is not None:
            send(last)
        self._begin_contribution(round_)  # in fragments also if it has no blob

    def record_of(
        self, round_: int, own: Mapping[str, bytes] | None = None, generation: int | None = None, steps: int = 0
    ) -> pb.RoundRecord:
        """Return the record once the round is closed.

        After a lost connection, deposit `own` again, as the exchange may have restarted.
        """
        while True:
            try:
                with self._blocking():
                    return self.record(round_, self.member)
            except ExchangeLost:
                self.contribute(round_, (own or {}).items(), generation, steps)

    def entry(self, record: pb.RoundRecord) -> pb.ContributionEntry | None:
        """Return the entry of a record that is this replica's; None if the round excludes it."""
        return next((one for one in record.contributions if one.replica == self.replica), None)

    def fetches(self, round_: int) -> Callable[[str, str], bytes]:
        """Return a function that fetches the blob of (replica, block) in a round."""

        def fetch(replica: str, block: str) -> bytes:
            with self._blocking():
                return self.fetch(self.member, round_, replica, block)

        return fetch

    def carry(self, round_: int, blocks: Collection[str]) -> None:
        """Complete a round in the background while the member trains the next one. The first rank alone does so.

        A thread deposits what waits, then waits for the record, and fetches the other replicas' blobs of these blocks.
        They are here when the record is asked for, unless training took less time.
        """
        if self._exchange is None:
            return
        waiting, self._waiting = self._waiting, []
        carried: Future[tuple[pb.RoundRecord, _Fetched]] = Future()
        self._carried, self._fetched, caller = (round_, carried), (0, {}), Caller(self.member)

        def run() -> None:
            try:
                record = self._deposit_and_record(waiting, pb.RecordRequest(round=round_), caller)
                wanted = [
                    pb.FetchRequest(round=round_, replica=entry.replica, block=blob.block)
                    for entry in record.contributions
                    for blob in entry.blobs
                    if blob.block in blocks and entry.replica != self.replica
                ]
                fetched = {
                    (one.replica, one.block): self._fetch(one, caller) for one in wanted if not carried.cancelled()
                }
                with suppress(InvalidStateError):  # it was given up
                    carried.set_result((record, fetched))
            except BaseException as error:  # noqa: BLE001 (raised by the call for the record)
                with suppress(InvalidStateError):
                    carried.set_exception(error)

        threading.Thread(target=run, name=f"carries round {round_} of {self.member}", daemon=True).start()

    def give_up_carried(self) -> None:
        """Wait no more for the round that is carried, and drop the blobs that were not deposited."""
        self._waiting = []
        if self._carried is not None:
            self._carried[1].cancel()
            self._carried = None

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.blocked += time.monotonic() - began

    # ---- the calls of ExchangeService, on every rank ----

    def call(self, request: Message, caller: Caller) -> Any:
        """Make a call on the first rank, and return the reply on all ranks.

        All ranks make a call together, except heartbeats, hashes and reports, which the first rank sends alone.
        """
        match request:
            case pb.HeartbeatRequest() | pb.HashReport() | pb.ReportRequest():
                return _reply_to(request)() if self._exchange is None else self._call(request, caller)
            case pb.RecordRequest():
                return self._record(request, caller)
        return self._on_all(request, lambda: self._call(request, caller))

    def _record(self, request: pb.RecordRequest, caller: Caller) -> pb.RoundRecord:
        if self._contributed == request.round:
            self._contributed = None
            self.faults.reached(FaultPhase.WAITING, request.round)
        deferred, self._deferred = self._deferred, None

        def ask() -> pb.RoundRecord:
            if deferred is not None:
                raise deferred
            carried, self._carried = self._carried, None
            if carried is None or carried[0] != request.round:
                waiting, self._waiting = self._waiting, []
                return self._deposit_and_record(waiting, request, caller)
            with self.stopping.allowed(request.round):
                record, fetched = carried[1].result()
            self._fetched = request.round, fetched
            return record

        record: pb.RoundRecord = self._on_all(request, ask)
        missed, self._missed = self._missed, []
        for blob in missed:
            self._deposit_first(*blob, caller)
        return record

    def read_checkpoint(
        self, request: pb.CheckpointRequest, caller: Caller, arrived: Arrived = untold
    ) -> dict[str, Tensor]:
        """Return tensors of a run checkpoint, on all ranks.

        Each is broadcast alone, because a large model would be twice in memory otherwise.
        """
        if self.ranks.world == 1:
            return self._read(request, caller, arrived)
        tensors: dict[str, Tensor] = {}
        for name in request.names:
            one = pb.CheckpointRequest(names=[name], round=request.round if request.HasField("round") else None)
            tensors |= load(self._broadcast(lambda one=one: save(self._read(one, caller, arrived))))  # type: ignore[misc]
        return tensors

    def deposit_blob(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        """Deposit a blob on the first rank. The next call for the record raises its error on all ranks.

        With `overlaps`, it waits until `carry`, or until the record is asked for.
        """
        if self.commitment is not None:
            header.commitment.CopyFrom(self.commitment)
        self._begin_contribution(header.round)
        if header.round in self.faults.missed:
            self._missed.append((header, data))
        else:
            self._deposit_first(header, data, caller)

    def _begin_contribution(self, round_: int) -> None:
        """Note that the member contributes to a round, unless this is known."""
        if self._contributed != round_:
            self._contributed, self._missed = round_, []
            self.faults.reached(FaultPhase.CONTRIBUTING, round_)

    def _deposit_first(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        if self._exchange is None:
            return
        if self.overlaps:
            self._waiting.append((header, data))
            return
        try:
            self._deposit(header, data, caller)
        except (IncarnationOver, Suspended, Stopped) as error:
            if self.ranks.world == 1:
                raise
            self._deferred = error

    def fetch_blob(self, request: pb.FetchRequest, caller: Caller) -> bytes:
        """Return one blob of a closed round, on all ranks. One that was carried is returned once, then forgotten."""

        def ask() -> bytes:
            of_round, fetched = self._fetched
            data = fetched.pop((request.replica, request.block), None) if of_round == request.round else None
            return self._fetch(request, caller) if data is None else data

        return self._broadcast(ask)

    def show_file(self, header: pb.ShownFile, path: Path, caller: Caller) -> None:
        """Send a file. Its frames cross the line first."""
        assert self._exchange is not None
        if self.line is not None:
            self.line.send_file(header.round, header.size)
        self._exchange.show_file(header, path, caller)

    # ---- the same calls, on the first rank: a stop may end them, and the line delays them ----

    def _call(self, request: Message, caller: Caller) -> Any:
        """Make a call. Stopped may interrupt it while it waits for a reply, or for an exchange that is gone.

        A member that is asked to stop and gets no reply to its hashes continues without one: it has applied the round.
        """
        assert self._exchange is not None
        match request:
            case pb.RecordRequest():
                round_: int | None = request.round
            case pb.HashReport():
                with suppress(Stopped), self.stopping.allowed(request.round):
                    self._exchange.call(request, caller)
                return pb.Nothing()
            case pb.NewestCheckpointRequest():
                round_ = 0  # the member is recovering, and can save its state afterwards
            case _:
                round_ = None
        with self.stopping.allowed(round_):
            return self._exchange.call(request, caller)

    def _read(self, request: pb.CheckpointRequest, caller: Caller, arrived: Arrived) -> dict[str, Tensor]:
        assert self._exchange is not None
        with self.stopping.allowed(request.round, SECONDS_TO_FETCH):
            frame = arrived if self.line is None else self.line.receive_frames(arrived)
            tensors = self._exchange.read_checkpoint(request, caller, frame)
        if self.line is not None:
            self.line.received(sum(tensor.nbytes for tensor in tensors.values()))
        return tensors

    def _deposit(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        assert self._exchange is not None
        with self.stopping.allowed(header.round):  # the round may be decided by this blob
            if self.line is not None:
                for _, blob in split_blobs(header, data):  # each counts as a message, as it is predicted
                    self.line.send(header.round, len(blob))
            self._exchange.deposit_blob(header, data, caller)

    def _deposit_and_record(
        self, waiting: Sequence[_Blob], request: pb.RecordRequest, caller: Caller
    ) -> pb.RoundRecord:
        for blob in waiting:
            self._deposit(*blob, caller)
        record: pb.RoundRecord = self._call(request, caller)
        return record

    def _fetch(self, request: pb.FetchRequest, caller: Caller) -> bytes:
        assert self._exchange is not None
        with self.stopping.allowed(request.round, SECONDS_TO_FETCH):
            data = self._exchange.fetch_blob(request, caller)
            if self.line is not None:
                self.line.receive(request.round, len(data))
        return data

    # ---- all ranks ----

    def _on_all(self, request: Message, ask: Callable[[], Message]) -> Any:
        """Return the first rank's reply to a request on every rank."""
        if self.ranks.world == 1:
            return ask()
        return _reply_to(request).FromString(self._broadcast(lambda: ask().SerializeToString()))

    def _broadcast(self, ask: Callable[[], bytes]) -> bytes:
        """Return what `ask` returns on the first rank, or raise what it raises there, on every rank."""
        if self.ranks.world == 1:
            return ask()
        answer, failure = None, None
        if self.ranks.is_first:
            try:
                answer = _ANSWER + ask()
            except HeteroPPError as error:
                kind = next((index for index, one in enumerate(_ERRORS) if isinstance(error, one)), 0)
                answer, failure = bytes([1 + kind]) + str(error).encode(), error
        reply = self.ranks.broadcast_bytes(answer)
        if failure is not None:
            raise failure
        if reply[:1] != _ANSWER:
            raise _ERRORS[reply[0] - 1](reply[1:].decode())
        return reply[1:]


def _reply_to(request: Message) -> type[Message]:
    return GetMessageClass(call_of(request).output_type)
