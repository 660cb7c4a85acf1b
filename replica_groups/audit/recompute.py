"""Computes a replica's round again in one process, compares it with the contribution, and names the liar.

The members of the replica begin with the states that they showed; no network takes part. If the contribution of a group
differs, the transcripts of its stages tell which stage computed something else.

Each stage is judged by its own transcript. A stage that says that it received what the recomputation received, and then
sent something else, has computed something else. An honest stage behind it received something else before it sent
something else, so it is never named.

Two neighbours may say different things about a message. The receiver then has to show the sender's signature under what
it says that it received. If it can, the sender has lied, else the receiver. Without certificates neither is named.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import torch
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from torch import Tensor

from hetero_pp.config.lines import LinkShape, LinkSpec, stage_link_name
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.core.device import CPU, computing
from hetero_pp.core.errors import DamagedFile, LinkClosed, MalformedMessage
from hetero_pp.data.batches import RoundText
from hetero_pp.data.sources import Source
from hetero_pp.link.in_process import in_process_pair
from hetero_pp.link.protocol import LinkEnd, LinkEnds
from hetero_pp.messages.messages_pb2 import ContributionEntry, StageMessages
from hetero_pp.model.transformer import EMBEDDING, Shapes
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, decode_blob
from hetero_pp.rpc.identities import check_statement
from replica_groups.audit.commitments import CommittedState, state_of
from replica_groups.engines.ranks import Ranks
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession
from replica_groups.member.trainers import Start, TrainingMember, build_member
from stages.transcript import GroupPosition, Way, records_of

# ---- the replica ----

_OF_A_STATE = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError)
"""Errors that an invented state leads to, when it is loaded or used. Others may be those of this machine."""


@dataclass(frozen=True)
class RoundStart:
    """The state from which a replica trains a round."""

    round: int
    theta: Mapping[str, Tensor]  # all parameters before the round, by name
    basis: Tensor | None  # U [D, K'] of the run; None if nothing is compressed
    states: Mapping[str, CommittedState] = field(default_factory=dict)
    """State of each member before the round; a member without one starts as at the start of the run."""
    met: frozenset[str] = frozenset()
    """Blocks that rounds have synchronised since the replica was last counted; that round's own, too."""
    tokens: int = 0  # of the run before the round (RoundRecord.tokens), if it ends after a number of tokens


class ReplicaHere:
    """All members of a replica in this process, at the start of a round."""

    def __init__(
        self, spec: RunSpec, replica: str, start: RoundStart, source: Source | None, device: torch.device = CPU
    ) -> None:
        """Build the members of a replica from `start`, on one device.

        `source` is the text of the run; `spec` has the changes of the run up to this round.

        Raises ValueError, KeyError, IndexError, TypeError or RuntimeError for states of other members.
        """
        self.spec, self.start = spec, start
        own = [one for one in spec.members.values() if one.replica.name == replica]
        self._replica, self._ends = replica, _linked(own, spec.config.seed)
        self.members: dict[str, TrainingMember] = {}
        self.outers: dict[str, OuterRound] = {}
        self.blobs: dict[str, bytes] = {}  # the replica's contribution to the round, by block; filled by `train`
        self.after: dict[str, bytes] = {}  # member -> digest of its checkpoint after the round
        self.text: dict[str, bytes] = {}  # member -> digest of its text; of those that read it
        self.first = 0  # number of the round's first step, counted over the run
        for one in own:
            self._add(one, source, Ranks(device=device))
        for name, member in self.members.items():
            member.start_round(self.outers[name])

    def _add(self, member: MemberSpec, source: Source | None, ranks: Ranks) -> None:
        spec, start, name = self.spec, self.start, member.name
        held = [*member.owned, *([EMBEDDING] if member.follows_embedding else [])]
        theta = {one: start.theta[one].clone() for one in held}
        trainer = build_member(spec, member, Start(theta, start.basis), self._ends[name], source, ranks)
        session = MemberSession(None, name, self._replica, spec.run, ranks=ranks)  # a round ends with its contribution
        outer = OuterRound(session, trainer.parameters, theta, spec.config.outer, fragments=spec.fragments)
        outer.own.met = start.met
        known = None
        if (state := start.states.get(name)) is not None:
            restore(trainer, outer, state)
            known = state.rest["steps"]
        self.first, last = (0, None) if known is None else (int(known["first"]), known["last"])
        if (steps := spec.steps_of(self._replica)) is not None:
            self.first = (start.round - 1) * steps
        outer.start_streaming(False)
        trainer.follow(spec.rates_in(start.round, self.first, last, steps, (start.round - 1, start.tokens)))
        trainer.take_share(spec.share_of(self._replica, start.round), self.first)
        self.members[name], self.outers[name] = trainer, outer

    def train(self, steps: int) -> Mapping[str, bytes]:
        """Train the inner steps of the round and compress the result; return the replica's blobs by block.

        Raises the first error of a member; HeteroPPError if its values are not finite.
        """
        announces = self.spec.config.inner.steps is None

        def work(name: str) -> None:
            member, round_ = self.members[name], self.start.round
            for step in range(steps):
                member.inner_step(round_, step, self.first + step, announces and step == steps - 1)
            member.end_inner_loop(round_)

        self._together(work)
        for outer in self.outers.values():
            self.blobs |= outer.contribute(self.start.round, steps=steps)
        return self.blobs

    def _together(self, work: Callable[[str], None]) -> None:
        """Let all members work at once, each in a thread, because they wait for each other's messages."""
        errors: list[Exception] = []

        def run(name: str) -> None:
            torch.set_num_threads(self.spec.config.threads)
            try:
                work(name)
            except Exception as error:  # noqa: BLE001 (raised by the caller)
                errors.append(error)
                self._ends[name].abort(str(error))

        threads = [threading.Thread(target=run, args=(name,), name=name, daemon=True) for name in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((error for error in errors if not isinstance(error, LinkClosed)), errors[0])


def restore(member: TrainingMember, outer: OuterRound, state: CommittedState) -> None:
    """Set moments, error feedback, own parameters and the position in the data of a member that was just built.

    Raises ValueError, KeyError, IndexError, TypeError or RuntimeError for the state of another member.
    """
    of: dict[str, dict[str, Tensor]] = {kind: {} for kind in ("moments", "error", "own")}
    for key, tensor in state.tensors.items():
        kind, name = key.split(":", 1)
        of[kind][name] = tensor
    member.load_moments(of["moments"])
    if of["error"].keys() != outer.error.keys():
        raise ValueError("found error feedback of other parameters")
    for name, tensor in of["error"].items():
        if tensor.shape != outer.error[name].shape:
            raise ValueError(f"found error feedback {list(tensor.shape)}, expected {list(outer.error[name].shape)}")
        outer.error[name].copy_(tensor)
    for name, tensor in of["own"].items():
        if tensor.shape != outer.error[name].shape:
            raise ValueError(f"found own {name} {list(tensor.shape)}, expected {list(outer.error[name].shape)}")
    outer.own.before = of["own"]
    if member.batches is not None:
        member.batches.load(state.rest["data"])


def _linked(members: list[MemberSpec], seed: int) -> dict[str, LinkEnds]:
    """Return the link ends of each member of a replica; its links are as fast as they can be."""
    upstream: list[LinkEnd | None] = [None]
    downstream: list[LinkEnd | None] = []
    for hop, (source, target) in enumerate(pairwise(members)):
        name = stage_link_name(source.replica.name, hop)
        forward, backward = in_process_pair(LinkSpec(name, source.name, target.name, LinkShape(), LinkShape()), seed)
        downstream.append(forward)
        upstream.append(backward)
    ends = zip(members, upstream, [*downstream, None], strict=True)
    return {member.name: LinkEnds(before, after) for member, before, after in ends}


def recompute(
    spec: RunSpec, replica: str, start: RoundStart, steps: int, source: Source | None, device: torch.device = CPU
) -> ReplicaHere:
    """Train a replica's round again; return it as it is after the round. The tensors of `start` are not changed.

    Raises DamagedFile for a checkpoint that is not of its member, and ConfigError for one of another text. Raises
    HeteroPPError for values that are not finite, and OutOfMemory if this device is too small.
    """
    torch.set_num_threads(spec.config.threads)
    for name, state in start.states.items():
        for key, tensor in state.tensors.items():
            if tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
                raise DamagedFile(f"{name}: found {key} in its checkpoint, expected finite values in fp32")
    texts: dict[str, RoundText] = {}
    try:
        with computing("recomputation", device):
            try:
                here = ReplicaHere(spec, replica, start, source, device)
            except RuntimeError as error:
                if isinstance(error, torch.AcceleratorError) or "memory" in str(error):
                    raise
                raise ValueError(error) from None
            for name, member in here.members.items():
                if member.batches is not None:
                    member.batches.text = texts[name] = RoundText()
            here.train(steps)
    except _OF_A_STATE as error:
        raise DamagedFile(f"the checkpoint of {replica} is not of its members ({error})") from None
    here.text = {name: text.digest() for name, text in texts.items()}
    known = None if spec.config.inner.steps is not None else {"first": here.first + steps, "last": steps}
    for name, member in here.members.items():
        position = None if member.batches is None else member.batches.state()
        here.after[name] = state_of(member, here.outers[name], position, known).sha256
    return here


# ---- its contribution ----


@dataclass(frozen=True)
class Comparison:
    """Outcome of a comparison."""

    difference: float  # largest relative difference of a block; 0: equal bits
    cause: str = ""  # names the difference in one line; empty if there is none
    member: str = ""  # member that committed to something else, if that is known

    @property
    def is_equal(self) -> bool:
        return not self.cause


def compare(
    entry: ContributionEntry, differences: Mapping[str, float], again: ReplicaHere, tolerance: float
) -> Comparison:
    """Return the outcome for a contribution whose blocks have these relative differences."""
    block, largest = max(differences.items(), key=lambda one: one[1], default=("", 0.0))
    for one in entry.commitments:
        if one.text and one.text != again.text.get(one.member):
            return Comparison(largest, f"{one.member} trained on another text than its own", one.member)
    if largest > tolerance:
        allowed = f"expected at most {tolerance:.3g}" if tolerance else "expected none"
        return Comparison(largest, f"`{block}` differs by {largest:.3g} of its norm from its round, {allowed}")
    for one in entry.commitments if largest == tolerance == 0 else ():
        if one.after != again.after[one.member]:
            return Comparison(largest, f"{one.member} committed to another state than its round ends with", one.member)
    return Comparison(largest)


def difference(address: BlobAddress, shapes: Shapes, settings: CompressionSettings, told: bytes, again: bytes) -> float:
    """Return ||told - again|| / ||again|| over the decoded values of a block; 0 for equal bytes.

    Raises MalformedContribution.
    """
    if told == again:
        return 0.0
    first, second = (decode_blob(data, address, shapes, settings) for data in (told, again))
    apart = 0.0
    for name, shape in shapes.items():
        total = torch.zeros(math.prod(shape), dtype=torch.float64)
        total[first[name].indices] += first[name].values.double()
        total[second[name].indices] -= second[name].values.double()
        apart += float(total.square().sum())
    norm = sum(float(one.values.double().square().sum()) for one in second.values())
    return math.sqrt(apart / norm) if norm else math.inf if apart else 0.0


# ---- its stages ----

NO_HOLDERS: Mapping[str, int] = MappingProxyType({})
"""Holder numbers of members that were all started with the run's secret."""

_KEY = ["way", "micro_batch", "step"]
_NEAR = 1 / 4
"""Share of the tolerance within which a received message counts as equal, because computing on widens a difference."""


@dataclass(frozen=True)
class Blame:
    """Outcome of a comparison."""

    member: str  # member that computed something else; empty if it is not known
    cause: str  # one line: what differs, and where


@dataclass(frozen=True)
class _Compared:
    """The transcript of one stage beside that of its recomputation."""

    position: GroupPosition
    shown: StageMessages
    records: NDArray[np.void]  # the stage's records [N]
    differs: NDArray[np.bool_]  # whether each record [N] differs from the recomputation

    @property
    def member(self) -> str:
        return self.position.member

    @property
    def first(self) -> int | None:
        """The first record that differs; None if all are equal."""
        return int(self.differs.argmax()) if self.differs.any() else None

    @property
    def is_guilty(self) -> bool:
        """Whether it sent something else although it had received the same."""
        return self.first is not None and Way(self.records[self.first]["way"]).is_sent

    def of_way(self, way: Way) -> NDArray[np.void]:
        """Return the records of messages on a way."""
        return self.records[self.records["way"] == way]


def blame(
    here: ReplicaHere,
    messages: Mapping[str, bytes],
    differing: Collection[str],
    other_text: bool = False,
    generation: int = 0,
    authority: str | None = None,
    holders: Mapping[str, int] = NO_HOLDERS,
) -> Blame | None:
    """Return the stage that computed something else than `here`, which has trained the round again; None if all agree.

    `messages`: member -> its transcript, which has the digest that it committed to. A member without one is not judged.
    `differing`: blocks of the contribution that differ from those of `here`.
    `other_text`: whether the first stage committed to another text than the run's.
    `generation`: of the replica, in the round record. `authority`: certificate (PEM) of the authority of the run; None
    if members have no certificates. `holders`: member -> holder number with which it committed; 0 without a ticket.
    """
    recompute = here.spec.config.audit.recompute
    tolerance = 0.0 if recompute is None else recompute.tolerance
    compared: dict[str, _Compared] = {}
    for stage, member in enumerate(here.members):
        if member in messages:
            position = GroupPosition(here.spec.run, list(here.members), stage)
            found = _compared(position, messages[member], here.members[member].message_digests(), tolerance)
            if isinstance(found, Blame):
                return found
            compared[member] = found
    guilty = [one for one in compared.values() if one.is_guilty]
    if guilty:
        first = min(guilty, key=lambda one: one.records[one.first]["step"])
        what = "read another text, so it " if other_text and first.position.stage == 0 else ""
        assert first.first is not None
        sent = f"sent {_named(first.records[first.first])}, although it had received the expected messages until then"
        return Blame(first.member, f"{first.member} {what}{sent}")
    for member, one in compared.items():
        blocks = sorted(here.outers[member].blocks & set(differing))
        if one.first is None and blocks:
            cause = f"{member} sent the expected messages, but its contribution to {', '.join(blocks)} is another"
            return Blame(member, cause)
    for before, after in pairwise(here.members):
        if before in compared and after in compared:
            for dispute in _disputes(compared[before], compared[after]):
                return dispute.settled(here.start.round, generation, authority, holders)
    return None


def _compared(position: GroupPosition, data: bytes, expected: bytes, tolerance: float) -> _Compared | Blame:
    """Compare a stage's transcript with its recomputation; blame it for a transcript of other messages."""
    member, wanted = position.member, records_of(StageMessages.FromString(expected), tolerance > 0)
    try:
        records = records_of(shown := StageMessages.FromString(data), tolerance > 0)
    except (ValueError, DecodeError):
        return Blame(member, f"{member} showed {len(data)} bytes that are no transcript of messages")
    if len(records) != len(wanted) or any((records[key] != wanted[key]).any() for key in _KEY):
        return Blame(member, f"{member} showed {len(records)} messages, expected {len(wanted)} in schedule order")
    return _Compared(position, shown, records, _differs(records, wanted, tolerance))


def _differs(records: NDArray[np.void], wanted: NDArray[np.void], tolerance: float) -> NDArray[np.bool_]:
    """Return which records differ: in a bit; or with a tolerance, by more than that in the sketch or the norm."""
    if tolerance == 0:
        return (records["sha256"] != wanted["sha256"]).any(axis=1)
    allowed = np.where(np.isin(wanted["way"], [way for way in Way if way.is_sent]), tolerance, _NEAR * tolerance)
    sketches, expected = records["sketch"].astype(float), wanted["sketch"].astype(float)
    apart = np.linalg.norm(sketches - expected, axis=1)
    by_norm = np.abs(records["norm"] - wanted["norm"])
    has_norm = np.isfinite(wanted["norm"])
    with np.errstate(invalid="ignore"):
        is_near = apart <= allowed * np.linalg.norm(expected, axis=1)
        is_near &= ~has_norm | (by_norm <= allowed * np.abs(wanted["norm"]))
    return ~is_near | (np.isfinite(records["norm"]) != has_norm)


def _named(record: np.void) -> str:
    what = "gradient" if Way(record["way"]) in (Way.SENT_GRADIENT, Way.RECEIVED_GRADIENT) else "activation"
    return f"another {what} of micro-batch {record['micro_batch']} in step {record['step']}"


@dataclass(frozen=True)
class _Dispute:
    """Two neighbours that say different things about a message."""

    sender: _Compared
    receiver: _Compared
    way: Way  # as the receiver sees it
    message: str

    def settled(self, round_: int, generation: int, authority: str | None, holders: Mapping[str, int]) -> Blame:
        """Return which of the two has lied.

        Neither is named if members have no certificates (`authority` is None), or if another holder of the sender's
        slot has signed. The sender may have an older certificate, or the receiver may know the other holder.
        """
        sender, receiver = self.sender.member, self.receiver.member
        if authority is None:
            return Blame("", f"{receiver} says that {sender} sent {self.message} than {sender} says")
        is_forward = self.way is Way.RECEIVED_ACTIVATION
        statement = self.receiver.shown.from_previous if is_forward else self.receiver.shown.from_next
        signed = self.receiver.position.signed(self.way, round_, generation, self.receiver.records)
        try:
            holder = check_statement(statement, signed, sender, authority)
        except MalformedMessage:
            return Blame(receiver, f"{receiver} says that {sender} sent {self.message}, without its signature")
        if holder != holders.get(sender, 0):
            cause = f"{receiver} says that {sender} sent {self.message}, with the signature of another holder"
            return Blame("", cause)
        return Blame(sender, f"{sender} sent and signed {self.message} than it says")


def _disputes(before: _Compared, after: _Compared) -> Iterator[_Dispute]:
    """Yield a dispute of two neighbours for each direction in which they have one."""
    for sender, sent, receiver, received in (
        (before, Way.SENT_ACTIVATION, after, Way.RECEIVED_ACTIVATION),
        (after, Way.SENT_GRADIENT, before, Way.RECEIVED_GRADIENT),
    ):
        found = receiver.of_way(received)
        differs = (sender.of_way(sent)["sha256"] != found["sha256"]).any(axis=1)
        if differs.any():
            yield _Dispute(sender, receiver, received, _named(found[int(differs.argmax())]))
