"""A group of stages against the whole model: gradients, norms, several steps, evaluation, and refused messages."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from hetero_pp.config.links import LinkShape, LinkSpec
from hetero_pp.config.topology import StageSpec
from hetero_pp.core.errors import HeteroPPError, PeerAtFault
from hetero_pp.link.in_process import InProcessLinkEnd, in_process_pair
from hetero_pp.link.protocol import LinkEnd, Message
from hetero_pp.link.token_ids import pack_tokens
from hetero_pp.messages.messages_pb2 import ACTIVATION, EVALUATION, FLUSH, GRADIENT, LinkHeader
from hetero_pp.model.inner import InnerOptimizer, InnerSettings
from hetero_pp.model.loss import next_token_loss
from hetero_pp.model.transformer import (
    EMBEDDING,
    ModelShape,
    Transformer,
    build_part,
    initialise,
    parameters_of,
)
from hetero_pp.pipeline.coefficients import Bits, CoefficientFormat, Floats, noise_key
from hetero_pp.pipeline.subspace import random_basis
from stages.boundary import Boundary
from stages.stage import Stage
from stages.worker import StageWorker, WorkerSettings

SHAPE = ModelShape(width=32, layers=4, heads=2, feed_forward=48, vocabulary=64)
INNER = InnerSettings(learning_rate=3e-3, warmup_steps=2, epsilon=1e-5, clip_norm=0.5, weight_decay=0.1)
TOTAL, BATCH, LENGTH, SEED = 20, 8, 16, 3
TIMEOUT = 60.0
UNLIMITED = LinkShape()

T = TypeVar("T")
Gradients = dict[str, Tensor]


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Use one Torch thread, because each stage already has a thread of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Setup:
    """The cuts of a group, and the format of its links."""

    cuts: tuple[int, ...] = (0, 1, 2, 3, 4)
    micro_batches: int = 4
    extra_in_flight: int = 1
    rank: int | None = None
    dtype: torch.dtype = torch.float32
    bits: int | None = None

    @property
    def format(self) -> CoefficientFormat:
        return Floats(self.dtype) if self.bits is None else Bits(self.bits)

    @property
    def stages(self) -> int:
        return len(self.cuts) - 1

    @property
    def basis(self) -> Tensor | None:
        return None if self.rank is None else random_basis(SHAPE.width, self.rank, SEED)


class Group:
    """The stages of one replica, each in a thread when they run, and the gradients of their steps."""

    def __init__(self, setup: Setup, inner: InnerSettings = INNER) -> None:
        self.setup = setup
        self.gradients: list[Gradients] = []
        links: list[tuple[LinkEnd, LinkEnd]] = []
        for hop in range(setup.stages - 1):
            spec = LinkSpec(f"g.{hop}-{hop + 1}", f"g.{hop}", f"g.{hop + 1}", UNLIMITED, UNLIMITED)
            links.append(in_process_pair(spec, seed=1))
        upstream = [None, *(second for _, second in links)]
        downstream = [*(first for first, _ in links), None]
        ends = zip(upstream, downstream, strict=True)
        self.workers = [self._worker(index, above, below, inner) for index, (above, below) in enumerate(ends)]
        embedding = self.workers[0].stage.parameters[EMBEDDING].detach().clone()
        for worker in self.workers:
            worker.stage.split_embedding(embedding)

    def _worker(
        self, index: int, upstream: LinkEnd | None, downstream: LinkEnd | None, inner: InnerSettings
    ) -> StageWorker:
        stage = _stage(self.setup, index, inner)
        self._record(stage.optimizer, stage.parameters)
        return StageWorker(stage, _worker_settings(self.setup), upstream, downstream)

    def _record(self, optimizer: InnerOptimizer, parameters: dict[str, torch.nn.Parameter]) -> None:
        """Keep the gradients of every step of this stage before clipping."""
        original = optimizer.step
        count = 0
        lock = threading.Lock()

        def recorded(step: int, replica_norm: Tensor) -> float:
            nonlocal count
            with lock:
                while len(self.gradients) <= count:
                    self.gradients.append({})
                self.gradients[count] |= {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
            count += 1
            return original(step, replica_norm)

        optimizer.step = recorded  # type: ignore[method-assign]

    def together(self, work: Callable[[StageWorker], T]) -> list[T]:
        """Run `work` for every stage at once. Raise the first error."""
        outcomes: dict[int, T] = {}
        errors: list[BaseException] = []

        def run(index: int, worker: StageWorker) -> None:
            torch.set_num_threads(1)
            try:
                outcomes[index] = work(worker)
            except (HeteroPPError, AssertionError, RuntimeError, LookupError) as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        if errors:
            raise errors[0]
        return [outcomes[index] for index in range(len(threads))]

    def train(self, batches: Sequence[Tensor]) -> list[float]:
        """Run inner steps and the flush. Return the loss of each step."""

        def work(worker: StageWorker) -> list[float | None]:
            losses = [
                worker.inner_step(1, step, step, tokens if worker.stage.spec.is_first else None)
                for step, tokens in enumerate(batches)
            ]
            worker.flush(1)
            return losses

        return [loss for loss in self.together(work)[-1] if loss is not None]

    def evaluate(self, batches: Sequence[Tensor]) -> list[tuple[float, int] | None]:
        return self.together(
            lambda worker: worker.evaluate(1, batches if worker.stage.spec.is_first else [], len(batches))
        )

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for worker in self.workers for name, p in worker.stage.parameters.items()}


def _stage(setup: Setup, index: int, inner: InnerSettings = INNER) -> Stage:
    spec = StageSpec(index, setup.stages, range(setup.cuts[index], setup.cuts[index + 1]))
    module = build_part(SHAPE, spec)
    initialise(module, SEED)
    return Stage(spec, module, Boundary(SHAPE.width, setup.format, setup.basis), inner, TOTAL)


def _worker_settings(setup: Setup) -> WorkerSettings:
    return WorkerSettings(
        micro_batches=setup.micro_batches,
        micro_batch_size=BATCH // setup.micro_batches,
        sequence_length=LENGTH,
        extra_in_flight=setup.extra_in_flight,
        receive_timeout=TIMEOUT,
        replica="g",
        seed=SEED,
    )


def _batch(seed: int, rows: int = BATCH) -> Tensor:
    return torch.randint(SHAPE.vocabulary, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def _ends(model: Transformer) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return the parts of a whole model before and after its layers."""
    embedding, norm, head = model.tok_embeddings, model.norm, model.lm_head
    assert embedding is not None and norm is not None and head is not None
    return embedding, lambda x: head(norm(x))


class Whole:
    """The same replica as one model in one autograd graph, with the paper's formula at the cuts."""

    def __init__(self, setup: Setup, inner: InnerSettings = INNER) -> None:
        self.setup = setup
        self.model = Transformer(SHAPE)
        initialise(self.model, SEED)
        self.named = parameters_of(self.model)
        self.optimizer = InnerOptimizer(self.named, inner, TOTAL)
        self.norms: list[float] = []
        self.rest: Tensor | None = None
        if (u := setup.basis) is not None and setup.stages > 1:
            embedding = self.named[EMBEDDING].detach()
            self.rest = embedding - embedding @ u @ u.T
            self.optimizer.perpendicular = self.rest

    def loss(self, tokens: Tensor) -> Tensor:
        inputs, u = tokens[:, :-1], self.setup.basis
        embed, predict = _ends(self.model)
        x = embed(inputs)
        rope = self.model.rope(LENGTH, x.device)
        for index, block in enumerate(self.model.layers.values()):
            if u is not None and self.rest is not None and index in self.setup.cuts[1:-1]:
                rest = self.rest[inputs]
                x = (x - rest) @ u @ u.T + rest
            x = block(x, rope)
        return next_token_loss(predict(x), tokens[:, 1:])

    def backward(self, tokens: Tensor) -> float:
        total = 0.0
        for part in tokens.chunk(self.setup.micro_batches):
            loss = self.loss(part) / self.setup.micro_batches
            loss.backward()
            total += loss.item()
        return total

    def train(self, batches: Sequence[Tensor]) -> list[float]:
        losses = []
        for step, tokens in enumerate(batches):
            losses.append(self.backward(tokens))
            norm = torch.cat([p.grad.flatten().double() for p in self.named.values() if p.grad is not None]).norm()
            self.norms.append(norm.item())
            self.optimizer.step(step, norm.float())
        return losses


def _assert_gradients_are_the_whole_models(group: Group, whole: Whole, tolerance: float) -> None:
    assert group.gradients[0].keys() == whole.named.keys()
    largest = max(p.grad.abs().max().item() for p in whole.named.values() if p.grad is not None)
    assert largest > 1000 * tolerance  # otherwise the comparison would show nothing
    for name, parameter in whole.named.items():
        torch.testing.assert_close(group.gradients[0][name], parameter.grad, atol=tolerance, rtol=0, msg=name)


SPLITS = [
    Setup(),
    Setup(micro_batches=1),
    Setup(micro_batches=8),
    Setup(cuts=(0, 2, 4)),
    Setup(cuts=(0, 1, 3, 4), micro_batches=2),
    Setup(cuts=(0, 3, 4)),
    Setup(extra_in_flight=0),
    Setup(extra_in_flight=3, micro_batches=8),
    Setup(cuts=(0, 4)),
]


@pytest.mark.parametrize("setup", SPLITS, ids=str)
def test_a_step_has_the_whole_models_gradients(setup: Setup) -> None:
    group, whole = Group(setup), Whole(Setup(micro_batches=1))
    tokens = _batch(0)
    losses = group.train([tokens])
    assert losses == [pytest.approx(whole.backward(tokens), abs=1e-5)]
    _assert_gradients_are_the_whole_models(group, whole, 1e-6)


@pytest.mark.parametrize("setup", SPLITS, ids=str)
def test_steps_clip_by_the_whole_models_norm_and_train_alike(setup: Setup) -> None:
    group, whole = Group(setup), Whole(replace(setup, cuts=(0, 4)))
    batches = [_batch(step) for step in range(4)]
    seen: list[list[float]] = [[] for _ in group.workers]
    for index, worker in enumerate(group.workers):
        _note_norms(worker.stage.optimizer, seen[index])
    losses, expected = group.train(batches), whole.train(batches)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert INNER.clip_norm is not None
    assert min(whole.norms) > 2 * INNER.clip_norm
    for index, norms in enumerate(seen):
        assert norms == pytest.approx(whole.norms, rel=1e-5), f"stage {index}"
        assert group.workers[index].gradient_norm == pytest.approx(norms[-1], rel=1e-6)
    start = dict(Whole(setup).named)
    for name, parameter in group.parameters().items():
        torch.testing.assert_close(parameter, whole.named[name].detach(), atol=1e-5, rtol=0, msg=name)
        assert (parameter - start[name]).abs().max() > 1e-3, name


def _note_norms(optimizer: InnerOptimizer, norms: list[float]) -> None:
    original = optimizer.step

    def noted(step: int, replica_norm: Tensor) -> float:
        norms.append(replica_norm.item())
        return original(step, replica_norm)

    optimizer.step = noted  # type: ignore[method-assign]


def test_every_stage_steps_with_the_same_learning_rates() -> None:
    group = Group(Setup())
    group.train([_batch(step) for step in range(4)])
    expected = INNER.rates(TOTAL).at(3)
    assert [worker.learning_rate for worker in group.workers] == [expected] * 4


def test_each_stage_counts_the_seconds_in_which_it_waits_for_either_neighbour() -> None:
    group = Group(Setup())
    group.train([_batch(0)])
    times = [worker.timing for worker in group.workers]
    assert [one.waited_previous > 0 for one in times] == [False, True, True, True]
    assert [one.waited_next > 0 for one in times] == [True, True, True, False]


def test_a_second_round_goes_on_where_the_first_ended() -> None:
    """A flush applies every step, and no step is applied twice."""
    group, whole = Group(Setup()), Whole(Setup(cuts=(0, 4)))
    first, second = [_batch(0), _batch(1)], [_batch(2), _batch(3)]
    group.train(first)

    def work(worker: StageWorker) -> None:
        for step, tokens in enumerate(second):
            worker.inner_step(2, step, 2 + step, tokens if worker.stage.spec.is_first else None)
        worker.flush(2)

    group.evaluate([_batch(9, rows=2)])
    group.together(work)
    whole.train(first + second)
    assert len(group.gradients) == 4
    for name, parameter in group.parameters().items():
        torch.testing.assert_close(parameter, whole.named[name].detach(), atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("setup", [Setup(), Setup(cuts=(0, 1, 2, 3, 4))], ids=str)
def test_all_stages_hear_from_the_first_which_step_is_the_last(setup: Setup) -> None:
    """No other stage knows the number of steps, and all stop after the same one."""
    group, steps = Group(setup), 3

    def work(worker: StageWorker) -> list[bool]:
        heard: list[bool] = []
        while not (heard and heard[-1]):
            is_first, step = worker.stage.spec.is_first, len(heard)
            worker.inner_step(1, step, step, _batch(step) if is_first else None, is_first and step + 1 == steps)
            heard.append(worker.was_last)
        worker.flush(1)
        return heard

    assert group.together(work) == [[False, False, True]] * (len(setup.cuts) - 1)


COMPRESSED = [
    Setup(rank=8),
    Setup(rank=1),
    Setup(rank=8, cuts=(0, 2, 4), micro_batches=2),
    Setup(rank=8, cuts=(0, 1, 3, 4), extra_in_flight=0),
]


@pytest.mark.parametrize("setup", COMPRESSED, ids=str)
def test_compressed_it_is_one_graph_with_the_closed_formula(setup: Setup) -> None:
    group, whole, plain = Group(setup), Whole(setup), Whole(Setup(cuts=(0, 4)))
    tokens = _batch(0)
    losses = group.train([tokens])
    assert losses == [pytest.approx(whole.backward(tokens), abs=1e-5)]
    _assert_gradients_are_the_whole_models(group, whole, 1e-5)
    plain.backward(tokens)
    name = "layers.0.attention.wv.weight"
    gradient = plain.named[name].grad
    assert gradient is not None
    assert (group.gradients[0][name] - gradient).abs().max() > 1e-3  # compression changes the gradient


class WholeInFewBits(Whole):
    """One graph with the rounding of the wire at the cuts: codes, scales, and the keyed noise of gradients."""

    def backward(self, tokens: Tensor) -> float:
        total = 0.0
        for index, part in enumerate(tokens.chunk(self.setup.micro_batches)):
            inputs = part[:, :-1]
            embed, predict = _ends(self.model)
            x = embed(inputs)
            rope = self.model.rope(LENGTH, x.device)
            for layer, block in enumerate(self.model.layers.values()):
                if layer in self.setup.cuts[1:-1]:
                    hop = self.setup.cuts.index(layer) - 1
                    boundary = Boundary(SHAPE.width, self.setup.format, self.setup.basis, self.rest)
                    x = boundary.cross(x, inputs, noise_key(SEED, "g", hop, len(self.norms), index))
                x = block(x, rope)
            loss = next_token_loss(predict(x), part[:, 1:]) / self.setup.micro_batches
            loss.backward()
            total += loss.item()
        return total


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_few_bits_are_rounded_by_the_link_and_by_nothing_else(bits: int) -> None:
    """There are two steps, so that each has its own noise."""
    setup = Setup(rank=12, cuts=(0, 1, 3, 4), micro_batches=2, bits=bits)
    group, whole, exact = Group(setup), WholeInFewBits(setup), Whole(replace(setup, bits=None))
    batches = [_batch(0), _batch(1)]
    assert group.train(batches) == pytest.approx(whole.train(batches), abs=1e-5)
    exact.train(batches)
    for name, parameter in group.parameters().items():
        torch.testing.assert_close(parameter, whole.named[name].detach(), atol=1e-5, rtol=0, msg=name)
    name = "layers.0.attention.wv.weight"
    assert (group.parameters()[name] - exact.named[name]).abs().max() > 1e-4


@pytest.mark.parametrize("setup", COMPRESSED, ids=str)
def test_compressed_it_trains_like_one_graph(setup: Setup) -> None:
    group, whole = Group(setup), Whole(setup)
    batches = [_batch(step) for step in range(3)]
    assert group.train(batches) == pytest.approx(whole.train(batches), abs=1e-5)
    for name, parameter in group.parameters().items():
        torch.testing.assert_close(parameter, whole.named[name].detach(), atol=1e-4, rtol=0, msg=name)


def test_at_the_rank_of_the_width_compression_changes_nothing() -> None:
    group, whole = Group(Setup(rank=SHAPE.width)), Whole(Setup(cuts=(0, 4)))
    tokens = _batch(0)
    group.train([tokens])
    whole.backward(tokens)
    _assert_gradients_are_the_whole_models(group, whole, 1e-4)
    batches = [_batch(5, rows=2)]
    assert _loss(Group(Setup(rank=SHAPE.width)), batches) == pytest.approx(_loss(Group(Setup()), batches), abs=1e-4)


def test_decay_of_the_embedding_in_a_compressed_group_stays_in_the_subspace() -> None:
    """Gradients are small beside this weight decay, so TE - T_perp shrinks and T_perp stays."""
    setup, inner = Setup(rank=4), INNER.model_copy(update={"weight_decay": 50.0, "warmup_steps": 0, "epsilon": 1e3})
    group = Group(setup, inner)
    before = group.parameters()[EMBEDDING].clone()
    group.train([_batch(0)])
    u = setup.basis
    assert u is not None
    expected = before - 3e-3 * 50.0 * (before @ u @ u.T)
    torch.testing.assert_close(group.parameters()[EMBEDDING], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("setup", [Setup(), Setup(cuts=(0, 3, 4)), Setup(rank=8), Setup(cuts=(0, 4))], ids=str)
def test_evaluation_is_the_mean_over_rows(setup: Setup) -> None:
    """The last batch is shorter. Each row has the same weight."""
    group, whole = Group(setup), Whole(setup)
    batches = [_batch(seed, rows) for seed, rows in ((0, 2), (1, 2), (2, 1))]
    *others, last = group.evaluate(batches)
    assert others == [None] * (setup.stages - 1)
    with torch.no_grad():
        expected = whole.loss(torch.cat(batches)).item()
    assert last == (pytest.approx(expected, abs=1e-5), 5)


def _loss(group: Group, batches: Sequence[Tensor]) -> float:
    outcome = group.evaluate(batches)[-1]
    assert outcome is not None
    return outcome[0]


def test_an_evaluation_leaves_nothing_behind() -> None:
    group, untouched = Group(Setup(rank=8)), Group(Setup(rank=8))
    group.evaluate([_batch(7, rows=2)])
    group.train([_batch(0)])
    untouched.train([_batch(0)])
    for name, gradient in untouched.gradients[0].items():
        assert torch.equal(group.gradients[0][name], gradient), name


def test_a_bf16_wire_rounds_what_crosses_and_nothing_else() -> None:
    """With one hop at full rank, the loss is that of the hidden states rounded to bf16."""
    setup = Setup(cuts=(0, 2, 4), dtype=torch.bfloat16)
    group, model = Group(setup), Whole(setup).model
    tokens = _batch(0, rows=2)
    with torch.no_grad():
        embed, predict = _ends(model)
        x, rope = embed(tokens[:, :-1]), model.rope(LENGTH, torch.device("cpu"))
        for block in (model.layers["0"], model.layers["1"]):
            x = block(x, rope)
        rounded = x.bfloat16().float()
        assert not torch.equal(rounded, x)
        for block in (model.layers["2"], model.layers["3"]):
            rounded = block(rounded, rope)
        expected = next_token_loss(predict(rounded), tokens[:, 1:]).item()
    assert _loss(group, [tokens]) == pytest.approx(expected, abs=1e-6)


# ---- messages that no honest neighbour sends ----


class Alone:
    """One of two stages and the far end of its link, from which a test sends."""

    def __init__(self, index: int, setup: Setup | None = None) -> None:
        self.setup = Setup(cuts=(0, 2, 4), micro_batches=1) if setup is None else setup
        spec = LinkSpec("g.0-1", "g.0", "g.1", UNLIMITED, UNLIMITED)
        first, second = in_process_pair(spec, seed=1)
        own, self.far = (first, second) if index == 0 else (second, first)
        stage = _stage(self.setup, index)
        whole = Transformer(SHAPE)
        initialise(whole, SEED)
        stage.split_embedding(parameters_of(whole)[EMBEDDING].detach())
        ends = {"upstream": own if index == 1 else None, "downstream": own if index == 0 else None}
        self.worker = StageWorker(stage, _worker_settings(self.setup), **ends)

    def step(self, step: int = 0) -> float | None:
        tokens = _batch(0) if self.worker.stage.spec.is_first else None
        return self.worker.inner_step(1, step, step, tokens)


def _activation(
    wire: Tensor | None = None, packed: Tensor | None = None, purpose: int = ACTIVATION, **header: float
) -> Message:
    wire = torch.zeros(BATCH, LENGTH, SHAPE.width) if wire is None else wire
    packed = pack_tokens(_batch(0), SHAPE.vocabulary) if packed is None else packed
    fields: dict[str, Any] = {"purpose": purpose, "round": 1, "step": 0, "micro_batch": 0, "rows": BATCH} | header
    return Message(LinkHeader(**fields), (packed, wire))


def _gradient(wire: Tensor | None = None, **header: float) -> Message:
    wire = torch.zeros(BATCH, LENGTH, SHAPE.width) if wire is None else wire
    honest = {"purpose": GRADIENT, "round": 1, "step": 0, "micro_batch": 0, "squared_norm": 1.0}
    fields: dict[str, Any] = honest | header
    return Message(LinkHeader(**fields), (wire,))


def test_what_an_honest_neighbour_sends_is_taken() -> None:
    last, first = Alone(1), Alone(0)
    last.far.send(_activation())
    assert last.step() == pytest.approx(math.log(SHAPE.vocabulary), rel=0.2)
    assert last.far.receive(TIMEOUT).header.purpose == GRADIENT
    first.far.send(_gradient())
    first.step()
    assert first.worker.gradient_norm == pytest.approx(1.0)


@pytest.mark.parametrize(
    "message",
    [
        _activation(torch.zeros(BATCH, LENGTH, SHAPE.width - 1)),
        _activation(torch.zeros(BATCH - 1, LENGTH, SHAPE.width)),
        _activation(torch.zeros(BATCH, LENGTH + 1, SHAPE.width)),
        _activation(torch.zeros(BATCH * LENGTH, SHAPE.width)),
        _activation(torch.zeros(BATCH, LENGTH, SHAPE.width, dtype=torch.bfloat16)),
        _activation(micro_batch=1),
        _activation(step=1),
        _activation(round=2),
        _activation(purpose=EVALUATION),
        _activation(purpose=FLUSH),
        _activation(gradient_norm=1.0),
        Message(_activation().header, ()),
        Message(_activation().header, _activation().tensors[1:]),
        Message(_activation().header, (*_activation().tensors, torch.zeros(1))),
    ],
    ids=[
        "width",
        "rows",
        "length",
        "two dimensions",
        "dtype",
        "micro-batch",
        "step",
        "round",
        "evaluation",
        "flush",
        "norm without a step",
        "no tensors",
        "no token ids",
        "three tensors",
    ],
)
def test_activations_that_do_not_belong_here(message: Message) -> None:
    last = Alone(1)
    last.far.send(message)
    with pytest.raises(PeerAtFault):
        last.step()


@pytest.mark.parametrize(
    "message",
    [
        _gradient(torch.zeros(BATCH, LENGTH, SHAPE.width + 1)),
        _gradient(torch.zeros(1, LENGTH, SHAPE.width)),
        _gradient(torch.zeros(BATCH, LENGTH, SHAPE.width, dtype=torch.uint8)),
        _gradient(micro_batch=1),
        _gradient(step=3),
        _gradient(purpose=ACTIVATION),
        Message(_gradient().header, ()),
        Message(_gradient().header, _gradient().tensors * 2),
    ],
    ids=["width", "rows", "dtype", "micro-batch", "step", "activation", "no tensors", "two tensors"],
)
def test_gradients_that_do_not_belong_here(message: Message) -> None:
    first = Alone(0)
    first.far.send(message)
    with pytest.raises(PeerAtFault):
        first.step()


def test_compressed_stages_expect_coefficients() -> None:
    setup = Setup(cuts=(0, 2, 4), micro_batches=1, rank=8)
    last = Alone(1, setup)
    last.far.send(_activation(torch.zeros(BATCH, LENGTH, SHAPE.width)))
    with pytest.raises(PeerAtFault, match="8"):
        last.step()


PACKED = pack_tokens(_batch(0), SHAPE.vocabulary)


@pytest.mark.parametrize(
    "packed",
    [
        PACKED[:-1],
        torch.cat([PACKED, PACKED[:1]]),
        PACKED.float(),
        PACKED.bfloat16(),
        torch.zeros(0, dtype=torch.uint8),
    ],
    ids=["short", "long", "fp32", "bf16", "empty"],
)
def test_token_ids_that_are_no_token_ids(packed: Tensor) -> None:
    last = Alone(1)
    last.far.send(_activation(packed=packed))
    with pytest.raises(PeerAtFault):
        last.step()


def test_a_token_id_beyond_the_vocabulary() -> None:
    shape = SHAPE.model_copy(update={"vocabulary": 50})
    spec = StageSpec(1, 2, range(2, 4))
    module = build_part(shape, spec)
    initialise(module, SEED)
    stage = Stage(spec, module, Boundary(SHAPE.width, Floats(torch.float32)), INNER, TOTAL)
    first, second = in_process_pair(LinkSpec("g.0-1", "g.0", "g.1", UNLIMITED, UNLIMITED), seed=1)
    worker = StageWorker(stage, _worker_settings(Setup(micro_batches=1)), second, None)
    ids = torch.full((BATCH, LENGTH + 1), 49)
    first.send(_activation(packed=pack_tokens(ids, 50)))
    worker.inner_step(1, 0, 0, None)
    ids[3, 5] = 50
    first.send(_activation(packed=pack_tokens(ids, 50), step=1, gradient_norm=1.0))
    with pytest.raises(PeerAtFault, match="50"):
        worker.inner_step(1, 1, 1, None)


def test_a_flush_where_an_activation_was_due_and_the_other_way_round() -> None:
    last = Alone(1)
    last.far.send(_activation())
    last.step()
    last.far.send(_activation(step=1, gradient_norm=1.0))
    with pytest.raises(PeerAtFault):
        last.worker.flush(1)


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0])
def test_a_gradient_norm_that_is_no_norm(norm: float) -> None:
    """A malformed or non-finite message is refused, as design.md says. Here, a NaN would spread to every weight."""
    last = Alone(1)
    last.far.send(_activation())
    last.step()
    last.far.send(_activation(step=1, gradient_norm=norm))
    with pytest.raises(PeerAtFault):
        last.step(1)


@pytest.mark.parametrize("squared", [math.nan, math.inf, -1.0])
def test_a_squared_norm_that_is_none(squared: float) -> None:
    first = Alone(0)
    first.far.send(_gradient(squared_norm=squared))
    with pytest.raises(PeerAtFault):
        first.step()


def test_a_step_must_not_be_lost_for_want_of_a_norm() -> None:
    """The second step's first activation has to bring the norm that the first step waits for."""
    last = Alone(1)
    last.far.send(_activation())
    last.step()
    last.far.send(_activation(step=1))
    with pytest.raises(PeerAtFault):
        last.step(1)


def test_a_flush_must_bring_the_norm_that_a_step_waits_for() -> None:
    """A missing norm that counts as 0 would leave the step unclipped."""
    last = Alone(1)
    last.far.send(_activation())
    last.step()
    last.far.send(Message(LinkHeader(purpose=FLUSH, round=1)))
    with pytest.raises(PeerAtFault):
        last.worker.flush(1)


def test_the_last_gradient_of_a_step_must_bring_a_squared_norm() -> None:
    first, message = Alone(0), _gradient()
    message.header.ClearField("squared_norm")
    first.far.send(message)
    with pytest.raises(PeerAtFault):
        first.step()


@pytest.mark.parametrize(
    "message",
    [
        _activation(rows=0),
        _activation(rows=BATCH - 1),
        _activation(rows=2**32 - 1),
        _activation(torch.full((BATCH, LENGTH, SHAPE.width), math.nan)),
        _activation(packed=pack_tokens(_batch(0), SHAPE.vocabulary).view(1, -1)),
    ],
    ids=["no rows", "few rows", "many rows", "not finite", "tokens of two dimensions"],
)
def test_numbers_beside_an_activation_are_checked(message: Message) -> None:
    last = Alone(1)
    last.far.send(message)
    with pytest.raises(PeerAtFault) as refused:
        last.step()
    assert refused.value.peer == "g.0"


def test_a_norm_of_all_stages_is_not_below_that_of_one() -> None:
    """Otherwise a neighbour could make this stage take an unclipped step."""
    last = Alone(1)
    last.far.send(_activation(torch.randn(BATCH, LENGTH, SHAPE.width, generator=torch.Generator().manual_seed(1))))
    last.step()
    last.far.send(_activation(step=1, gradient_norm=0.0))
    with pytest.raises(PeerAtFault, match=r"found a gradient norm of 0\.0, expected"):
        last.step(1)


def test_a_squared_norm_comes_with_the_last_gradient_alone() -> None:
    first = Alone(0, Setup(cuts=(0, 2, 4), micro_batches=2))
    rows = BATCH // 2
    first.far.send(_gradient(torch.zeros(rows, LENGTH, SHAPE.width)))
    with pytest.raises(PeerAtFault, match="expected none before the last"):
        first.step()


def test_the_last_step_is_marked_on_its_first_micro_batch_alone() -> None:
    last = Alone(1, Setup(cuts=(0, 2, 4), micro_batches=2))
    rows, packed = BATCH // 2, pack_tokens(_batch(0)[: BATCH // 2], SHAPE.vocabulary)
    for index in range(2):
        wire = torch.zeros(rows, LENGTH, SHAPE.width)
        last.far.send(_activation(wire, packed, rows=rows, micro_batch=index, is_last=bool(index)))
    with pytest.raises(PeerAtFault, match="mark of a round's last step"):
        last.step()


def test_a_stage_blames_who_made_it_overflow_and_sends_nothing_on() -> None:
    """Finite values of one neighbour become infinite here.

    If they were sent on, the other neighbour would blame this stage.
    """
    first = Alone(0)
    largest = torch.finfo(torch.float32).max
    first.far.send(_gradient(torch.full((BATCH, LENGTH, SHAPE.width), largest)))
    with pytest.raises(PeerAtFault, match="norm became") as refused:
        first.step()
    assert refused.value.peer == "g.1"


def test_a_neighbour_that_acknowledges_nothing_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcessLinkEnd, "unacknowledged", 1000)
    last = Alone(1)
    last.far.send(_activation())
    with pytest.raises(PeerAtFault, match="found 1000 unacknowledged messages, expected at most 33"):
        last.step()
