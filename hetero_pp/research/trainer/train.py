"""The trainer of tables: trains every replica of a row whole, one after the other, with nothing serialised.

Weights, optimizer state and error feedback are held once per replica, and theta at the start of the round once.

One step's gradients agree with the staged reference to 1e-5, final losses to within the spread over seeds. All losses
are bitwise equal to the staged run's if no replica is a group and nothing is compiled.
"""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero_pp.config.checkpoint import first_checkpoint
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import PART, complaint, flush, naming
from hetero_pp.core.tensor_files import save_object
from hetero_pp.data.batches import SharedBatches
from hetero_pp.data.sources import Source
from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.model.transformer import EMBEDDING, block_of, can_compile, compile_layers
from hetero_pp.outer.step import OuterOptimizer, start_before_mean
from hetero_pp.pipeline.coefficients import format_of
from hetero_pp.research.attacks import success
from hetero_pp.research.settings import UNMEASURED, Every, ablations_of, research_of
from hetero_pp.research.trainer.contributions import Contributions, PretrainedOptimizer
from hetero_pp.research.trainer.hostile import HostileContributions
from hetero_pp.research.trainer.measurements import (
    BiasMeter,
    Measured,
    OuterGradient,
    contribution_bytes,
    require_equal_rounds,
)
from hetero_pp.research.trainer.participation import (
    Death,
    Weights,
    deaths_in,
    replicas_in,
    sequences_in,
    share_of,
    table_batches,
)
from hetero_pp.research.trainer.peers import average_peers, bytes_per_token
from hetero_pp.research.trainer.replica import (
    AblatedBoundary,
    TableReplica,
    build_whole,
    constraint_of,
    forward_of,
    grassmann_step,
)
from replica_groups.engines.plain import WholeReplica
from replica_groups.engines.ranks import CPU

SLICES = 8  # number of consecutive parts of the validation rows; losses on them show what other rows would have given
MOMENTS = ("exp_avg", "exp_avg_sq")  # moments of AdamW that `averages_moments` averages


@dataclass(frozen=True)
class FastResult:
    """Result of a run. Losses are of the synced model after the embedding is split again, in nats."""

    validation_loss: list[float]  # loss after each round: each replica's own forward, averaged over replicas
    uncompressed: float
    compressed: float | None  # loss in the forward of the first compressed replica; None if there is none
    tokens: int
    seconds: float
    cpu_seconds: float  # CPU seconds of all threads of this process
    contribution_bytes: int  # bytes of the contributions of all replicas over the run
    boundary_bytes_per_token: float
    """Tensor bytes of a token at one hop, in one direction, in the replica that sends the most; 0 without a hop."""
    diverged: bool = False
    bias: list[tuple[int, float]] = field(default_factory=list)
    """Bias of equation 5 as a share of the unbiased pseudo-gradient: (round, share) for each measured round."""
    similarity: list[tuple[int, float, float]] = field(default_factory=list)
    """Similarity of contributions in measured rounds: (round, mean of the cosines of all pairs, standard deviation)."""
    volume: list[tuple[int, float, float, float | None, float]] = field(default_factory=list)
    """Volume of contributions in measured rounds: (round, bytes that a replica sends with each collective of Volume).
    """
    outer_gradients: list[OuterGradient] = field(default_factory=list)
    """Outer gradients in measured rounds: norms, and cosines with a reference momentum."""
    compiled: bool = False  # whether layers were compiled
    slices: dict[str, list[float]] = field(default_factory=dict)
    """Loss on each of SLICES parts of the validation rows, by forward (`own`, `uncompressed`, `compressed`)."""
    attacks: dict[str, Any] = field(default_factory=dict)
    """Fields of hostile.Told: actions of attacks and defences. Empty for a row without `research.attacks`."""


def train_fast(
    spec: RunSpec,
    source: Source,
    on_round: Callable[[int, float], None] = lambda round_, loss: None,
    compiles: bool = False,
    every: Every = UNMEASURED,
    device: torch.device = CPU,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 300.0,
    on_result: Callable[[FastResult], object] = lambda result: None,
) -> FastResult:
    """Train a whole topology in this thread; `on_round` is called with each round's validation loss.

    `compiles`: use torch.compile where it works. Losses then differ by rounding.
    `every`: rounds between measurements. `checkpoint`: the file of the state, saved after a round if
    `checkpoint_seconds` have passed. If it exists, training resumes from it, bitwise equal on a CPU. It is removed once
    `on_result`, which stores the result, returns.

    Raises ConfigError before the round in which a streamed corpus ends that may not be repeated. The state is saved
    then, and training resumes from it once repeats are allowed.
    """
    started, worked = time.monotonic(), time.process_time()
    kept = None if checkpoint is None else Checkpoint(checkpoint, _kept_as(spec), checkpoint_seconds)
    group, losses = AllReplicas(spec, source, compiles, every, device), list[float]()
    if kept is not None and (saved := kept.load()) is not None:
        losses = saved["losses"]
        started, worked = started - saved["seconds"], worked - saved["cpu_seconds"]
        group.load(saved["group"])
        del saved  # otherwise everything would be held twice

    def save() -> None:
        if kept is not None:
            spent = {"seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - worked}
            kept.save(len(losses), {"losses": losses, **spent, "group": group.state()})

    for round_ in range(len(losses) + 1, spec.config.rounds + 1):
        try:
            group.read_ahead(round_)
        except ConfigError as error:
            save()
            told = "" if kept is None else f"; the state after round {round_ - 1} is kept to resume from"
            raise ConfigError(error.key, error.message + told) from error
        loss = group.evaluate() if group.round(round_) else math.nan
        if not math.isfinite(loss):
            break
        losses.append(loss)
        if kept is not None and kept.is_due():
            save()
        on_round(round_, loss)

    diverged = len(losses) < spec.config.rounds
    slices: dict[str, list[float]] = {}
    if not diverged:
        batches, count = group.validation, min(SLICES, len(group.validation))
        parts = [batches[len(batches) * part // count : len(batches) * (part + 1) // count] for part in range(count)]
        compressed = [group.evaluate_compressed(part) for part in parts]
        slices = {
            "own": [group.evaluate(part) for part in parts],
            "uncompressed": [group.evaluate_uncompressed(part) for part in parts],
            "compressed": [loss for loss in compressed if loss is not None],
        }
    attacks: dict[str, Any] = {}
    if isinstance(group.contributions, HostileContributions):
        attacks = asdict(group.contributions.told)
        attacks["backdoor"] = success(group.replicas[0].module, group.validation)
    result = FastResult(
        validation_loss=losses,
        uncompressed=math.nan if diverged else group.evaluate_uncompressed(),
        compressed=None if diverged else group.evaluate_compressed(),
        tokens=sequences_in(spec.config, len(losses)) * spec.config.data.sequence_length * group.inner_steps,
        seconds=time.monotonic() - started,
        cpu_seconds=time.process_time() - worked,
        contribution_bytes=contribution_bytes(spec, len(losses)),
        boundary_bytes_per_token=max(boundary_bytes_per_token(replica, spec) for replica in spec.config.replicas),
        diverged=diverged,
        bias=group.bias,
        similarity=group.measured.similarity,
        volume=group.measured.volume,
        outer_gradients=[] if group.measured.outer is None else group.measured.outer.found,
        compiled=group.is_compiled,
        slices=slices,
        attacks=attacks,
    )
    on_result(result)
    if kept is not None:
        kept.remove()
    return result


def _kept_as(spec: RunSpec) -> str:
    """Return the run's name for its checkpoints.

    A streamed run is named as if it repeated its corpus, so that it can resume with repeats once the stream has ended.
    """
    config = spec.config
    if config.data.streamed is None or config.data.repeat:
        return spec.run
    repeats = config.model_copy(update={"data": config.data.model_copy(update={"repeat": True})})
    return RunSpec(repeats, spec.shape.vocabulary, spec.changes).run


def boundary_bytes_per_token(replica: ReplicaSettings, spec: RunSpec) -> float:
    """Return the tensor bytes of one token at one hop, in the direction that costs more."""
    if not isinstance(replica, ParticipantsReplica) or replica.stage_count == 1:
        return 0.0
    rank = replica.boundary.dimensions(spec.shape.width) or spec.shape.width
    rows, length = replica.batch_size // replica.micro_batches, spec.config.data.sequence_length
    if (peer := ablations_of(spec.config, replica).peer) is not None:
        return max(bytes_per_token(peer, replica.boundary, spec.shape.width, replica.batch_size * length))
    return format_of(replica.boundary).wire_bytes((rows, length, rank)) / (rows * length)


class Checkpoint:
    """At most one saved state of the run `run`, in `path`, from which an interrupted row resumes."""

    def __init__(self, path: Path, run: str, seconds: float) -> None:
        self.path, self.run = path, run
        self.seconds = seconds  # seconds between two saves of the state
        self._saved = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """Return the last saved state, on the CPU; None if there is none.

        Raises ConfigError if the file belongs to another run.
        """
        for part in self.path.parent.glob(f"{self.path.name}.*{PART}"):  # of a killed writer
            part.unlink(missing_ok=True)
        if not self.path.exists():
            return None
        found: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
        if found["run"] != self.run:
            told = "found the checkpoint of another configuration; delete it to start from the beginning"
            raise ConfigError((), f"{self.path}: {told}")
        return found

    def is_due(self) -> bool:
        """Return whether it is time to save."""
        return time.monotonic() - self._saved >= self.seconds

    def save(self, round_: int, state: dict[str, Any]) -> None:
        """Save the state after a round atomically: no reader sees half of it.

        If the file cannot be written, the previous save stays, and the next due save tries again.
        """
        self._saved = time.monotonic()
        part = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}{PART}")
        try:
            with naming(self.path):
                part.parent.mkdir(parents=True, exist_ok=True)
                save_object({"run": self.run, "round": round_, **state}, part)
                flush(part)
                part.replace(self.path)
                flush(self.path.parent)
        except OSError as error:
            told = "training continues, and the next checkpoint is saved on schedule"
            print(f"{complaint(error)}; {told}", file=sys.stderr, flush=True)
        with suppress(OSError):  # the part was renamed, or never made
            part.unlink()

    def remove(self) -> None:
        """Remove the file at the end of the run, if its disk allows it."""
        with suppress(OSError):
            self.path.unlink()


class AllReplicas:
    """All replicas of a run, and theta."""

    def __init__(
        self,
        spec: RunSpec,
        source: Source,
        compiles: bool = False,
        every: Every = UNMEASURED,
        device: torch.device = CPU,
    ) -> None:
        """The arguments are those of `train_fast`."""
        if every.bias is not None:
            require_equal_rounds(spec)
        self.spec, self.every = spec, every
        self.research = research_of(spec.config)
        self.inner_steps = spec.config.inner.require_steps("tables are trained without a clock")
        self.count = len(spec.config.replicas)
        checkpoint = first_checkpoint(spec)
        firsts = {member.replica.name: member for member in reversed(spec.members.values())}
        members = [firsts[replica.name] for replica in spec.config.replicas]
        self.settings: list[ReplicaSettings] = [member.replica for member in members]
        self.batches: list[SharedBatches] = [table_batches(spec, member, source)[0] for member in members]
        self.validation = [tokens.to(device) for tokens in table_batches(spec, members[0], source)[1]]
        self.replicas = [build_whole(spec, member, checkpoint, device) for member in members]
        self.is_compiled = compiles and can_compile(device)
        if self.is_compiled:
            compile_layers(replica.module for replica in self.replicas)
        self.theta = {name: tensor.to(device, copy=True) for name, tensor in checkpoint.parameters.items()}
        self.measured = Measured(spec, every, device)
        of = spec, [own.name for own in self.settings], self.theta, self.measured
        attacks = self.research.attacks
        self.contributions = (
            Contributions(*of) if attacks is None else HostileContributions(*of, settings=attacks, batches=self.batches)
        )
        outer, pretraining = spec.config.outer, self.research.pretraining
        self.outer = PretrainedOptimizer(outer, pretraining) if pretraining else OuterOptimizer(outer)
        self.bias: list[tuple[int, float]] = []
        self.ahead: list[dict[str, Tensor]] = []
        """With overlap, between rounds: the pseudo-gradient of the round that each replica has already trained."""
        self.own: list[dict[str, Tensor]] = [{} for _ in self.replicas]
        """In fragments: each replica's parameters after its last inner loop, where they differ from theta."""
        self.local: dict[int, dict[str, Tensor]] = {}
        """With keep_local, between rounds: the parameters of each replica that the last round excluded."""
        self.own_embeddings: dict[int, Tensor] = {}
        """Embedding at which a replica starts if its boundary discards the part outside the subspace (an ablation)."""
        if self.research.warms_up_again:
            since, warmup = pretraining * self.inner_steps, spec.config.inner.warmup_steps or 0
            for replica in self.replicas:
                replica.optimizer.follow(RenewedWarmup(replica.optimizer.rates, since, warmup))
        self._weights = Weights(spec, source)
        self._enter(1)
        self._split()

    def _enter(self, round_: int) -> None:
        self.deaths = deaths_in(round_, self.spec)  # groups that lose a stage in the current round, by name
        self.taking_part = self._taking_part_in(round_)
        """Indices of the replicas that take part in the current or last round."""
        self.weights = self._weights.in_round(round_)  # weight of every replica, by name, in the current or last round

    def _taking_part_in(self, round_: int) -> list[int]:
        names = {one.name for one in replicas_in(self.spec.config, round_)} - self.contributions.barred(round_)
        return [index for index, own in enumerate(self.settings) if own.name in names]

    @property
    def errors(self) -> list[dict[str, Tensor]]:
        """Error feedback of each replica, by parameter."""
        return self.contributions.errors

    def read_ahead(self, round_: int) -> None:
        """Read a round's batches ahead.

        Raises ConfigError if the text of a replica ends before the round does. The state is then that
        of the previous round.
        """
        last = min(round_ + self.outer.settings.overlap, self.spec.config.rounds)
        first = round_ + 1 if self.ahead else round_
        for index in self._taking_part_in(round_):
            self.batches[index].read_ahead(range(self._steps(first).start, self._steps(last).stop))

    def _steps(self, round_: int) -> range:
        return range((round_ - 1) * self.inner_steps, round_ * self.inner_steps)

    def round(self, round_: int) -> bool:
        """Run H inner steps on every replica, and the outer round; return False if training diverged.

        With overlap, runs the inner steps of the next round while this round's mean is on its way.
        """
        if self.outer.settings.overlap or self.outer.settings.is_streaming:
            return self._waiting_round(round_)
        steps = self._steps(round_)
        self._enter(round_)
        for index in self.taking_part:
            self.replicas[index].enter_round(round_)
            self.batches[index].take(share_of(self.spec, self.settings[index].name, round_), steps.start)
        for index, local in self.local.items():
            _copy(local, self.replicas[index].parameters)
        self.local = {}
        meter = None
        if self.every.bias is not None and round_ % self.every.bias == 0:
            fresh = self.inner_steps * self.spec.config.rounds
            meter = BiasMeter(self.replicas, self.batches, steps, fresh, len(self._compressed))
        if not self._inner_steps(steps):
            return False
        if meter is not None:
            self.bias.append((round_, meter.share(self.theta)))
        if self.outer.settings.source == "difference":
            self._synchronise(round_)
        if self.research.averages_moments:
            self._average_moments()
        self._move_basis(round_)
        self._split()
        return True

    def _waiting_round(self, round_: int) -> bool:
        """Run a round with overlap or in fragments: the steps of OuterRound in the same order, on all replicas."""
        settings, names = self.outer.settings, self._names_in(round_)
        if not self.ahead and not self._train_ahead(round_, self.own):
            return False
        means, starts = self._contribute(round_, names)
        if settings.is_streaming:
            for own, start in zip(self.own, starts, strict=True):
                own.update(start)
        self.ahead = []
        is_ahead = settings.overlap and round_ < self.spec.config.rounds
        if is_ahead and not self._train_ahead(round_ + 1, self.own if settings.is_streaming else starts):
            return False
        self.outer.begin(round_, self.weights)
        for name in names:
            self.outer.take(self.theta, name, means[name])
            for own in self.own:
                mine = own.pop(name, None)
                if mine is not None and settings.mixing:
                    own[name] = mine * settings.mixing + self.theta[name] * (1 - settings.mixing)
        for replica in self.replicas:
            replica.enter_round(round_)
            _copy(self.theta, replica.parameters)
        average_peers([replica.peer for replica in self.replicas])
        self._move_basis(round_)
        self._split()
        return True

    def _names_in(self, round_: int) -> list[str]:
        blocks = self.spec.fragments.among({block_of(name) for name in self.theta}, round_)
        return [name for name in self.theta if block_of(name) in blocks]

    def _train_ahead(self, round_: int, starts: Sequence[Mapping[str, Tensor]]) -> bool:
        """Run a round's inner steps from each replica's own start, theta where it has none.

        Return False if a replica diverged.
        """
        whole = [{**self.theta, **start} for start in starts]
        for replica, start in zip(self.replicas, whole, strict=True):
            replica.enter_round(round_)
            _copy(start, replica.parameters)
            # T_perp is of theta's embedding, and the coefficients are of the replica's own.
            replica.optimizer.perpendicular = replica.optimizer.perpendicular
        if not self._inner_steps(self._steps(round_)):
            return False
        with torch.no_grad():
            trained = [{name: one.detach() for name, one in own.parameters.items()} for own in self.replicas]
            if self.outer.settings.is_streaming:
                self.own = [{name: one.clone() for name, one in own.items()} for own in trained]
                whole = [self.theta] * len(whole)
            self.ahead = [
                {name: start[name] - own[name] for name in self._names_in(round_)}
                for start, own in zip(whole, trained, strict=True)
            ]
        return True

    @torch.no_grad()
    def _contribute(self, round_: int, names: Sequence[str]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """Return the means of the contributions trained ahead, and each replica's start of the next round."""
        self.contributions.begin(round_, self.weights)
        outer, means = self.outer.settings, {}
        starts: list[dict[str, Tensor]] = [{} for _ in self.replicas]
        for name in names:
            means[name], sent = self.contributions.mean(name, enumerate(own[name] for own in self.ahead))
            for index, values in enumerate(sent):
                if outer.is_streaming:  # exactly its own values if every value is sent
                    before, own = self.ahead[index][name], self.own[index][name]
                    starts[index][name] = start_before_mean(before, values, outer).add_(own)
                else:
                    starts[index][name] = start_before_mean(self.theta[name], values, outer)
        self.contributions.finish()
        return means, starts

    def _inner_steps(self, steps: range) -> bool:
        """Run inner steps on the replicas that take part; return False if one of them diverged."""
        dying = {index: death for index in self.taking_part if (death := self.deaths.get(self.settings[index].name))}
        saved = {index: self._moments_of(index, death) for index, death in dying.items()}
        for step in steps:
            if self.outer.settings.source == "gradient":
                self._synchronous_step(step)
                continue
            for index in self.taking_part:
                if index in dying and self.research.undoes_deaths:
                    continue
                _, norm, _ = self.replicas[index].inner_step(self.batches[index].train(step), step)
                if not math.isfinite(norm):
                    return False
                if index in dying and step + 1 - steps.start == dying[index].step:
                    self._replace(index, saved[index])
        return True

    def _moments_of(self, index: int, death: Death) -> dict[str, dict[str, Any]]:
        """Return the moments of a stage of a group, by parameter. A parameter without any has not been trained."""
        states = _states(self.replicas[index])
        return {
            name: {kind: one.clone() if isinstance(one, Tensor) else one for kind, one in states.get(name, {}).items()}
            for name in death.parameters
        }

    @torch.no_grad()
    def _replace(self, index: int, moments: Mapping[str, Mapping[str, Any]]) -> None:
        """Let another holder of a stage begin, from theta and from the moments before the round."""
        replica = self.replicas[index]
        for name, before in moments.items():
            replica.parameters[name].copy_(self.theta[name])
            for optimizer in replica.optimizer.optimizers:
                if replica.parameters[name] in optimizer.state:
                    optimizer.state[replica.parameters[name]] = dict(before)

    @torch.no_grad()
    def _synchronise(self, round_: int) -> None:
        """Run the outer round, parameter by parameter."""
        self.contributions.prepare(round_, self._deltas)
        self.contributions.begin(round_, self.weights)
        self.outer.begin(round_, self.weights)
        missed = self.contributions.missed if self.outer.settings.keep_local else frozenset()
        self.local = {
            index: {name: tensor.detach().clone() for name, tensor in self.replicas[index].parameters.items()}
            for index, own in enumerate(self.settings)
            if own.name in missed
        }
        for name, start in self.theta.items():
            mean = self.contributions.mean(name, self._deltas(name))[0]
            self.outer.take(self.theta, name, mean)
            for replica in self.replicas:
                replica.parameters[name].copy_(start)
        self.contributions.finish()
        average_peers([replica.peer for replica in self.replicas])

    def _deltas(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the pseudo-gradients of one parameter, of all replicas that contribute, by index."""
        for index in self.taking_part:
            is_undone = self.research.undoes_deaths and self.settings[index].name in self.deaths
            if index not in self.local and not is_undone:
                is_own = name == EMBEDDING and index in self.own_embeddings
                start = self.own_embeddings[index] if is_own else self.theta[name]
                yield index, start - self.replicas[index].parameters[name]

    def _synchronous_step(self, step: int) -> None:
        """Take one step of a synchronous method (`outer.source: gradient`).

        Het-PP (section 2.4) constrains the embedding of a compressed replica between two synchronizations: T_perp is
        fixed, and T_S may be kept in the subspace. Equations 3 and 4 then move what the mean of all replicas has
        outside of the subspace into T_perp. A synchronous method is read as the special case H = 1: each replica takes
        one step from the same parameters by the mean gradient, within its own constraint. The parameters of all
        replicas are then averaged, as in a round with outer learning rate 1. Table 4 of the paper leaves this open. A
        constraint on all replicas would freeze T_perp, and no constraint would let compressed replicas leave the
        subspace.
        """
        for replica, batches in zip(self.replicas, self.batches, strict=True):
            replica.backward(batches.train(step), step)
        with torch.no_grad():
            self._step_by_mean(step)
        for replica in self.replicas:
            replica.step_own(step)
        self._split()

    def _step_by_mean(self, step: int) -> None:
        """Give all replicas the mean of their steps by the mean gradient, clipped by its norm, and no gradients."""
        first, *others = self.replicas
        means: dict[str, Tensor] = {}
        for name, parameter in first.parameters.items():
            assert parameter.grad is not None
            for other in others:
                theirs = other.parameters[name].grad
                assert theirs is not None
                parameter.grad += theirs
                other.parameters[name].grad = None
            parameter.grad /= self.count
            means[name] = parameter.grad
        # The first replica of each kind steps for all of its kind, so one optimizer state is enough.
        keys = [constraint_of(one) for one in self.spec.config.replicas]
        kinds = [(keys.index(key), keys.count(key) / self.count) for key in dict.fromkeys(keys)]
        steppers = [self.replicas[index] for index, _ in kinds]
        for replica in steppers:
            for name, parameter in replica.parameters.items():
                parameter.grad = means[name].clone() if len(steppers) > 1 else means[name]  # clipped in place
            replica.optimizer.step(step, replica.optimizer.gradient_norm())
        for name, parameter in first.parameters.items():
            # start + sum of differences, not a weighted sum: equal values keep their bits
            start = mean = self.replicas[kinds[0][0]].parameters[name].detach()
            for index, share in kinds[1:]:
                mean = mean + (self.replicas[index].parameters[name] - start) * share
            for replica in self.replicas:
                replica.parameters[name].copy_(mean)
            parameter.grad = None

    @torch.no_grad()
    def _average_moments(self) -> None:
        """Replace each moment of each parameter by its weighted mean over all replicas (DiLoCo, section 6.1).

        Over the network this would triple the bytes, and contributions hold no moments.
        """
        states = [_states(replica) for replica in self.replicas]
        for name in self.theta:
            for kind in MOMENTS:
                total = torch.zeros_like(states[0][name][kind])
                for settings, own in zip(self.settings, states, strict=True):
                    total += own[name][kind] * self.weights[settings.name]
                total /= sum(self.weights.values())
                for own in states:
                    own[name][kind].copy_(total)

    @torch.no_grad()
    def _split(self) -> None:
        for index, replica in enumerate(self.replicas):
            replica.split_embedding()
            if isinstance(replica.boundary, AblatedBoundary) and replica.boundary.discards:
                self.own_embeddings[index] = replica.parameters[EMBEDDING].detach().clone()

    @torch.no_grad()
    def _move_basis(self, round_: int) -> None:
        """Update the one basis U [D, K] that all replicas share by a Grassmann step of one of them (an ablation)."""
        every = self.research.ablations.grassmann_every
        if every is None or round_ % every or not self._compressed:
            return
        boundary = self.replicas[self._compressed[0]].boundary
        assert isinstance(boundary, AblatedBoundary)
        assert boundary.basis is not None and boundary.last_gradient is not None
        step = self.research.ablations.grassmann_step
        moved = grassmann_step(boundary.basis, boundary.last_gradient.flatten(0, 1), step)
        for replica in self.replicas:
            replica.move_basis(moved)

    def state(self) -> dict[str, Any]:
        """Return everything that the next round depends on; save it before continuing, as its tensors are in use."""
        return {
            "theta": self.theta,
            "errors": self.errors,
            "contributions": self.contributions.state(),
            "momentum": self.outer.momentum,
            "own_embeddings": self.own_embeddings,
            "ahead": self.ahead,
            "own": self.own,
            "local": self.local,
            "bias": self.bias,
            "measured": self.measured.state(),
            "replicas": [replica.state() for replica in self.replicas],
            "batches": [batches.state() for batches in self.batches],
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Resume from the result of `state`, in a group of the same run."""
        device = self.theta[EMBEDDING].device

        def here(tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
            return {key: tensor.to(device) for key, tensor in tensors.items()}

        _copy(state["theta"], self.theta)
        for error, saved in zip(self.errors, state["errors"], strict=True):
            _copy(saved, error)
        self.outer.momentum = here(state["momentum"])
        self.own_embeddings = here(state["own_embeddings"])
        self.ahead = [here(ahead) for ahead in state["ahead"]]
        self.own = [here(own) for own in state["own"]]
        self.local = {index: here(local) for index, local in state["local"].items()}
        self.bias = state["bias"]
        self.measured.load(state["measured"])
        self.contributions.load(state["contributions"])
        for replica, saved in zip(self.replicas, state["replicas"], strict=True):
            replica.load(saved)
        for batches, saved in zip(self.batches, state["batches"], strict=True):
            batches.load(saved)

    def evaluate(self, rows: Sequence[Tensor] | None = None) -> float:
        """Return the mean loss over the participating replicas, each in its own forward.

        Equal forwards run once. `rows`: batches [b, L + 1], here and below; the validation rows if None.
        """
        losses: dict[object, float] = {}
        own = []
        for index in self.taking_part:
            key = forward_of(self.settings[index])
            if key not in losses:
                losses[key] = self.replicas[index].evaluate(rows or self.validation)
            own.append(losses[key])
        return sum(own) / len(own)

    @torch.no_grad()
    def evaluate_uncompressed(self, rows: Sequence[Tensor] | None = None) -> float:
        """Return the loss of the synced model without any boundary.

        Uses the synced embedding, because a replica may have discarded a part of its own.
        """
        plain = WholeReplica("plain", self.replicas[0].module, self.spec.config.inner, self.spec.total_steps)
        own, embedding = self.own_embeddings.get(0), plain.parameters[EMBEDDING]
        if own is not None:
            embedding.copy_(self.theta[EMBEDDING])
        loss = plain.evaluate(rows or self.validation)
        if own is not None:
            embedding.copy_(own)
        return loss

    def evaluate_compressed(self, rows: Sequence[Tensor] | None = None) -> float | None:
        """Return the loss in the forward of the first compressed replica; None if there is none."""
        if not self._compressed:
            return None
        return self.replicas[self._compressed[0]].evaluate(rows or self.validation)

    @property
    def _compressed(self) -> list[int]:
        """Indices of the replicas that send less than all of their activations."""
        has_peer = self.research.ablations.peer is not None
        return [
            index
            for index, replica in enumerate(self.spec.config.replicas)
            if isinstance(replica, ParticipantsReplica) and replica.stage_count > 1
            if replica.boundary.rank != "full" or has_peer
        ]


@dataclass(frozen=True)
class RenewedWarmup:
    """Learning rates that rise linearly once more, from step `since` on (DiLoCo, section 3.1)."""

    rates: LearningRates
    since: int
    steps: int

    def at(self, step: int) -> float:
        rate = self.rates.at(step)
        return rate if step < self.since else rate * min(1.0, (step - self.since + 1) / max(1, self.steps))


def _states(replica: TableReplica) -> dict[str, dict[str, Tensor]]:
    """Return the optimizers' state of each parameter, by the parameter's name."""
    kept = {id(tensor): state for one in replica.optimizer.optimizers for tensor, state in one.state.items()}
    return {name: kept[id(parameter)] for name, parameter in replica.parameters.items() if id(parameter) in kept}


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])
