"""A run with a member that lies: how far it can raise the loss, and that no honest member is scaled or named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import Refused
from hetero_pp.messages.messages_pb2 import BlobHeader, Report, RoundRecord
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.pseudo_gradient.contribution import scale_of
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import open_log
from replica_groups.member.outer_round import OuterRound

LIAR = "liar"
ROUNDS, STEPS = 5, 4

Lie = Callable[[int, Tensor], Tensor]
"""A function of the round and the honest change of a parameter. It returns what the liar contributes instead."""


@dataclass(frozen=True)
class Outcome:
    """The results of a run."""

    loss: float
    """Validation loss of replica `first` after the last round."""
    digest: bytes
    records: Sequence[RoundRecord]
    refused: Sequence[str]

    @property
    def named(self) -> set[str]:
        """Return the replicas that some record scales, leaves out or calls late."""
        scaled = {one.replica for record in self.records for one in record.contributions if scale_of(one) != 1}
        return scaled.union(*([*record.left_out, *record.late] for record in self.records))


def _run(
    corpus: Path,
    folder: Path,
    names: Sequence[str],
    exchange: Mapping[str, Any] | None = None,
    outer: Mapping[str, Any] | None = None,
    **options: Any,
) -> Outcome:
    config = RunConfig.model_validate(
        {
            "name": "t",
            "seed": 1,
            "threads": 1,
            "model": {"width": 16, "heads": 2, "feed_forward": 24, "layers": 1},
            "data": {"corpus": str(corpus), "sequence_length": 16, "validation_share": 0.2, "validation_sequences": 8},
            "inner": {"steps": STEPS, "warmup_steps": 4, "learning_rate": 0.02},
            "outer": {"rounds": ROUNDS, "compression": {"density": "1/8"}, **(outer or {})},
            "exchange": {"quorum": 1.0, **(exchange or {})},
            "replicas": [{"name": name, "kind": "datacenter", "batch_size": 2} for name in names],
        }
    )
    reports: list[Report] = []
    spec, own = RunSpec(config, 256), RunFolder(folder)
    run_in_process(spec, own, reports.append, **options)
    log = open_log(config, own)
    evaluations = [one for one in reports if one.HasField("evaluation") and one.member == "first"]
    verified = [one.round_verified for one in reports if one.HasField("round_verified")]
    return Outcome(
        evaluations[-1].evaluation.loss,
        next(one.parameters_sha256 for one in verified if (one.round, one.replica) == (ROUNDS, "first")),
        [log.read_record(round_) for round_ in range(1, ROUNDS + 1)],
        [one.refusal.sender for one in reports if one.HasField("refusal")],
    )


@pytest.fixture
def tells(monkeypatch: pytest.MonkeyPatch) -> Callable[[Lie], None]:
    """Return a function that replaces the liar's honest pseudo-gradients by a lie."""
    contributed = OuterRound._contributed

    def tell(lie: Lie) -> None:
        def changed(outer: OuterRound, round_: int, name: str) -> Tensor:
            honest = contributed(outer, round_, name)
            return lie(round_, honest) if outer.session.replica == LIAR else honest

        monkeypatch.setattr(OuterRound, "_contributed", changed)

    return tell


NAMES = ("first", LIAR, "second")
SOON = {"quorum": 0.6, "grace": {"factor": 1, "least": "1 ms", "most": "1 ms"}}


def test_who_claims_other_steps_is_refused_and_changes_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It claims one step too few, and far too many. The result is that of a run in which it is always late."""
    late = frozenset(range(1, ROUNDS + 1))
    without = _run(corpus, tmp_path / "late", NAMES, SOON, missed={LIAR: late})
    deposit, refusals = Exchange.deposit_blob, list[int]()

    def lies(exchange: Exchange, header: BlobHeader, data: bytes, caller: Caller) -> None:
        if caller.name != LIAR:
            deposit(exchange, header, data, caller)
        else:
            for steps in (STEPS - 1, 2**32):
                header.steps = steps
                with pytest.raises(Refused, match=f"found {steps} inner steps, expected {STEPS}$"):
                    deposit(exchange, header, data, caller)
                refusals.append(steps)

    monkeypatch.setattr(Exchange, "deposit_blob", lies)
    found = _run(corpus, tmp_path / "lie", NAMES, SOON)
    assert set(refusals) == {STEPS - 1, 2**32}
    assert set(found.refused) == {LIAR}
    assert found.digest == without.digest
    assert {one.replica for record in found.records for one in record.contributions} == {"first", "second"}
    assert found.named <= {LIAR}


LIES: dict[str, tuple[Lie, float]] = {
    "a million times as large": (lambda _, change: 1e6 * change, 0.4),
    "2.5 times as large every other round": (lambda round_, change: 2.5 ** (round_ // 2) * change, 0.2),
    "next to nothing, then a million": (lambda round_, change: (1e-6 if round_ < 4 else 1e6) * change, 0.4),
    "next to nothing": (lambda _, change: 1e-6 * change, 0.9),
}
"""Lies by name, each with the largest increase of the final loss that it may cause."""
AGAINST_ONE = ("a million times as large", "2.5 times as large every other round", "next to nothing")
AGAINST_TWO = ("2.5 times as large every other round", "next to nothing, then a million")
"""Lies in runs with one and with two honest members, each of which has other bounds."""


@pytest.mark.parametrize(
    ("names", "lies"),
    [(("first", LIAR), AGAINST_ONE), (("first", LIAR, "second"), AGAINST_TWO)],
    ids=["of two", "of three"],
)
def test_who_sends_too_much_is_bounded_and_nobody_else_is(
    names: Sequence[str], lies: Sequence[str], corpus: Path, tmp_path: Path, tells: Callable[[Lie], None]
) -> None:
    honest = _run(corpus, tmp_path / "honest", names)
    assert honest.named == set()
    for number, lie in enumerate(lies):
        change, most = LIES[lie]
        tells(change)
        found = _run(corpus, tmp_path / str(number), names)
        assert found.named == (set() if lie == "next to nothing" else {LIAR}), lie
        assert found.loss < honest.loss + most, lie


@pytest.mark.parametrize("outer", [{"overlap": 1}, {"keep_local": True}], ids=["overlapped", "parameters kept"])
def test_a_liar_neither_ends_a_run_of_these_kinds_nor_excludes_an_honest_member(
    outer: Mapping[str, Any], corpus: Path, tmp_path: Path, tells: Callable[[Lie], None]
) -> None:
    """With `overlap` the liar applies its own lie before the round is decided.

    A lie of a million times the honest size would therefore end the liar's own training.
    """
    names = ("first", LIAR, "second")
    honest = _run(corpus, tmp_path / "honest", names, outer=outer)
    tells(lambda _, change: 10 * change)
    found = _run(corpus, tmp_path / "lie", names, outer=outer)
    assert honest.named == set() and found.named == {LIAR}
    assert all({"first", "second"} <= {one.replica for one in record.contributions} for record in found.records)
    assert found.loss < honest.loss + 0.6
