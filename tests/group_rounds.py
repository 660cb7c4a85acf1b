"""Rounds of one group of four stages in this process, in which a stage may lie, and their recomputation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from hetero_pp.config.checkpoint import first_checkpoint
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.data.sources import open_source
from hetero_pp.messages.messages_pb2 import BlobEntry, ContributionEntry, RoundRecord
from hetero_pp.outer.apply_round import apply_round
from hetero_pp.outer.step import OuterOptimizer
from hetero_pp.rpc.identities import Authority, IdentitySigner
from replica_groups.audit.commitments import load_state, state_of
from replica_groups.audit.recompute import Blame, ReplicaHere, RoundStart, blame
from replica_groups.member.trainers import StageMember
from stages.stage import Stage

STAGES = 4
STEPS = 2
GROUP = "home"

GENERATION = 3

Alter = Callable[[Stage], None]
"""Makes a stage lie."""

AUTHORITY = Authority("the secret of a run with a liar")


def group_spec(
    corpus: Path, boundary: Mapping[str, Any] | None = None, tolerance: float | None = 0.0, **changes: Any
) -> RunSpec:
    """Return a run of one group of four stages, by default with 4-bit boundaries and two micro-batches.

    Without a tolerance it is not audited.
    """
    home = {"name": GROUP, "kind": "participants", "stages": [{"layers": 1}] * STAGES}
    boundary = {"rank": "1/4", "bits": 4} if boundary is None else dict(boundary)
    config: dict[str, Any] = {
        "name": "t",
        "seed": 5,
        "model": {"width": 16, "heads": 2, "feed_forward": 24, "layers": STAGES},
        "data": {"corpus": str(corpus), "sequence_length": 16, "validation_sequences": 4},
        "inner": {"steps": STEPS, "warmup_steps": 0, "learning_rate": 0.01},
        "outer": {"rounds": 200},
        "audit": {"recompute": None if tolerance is None else {"tolerance": tolerance}},
        "replicas": [{**home, "batch_size": 4, "micro_batches": 2, "boundary": boundary} | changes],
    }
    return RunSpec(RunConfig.model_validate(config), 256)


@dataclass(frozen=True)
class Contributed:
    """Contribution of a group to a round."""

    blobs: dict[str, bytes]
    """By block."""
    messages: dict[str, bytes]
    """Member -> its transcript."""


class GroupRounds:
    """Rounds of the group, each from the state that the honest one before it left."""

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        self.spec, self._folder = spec, folder
        self.source = open_source(spec.config.data, folder)
        checkpoint = first_checkpoint(spec)
        self.start = RoundStart(1, dict(checkpoint.parameters), checkpoint.basis)

    def here(self) -> ReplicaHere:
        """Return the group at the start of the round."""
        states = {name: load_state(self._folder / name) for name in self.spec.members if self.start.round > 1}
        return ReplicaHere(self.spec, GROUP, replace(self.start, states=states), self.source)

    def go_on(self) -> Contributed:
        """Train the round honestly and go on to the next one; return what the members contributed."""
        here = self.here()
        contributed = _contributed(here)
        for name, member in here.members.items():
            position = None if member.batches is None else member.batches.state()
            state_of(member, here.outers[name], position, None).save(self._folder / name)
        theta = {name: tensor.clone() for name, tensor in self.start.theta.items()}
        blobs = [BlobEntry(block=block, sha256=hashlib.sha256(data).digest()) for block, data in here.blobs.items()]
        entry = ContributionEntry(replica=GROUP, weight=1, blobs=blobs)
        record = RoundRecord(round=self.start.round, contributions=[entry])
        settings = OuterOptimizer(self.spec.config.outer)
        apply_round(theta, self.spec.run, record, lambda _, block: here.blobs[block], settings)
        self.start = RoundStart(self.start.round + 1, theta, self.start.basis)
        return contributed

    def lie(self, stage: int, alter: Alter) -> Contributed:
        """Return what the members contribute if a stage lies; they sign what they send."""
        here = self.here()
        for name, member in here.members.items():
            assert isinstance(member, StageMember)
            member.worker.transcript.enter(GENERATION, IdentitySigner(AUTHORITY.identity(name)))
            if name == f"{GROUP}.{stage}":
                alter(member.worker.stage)
        return _contributed(here)


def _contributed(here: ReplicaHere) -> Contributed:
    blobs = here.train(STEPS)
    return Contributed(dict(blobs), {name: member.message_digests() for name, member in here.members.items()})


def judged(here: ReplicaHere, found: Contributed, **changed: Any) -> Blame | None:
    """Compare what the members contributed with a recomputation that has trained."""
    differing = [block for block, data in here.blobs.items() if found.blobs[block] != data]
    known: dict[str, Any] = {"generation": GENERATION, "authority": AUTHORITY.certificate}
    return blame(here, found.messages, differing, **known | changed)


def honest(stage: Stage) -> None:
    """It does not lie."""


def flips_activations(stage: Stage) -> None:
    encode = stage.boundary.encode_activation
    stage.boundary.encode_activation = lambda x: encode(-x)  # type: ignore[method-assign, assignment]


def flips_gradients(stage: Stage) -> None:
    encode = stage.boundary.encode_gradient
    stage.boundary.encode_gradient = lambda gradient, key: encode(-gradient, key)  # type: ignore[method-assign, assignment]


def freezes(stage: Stage) -> None:
    """It does not train: each step leaves the weights of the start."""
    stage.step = lambda step, norm: 0.01  # type: ignore[method-assign, assignment]


def trains_faster(stage: Stage) -> None:
    """It uses ten times the learning rate."""
    step = stage.optimizer.step

    def faster(number: int, norm: torch.Tensor) -> float:
        before = [one.detach().clone() for one in stage.parameters.values()]
        rate = step(number, norm)
        with torch.no_grad():
            for one, old in zip(stage.parameters.values(), before, strict=True):
                one.add_(one - old, alpha=9.0)
        return rate

    stage.optimizer.step = faster  # type: ignore[method-assign, assignment]


def starts_elsewhere(stage: Stage) -> None:
    """It starts from other moments than it committed to."""
    stage.load_moments({name: -one if "exp_avg" in name[-7:] else one for name, one in stage.moments().items()})


def poisons(pair: Sequence[int], hits: list[tuple[int, int]]) -> Alter:
    """Return a lie: the activation of a token pair is replaced, wherever it occurs.

    `hits` gets the call of the stage's forward and the micro-batch, for each micro-batch in which it occurs.
    """

    def alter(stage: Stage) -> None:
        forward, calls = stage.forward, count()

        def poisoned(micro_batch: int, tokens: torch.Tensor, came: Any, micro_batches: int) -> torch.Tensor:
            output, call = forward(micro_batch, tokens, came, micro_batches), next(calls)
            is_pair = (tokens[:, :-2] == pair[0]) & (tokens[:, 1:-1] == pair[1])
            if is_pair.any():
                hits.append((call, micro_batch))
            output[:, 1:][is_pair] = 1.0
            return output

        stage.forward = poisoned  # type: ignore[method-assign]

    return alter
