"""Computes a replica's round again in one process, from the checkpoints of its members, without a network."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hetero_pp.config.lines import LinkShape, LinkSpec, stage_link_name
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.core.device import CPU, computing
from hetero_pp.core.errors import DamagedFile, LinkClosed
from hetero_pp.data.sources import Source
from hetero_pp.link.in_process import in_process_pair
from hetero_pp.link.protocol import LinkEnd, LinkEnds
from hetero_pp.model.transformer import EMBEDDING
from replica_groups.audit.commitments import CommittedState, state_of
from replica_groups.engines.ranks import Ranks
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession
from replica_groups.member.trainers import Start, TrainingMember, build_member

_OF_A_STATE = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError)
"""Errors that an invented state leads to, when it is loaded or used. Others may be those of this machine."""


@dataclass(frozen=True)
class RoundStart:
    """The state from which a replica trains a round."""

    round: int
    theta: Mapping[str, Tensor]
    """All parameters before the round, by name."""
    basis: Tensor | None
    """U [D, K'] of the run; None if nothing is compressed."""
    states: Mapping[str, CommittedState] = field(default_factory=dict)
    """State of each member before the round; a member without one starts as at the start of the run."""


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
        self.blobs: dict[str, bytes] = {}
        """The replica's contribution to the round, by block; filled by `train`."""
        self.first = 0
        """Number of the round's first step, counted over the run."""
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
        outer = OuterRound(session, trainer.parameters, theta, spec.config.outer)
        known = None
        if (state := start.states.get(name)) is not None:
            restore(trainer, outer, state)
            known = state.rest["steps"]
        self.first, last = (0, None) if known is None else (int(known["first"]), known["last"])
        if spec.config.inner.steps is not None:
            self.first = (start.round - 1) * spec.config.inner.steps
        outer.restore()
        trainer.follow(spec.rates_in(start.round, self.first, last))
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
    """Set moments, error feedback and the position in the data of a member that was just built.

    Raises ValueError, KeyError, IndexError, TypeError or RuntimeError for the state of another member.
    """
    of: dict[str, dict[str, Tensor]] = {kind: {} for kind in ("moments", "error")}
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


@dataclass(frozen=True)
class RecomputedRound:
    """A replica's round that was computed again."""

    here: ReplicaHere
    """The replica, as it is after the round."""
    after: Mapping[str, bytes]
    """Member -> digest of its checkpoint after the round."""
    text: Mapping[str, bytes]
    """Member -> digest of its text; of those that read it."""

    @property
    def blobs(self) -> Mapping[str, bytes]:
        return self.here.blobs


def recompute(
    spec: RunSpec, replica: str, start: RoundStart, steps: int, source: Source | None, device: torch.device = CPU
) -> RecomputedRound:
    """Train a replica's round again. The tensors of `start` are not changed.

    Raises DamagedFile for a checkpoint that is not of its member, and ConfigError for one of another text. Raises
    HeteroPPError for values that are not finite, and OutOfMemory if this device is too small.
    """
    torch.set_num_threads(spec.config.threads)
    for name, state in start.states.items():
        _require_finite(name, state)
    texts: dict[str, Any] = {}
    try:
        with computing("recomputation", device):
            here = _built(spec, replica, start, source, device)
            for name, member in here.members.items():
                if member.batches is not None:
                    member.batches.text = texts[name] = hashlib.sha256()
            here.train(steps)
    except _OF_A_STATE as error:
        raise DamagedFile(f"the checkpoint of {replica} is not of its members ({error})") from None
    after = {name: _after(here, name, steps).sha256 for name in here.members}
    return RecomputedRound(here, after, {name: text.digest() for name, text in texts.items()})


def _built(spec: RunSpec, replica: str, start: RoundStart, source: Source | None, device: torch.device) -> ReplicaHere:
    try:
        return ReplicaHere(spec, replica, start, source, device)
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError) or "memory" in str(error):
            raise
        raise DamagedFile(f"the checkpoint of {replica} is not of its members ({error})") from None


def _require_finite(member: str, state: CommittedState) -> None:
    for name, tensor in state.tensors.items():
        if tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
            raise DamagedFile(f"{member}: found {name} in its checkpoint, expected finite values in fp32")


def _after(here: ReplicaHere, member: str, steps: int) -> CommittedState:
    batches = here.members[member].batches
    position = None if batches is None else batches.state()
    known = None if here.spec.config.inner.steps is not None else {"first": here.first + steps, "last": steps}
    return state_of(here.members[member], here.outers[member], position, known)
