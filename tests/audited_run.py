"""A small run of two datacenter replicas that is audited by recomputation, and lies about training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from replica_groups.member import take_part

LIAR, ROUNDS, STEPS = "home", 2, 2

Lie = Callable[[Any, Any], None]
"""Changes the trainer and the outer round of a member."""


def audited_spec(corpus: Path, changes: dict[str, Any] | None = None, **recompute: Any) -> RunSpec:
    """Return a run in which every round of every replica is computed again."""
    config: dict[str, Any] = {
        "name": "t",
        "seed": 3,
        "model": {"width": 16, "heads": 2, "feed_forward": 24, "layers": 1},
        "data": {"corpus": str(corpus), "sequence_length": 16, "validation_sequences": 1},
        "inner": {"steps": STEPS, "learning_rate": 0.01},
        "outer": {"rounds": ROUNDS, "compression": {"density": 1 / 8}},
        "audit": {"recompute": {"share": 1, **recompute}},
        "replicas": [{"name": name, "kind": "datacenter", "batch_size": 1} for name in ("a", LIAR)],
    }
    return RunSpec(RunConfig.model_validate(config | (changes or {})), 256)


@contextmanager
def lying(lies: dict[str, Lie]) -> Iterator[None]:
    """Let members lie in the runs of a block."""
    build = take_part.build_from_checkpoint

    def built(spec: Any, member: Any, *rest: Any, **others: Any) -> Any:
        trainer, outer, holds = build(spec, member, *rest, **others)
        if member.name in lies:
            lies[member.name](trainer, outer)
        return trainer, outer, holds

    with mock.patch.object(take_part, "build_from_checkpoint", built):
        yield


def flips(trainer: Any, outer: Any) -> None:
    """Contribute the negative of what was trained."""
    honest = outer._contributed
    outer._contributed = lambda round_, name: -honest(round_, name)


def skips(trainer: Any, outer: Any) -> None:
    """Take only the first step of each round."""
    step = trainer.inner_step

    def first_only(round_: int, number: int, global_step: int, is_last: bool = False) -> Any:
        before = [one.detach().clone() for one in trainer.engine.whole.parameters.values()]
        report = step(round_, number, global_step, is_last)
        with torch.no_grad():
            for one, old in zip(trainer.engine.whole.parameters.values(), before, strict=True):
                one.copy_(old if number > 0 else one)
        return report

    trainer.inner_step = first_only


def rereads(trainer: Any, outer: Any) -> None:
    """Train on the same batch in every step."""
    own = trainer.batches._batches
    train = own.train
    object.__setattr__(own, "train", lambda step: train(0))
