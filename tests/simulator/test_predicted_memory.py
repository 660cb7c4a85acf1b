"""The formula of memory, compared with the tensors of small members that train for real, phase by phase."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
from live_bytes import LiveBytes

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.model import arithmetic
from hetero_pp.model.transformer import Transformer
from hetero_pp.program.launch import in_process
from hetero_pp.simulator.memory import Memory, Phase, memory_of_exchange, memory_of_member
from replica_groups.engines import build
from replica_groups.exchange.auditor import Auditor
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.take_part import TrainingLoop

NO_TENSORS = {"process", "allocator", "own contribution", "one block of all contributions", "checkpoint"}
"""Terms of bytes that are no tensors, and of tensors that an exchange in the same process shares."""
OF_SERVERS = {"process", "allocator", "members", "decoding", "messages in flight", "one block of all contributions"}
"""Terms of the exchange of bytes that are no tensors, and of tensors that threads make that serve members."""
DC = {"name": "dc", "kind": "datacenter", "batch_size": 2}
HOME = {"name": "home", "kind": "participants", "stages": 3, "batch_size": 4, "micro_batches": 4}
RANK = {"boundary": {"rank": "1/4"}}


class Peaks:
    """Live bytes of every member by phase; a thread belongs to one member."""

    def __init__(self) -> None:
        self.by_member: dict[str, dict[Phase, int]] = {}
        self._own = threading.local()

    def take_part(self, real: Callable[..., None]) -> Callable[..., None]:
        """Count what a member's thread makes."""

        def counted(spec: RunSpec, member: Any, *arguments: Any, **options: Any) -> None:
            self._own.peaks = self.by_member[member.name] = {}
            with LiveBytes() as self._own.live:
                real(spec, member, *arguments, **options)

        return counted

    def within(self, phase: Phase, real: Callable[..., Any]) -> Callable[..., Any]:
        """Note the peak of a call as that of a phase."""

        def counted(*arguments: Any, **options: Any) -> Any:
            live, peaks = self._own.live, self._own.peaks
            live.most = live.now
            try:
                return real(*arguments, **options)
            finally:
                peaks[phase] = max(peaks.get(phase, 0), live.most)

        return counted


def _spec(corpus: Path, replicas: list[dict[str, Any]], **changes: Any) -> RunSpec:
    outer = {"rounds": 2, "compression": {"density": 1 / 32, "tile": [16, 16]}}
    config: dict[str, Any] = {
        "name": "t",
        "model": {"preset": "micro", "width": 64, "heads": 2, "feed_forward": 192, "layers": 3, "vocabulary": 2000},
        "data": {"corpus": str(corpus), "sequence_length": 16, "validation_sequences": 2, "validation_share": 0.1},
        "inner": {"steps": 1},
        "replicas": replicas,
        "outer": {**outer, **changes.pop("outer", {})},
    }
    for section, values in changes.items():
        config[section] = {**config.get(section, {}), **values}
    return RunSpec(RunConfig.model_validate(config), 256)


def _train(spec: RunSpec, folder: Path) -> None:
    folder.mkdir()
    in_process.run_in_process(spec, RunFolder(folder), lambda report: None)


CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "activations": ([{**DC, "batch_size": 4}], {"data": {"sequence_length": 128}, "model": {"vocabulary": 300}}),
    "logits": ([DC], {"data": {"sequence_length": 128}}),
    "micro-batches": ([{**DC, "batch_size": 4, "micro_batches": 4}], {"data": {"sequence_length": 64}}),
    "compiled": ([{**DC, "compile": True}], {"data": {"sequence_length": 128}}),
    "pieces": ([{**DC, "micro_batches": 2}], {"data": {"sequence_length": 256}}),
    "recompute": ([{**DC, "recompute": "layers"}], {"data": {"sequence_length": 256}, "model": {"vocabulary": 300}}),
    "bf16": ([{**DC, "precision": "bf16"}], {"data": {"sequence_length": 256}, "model": {"vocabulary": 300}}),
    "momentum": ([DC], {"outer": {"momentum": 0.9}}),
    "muon": ([DC], {"inner": {"optimizer": "muon"}}),
    "stages": ([{**HOME, **RANK}], {"data": {"sequence_length": 64}}),
    "anchors": ([{**HOME, "boundary": {"rank": "1/4", "anchors": {"rank": 16}}}], {}),
    "fragments": ([DC], {"outer": {"rounds": 4, "fragments": 2}}),
    "fragments in stages": ([{**HOME, **RANK}], {"outer": {"rounds": 5, "fragments": 4, "pattern": "sequential"}}),
    "mixed fragments": ([DC], {"outer": {"rounds": 4, "fragments": 2, "mixing": 0.5}}),
    "overlap": ([DC], {"outer": {"rounds": 4, "overlap": 1}}),
    "fragments with overlap": ([DC], {"outer": {"rounds": 5, "fragments": 2, "overlap": 1}}),
}


def _give_a_gradient(models: Iterable[Transformer]) -> None:
    for model in models:
        model.gradient_of_logits = lambda *arguments: arithmetic.gradient_of_logits(*arguments)


@pytest.mark.parametrize("case", CASES)
def test_a_member_holds_the_tensors_that_are_predicted(
    case: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas, changes = CASES[case]
    spec, peaks = _spec(corpus, replicas, **changes), Peaks()
    if case == "pieces":
        monkeypatch.setattr(arithmetic, "PIECE_BYTES", 4 * 2000 * 64)
    if case == "compiled":  # the same loss, without a compiler
        monkeypatch.setattr(build, "require_compiler", lambda device: None)
        monkeypatch.setattr(build, "compile_layers", _give_a_gradient)
    monkeypatch.setattr(in_process, "take_part", peaks.take_part(in_process.take_part))
    monkeypatch.setattr(TrainingLoop, "_train", peaks.within(Phase.STEP, TrainingLoop._train))
    monkeypatch.setattr(OuterRound, "contribute", peaks.within(Phase.CONTRIBUTE, OuterRound.contribute))
    monkeypatch.setattr(OuterRound, "apply", peaks.within(Phase.APPLY, OuterRound.apply))
    _train(spec, tmp_path / "run")
    for name, member in spec.members.items():
        memory, found = memory_of_member(spec, member, accelerated=False), peaks.by_member[name]
        predicted = {phase: _tensors(memory, phase) for phase in found}
        predicted[Phase.STEP] = max(predicted[Phase.STEP], _tensors(memory, Phase.UPDATE))
        predicted[Phase.CONTRIBUTE] = max(predicted[Phase.CONTRIBUTE], _tensors(memory, Phase.SAVE))
        assert predicted == pytest.approx(found, rel=0.1), name


def _tensors(memory: Memory, phase: Phase, others: Collection[str] = NO_TENSORS) -> float:
    return sum(size for name, size in memory.in_phase(phase).items() if name not in others)


@pytest.mark.parametrize("outer", [{}, {"momentum": 0.9}])
def test_the_exchange_holds_the_tensors_that_are_predicted(
    outer: dict[str, Any], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, live = _spec(corpus, [DC, {**DC, "name": "other"}], outer=outer), LiveBytes()

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with live:
                return real(*arguments, **options)

        return call

    monkeypatch.setattr(in_process, "begin_run", counted(in_process.begin_run))
    monkeypatch.setattr(Auditor, "_run", counted(Auditor._run))
    _train(spec, tmp_path / "run")
    memory = memory_of_exchange(spec, members=2, relayed_links=0, way="gather")
    predicted = max(_tensors(memory, phase, OF_SERVERS) for phase in Phase)
    assert predicted == pytest.approx(live.most, rel=0.1)
