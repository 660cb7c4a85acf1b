"""Interface between the members of a run and the exchange: the messages of `service Exchange` in messages.proto.

The exchange is called over the network (`rpc.exchange_client`) or in process (`replica_groups.exchange.exchange`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from torch import Tensor

from hetero_pp.config.changes import Changes
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.messages import messages_pb2 as pb

FIRST_TOLD, MOST_BETWEEN = 10.0, 600.0
"""Seconds before a waiting process reports it for the first time, and the longest time between two reports."""

IsAsked = Callable[[], bool]  # returns whether the caller still waits for the reply


Arrived = Callable[[int], None]  # is told how many more bytes of a reply have arrived


def always() -> bool:
    """Return True: a caller that is a thread of this process waits for its reply."""
    return True


def untold(n_bytes: int) -> None:
    """Do nothing with the bytes of a reply."""


@dataclass(frozen=True)
class AvailableStates:
    """Rounds that a member could resume from, because its state is sound, and the errors of its damaged states."""

    rounds: frozenset[int] = frozenset()
    damaged: tuple[str, ...] = ()


NO_STATES = AvailableStates()


@dataclass(frozen=True)
class Caller:
    """Sender of a request, as far as the exchange knows it apart from the request."""

    name: str
    incarnation: int | None = None
    """Incarnation of the member; None: the current one, for a member in the exchange's process."""
    holder: int = 0  # number of the ticket's holder at this slot; 0 without a ticket
    is_asked: IsAsked = always


_PROCESS = Caller(EXCHANGE)  # the exchange's own process, and callers of requests that are answered alike for everybody


class HeldBy(NamedTuple):
    """Holder of a slot."""

    slot: str
    holder: int  # number of the ticket's holder at this slot; 0 without a ticket
    incarnation: int  # incarnation of the member


class ExchangeService(ABC):
    """The exchange of contributions, as its members see it.

    An implementation has five methods. `call` takes every request that is one message, and returns one message. Four
    more move a run checkpoint, a blob or a file, which stay tensors, bytes and paths in process. A field that is added
    to a message needs no change of any of them. The other methods build a request and make the call; `member` is the
    caller.

    Every call may raise Refused (the request is wrong) or RunFailed (the run is over). Every call after `join` may also
    raise IncarnationOver: another process may hold this member's slot, so the member must join again.
    """

    @abstractmethod
    def call(self, request: Message, caller: Caller) -> Any:
        """Return the reply to a request, of the type that messages.proto gives for it."""

    @abstractmethod
    def read_checkpoint(
        self, request: pb.CheckpointRequest, caller: Caller, arrived: Arrived = untold
    ) -> dict[str, Tensor]:
        """Return tensors of a run checkpoint, by default the newest: parameters by name, the basis, the outer momentum.

        `arrived` is told of the bytes as they come, and may delay what follows.
        """

    @abstractmethod
    def deposit_blob(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        """Deposit a blob of the replica's contribution to a round, and those that follow it. May be repeated.

        Raises Suspended if the replica is formed anew.
        """

    @abstractmethod
    def fetch_blob(self, request: pb.FetchRequest, caller: Caller) -> bytes:
        """Return one blob of a closed round."""

    def show_file(self, header: pb.ShownFile, path: Path, caller: Caller) -> None:
        """Send a file of a member's checkpoint that an audit asked for. May be called from another thread.

        Raises Refused if it is not what the member committed to.
        """
        raise NotImplementedError("this exchange takes no files of checkpoints")

    def agree(self, member: str | Caller, configuration: str, tokens: str = "") -> str:
        """Return the name of the run, for a member with this configuration (RunSpec.agreed).

        `tokens`: the digest of the tokens that the member reads (TokenStore.digest); empty if it reads none, or a
        stream. Raises Refused, with the keys that differ, if the configuration is another run's, or if other members
        read other tokens.
        """
        request = pb.AgreeRequest(configuration=configuration, tokens=tokens)
        reply: pb.AgreeReply = self.call(request, _caller(member))
        return reply.run

    def join(
        self, member: str | Caller, address: str, available: AvailableStates = NO_STATES, process: str = ""
    ) -> int:
        """Take the slot of this name, and wait until it is vacant.

        `address`: where the member listens for neighbouring stages; empty: nowhere. `available`: the states that it
        holds. `process` names the caller, so that it may ask again. Returns the incarnation: how many times the slot
        was taken.
        """
        rounds, damaged = sorted(available.rounds), available.damaged
        request = pb.JoinRequest(address=address, rounds=rounds, damaged=damaged, process=process)
        reply: pb.JoinReply = self.call(request, _caller(member))
        return reply.incarnation

    def last_round(self) -> int:
        """Return the last decided round, 0 if there is none. Waits until all members have joined and the run begins."""
        reply: pb.LastRoundReply = self.call(pb.LastRoundRequest(), _PROCESS)
        return reply.last_round

    def changes(self) -> Changes:
        """Return the keys that were changed when the run resumed. Waits as `last_round` does."""
        reply: pb.LastRoundReply = self.call(pb.LastRoundRequest(), _PROCESS)
        return Changes.from_json(reply.changes)

    def newest_checkpoint(self) -> tuple[int, Sequence[str]]:
        """Return the round of the newest run checkpoint, and its tensors' names. Waits as `last_round` does."""
        reply: pb.NewestCheckpointReply = self.call(pb.NewestCheckpointRequest(), _PROCESS)
        return reply.round, list(reply.names)

    def checkpoint(self, names: Sequence[str], round_: int | None = None) -> dict[str, Tensor]:
        """Return tensors of a run checkpoint (`read_checkpoint`)."""
        return self.read_checkpoint(pb.CheckpointRequest(names=names, round=round_), _PROCESS)

    def assign(
        self,
        member: str | Caller,
        holds: int,
        address: str = "",
        trained: int = 0,
        kept: pb.KeptSteps | None = None,
        differs: bool = False,
    ) -> pb.AssignReply:
        """Return a member's next task, once all members of its replica ask for one.

        `holds`: the round after which the member holds theta. `address`: where it listens for the previous stage.
        `trained`: the last round that it has trained but no record has, because it was trained ahead or excluded; 0:
        none. It is used only if all members of the replica have trained that round. `kept`: steps of the round in which
        its replica was suspended. `differs`: a heartbeat was answered that the member's bits differ from the run log.
        """
        request = pb.AssignRequest(holds=holds, address=address, trained=trained, kept=kept, differs=differs)
        return self.call(request, _caller(member))

    def heartbeat(
        self,
        member: str | Caller,
        round_: int | None = None,
        generation: int = 0,
        progress: int = 0,
        computes: bool = False,
        resumption: pb.Resumption | None = None,
    ) -> pb.HeartbeatReply:
        """Send a heartbeat: the member is alive, what it trains, and its progress (another `progress` if it moved).

        `computes`: it is busy, and does not wait for another process. `resumption`: as in the assignment of the round.
        """
        request = pb.HeartbeatRequest(round=round_, generation=generation, progress=progress, computes=computes)
        if resumption is not None:
            request.resumption.CopyFrom(resumption)
        return self.call(request, _caller(member))

    def broken(self, member: str | Caller, generation: int, cause: str, blames: str = "") -> None:
        """Report that the member cannot reach a neighbour; a stage of its replica counts as missing from then on.

        `blames`: the neighbour that sent a malformed message; empty if the link only broke.
        """
        self.call(pb.BrokenRequest(generation=generation, cause=cause, blames=blames), _caller(member))

    def died(self, member: str, cause: str, incarnation: int | None = None) -> None:
        """Report that a member's process has ended, and its incarnation if known; sent by its supervisor."""
        self.call(pb.DiedRequest(member=member, cause=cause, incarnation=incarnation), _PROCESS)

    def record(self, round_: int, member: str | Caller | None = None) -> pb.RoundRecord:
        """Return the record of the contributions included in a round; waits until the round is closed.

        `member` names the waiting member, if it is one. Raises Suspended if its replica must train the round again.
        """
        return self.call(pb.RecordRequest(round=round_), _caller(member or _PROCESS))

    def fetch(self, member: str | Caller, round_: int, replica: str, block: str) -> bytes:
        """Return one blob of a closed round."""
        return self.fetch_blob(pb.FetchRequest(round=round_, replica=replica, block=block), _caller(member))

    def confirm(self, member: str | Caller, round_: int, sha256: Mapping[str, bytes]) -> None:
        """Send the hashes of the parameters held after a round."""
        self.call(pb.HashReport(round=round_, sha256=sha256), _caller(member))

    def report(self, reports: Sequence[pb.Report], member: str | Caller = _PROCESS) -> None:
        """Send reports of events."""
        self.call(pb.ReportRequest(reports=reports), _caller(member))


def call_of(request: Message) -> MethodDescriptor:
    """Return the call of the service that takes this type of request."""
    methods = pb.DESCRIPTOR.services_by_name["Exchange"].methods
    return next(one for one in methods if one.input_type is request.DESCRIPTOR)


def _caller(member: str | Caller) -> Caller:
    return member if isinstance(member, Caller) else Caller(member)
