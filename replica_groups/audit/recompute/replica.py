"""Computes a replica's round again, from theta and its members' checkpoints before the round, in this process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hetero_pp.config.links import LinkShape, stage_link_name
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.device import CPU
from hetero_pp.core.errors import DamagedFile, HeteroPPError
from hetero_pp.data.sources import Source
from hetero_pp.link.ends import LinkEnds
from hetero_pp.link.in_process import in_process_pair
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.model.transformer import EMBEDDING
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.run.spec import MemberSpec, RunSpec
from replica_groups.loop.commitments import state_of
from replica_groups.loop.steps_taken import StepsTaken
from replica_groups.member.build_member import Start, build_member
from replica_groups.member.committed_state import CommittedState
from replica_groups.member.training_member import TrainingMember
from replica_groups.outer.outer_round import OuterRound
from replica_groups.outer.ranks import Ranks


@dataclass(frozen=True)
class Round:
    """A round of one replica, and what it starts from."""

    number: int
    replica: str
    steps: int
    theta: Mapping[str, Tensor]
    """All parameters before the round."""
    basis: Tensor | None
    """U [D, K']; None if nothing in the run is compressed."""
    states: Mapping[str, CommittedState]
    """Member -> its checkpoint from before the round."""


@dataclass(frozen=True)
class Recomputed:
    """What the members of a replica contribute to a round, and to what they commit."""

    blobs: Mapping[str, bytes]
    """By block."""
    after: Mapping[str, bytes]
    """Member -> digest of its checkpoint after the round."""
    text: Mapping[str, bytes]
    """Member -> digest of its text; of those that read it."""


@dataclass
class _Kept:
    """Keeps what a member deposits. Implements Contributions as far as a contribution needs it."""

    blobs: dict[str, bytes] = field(default_factory=dict)

    def deposit(self, member: str, address: BlobAddress, data: bytes, epoch: int | None = None, steps: int = 0) -> None:
        self.blobs[address.block] = data

    def record(self, round_: int, member: str | None = None) -> RoundRecord:
        raise NotImplementedError("a round that is computed again has no record")

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes:
        raise NotImplementedError("a round that is computed again fetches nothing")

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None:
        raise NotImplementedError("a round that is computed again confirms nothing")


@dataclass
class Rebuilt:
    """One member, as it was before the round."""

    spec: MemberSpec
    trainer: TrainingMember
    outer: OuterRound
    deposits: _Kept
    steps: StepsTaken


OnBuilt = Callable[[Mapping[str, Rebuilt]], None]
"""Is given the members before they train, to observe them."""


def recompute(
    spec: RunSpec,
    round_: Round,
    source: Source | None,
    device: torch.device = CPU,
    on_built: OnBuilt = lambda members: None,
) -> Recomputed:
    """Train a replica's round again and return what it contributes; theta and the checkpoints stay as they are.

    Raises DamagedFile for a checkpoint that is not of its member, ConfigError for one of another text.
    """
    torch.set_num_threads(spec.config.threads)
    members = {name: one for name, one in spec.members.items() if one.replica.name == round_.replica}
    ends = _links(spec, members)
    rebuilt = {name: _rebuilt(spec, one, round_, ends[name], source, device) for name, one in members.items()}
    on_built(rebuilt)
    texts = _hear(rebuilt)
    if len(rebuilt) == 1:
        _train(spec, round_, *rebuilt.values())
    else:
        _train_together(spec, round_, rebuilt, ends)
    blobs = {block: data for one in rebuilt.values() for block, data in one.deposits.blobs.items()}
    after = {name: _state(one, round_.number, round_.steps).sha256 for name, one in rebuilt.items()}
    return Recomputed(blobs, after, {name: text.digest() for name, text in texts.items()})


def _links(spec: RunSpec, members: Mapping[str, MemberSpec]) -> Mapping[str, LinkEnds]:
    """Return the ends of each member's links, which are as fast as this process."""
    ends = {name: LinkEnds() for name in members}
    names = list(members)
    for hop, (before, after) in enumerate(pairwise(names)):
        link = spec.links[stage_link_name(members[before].replica.name, hop)]
        free = replace(link, forward=LinkShape(), backward=LinkShape(), source_line=None, target_line=None)
        first, second = in_process_pair(free, spec.config.seed)
        ends[before] = replace(ends[before], downstream=first)
        ends[after] = replace(ends[after], upstream=second)
    return ends


def _rebuilt(
    spec: RunSpec, member: MemberSpec, round_: Round, ends: LinkEnds, source: Source | None, device: torch.device
) -> Rebuilt:
    held = [*member.owned, *([EMBEDDING] if member.follows_embedding else [])]
    start = Start({name: round_.theta[name].clone() for name in held}, round_.basis)
    ranks, own = Ranks(device=device), _Kept()
    trainer = build_member(spec, member, start, ends, source if member.reads_data else None, ranks)
    outer = OuterRound(
        spec.run,
        member.name,
        member.replica.name,
        trainer.parameters,
        start.parameters,
        own,
        spec.config.outer,
        ranks=ranks,
        keeps_undo=False,
    )
    steps = StepsTaken(member.replica.name, spec.config.inner.steps)
    rebuilt = Rebuilt(member, trainer, outer, own, steps)
    try:
        _load(rebuilt, round_.states[member.name])
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise DamagedFile(f"{member.name}: its checkpoint is not of this member ({error})") from None
    return rebuilt


@torch.no_grad()
def _load(one: Rebuilt, state: CommittedState) -> None:
    """Restore a checkpoint. Raises KeyError, ValueError and the like for one of another member."""
    moments: dict[str, Tensor] = {}
    errors: dict[str, Tensor] = {}
    for name, tensor in state.tensors.items():
        kind, _, rest = name.partition(":")
        {"moments": moments, "error": errors}[kind][rest] = tensor
        if tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} is not finite, or not fp32")
    shapes = {name: error.shape for name, error in one.outer.error.items()}
    if {name: error.shape for name, error in errors.items()} != shapes:
        raise ValueError("its error feedback has other names or shapes")
    for name, error in one.outer.error.items():
        error.copy_(errors[name])
    one.trainer.load_moments(moments)
    if one.trainer.batches is not None:
        one.trainer.batches.load(state.rest["data"])
    one.steps.begin(state.rest["steps"])


def _hear(members: Mapping[str, Rebuilt]) -> Mapping[str, Any]:
    """Begin to note the text of those members that read it."""
    texts = {}
    for name, one in members.items():
        if one.trainer.batches is not None:
            one.trainer.batches.text = texts[name] = hashlib.sha256()
    return texts


def _train(spec: RunSpec, round_: Round, one: Rebuilt) -> None:
    """Run a member's inner steps, and compress its contribution, in the order of TrainingLoop."""
    number, timed = round_.number, spec.config.inner.steps is None
    first = one.steps.before(number)
    one.trainer.start_round(one.outer)
    one.trainer.follow(spec.rates_in(number, first, one.steps.last))
    one.trainer.take_share(spec.share_of(round_.replica, number), first)
    for step in range(round_.steps):
        one.trainer.inner_step(number, step, first + step, timed and step == round_.steps - 1)
    one.trainer.end_inner_loop(number)
    one.outer.contribute(number, None, round_.steps)


def _train_together(spec: RunSpec, round_: Round, members: Mapping[str, Rebuilt], ends: Mapping[str, LinkEnds]) -> None:
    """Run all stages of a group, each in a thread. The first error ends the links, so that no other stage waits."""

    def run(one: Rebuilt) -> None:
        torch.set_num_threads(spec.config.threads)
        try:
            _train(spec, round_, one)
        except BaseException as error:
            for other in ends.values():
                other.abort(str(error))
            raise

    with ThreadPoolExecutor(len(members), "computes a round again") as pool:
        errors = [one.exception() for one in [pool.submit(run, one) for one in members.values()]]
    found = [error for error in errors if error is not None]
    if found:
        raise next((one for one in found if not isinstance(one, HeteroPPError)), found[0])


def _state(one: Rebuilt, number: int, steps: int) -> CommittedState:
    batches = one.trainer.batches
    position = None if batches is None else batches.state()
    return state_of(one.trainer, one.outer, position, one.steps.known_after(number, steps))


def is_group(spec: RunSpec, replica: str) -> bool:
    """Return whether a replica consists of stages."""
    return any(one.name == replica and isinstance(one, ParticipantsReplica) for one in spec.config.replicas)
