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
    """Lets a stage die once, before the forward or the backward of a micro-batch of a step."""

    def __init__(self, micro_batch: int, in_forward: bool, step: int = DIES_IN) -> None:
        self._when = step, micro_batch, in_forward

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


def _resumed(setup: Setup, *deaths: tuple[set[int], Faults]) -> Group:
    """Train a group in which stages die, and others take their place. The last stage of each set has the faults."""
    group, step, began = Group(setup), 0, [0] * setup.stages
    for worker in group.workers:
        _audit(worker, 1)
    for generation, (dying, faults) in enumerate(deaths, 2):
        group.workers[max(dying)].faults = faults
        group.together(_work(step, found := dict[int, tuple[int, bool]]()))
        kept = {index: one for index, one in found.items() if index not in dying and one != (began[index], False)}
        step = max(steps for steps, _ in kept.values())
        assert step == DIES_IN
        assert all(steps == step or (steps == step - 1 and has_next) for steps, has_next in kept.values())
        for index in found.keys() - kept.keys():
            group.workers[index], began[index] = Group(setup).workers[index], step
        links = [
            in_process_pair(LinkSpec(f"{a}", "a", "b", UNLIMITED, UNLIMITED), seed=1)
            for a, _ in pairwise(group.workers)
        ]
        for index, worker in enumerate(group.workers):
            above = links[index - 1][1] if index else None
            worker.relink(above, links[index][0] if index < len(links) else None)
            _audit(worker, generation)
            worker.resume(step, keeps=index in kept, is_same=False)
    again = dict[int, tuple[int, bool]]()
    group.together(_work(step, again))
    assert not again
    assert [worker.applied for worker in group.workers] == [STEPS] * setup.stages
    return group


def _plain(setup: Setup, die: set[int]) -> dict[str, Tensor]:
    """Train the whole model with torch alone; set the layers of stages back to their start before step DIES_IN."""
    model = Transformer(SHAPE)
    initialise(model, SEED)
    named = parameters_of(model)
    groups = [
        {"params": [p for p in named.values() if (p.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, INNER.weight_decay), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, betas=INNER.betas, eps=INNER.epsilon)
    workers = Group(setup).workers
    lost = {name: start for stage in die for name, start in workers[stage].stage.parameters.items()}
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
    "deaths",
    [
        [({2}, _Dies(3, in_forward=True))],
        [({1}, _Dies(0, in_forward=True))],  # later stages have not got the norm of the step before
        [({3}, _Dies(0, in_forward=False))],
        [({0}, _Dies(0, in_forward=False))],
        # The new second stage has gradients of its first step when the new first one dies: it knows no norm to repeat.
        [({0, 1}, _Dies(3, in_forward=True)), ({0}, _Dies(0, in_forward=True, step=DIES_IN + 1))],
    ],
    ids=["third", "second, at once", "last", "first", "first and second, and first again"],
)
def test_a_group_resumes_as_a_plain_loop_that_sets_a_stage_back(deaths: list[tuple[set[int], Faults]]) -> None:
    setup = Setup()
    group, expected = _resumed(setup, *deaths), _plain(setup, deaths[0][0])
    for name, found in group.parameters().items():
        torch.testing.assert_close(found, expected[name], atol=5e-6, rtol=0, msg=name)
    undisturbed = Group(setup)
    undisturbed.train([batch_of(step) for step in range(STEPS)])
    moved = [(found - undisturbed.parameters()[name]).abs().max().item() for name, found in group.parameters().items()]
    assert min(moved) > 1e-4
