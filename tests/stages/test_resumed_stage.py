"""A stage that is replaced within a round: the group goes on at the step, as a plain PyTorch loop that sets it back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from stage_groups import INNER, LENGTH, SEED, SHAPE, TOTAL, UNLIMITED, Group, Setup, batch_of, ends_of
from torch import Tensor

from hetero_pp.config.lines import LinkSpec
from hetero_pp.core.errors import LinkClosed, LinkError
from hetero_pp.link.in_process import in_process_pair
from hetero_pp.model.arithmetic import next_token_loss
from hetero_pp.model.transformer import Transformer, initialise, parameters_of
from hetero_pp.rpc.identities import Authority, IdentitySigner
from hetero_pp.store.faults import Faults
from stages.transcript import GroupPosition, NoTranscript, Transcript
from stages.worker import StageWorker

STEPS, DIES_IN = 6, 3
AUTHORITY = Authority("secret")


class _Dies(Faults):
    """Lets a stage die once, before the forward or the backward of a micro-batch in step DIES_IN."""

    def __init__(self, micro_batch: int, in_forward: bool) -> None:
        self._when = DIES_IN, micro_batch, in_forward

    def computes(self, round_: int, step: int, micro_batch: int, is_forward: bool) -> None:
        if (step, micro_batch, is_forward) == self._when:
            raise LinkClosed("it died")


def _work(step: int, found: dict[int, tuple[int, bool]]) -> Callable[[StageWorker], None]:
    """Return the work of a stage from a step on; a stage that loses a link notes what it keeps."""

    def work(worker: StageWorker) -> None:
        try:
            for number in range(step, STEPS):
                worker.inner_step(1, number, number, batch_of(number) if worker.stage.spec.is_first else None)
            worker.flush(1)
        except LinkError as error:
            for end in (worker._upstream, worker._downstream):
                if end is not None:
                    end.abort(str(error))
            found[worker.stage.spec.index] = worker.suspend()

    return work


def _audit(worker: StageWorker, generation: int) -> None:
    """Let a stage sign what it sends, and check what its neighbours sign."""
    index, names = worker.stage.spec.index, [f"home.{index}" for index in range(worker.stage.spec.count)]
    if type(worker.transcript) is NoTranscript:
        worker.transcript = Transcript(GroupPosition("run", names, index))
    worker.transcript.enter(generation, IdentitySigner(AUTHORITY.identity(names[index])))


def _resumed(setup: Setup, dies: int, faults: Faults) -> Group:
    """Train a group in which a stage dies and another one takes its place."""
    group, found = Group(setup), dict[int, tuple[int, bool]]()
    for worker in group.workers:
        _audit(worker, 1)
    group.workers[dies].faults = faults
    group.together(_work(0, found))
    applied = {index: one for index, one in found.items() if index != dies}
    step = max(steps for steps, _ in applied.values())
    assert step == DIES_IN
    assert all(steps == step or (steps == step - 1 and has_next) for steps, has_next in applied.values())
    group.workers[dies] = Group(setup).workers[dies]
    links = [
        in_process_pair(LinkSpec(f"{a}", "a", "b", UNLIMITED, UNLIMITED), seed=1) for a, _ in pairwise(group.workers)
    ]
    for index, worker in enumerate(group.workers):
        above = links[index - 1][1] if index else None
        worker.relink(above, links[index][0] if index < len(links) else None)
        _audit(worker, 2)
        worker.resume(step, keeps=index != dies, is_same=False)
    again = dict[int, tuple[int, bool]]()
    group.together(_work(step, again))
    assert not again
    assert [worker.applied for worker in group.workers] == [STEPS] * setup.stages
    return group


def _plain(setup: Setup, dies: int) -> dict[str, Tensor]:
    """Train the whole model with torch alone; set the layers of a stage back to their start before step DIES_IN."""
    model = Transformer(SHAPE)
    initialise(model, SEED)
    named = parameters_of(model)
    groups = [
        {"params": [p for p in named.values() if (p.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, INNER.weight_decay), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, betas=INNER.betas, eps=INNER.epsilon)
    lost = Group(setup).workers[dies].stage.parameters
    for step in range(STEPS):
        if step == DIES_IN:
            with torch.no_grad():
                for name, start in lost.items():
                    named[name].copy_(start)
                    del adamw.state[named[name]]
        for part in batch_of(step).chunk(setup.micro_batches):
            embed, predict = ends_of(model)
            x = embed(part[:, :-1])
            for block in model.layers.values():
                x = block(x, model.rope(LENGTH, x.device))
            (next_token_loss(predict(x), part[:, 1:]) / setup.micro_batches).backward()
        assert INNER.clip_norm is not None
        torch.nn.utils.clip_grad_norm_(named.values(), INNER.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = INNER.rates(TOTAL).at(step)
        adamw.step()
        adamw.zero_grad()
    return {name: parameter.detach() for name, parameter in named.items()}


@pytest.mark.parametrize(
    ("dies", "faults"),
    [
        (2, _Dies(3, in_forward=True)),
        (1, _Dies(0, in_forward=True)),  # later stages have not got the norm of the step before
        (3, _Dies(0, in_forward=False)),
        (0, _Dies(0, in_forward=False)),
    ],
    ids=["third", "second, at once", "last", "first"],
)
def test_a_group_resumes_as_a_plain_loop_that_sets_a_stage_back(dies: int, faults: Faults) -> None:
    setup = Setup()
    group, expected = _resumed(setup, dies, faults), _plain(setup, dies)
    for name, found in group.parameters().items():
        torch.testing.assert_close(found, expected[name], atol=5e-6, rtol=0, msg=name)
    undisturbed = Group(setup)
    undisturbed.train([batch_of(step) for step in range(STEPS)])
    moved = [(found - undisturbed.parameters()[name]).abs().max().item() for name, found in group.parameters().items()]
    assert min(moved) > 1e-4
