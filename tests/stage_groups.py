"""The stages of one group as threads, without a run, and the same replica as one model in one autograd graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hetero_pp.config.lines import LinkShape, LinkSpec
from hetero_pp.core.errors import HeteroPPError
from hetero_pp.link.in_process import in_process_pair
from hetero_pp.link.protocol import LinkEnd
from hetero_pp.model.arithmetic import next_token_loss
from hetero_pp.model.inner import InnerOptimizer, InnerSettings
from hetero_pp.model.part_settings import StageSpec
from hetero_pp.model.transformer import EMBEDDING, ModelShape, Transformer, build_part, initialise, parameters_of
from hetero_pp.pipeline.coefficients import Bits, CoefficientFormat, Floats
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
        stage = build_stage(self.setup, index, inner)
        self._record(stage.optimizer, stage.parameters)
        return StageWorker(stage, worker_settings(self.setup), upstream, downstream)

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


def build_stage(setup: Setup, index: int, inner: InnerSettings = INNER) -> Stage:
    spec = StageSpec(index, setup.stages, range(setup.cuts[index], setup.cuts[index + 1]))
    module = build_part(SHAPE, spec)
    initialise(module, SEED)
    return Stage(spec, module, Boundary(SHAPE.width, setup.format, setup.basis), inner, TOTAL)


def worker_settings(setup: Setup) -> WorkerSettings:
    return WorkerSettings(
        micro_batches=setup.micro_batches,
        micro_batch_size=BATCH // setup.micro_batches,
        sequence_length=LENGTH,
        extra_in_flight=setup.extra_in_flight,
        receive_timeout=TIMEOUT,
        replica="g",
        seed=SEED,
    )


def batch_of(seed: int, rows: int = BATCH) -> Tensor:
    return torch.randint(SHAPE.vocabulary, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def ends_of(model: Transformer) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
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
        self.gradients: list[Gradients] = []
        """Gradients of every step before clipping."""
        self.norms: list[float] = []
        self.rest: Tensor | None = None
        if (u := setup.basis) is not None and setup.stages > 1:
            embedding = self.named[EMBEDDING].detach()
            self.rest = embedding - embedding @ u @ u.T
            self.optimizer.perpendicular = self.rest

    def loss(self, tokens: Tensor) -> Tensor:
        inputs, u = tokens[:, :-1], self.setup.basis
        embed, predict = ends_of(self.model)
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
            self.gradients.append({n: p.grad.clone() for n, p in self.named.items() if p.grad is not None})
            norm = torch.cat([gradient.flatten().double() for gradient in self.gradients[-1].values()]).norm()
            self.norms.append(norm.item())
            self.optimizer.step(step, norm.float())
        return losses
