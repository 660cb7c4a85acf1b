"""The stages of one group as members of a run, each in a thread, over links that a test provides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hetero_pp.config.checkpoint import first_checkpoint
from hetero_pp.config.lines import LinkSpec, stage_link_name
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import LinkClosed
from hetero_pp.data.sources import open_source
from hetero_pp.link.protocol import LinkEnds
from hetero_pp.messages.messages_pb2 import Evaluation, InnerStep
from hetero_pp.model.transformer import EMBEDDING
from replica_groups.engines.ranks import ALONE
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession
from replica_groups.member.trainers import StageMember, Start, build_member

T = TypeVar("T")
SECONDS = 120.0
STEPS = 3


def group_spec(corpus: str, boundary: Mapping[str, Any] | None = None, **changes: Any) -> RunSpec:
    """Return a run of one group: three uneven stages, a 4-bit boundary, four micro-batches, three steps per round."""
    boundary = {"rank": "1/4", "bits": 4} | dict(boundary or {})
    home = {"name": "home", "kind": "participants", "stages": [{"layers": 1}, {"layers": 2}, {"layers": 1}]}
    config: dict[str, Any] = {
        "name": "t",
        "seed": 5,
        "model": {"preset": "micro", "width": 16, "heads": 2, "feed_forward": 24, "layers": 4},
        "data": {"corpus": corpus, "sequence_length": 16, "validation_sequences": 4},
        "inner": {"steps": STEPS, "warmup_steps": 2, "learning_rate": 0.01},
        "outer": {"rounds": 4},
        "replicas": [{**home, "batch_size": 4, "micro_batches": 4, "boundary": boundary}],
    }
    return RunSpec(RunConfig.model_validate(config | changes), 256)


class StageMembers:
    """The members of the group, with their outer rounds."""

    def __init__(self, spec: RunSpec, ends: Sequence[LinkEnds], cache: Path) -> None:
        self.spec, self.ends = spec, list(ends)
        checkpoint = first_checkpoint(spec)
        self.members: list[StageMember] = []
        self.outers: list[OuterRound] = []
        for one, own in zip(spec.members.values(), ends, strict=True):
            names = [*one.owned, *([EMBEDDING] if one.follows_embedding else [])]
            start = Start({name: checkpoint.parameters[name] for name in names}, checkpoint.basis)
            source = open_source(spec.config.data, cache) if one.reads_data else None
            member = build_member(spec, one, start, own, source, ALONE)
            assert isinstance(member, StageMember)
            self.members.append(member)
            settings = spec.config.outer
            self.outers.append(
                OuterRound(
                    MemberSession(None, one.name, "home", spec.run), member.parameters, start.parameters, settings
                )
            )
        self.start_round()

    def start_round(self) -> None:
        """Prepare and remember the start of a round, as after an outer round."""
        for member, outer in zip(self.members, self.outers, strict=True):
            member.start_round(outer)
            member.remember()

    def keep_what_was_trained(self) -> None:
        """Set theta to the trained parameters, in place of an outer round."""
        trained = self.parameters()
        for outer in self.outers:
            for name, tensor in outer.theta.items():
                tensor.copy_(trained[name])

    def undo(self, ends: Sequence[LinkEnds]) -> None:
        """Return all members to the start of the round, and continue over other links."""
        self.ends = list(ends)
        for member, outer, own in zip(self.members, self.outers, ends, strict=True):
            member.undo(outer)
            member.relink(own)

    def train(self, round_: int) -> list[list[InnerStep]]:
        """Train the inner loop of a round; return every stage's report of each step.

        If a stage fails, its links are aborted, so that its neighbours fail as well. The first error that is not
        LinkClosed is then raised, or else LinkClosed.
        """

        def work(member: StageMember) -> list[InnerStep]:
            first = (round_ - 1) * STEPS
            reports = [member.inner_step(round_, step, first + step) for step in range(STEPS)]
            member.end_inner_loop(round_)
            return reports

        return self._together(work)

    def evaluate(self, round_: int) -> Evaluation:
        """Return the evaluation of the last stage."""
        outcome = self._together(lambda member: member.evaluate(round_))[-1]
        assert outcome is not None
        return outcome

    def parameters(self) -> dict[str, Tensor]:
        """Return a copy of the parameters of all stages."""
        return {
            name: parameter.detach().clone()
            for member in self.members
            for name, parameter in member.parameters.parameters.items()
        }

    def moments(self) -> list[Tensor]:
        """Return copies of the anchors' parameters and of all stages' moments, in the order of the parameters."""
        stages = [member.worker.stage for member in self.members]
        learned = [p for stage in stages if stage.anchors is not None for p in stage.anchors.parameters.values()]
        return [parameter.detach().clone() for parameter in learned] + [
            torch.as_tensor(value).clone()
            for stage in stages
            for optimizer in stage.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            for value in optimizer.state[parameter].values()
        ]

    def _together(self, work: Callable[[StageMember], T]) -> list[T]:
        outcomes: dict[int, T] = {}
        errors: list[Exception] = []

        def run(index: int) -> None:
            torch.set_num_threads(1)
            try:
                outcomes[index] = work(self.members[index])
            except Exception as error:  # noqa: BLE001 (raised by the caller)
                errors.append(error)
                self.ends[index].abort(str(error))

        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(self.members))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        if errors:
            raise next((error for error in errors if not isinstance(error, LinkClosed)), errors[0])
        assert len(outcomes) == len(threads), "some stage still waits"
        return [outcomes[index] for index in range(len(threads))]


def links_of(spec: RunSpec) -> list[LinkSpec]:
    """Return the links between the stages of the group, in their order."""
    return [spec.links[stage_link_name("home", hop)] for hop in range(len(spec.members) - 1)]
