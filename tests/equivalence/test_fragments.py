"""Fragments: a plain loop of Streaming DiLoCo, numbers by hand, and equal bits in process, over gRPC and in tables."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from members import TIMEOUT
from started import run_program, run_script
from table_config import table_config, tiny
from torch import Tensor, nn

from hetero_pp.config.checkpoint import open_checkpoint
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile, read_run
from hetero_pp.core.errors import ConfigError, Suspended
from hetero_pp.data.batches import StoreBatches
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.messages.messages_pb2 import BlobHeader, Report, RoundRecord
from hetero_pp.model.inner import InnerSettings, SubspaceOptimizer
from hetero_pp.model.transformer import EMBEDDING, Transformer, initialise
from hetero_pp.outer.fragments import Fragments
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import OuterOptimizer
from hetero_pp.program.launch import in_process
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import split_blobs
from hetero_pp.research.trainer.replica import TableReplica
from hetero_pp.research.trainer.train import AllReplicas, Checkpoint, train_fast
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.store.faults import FaultPhase, Faults
from hetero_pp.store.folder import FolderStore
from replica_groups.engines.engine import LocalParameters
from replica_groups.exchange import runner
from replica_groups.exchange.log import ContributionLog
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession
from replica_groups.member.trainers import StageMember
from stages.stage import Stage

H, ROUNDS, LAYERS, SEED = 2, 6, 4, 5
LAUNCH_WITH_FAULTS = Path(__file__).parents[2] / "benchmarks/launch_with_faults.py"
YAML = Path(__file__).with_name("mixed.yaml")
INNER = InnerSettings(steps=H, learning_rate=0.01, warmup_steps=3)
DC = {"kind": "datacenter", "batch_size": 2}
HOME = {"name": "home", "kind": "participants", "stages": 4, "batch_size": 2}


def _config(corpus: Path, outer: Mapping[str, Any], replicas: list[dict[str, Any]]) -> RunConfig:
    return table_config(
        {
            **tiny(corpus, 16, LAYERS, SEED),
            "inner": INNER.model_dump(exclude_unset=True),
            "outer": {"rounds": ROUNDS, **outer},
            "checkpoints": {"every": 1, "keep": ROUNDS},
            "replicas": replicas,
        }
    )


def _thetas(run: Path) -> list[Mapping[str, Tensor]]:
    names = (f"checkpoint-{round_:06d}.safetensors" for round_ in range(1, ROUNDS + 1))
    return [open_checkpoint(run / "log" / name).checkpoint().parameters for name in names]


# ---- Streaming DiLoCo as a plain loop ----


class PlainReplica:
    """A model, AdamW and its text."""

    def __init__(self, spec: RunSpec, store: Any, index: int) -> None:
        self.model = Transformer(spec.shape)
        initialise(self.model, SEED)
        self.x = dict(sorted(self.model.named_parameters()))
        groups = [
            {"params": [p for p in self.x.values() if (p.ndim > 1) == is_matrix], "weight_decay": decay}
            for is_matrix, decay in ((True, 0.1), (False, 0.0))
        ]
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        shape = {"store": store, "sequence_length": 16, "seed": SEED, "replicas": 2, "batch_size": 2}
        self.batches = StoreBatches(replica=index, **shape)

    def train(self, round_: int) -> None:
        for step in range((round_ - 1) * H, round_ * H):
            tokens = self.batches.train(step)
            F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(list(self.x.values()), 1.0)
            for group in self.adamw.param_groups:
                group["lr"] = INNER.rates(H * ROUNDS).at(step)
            self.adamw.step()
            self.adamw.zero_grad()


def _fragment(name: str, count: int, pattern: str) -> int:
    if name.startswith("layers."):
        layer = int(name.split(".")[1])
        return layer % count if pattern == "strided" else layer * count // LAYERS
    return 0 if name == EMBEDDING else count - 1


@torch.no_grad()
def _plain_loop(spec: RunSpec, folder: Path, excluded: Mapping[int, int]) -> list[dict[str, Tensor]]:
    """Return theta after each round of Streaming DiLoCo. `excluded`: round -> index of a replica without effect."""
    outer = spec.config.outer
    store = prepare_tokens(spec.config.data, folder)
    replicas = [PlainReplica(spec, store, index) for index in range(2)]
    theta = {name: p.detach().clone() for name, p in replicas[0].x.items()}
    momentum: dict[str, Tensor] = {}
    found = []
    for round_ in range(1, ROUNDS + 1):
        if round_ == 1 or not outer.overlap:
            for one in replicas:
                with torch.enable_grad():
                    one.train(round_)
        synchronised = [
            name for name in theta if _fragment(name, outer.fragments, outer.pattern) == (round_ - 1) % outer.fragments
        ]
        deltas = [{name: theta[name] - one.x[name] for name in synchronised} for one in replicas]
        if outer.overlap and round_ < ROUNDS:
            for one in replicas:
                with torch.enable_grad():
                    one.train(round_ + 1)
        included = [delta for index, delta in enumerate(deltas) if index != excluded.get(round_)]
        for name in synchronised:
            mean = torch.stack([delta[name] for delta in included]).sum(0) / len(included)
            momentum[name] = 0.9 * momentum[name] + mean if name in momentum else mean
            theta[name] = theta[name] - 0.7 * (mean + 0.9 * momentum[name])
            for one in replicas:
                one.x[name].copy_(one.x[name] * outer.mixing + theta[name] * (1 - outer.mixing))
        found.append(dict(theta))
    return found


def _assert_plain(
    corpus: Path, folder: Path, outer: Mapping[str, Any], excluded: Mapping[int, int], **how: Any
) -> None:
    torch.set_num_threads(1)
    spec = RunSpec(_config(corpus, {"method": "diloco", **outer}, [{**DC, "name": name} for name in ("a", "b")]), 256)
    run_in_process(spec, RunFolder(folder / "run"), lambda _: None, **how)
    for round_, (found, expected) in enumerate(
        zip(_thetas(folder / "run"), _plain_loop(spec, folder, excluded), strict=True), 1
    ):
        for name, theta in expected.items():
            assert found[name].equal(theta), f"{name} after round {round_}"


@pytest.mark.parametrize(
    ("fragments", "overlap", "mixing", "pattern"),
    list(product((2, 3), (0, 1), (0, 0.5), ("strided", "sequential"))),
)
def test_two_datacenter_replicas_are_a_plain_loop(
    fragments: int, overlap: int, mixing: float, pattern: str, corpus: Path, tmp_path: Path
) -> None:
    outer = {"fragments": fragments, "overlap": overlap, "mixing": mixing, "pattern": pattern}
    _assert_plain(corpus, tmp_path, outer, {})


@pytest.mark.parametrize(("overlap", "mixing"), [(0, 0.0), (0, 0.25), (1, 0.25)])
def test_a_late_contribution_is_without_effect_and_its_replica_goes_on(
    overlap: int, mixing: float, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = in_process._ThreadFaults.reached

    def waits(own: Any, phase: FaultPhase, round_: int) -> None:
        """Let `a` contribute to round 4 once `b` takes part in it: otherwise the round may close without `b`, too."""
        if (phase, round_, own._member.name) == (FaultPhase.EVALUATING, 3, "a"):
            runner = own._run.exchange.runner
            with runner.changed:
                assert runner.changed.wait_for(lambda: "b" in runner.coordinator.open.taking_part, TIMEOUT)
        reached(own, phase, round_)

    monkeypatch.setattr(in_process._ThreadFaults, "reached", waits)
    outer = {"fragments": 2, "overlap": overlap, "mixing": mixing}
    _assert_plain(corpus, tmp_path, outer, {3: 1}, missed={"b": frozenset({3})})


@pytest.mark.parametrize(("overlap", "mixing"), [(0, 0.0), (1, 0.5)])
def test_a_rejected_contribution_is_without_effect_and_its_replica_goes_on(
    overlap: int, mixing: float, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rejects(record: RoundRecord, *others: object) -> None:
        if record.round == 3:
            kept = [one for one in record.contributions if one.replica != "a"]
            del record.contributions[:]
            record.contributions.extend(kept)
            record.left_out.append("a")

    monkeypatch.setattr(runner, "bound", rejects)
    _assert_plain(corpus, tmp_path, {"fragments": 2, "overlap": overlap, "mixing": mixing}, {3: 0})


# ---- numbers by hand ----


class SharedSession(MemberSession):
    """A session of one of two replicas whose exchange holds the contributions of both, and answers at once."""

    def __init__(self, replica: str, blobs: dict[tuple[int, str, str], bytes], overlaps: bool) -> None:
        super().__init__(None, replica, replica, "run", overlaps=overlaps)
        self.blobs = blobs

    def deposit_blob(self, header: BlobHeader, data: bytes, caller: Caller) -> None:
        self.blobs.update({(one.round, one.replica, one.block): part for one, part in split_blobs(header, data)})

    def record(self, round_: int, member: str | Caller | None = None) -> RoundRecord:
        record = RoundRecord(round=round_)
        for own in sorted({replica for number, replica, _ in self.blobs if number == round_}):
            entry = record.contributions.add(replica=own, weight=1.0, generation=1)
            for (number, replica, block), data in self.blobs.items():
                if (number, replica) == (round_, own):
                    entry.blobs.add(block=block, sha256=hashlib.sha256(data).digest())
        return record

    def fetch(self, member: str | Caller, round_: int, replica: str, block: str) -> bytes:
        return self.blobs[round_, replica, block]

    def confirm(self, member: str | Caller, round_: int, sha256: Mapping[str, bytes]) -> None: ...

    def carry(self, round_: int, blocks: Any) -> None: ...

    def give_up_carried(self) -> None: ...


@pytest.mark.parametrize(
    ("overlap", "mixing", "expected"),
    [
        # theta of both parameters after each round
        (0, 0.0, [(6.5, 16.0), (6.5, 11.5), (3.25, 11.5), (3.25, 6.25)]),
        (0, 0.5, [(6.5, 16.0), (6.5, 11.5), (3.0625, 11.5), (3.0625, 5.6875)]),
        (1, 0.5, [(6.5, 16.0), (6.5, 11.5), (3.8125, 11.5), (3.8125, 6.8125)]),
        (1, 0.25, [(6.5, 16.0), (6.5, 11.5), (4.28125, 11.5), (4.28125, 7.65625)]),
    ],
)
def test_it_has_the_numbers_of_torchft(overlap: int, mixing: float, expected: list[tuple[float, float]]) -> None:
    """`sync_every` is two rounds in two fragments, `fragment_sync_delay` none or one round, and alpha is `mixing`.

    Two scalars start at 8 and 16. In each round replica a moves them by -1 and -2, replica b by -3 and -4. The outer
    optimizer is SGD with rate 1/2, Nesterov and momentum 1/2. With delay and alpha 1/2, for example:

        round 1: a (7, 14), b (5, 12); first parameter: mean (1 + 3) / 2 = 2, direction 2 + 2 / 2 = 3
                 theta 8 - 3 / 2 = 6.5; meanwhile a trains to 6 and b to 2, which become 6.25 and 4.25
        round 2: second: mean (2 + 4 + 2 + 4) / 2 = 6, direction 9, theta 11.5
        round 3: first: a 5.25, b 1.25; mean 3.25, momentum 4.25, direction 5.375, theta 3.8125
        round 4: second: a 8.75, b 3.75; mean 5.25, momentum 8.25, direction 9.375, theta 6.8125
    """
    settings = OuterSettings(
        rounds=4, method="diloco", learning_rate=0.5, momentum=0.5, fragments=2, overlap=overlap, mixing=mixing
    )
    start = {"layers.0.w": torch.tensor([8.0]), "layers.1.w": torch.tensor([16.0])}
    moves = {"a": (-1.0, -2.0), "b": (-3.0, -4.0)}
    blobs: dict[tuple[int, str, str], bytes] = {}
    held = {name: {key: nn.Parameter(one.clone()) for key, one in start.items()} for name in moves}
    outers = {
        name: OuterRound(
            SharedSession(name, blobs, overlap > 0),
            LocalParameters(held[name]),
            start,
            settings,
            fragments=Fragments(2, "strided", 2),
        )
        for name in moves
    }

    @torch.no_grad()
    def train(name: str, round_: int) -> None:
        for parameter, move in zip(held[name].values(), moves[name], strict=True):
            parameter.add_(move)
        if overlap:
            outers[name].end_inner_loop(round_)

    def ahead(name: str, round_: int) -> None:
        if overlap:
            outers[name].start_ahead()
            train(name, round_ + 1)

    for round_, values in enumerate(expected, 1):
        for name, outer in outers.items():
            outer.start_streaming(is_trained=overlap > 0 and round_ > 1)
            if not overlap or round_ == 1:
                train(name, round_)

        def others(round_: int = round_) -> None:
            ahead("a", round_)
            outers["b"].synchronise(round_, 1, 1, lambda: ahead("b", round_))

        outers["a"].synchronise(round_, 1, 1, others)
        for name, outer in outers.items():
            assert tuple(tensor.item() for tensor in outer.theta.values()) == values, f"round {round_}"
            assert tuple(parameter.item() for parameter in held[name].values()) == values  # to be evaluated


SPARSE = OuterSettings(
    rounds=4,
    fragments=2,
    compression=CompressionSettings(density=1 / 8, tile=(8, 8), value_bits=32, quantiser="levels"),
)
START = {f"layers.{layer}.w": torch.linspace(-1, 1, 256).reshape(16, 16) for layer in (0, 1)}


def _sparse(name: str, blobs: dict[tuple[int, str, str], bytes], overlap: int) -> OuterRound:
    """Return the outer round of a replica with two layers of one matrix each."""
    held = LocalParameters({name: nn.Parameter(one.clone()) for name, one in START.items()})
    settings = SPARSE.model_copy(update={"overlap": overlap})
    session = SharedSession(name, blobs, overlap > 0)
    return OuterRound(session, held, START, settings, fragments=Fragments(2, "strided", 2))


@torch.no_grad()
def _train(outer: OuterRound, round_: int) -> None:
    """Change the parameters at random, as the inner loop of a round."""
    random = torch.Generator().manual_seed(round_)
    for name, shape in outer.parameters.shapes.items():
        now = outer.parameters.read(name, outer.part.rows[name])
        outer.parameters.write(name, now + 0.01 * torch.randn(shape, generator=random))
    if outer.settings.overlap:
        outer.end_inner_loop(round_)


def _round(outer: OuterRound, round_: int, is_trained: bool = True) -> None:
    """Run a round, and with overlap train the next one ahead."""
    outer.start_streaming(is_trained)
    if not is_trained:
        _train(outer, round_)

    def ahead() -> None:
        if outer.settings.overlap:
            outer.start_ahead()
            _train(outer, round_ + 1)

    outer.synchronise(round_, 1, 1, ahead)


@pytest.mark.parametrize("stops", [False, True], ids=["its group loses a stage", "it stops and resumes"])
def test_a_contribution_that_is_repeated_leaves_the_same_start(stops: bool, tmp_path: Path) -> None:
    """The round that was trained ahead of it is dropped."""
    undisturbed, broken = (_sparse("a", {}, 1) for _ in range(2))
    for one in (undisturbed, broken):
        _round(one, 1, is_trained=False)

    def breaks_off() -> None:
        broken.start_ahead()
        raise Suspended("a neighbour is gone")

    broken.start_streaming(is_trained=True)
    with pytest.raises(Suspended):
        broken.synchronise(2, 1, 1, breaks_off)
    broken.undo()
    if stops:
        broken.feedback.take_back()
        broken.save(tmp_path)
        session = broken.session
        assert isinstance(session, SharedSession)
        broken = _sparse("a", session.blobs, 1)
        broken.apply(session.record(1), None)
        broken.load(tmp_path)
    for round_ in (2, 3):
        for one in (undisturbed, broken):
            _round(one, round_)
        for name, theta in undisturbed.theta.items():
            assert broken.own.before[name].equal(undisturbed.own.before[name]), f"{name} in round {round_}"
            assert broken.own.after[name].equal(undisturbed.own.after[name])
            assert broken.error[name].equal(undisturbed.error[name])
            assert broken.theta[name].equal(theta)


@pytest.mark.parametrize("is_audited", [False, True])
def test_a_run_checkpoint_takes_the_place_of_missed_rounds_alone(is_audited: bool) -> None:
    """The replica goes on as if it had applied the rounds. An audited state stays as it was committed to."""
    blobs: dict[tuple[int, str, str], bytes] = {}
    applies, reads, other = (_sparse(name, blobs, 0) for name in ("a", "a", "b"))
    for one in (applies, reads):
        one.on_compressed = (lambda round_, steps: None) if is_audited else None
        _round(one, 1, is_trained=False)
    committed = {name: tensor.clone() for name, tensor in reads.own.before.items()}
    for round_ in (2, 3):
        _train(other, round_)
        other.contribute(round_, 1, 1)
    applies.catch_up(range(2, 4), range(2, 4))
    reads.reset(applies.theta, applies.optimizer.state, 3, range(2, 4))
    for one in (applies, reads):
        one.start_streaming(is_trained=False)
    for name, own in committed.items():
        goes_on = not is_audited and name == "layers.1.w"  # the other one was contributed to round 1
        torch.testing.assert_close(reads.own.before[name], applies.own.before[name], atol=1e-6, rtol=0)
        assert goes_on != reads.own.before[name].equal(own)
        rows = reads.part.rows[name]
        now, expected = reads.parameters.read(name, rows), applies.parameters.read(name, rows)
        torch.testing.assert_close(now, expected, atol=1e-6, rtol=0)
        assert goes_on != now.equal(reads.theta[name])
    reads.reset(applies.theta, applies.optimizer.state, 3)  # its bits differed
    assert not reads.own.before


class Reached(Faults):
    """Notes the phases that a member reaches."""

    def __init__(self) -> None:
        self.phases: list[tuple[FaultPhase, int]] = []

    def reached(self, phase: FaultPhase, round_: int) -> None:
        self.phases.append((phase, round_))


def test_a_stage_that_contributes_nothing_reaches_every_phase() -> None:
    session = MemberSession(MagicMock(), "home.2", "home", "run", faults=(faults := Reached()))
    for round_ in (1, 2):
        session.contribute(round_, iter(()), 1, 3)
        session.record_of(round_)
    phases = FaultPhase.CONTRIBUTING, FaultPhase.WAITING
    assert faults.phases == [(phase, round_) for round_ in (1, 2) for phase in phases]


def test_a_stage_that_contributes_nothing_knows_that_it_trained_ahead(tmp_path: Path) -> None:
    """Its group goes on only from a round that all of its stages have."""

    def stage() -> OuterRound:
        start = {"layers.1.w": torch.tensor([16.0])}
        settings = OuterSettings(rounds=4, method="diloco", fragments=2, overlap=1)
        held = LocalParameters({name: nn.Parameter(one.clone()) for name, one in start.items()})
        return OuterRound(SharedSession("a", {}, True), held, start, settings, fragments=Fragments(2, "strided", 2))

    saved, resumed = stage(), stage()
    saved.end_inner_loop(3)
    saved.save(tmp_path)
    resumed.load(tmp_path)
    assert resumed.own.beyond(2) == 3
    assert resumed.own.trained == {3: {}}


def test_adam_counts_the_rounds_of_each_fragment() -> None:
    """In three fragments, the third one's first two steps are in rounds 3 and 6."""
    adam = OuterSettings(rounds=6, optimizer="adam", momentum=0.0, nesterov=False, learning_rate=0.5)
    whole = OuterOptimizer(adam)
    parts = OuterOptimizer(adam.model_copy(update={"fragments": 3}))
    ends = []
    for optimizer, rounds in ((whole, (1, 2)), (parts, (3, 6))):
        theta = {"w": torch.tensor([1.0, -2.0])}
        for round_, mean in zip(rounds, (torch.tensor([0.25, 4.0]), torch.tensor([-0.5, 1.0])), strict=True):
            optimizer.begin(round_, {})
            optimizer.take(theta, "w", mean.clone())
        ends.append(theta["w"])
    assert ends[0].equal(ends[1])


# ---- the embedding of compressed boundaries ----


def _mixed(corpus: Path, outer: Mapping[str, Any], embedding: str) -> RunSpec:
    home = {**HOME, "boundary": {"rank": "1/8", "embedding": embedding}}
    return RunSpec(_config(corpus, outer, [{**DC, "name": "dc"}, home]), 256)


CASES: list[tuple[dict[str, Any], str]] = [
    ({"fragments": 2}, "coefficients"),
    ({"fragments": 2}, "projected"),
    ({"fragments": 4, "overlap": 1, "mixing": 0.5}, "free"),
]


def _assert_split(perpendicular: Tensor | None, basis: Tensor | None, theta: Tensor) -> None:
    """Require T_perp U = 0, and that T_perp is what theta's embedding has outside of the subspace."""
    assert perpendicular is not None and basis is not None
    assert (perpendicular @ basis).abs().max() < 1e-6
    torch.testing.assert_close(perpendicular, theta - (theta @ basis) @ basis.T, rtol=0, atol=1e-6)


def _assert_own_coefficients(optimizer: Any, embedding: Tensor) -> None:
    """Require that C is of the replica's own embedding, which is to be trained."""
    assert isinstance(optimizer, SubspaceOptimizer) and optimizer.coefficients is not None
    torch.testing.assert_close(optimizer.coefficients.detach(), embedding @ optimizer.basis, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("outer", "embedding"), CASES)
def test_stages_split_the_synchronised_embedding(
    outer: dict[str, Any], embedding: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, reports = _mixed(corpus, outer, embedding), list[Report]()
    splits: dict[int, list[tuple[Tensor, Stage]]] = {}
    step_of, split_of = StageMember.inner_step, Stage.split_embedding
    apart = 0

    def split(stage: Stage, table: Tensor) -> None:
        split_of(stage, table)
        if stage.boundary.basis is not None and stage.boundary.perpendicular is not None:
            _assert_split(stage.boundary.perpendicular, stage.boundary.basis, table.detach())
            splits.setdefault(stage.spec.index, []).append((table.detach().clone(), stage))

    def step(member: StageMember, round_: int, number: int, *others: Any) -> Any:
        nonlocal apart
        stage = member.worker.stage
        if number == 0 and EMBEDDING in stage.parameters:
            own = stage.parameters[EMBEDDING].detach()
            apart += not own.equal(splits[stage.spec.index][-1][0])
            if embedding == "coefficients":
                _assert_own_coefficients(stage.optimizer, own)
        return step_of(member, round_, number, *others)

    monkeypatch.setattr(Stage, "split_embedding", split)
    monkeypatch.setattr(StageMember, "inner_step", step)
    run_in_process(spec, RunFolder(tmp_path / "run"), reports.append)
    assert apart >= ROUNDS // 2 - 1  # rounds in which the group went on from its own embedding
    theta = [one[EMBEDDING] for one in _thetas(tmp_path / "run")]
    for tables in splits.values():  # every stage has split theta after every round
        seen = [table for table, _ in tables]
        assert all(any(table.equal(one) for table in seen) for one in theta)
    verified = [one.round_verified for one in reports if one.HasField("round_verified")]
    for round_ in range(1, ROUNDS + 1):
        hashes = [one.parameters_sha256 for one in verified if one.round == round_]
        assert len(hashes) == 2 and len(set(hashes)) == 1


@pytest.mark.parametrize(("outer", "embedding"), CASES)
def test_the_trainer_of_tables_splits_the_synchronised_embedding(
    outer: dict[str, Any], embedding: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends where the stages end, too: sums are grouped differently."""
    torch.set_num_threads(1)
    spec, reports = _mixed(corpus, outer, embedding), list[Report]()
    store, step_of, starts = prepare_tokens(spec.config.data, tmp_path), TableReplica.inner_step, list[Tensor]()

    def step(replica: TableReplica, tokens: Tensor, number: int) -> Any:
        if number % H == 0 and replica.name == "home":
            starts.append(replica.parameters[EMBEDDING].detach().clone())
            if embedding == "coefficients":
                _assert_own_coefficients(replica.optimizer, starts[-1])
        return step_of(replica, tokens, number)

    monkeypatch.setattr(TableReplica, "inner_step", step)
    group, losses, thetas = AllReplicas(spec, store), list[float](), list[Tensor]()
    for round_ in range(1, ROUNDS + 1):
        thetas.append(group.theta[EMBEDDING].clone())
        assert group.round(round_)
        home = group.replicas[1]
        assert all(one.parameters[EMBEDDING].equal(group.theta[EMBEDDING]) for one in group.replicas)
        assert home.boundary is not None
        _assert_split(home.boundary.perpendicular, home.boundary.basis, group.theta[EMBEDDING])
        losses.append(group.evaluate())
    assert sum(not own.equal(theta) for own, theta in zip(starts, thetas, strict=True)) >= ROUNDS // 2 - 1
    run_in_process(spec, RunFolder(tmp_path / "run"), reports.append)
    told = [one.evaluation for one in reports if one.HasField("evaluation")]
    staged = [sum(one.loss for one in told if one.round == round_) / 2 for round_ in range(1, ROUNDS + 1)]
    assert losses == pytest.approx(staged, abs=1e-3)


# ---- rows of tables ----


@pytest.mark.parametrize(
    "outer",
    [
        {"fragments": 2, "overlap": 1, "mixing": 0.5},
        {"fragments": 3, "method": "diloco"},
        {"mixing": 0.25},
    ],
)
def test_an_interrupted_row_goes_on_to_the_same_bits(outer: dict[str, Any], corpus: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    embedding = "free" if outer.get("mixing") else "coefficients"
    spec = _mixed(corpus, {"method": "sparseloco", **outer}, embedding)
    store = prepare_tokens(spec.config.data, tmp_path)
    whole = train_fast(spec, store)
    first = AllReplicas(spec, store)
    for round_ in (1, 2, 3):
        assert first.round(round_)
    kept = Checkpoint(tmp_path / "row", spec.run, 0.0)
    kept.save(3, {"group": first.state()})
    second = AllReplicas(spec, store)
    saved = kept.load()
    assert saved is not None
    second.load(saved["group"])
    losses = []
    for round_ in range(4, ROUNDS + 1):
        assert second.round(round_)
        losses.append(second.evaluate())
    assert losses == whole.validation_loss[3:]


def test_a_row_sends_each_fragment_once_in_a_cycle(corpus: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    sent = []
    for fragments in (1, 3):
        spec = _mixed(corpus, {"rounds": 3 * fragments, "fragments": fragments}, "free")
        sent.append(train_fast(spec, prepare_tokens(spec.config.data, tmp_path)).contribution_bytes)
    assert sent[0] == sent[1]


@pytest.mark.parametrize(
    ("research", "key"),
    [
        ({"taking_part": {1: 1}}, "taking_part"),
        ({"pretraining": 1}, "pretraining"),
        ({"averages_moments": True}, "averages_moments"),
    ],
)
def test_settings_of_tables_that_know_only_one_start_are_refused(
    research: dict[str, Any], key: str, corpus: Path
) -> None:
    replicas = [{**DC, "name": name} for name in ("a", "b")]
    with pytest.raises(ConfigError) as error:
        _config(corpus, {"method": "diloco", "fragments": 2, **research}, replicas).check()
    assert error.value.key == ("research", key)
    assert "`fragments: 2`" in error.value.message


# ---- real processes ----

STEPS = 3
PROCESSES = (
    "model.layers=4",
    "replicas.1.stages=[{layers: 1}, {layers: 1}, {layers: 1}, {layers: 1}]",
    "replicas.1.micro_batches=4",
    "replicas.1.boundary.rank=1/8",
    "replicas.1.boundary.embedding=free",
    f"inner.steps={STEPS}",
    f"outer.rounds={ROUNDS}",
    "outer.fragments=4",
    "outer.mixing=0.5",
    "states.every=1",
    "checkpoints={every: 1, keep: 6}",
    "exchange.quorum=1",
)
"""Each fragment is one layer, so three of the four stages contribute nothing to most rounds."""


def _settings(corpus: Path, *changes: str) -> list[str]:
    return [f"--set={one}" for one in (f"data.corpus={corpus}", *PROCESSES, *changes)]


def _launched(corpus: Path, runs: Path, *changes: str, faults: str = "") -> Path:
    """Launch the run in real processes, with faults if there are any; return its folder."""
    if faults:
        runs.mkdir(exist_ok=True)
        (runs / "faults.yaml").write_text(f"faults: [{faults}]")
        options = ["--runs", str(runs), "--faults", str(runs / "faults.yaml"), *_settings(corpus, *changes)]
        done = run_script(LAUNCH_WITH_FAULTS, str(YAML), *options)
    else:
        done = run_program("launch", str(YAML), "--runs", str(runs), *_settings(corpus, *changes))
    assert done.returncode == 0, done.stdout + done.stderr
    return runs / "mixed"


def _records(run: Path) -> list[RoundRecord]:
    log = ContributionLog(FolderStore(run / "log"))
    return [log.read_record(round_) for round_ in range(1, ROUNDS + 1)]


def _assert_in_process_alike(run: Path, folder: Path) -> None:
    """Require the losses, contributions and parameters of a run in this process with equal restarts and exclusions."""
    restarts: dict[str, list[tuple[int, int]]] = {}
    missed = {"dc": set(range(1, ROUNDS + 1)), "home": set(range(1, ROUNDS + 1))}
    for record in _records(run):
        for entry in record.contributions:
            missed[entry.replica].discard(record.round)
            for one in entry.restarts:
                restarts.setdefault(one.slot, []).append((record.round, one.step))
    late = {replica: frozenset(rounds) for replica, rounds in missed.items()}
    reports = list[Report]()
    run_in_process(read_run(RunFolder(run)), RunFolder(folder), reports.append, restarts=restarts, missed=late)
    for found, expected in zip(_records(folder), _records(run), strict=True):
        assert [(one.replica, one.steps, one.weight, one.digest) for one in found.contributions] == [
            (one.replica, one.steps, one.weight, one.digest) for one in expected.contributions
        ]
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = {(one["replica"], one["round"]): one["loss"] for one in events if one["event"] == "evaluation"}
    evaluations = [one.evaluation for one in reports if one.HasField("evaluation")]
    assert {(one.replica, one.round): one.loss for one in evaluations} == told
    verified = {
        (one["replica"], one["round"]): one["parameters_sha256"] for one in events if "parameters_sha256" in one
    }
    hashes = [one.round_verified for one in reports if one.HasField("round_verified")]
    assert {(one.replica, one.round): one.parameters_sha256.hex() for one in hashes} == verified
    assert len(verified) == 2 * ROUNDS
    for theta, same in zip(_thetas(folder), _thetas(run), strict=True):
        assert all(tensor.equal(same[name]) for name, tensor in theta.items())


@pytest.mark.starts_processes
@pytest.mark.parametrize("overlap", [0, 1])
def test_over_grpc_it_has_the_bits_of_one_process(overlap: int, corpus: Path, tmp_path: Path) -> None:
    run = _launched(corpus, tmp_path / "grpc", f"outer.overlap={overlap}")
    _assert_in_process_alike(run, tmp_path / "in process")
    blocks = [{blob.block for one in record.contributions for blob in one.blobs} for record in _records(run)]
    embedding, head = {"tok_embeddings"}, blocks[3] - {"layers.3"}
    assert blocks[:4] == [embedding | {"layers.0"}, {"layers.1"}, {"layers.2"}, head | {"layers.3"}]
    assert blocks[4:] == blocks[: ROUNDS - 4]


@pytest.mark.starts_processes
def test_a_stage_that_is_killed_within_a_round_resumes_to_the_bits_of_one_process(corpus: Path, tmp_path: Path) -> None:
    fault = "{kill: home.2, at: {round: 3, step: 2, micro_batch: 1}}"
    run = _launched(corpus, tmp_path / "grpc", faults=fault)
    restarts = [(one.slot, one.step) for entry in _records(run)[2].contributions for one in entry.restarts]
    assert restarts == [("home.2", 2)]
    _assert_in_process_alike(run, tmp_path / "in process")


@pytest.mark.parametrize("slot", ["home.0", "home.2"])
def test_a_stage_dies_after_the_last_step_of_a_round_to_which_it_contributes_nothing(
    slot: str, corpus: Path, tmp_path: Path
) -> None:
    """Its group waits for it, because it had not contributed."""
    spec = RunSpec(ConfigFile(YAML, [f"data.corpus={corpus}", *PROCESSES]).config, 256)
    run_in_process(spec, RunFolder(tmp_path), lambda _: None, restarts={slot: [(2, STEPS)]})
    restarts = [(one.slot, one.step) for entry in _records(tmp_path)[1].contributions for one in entry.restarts]
    assert restarts == [(slot, STEPS)]


@pytest.mark.starts_processes
def test_a_late_contribution_has_the_bits_of_one_process(corpus: Path, tmp_path: Path) -> None:
    quorum = "exchange={quorum: 0.5, grace: {factor: 1, least: 4 s, most: 4 s}}"
    run = _launched(corpus, tmp_path / "grpc", quorum, faults="{miss: home, rounds: [2]}")
    counted = [{one.replica for one in record.contributions} for record in _records(run)]
    assert counted[1] == {"dc"}
    assert {"dc", "home"} in counted[2:]
    _assert_in_process_alike(run, tmp_path / "in process")
