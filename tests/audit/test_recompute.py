"""Rounds that are computed again: honest ones have the same bits, cheats do not, and what cannot be is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from audited_run import LIAR, STEPS, audited_spec, flips, lying, rereads, skips
from typer.testing import CliRunner

from hetero_pp.config.checkpoint import first_checkpoint
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError, DamagedFile, OutOfMemory
from hetero_pp.data.sources import Source, open_source
from hetero_pp.messages.messages_pb2 import Commitment, ContributionEntry, Judgement, Report
from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.program.cli import app
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.store.folder import FolderStore
from replica_groups.audit import recompute as module
from replica_groups.audit.commitments import CommittedState, load_state, state_of
from replica_groups.audit.recompute import (
    Comparison,
    ReplicaHere,
    RoundStart,
    compare,
    difference,
    recompute,
)
from replica_groups.exchange.audits import read_audit
from replica_groups.exchange.log import ContributionLog

GROUP = {
    "name": "group",
    "kind": "participants",
    "stages": [{"layers": 1}] * 2,
    "batch_size": 4,
    "micro_batches": 2,
    "boundary": {"rank": "1/4", "bits": 4},
}
DATACENTER = {"name": LIAR, "kind": "datacenter", "batch_size": 2}


# ---- a run ----


FRAGMENTS = {"fragments": 2, "mixing": 0.5}


@pytest.mark.parametrize(("outer", "rounds"), [({}, 2), (FRAGMENTS, 4), ({**FRAGMENTS, "mixing": 0.0}, 4)])
def test_a_run_that_is_audited_has_the_bits_of_one_that_is_not(
    outer: dict[str, Any], rounds: int, corpus: Path, tmp_path: Path
) -> None:
    found: list[Judgement] = []
    digests: list[list[str]] = []
    layers = 2 * outer.get("fragments", 1)  # each stage has a layer of each fragment
    stages = [{"layers": layers // 2}] * 2
    for audit in ({"gauntlet": {"sequences": 2}, "recompute": {"share": 1}}, {}):
        model = {"width": 16, "heads": 2, "feed_forward": 24, "layers": layers}
        changes: dict[str, Any] = {"audit": audit, "model": model}
        changes["replicas"] = [DATACENTER, GROUP | {"stages": stages}]
        changes["outer"] = {"rounds": rounds, "compression": {"density": 1 / 8}, **outer}
        spec = audited_spec(corpus, changes)
        folder, told = RunFolder(tmp_path / str(len(digests)) / "t"), list[Report]()
        folder.path.mkdir(parents=True)
        run_in_process(spec, folder, told.append)
        found += [one.judged for one in told if one.HasField("judged")]
        store = FolderStore(folder.log)
        digests.append([read_audit(store, round_).parameters_sha256 for round_ in range(1, rounds + 1)])
        kept = {key.split("/")[0] for key in store.below()}
        assert kept == {"audited", "incarnations", "draws", *kept} if audit else "draws" not in kept
        assert folder.committed(LIAR).exists() == bool(audit)
    assert digests[0] == digests[1]
    for finding in ("losses", "recomputed"):
        of_kind = sorted((one.round, one.replica) for one in found if one.HasField(finding))
        assert of_kind == [(round_, name) for round_ in range(1, rounds + 1) for name in ("group", LIAR)]
    again = [one.recomputed for one in found if one.HasField("recomputed")]
    assert all(one.is_equal and one.difference == 0 for one in again)


def _forgets(trainer: Any, outer: Any) -> None:
    """Start each round from theta, also what the round before did not synchronise."""
    step = trainer.inner_step

    def forgetful(round_: int, number: int, *rest: Any) -> Any:
        if number == 0:
            with torch.no_grad():
                for name, parameter in trainer.engine.whole.parameters.items():
                    parameter.copy_(outer.theta[name])
        return step(round_, number, *rest)

    trainer.inner_step = forgetful


@pytest.mark.parametrize(("lie", "is_found"), [(_forgets, [False, True]), (flips, [True, True])])
def test_a_cheat_in_fragments_differs(
    lie: Callable[[Any, Any], None], is_found: list[bool], corpus: Path, tmp_path: Path
) -> None:
    """Round 2 begins with what round 1 trained of the other fragment, and the state of round 1 commits to it."""
    model, outer = {"width": 16, "heads": 2, "feed_forward": 24, "layers": 2}, {"rounds": 2, "fragments": 2}
    spec, told = audited_spec(corpus, {"model": model, "outer": outer}), list[Report]()
    folder = RunFolder(tmp_path / "t")
    folder.path.mkdir()
    with lying({LIAR: lie}):
        run_in_process(spec, folder, told.append)
    judged = sorted((one.judged for one in told if one.HasField("judged")), key=lambda one: one.round)
    assert [not one.recomputed.is_equal for one in judged if one.replica == LIAR] == is_found
    assert [one.recomputed.difference for one in judged if one.replica == "a"] == [0, 0]
    done = CliRunner().invoke(app, ["log", "verify", str(folder.path / "evidence" / f"000002-{LIAR}")])
    torch.set_num_threads(1)
    assert f"proven: {LIAR} computed something else in round 2 of {LIAR}" in done.output


def test_a_round_that_does_not_count_a_replica_is_undone(corpus: Path, tmp_path: Path) -> None:
    """Its state would not be known otherwise, and could be invented."""
    inner = {"seconds": 1.0}
    model, outer = {"width": 16, "heads": 2, "feed_forward": 24, "layers": 2}, {"rounds": 3}
    boundary = GROUP["boundary"] | {"anchors": {"rank": "1/4"}}  # type: ignore[operator]
    changes = {"model": model, "outer": outer, "inner": inner, "replicas": [DATACENTER, GROUP | {"boundary": boundary}]}
    changes["exchange"] = {"grace": {"least": "3 s"}}  # the group is late in round 2 alone, on a busy machine, too
    spec, folder, told = audited_spec(corpus, changes), RunFolder(tmp_path / "t"), list[Report]()
    folder.path.mkdir()
    late = {"group": frozenset({2})}
    run_in_process(spec, folder, told.append, steps_of=lambda replica, round_: STEPS, missed=late)
    log = ContributionLog(FolderStore(folder.log))
    entries = [{one.replica: one for one in log.read_record(round_).contributions} for round_ in (1, 2, 3)]
    assert ["group" in one for one in entries] == [True, False, True]
    for before, after in zip(entries[0]["group"].commitments, entries[2]["group"].commitments, strict=True):
        assert before.after == after.before
    found = [one.judged.recomputed for one in told if one.HasField("judged")]
    assert len(found) == 5 and all(one.is_equal and one.difference == 0 for one in found)


# ---- one round ----


class Trained:
    """A replica after one honest round, whose second round is trained and computed again."""

    def __init__(self, corpus: Path, folder: Path, **changes: Any) -> None:
        self.spec: RunSpec = audited_spec(corpus, {"replicas": [DATACENTER], **changes})
        self.source = open_source(self.spec.config.data, folder)
        checkpoint = first_checkpoint(self.spec)
        here = ReplicaHere(self.spec, LIAR, RoundStart(1, checkpoint.parameters, checkpoint.basis), self.source)
        here.train(STEPS)
        self.state = self.after(here, STEPS)
        self.state.save(folder / "state")
        self.start = RoundStart(2, checkpoint.parameters, checkpoint.basis, {LIAR: load_state(folder / "state")})

    def after(self, here: ReplicaHere, steps: int) -> CommittedState:
        member = here.members[LIAR]
        assert member.batches is not None
        known = None if self.spec.config.inner.steps is not None else {"first": here.first + steps, "last": steps}
        return state_of(member, here.outers[LIAR], member.batches.state(), known)

    def told(self, lie: Callable[[Any, Any], None] | None = None) -> tuple[dict[str, bytes], ContributionEntry]:
        """Return what the replica contributes to the second round, and what it commits to."""
        here = ReplicaHere(self.spec, LIAR, self.start, self.source)
        if lie is not None:
            lie(here.members[LIAR], here.outers[LIAR])
        blobs = dict(here.train(STEPS))
        own = Commitment(member=LIAR, after=self.after(here, STEPS).sha256)
        return blobs, ContributionEntry(replica=LIAR, steps=STEPS, commitments=[own])

    def again(self) -> ReplicaHere:
        return recompute(self.spec, LIAR, self.start, STEPS, self.source)

    def compared(self, lie: Callable[[Any, Any], None] | None = None, tolerance: float = 0.0) -> Comparison:
        (blobs, entry), again = self.told(lie), self.again()
        apart = {block: self.apart(block, blobs[block], again.blobs[block]) for block in blobs}
        return compare(entry, apart, again, tolerance)

    def apart(self, block: str, told: bytes, again: bytes) -> float:
        shapes = shapes_by_block(self.spec.parameter_shapes)[block]
        return difference(
            BlobAddress(self.spec.run, 2, LIAR, block), shapes, self.spec.config.outer.compression, told, again
        )


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(corpus, tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"inner": {"steps": STEPS, "optimizer": "muon"}},
        {"inner": {"steps": STEPS, "optimizer": "sgd", "momentum": 0.9}},
        {"inner": {"seconds": 1.0}},
        {"outer": {"rounds": 2, "method": "diloco"}},
    ],
    ids=["default", "muon", "sgd", "fixed time", "diloco"],
)
def test_an_honest_round_has_the_same_bits(corpus: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    assert Trained(corpus, tmp_path, **changes).compared() == Comparison(0.0)


@pytest.mark.parametrize("lie", [flips, skips, rereads])
def test_a_cheat_differs(trained: Trained, lie: Callable[[Any, Any], None]) -> None:
    found = trained.compared(lie, tolerance=0.1)
    assert found.difference > 0.3
    assert "of its norm from its round, expected at most 0.1" in found.cause


def test_a_tolerance_allows_a_difference(trained: Trained) -> None:
    assert trained.compared(flips, tolerance=2.5).is_equal
    assert trained.compared(flips, tolerance=1.5).cause.startswith("`")


def test_another_state_after_the_round_is_found_without_a_tolerance(trained: Trained) -> None:
    (_, entry), again = trained.told(), trained.again()
    entry.commitments[0].after = bytes(32)
    assert compare(entry, {"norm": 0.0}, again, 0.0).member == LIAR
    assert compare(entry, {"norm": 0.0}, again, 0.1).is_equal


def test_another_text_is_named_first(trained: Trained) -> None:
    (_, entry), again = trained.told(), trained.again()
    entry.commitments[0].text = again.text[LIAR]
    assert compare(entry, {"norm": 0.0}, again, 0.0).is_equal
    entry.commitments[0].text = bytes(32)
    assert compare(entry, {"norm": 9.0}, again, 0.0).cause == f"{LIAR} trained on another text than its own"


def _without_a_tensor(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(name for name in tensors if name.startswith("error:"))]


def _of_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("exp_avg"))
    tensors[name] = torch.ones(1)


def _not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[next(iter(tensors))].fill_(float("nan"))


def _unknown(tensors: dict[str, torch.Tensor]) -> None:
    tensors["moments:0.0.lr"] = torch.tensor(100.0)


def _of_no_parameter(tensors: dict[str, torch.Tensor]) -> None:
    tensors["moments:0.999.exp_avg"] = torch.ones(1)


def _in_fp64(tensors: dict[str, torch.Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name] = tensors[name].double()


@pytest.mark.parametrize(
    "alter", [_without_a_tensor, _of_another_shape, _not_finite, _unknown, _of_no_parameter, _in_fp64]
)
def test_a_hostile_checkpoint_is_refused(trained: Trained, alter: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = {name: tensor.clone() for name, tensor in trained.state.tensors.items()}
    alter(tensors)
    start = replace(trained.start, states={LIAR: CommittedState(tensors, trained.state.rest)})
    with pytest.raises(DamagedFile):
        recompute(trained.spec, LIAR, start, STEPS, trained.source)


# ---- settings ----


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"outer": {"rounds": 2, "overlap": 1}}, ("outer", "overlap")),
        ({"outer": {"rounds": 2, "keep_local": True}}, ("outer", "keep_local")),
        ({"outer": {"rounds": 2, "method": "adamw_ddp"}, "inner": {"steps": 1}}, ("outer", "method")),
        ({"states": {"undo": False}}, ("states", "undo")),
        ({"states": {"every": 2}}, ("states", "every")),
        ({"replicas": [DATACENTER | {"engine": "deepspeed"}]}, ("replicas", 0, "engine")),
    ],
)
def test_settings_that_prevent_it_are_refused(corpus: Path, changes: dict[str, Any], key: Sequence[str | int]) -> None:
    with pytest.raises(ConfigError, match=r"with `audit.recompute`, expected") as refused:
        audited_spec(corpus, changes).config.check()
    assert refused.value.key == tuple(key)


SecondRound = tuple[RunSpec, Source, RoundStart]


@pytest.fixture(scope="module")
def second_round(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecondRound]:
    spec = audited_spec(corpus)
    checkpoint = first_checkpoint(spec)
    source = open_source(spec.config.data, tmp_path_factory.mktemp("cache"))
    yield spec, source, RoundStart(1, checkpoint.parameters, checkpoint.basis)


@pytest.mark.parametrize(
    ("tensors", "rest"),
    [
        ({}, {"steps": {"first": math.inf, "last": 1}}),
        ({}, {"data": {"share": {"rotation": [1]}}}),
        ({"moments:0.0.exp_avg": torch.zeros(())}, {}),
        ({"moments:0.0.exp_avg": torch.zeros(32, 16)}, {}),
    ],
)
def test_an_invented_state_is_told_as_such(
    second_round: SecondRound, tensors: dict[str, torch.Tensor], rest: dict[str, Any]
) -> None:
    spec, source, start = second_round
    again = recompute(spec, "a", start, STEPS, source)
    error = {f"error:{name}": tensor for name, tensor in again.outers["a"].error.items()}
    data = {"tokens": source.digest, "steps": None}
    state = CommittedState(error | tensors, {"data": data, "steps": None} | rest)
    with pytest.raises(DamagedFile, match="is not of its members"):
        recompute(spec, "a", RoundStart(1, start.theta, start.basis, {"a": state}), STEPS, source)


def test_a_validator_without_memory_blames_nobody(second_round: SecondRound) -> None:
    spec, source, start = second_round
    full = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    with mock.patch.object(module, "ReplicaHere", full), pytest.raises(OutOfMemory):
        recompute(spec, "a", start, STEPS, source)
