"""Contributions that are far too large are scaled down or excluded.

Honest contributions stay as they were, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from deposits import deposit
from members import TIMEOUT, in_thread
from small_run import GRACE, SETTINGS, Run
from test_uncounted import Member

from hetero_pp.config.topology import MagnitudeSettings
from hetero_pp.core.errors import Refused
from hetero_pp.messages.messages_pb2 import LEFT_OUT, SCALED, BlobEntry, ContributionEntry, RoundRecord
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.transformer import shapes_by_block, shapes_of
from hetero_pp.outer.apply_round import apply_round
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import OuterOptimizer
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, DecodedTensor, decode_blob, encode_blob, scale_of
from hetero_pp.pseudo_gradient.error_feedback import select
from replica_groups.exchange.log import key_of
from replica_groups.exchange.magnitudes import REMEMBERED_ROUNDS, ContributionLimits, bound, remembered_before
from replica_groups.rounds.rules import MOST_TIMES_THE_STEPS

SETTING = MagnitudeSettings()


def _entry(
    replica: str, norm: float, peak: float | None = None, steps: int = 10, scale: float = 0.0
) -> ContributionEntry:
    """Return a contribution of two blocks. The first block has the same norm in all contributions."""
    blobs = [
        BlobEntry(block="a", norm=1.0, peak=0.5),
        BlobEntry(block="b", norm=norm, peak=norm / 2 if peak is None else peak),
    ]
    return ContributionEntry(replica=replica, weight=1.0, steps=steps, scale=scale, blobs=blobs)


def _record(*entries: ContributionEntry, round_: int = 9) -> RoundRecord:
    return RoundRecord(round=round_, contributions=entries)


def _past(norms: Mapping[str, Sequence[float]]) -> list[RoundRecord]:
    rounds = zip(*norms.values(), strict=True)
    return [_record(*(_entry(name, one) for name, one in zip(norms, norm, strict=True))) for norm in rounds]


def _bounded(record: RoundRecord, before: Sequence[RoundRecord] = ()) -> tuple[dict[str, float], list[str]]:
    bound(record, before, SETTING)
    return {one.replica: scale_of(one) for one in record.contributions}, list(record.left_out)


ALIKE = {name: [1.0] * 5 for name in ("x", "y", "z")}


@pytest.mark.parametrize(
    "norms", [(1.0, 1.1, 0.9), (1.0, 2.0, 0.5), (4.9, 1.0, 1.0), (0.0, 0.0, 0.0), (1e-9, 1.0, 1.0)]
)
@pytest.mark.parametrize("before", [[], _past(ALIKE)], ids=["first round", "later"])
def test_what_is_alike_stays_as_it_is(norms: tuple[float, ...], before: list[RoundRecord]) -> None:
    record = _record(*map(_entry, "xyz", norms))
    told = record.SerializeToString()
    assert _bounded(record, before) == (dict.fromkeys("xyz", 1.0), [])
    assert record.SerializeToString() == told


MOST = SETTING.scale
LATER = _past({"x": [1.0] * 4, "y": [1.0] * 4})
SCALED_BEFORE = [_record(_entry("x", 20.0, scale=0.05), _entry("y", 1.0), round_=n) for n in range(1, 6)]
TEN_TIMES_ITS_OWN = _past({"x": [0.1] * 5, "y": [1.0] * 5, "z": [1.0] * 5})
ONE, OTHER = _entry("x", 1.0), _entry("z", 1.0)
BOUNDED: dict[str, tuple[list[ContributionEntry], list[RoundRecord], dict[str, float], list[str]]] = {
    "larger, in a first round": ([ONE, _entry("y", 20.0), OTHER], [], {"x": 1, "y": MOST / 20, "z": 1}, []),
    "larger, later": ([ONE, _entry("y", 20.0), OTHER], _past(ALIKE), {"x": 1, "y": MOST / 20, "z": 1}, []),
    "one large value": ([ONE, _entry("y", 1.0, peak=10.0), OTHER], [], {"x": 1, "y": MOST / 20, "z": 1}, []),
    "far larger": ([ONE, _entry("y", 51.0), OTHER], [], {"x": 1, "z": 1}, ["y"]),
    "infinite": ([ONE, _entry("y", math.inf), OTHER], [], {"x": 1, "z": 1}, ["y"]),
    "ten times its own, as the others": (
        [ONE, _entry("y", 1.0), OTHER],
        TEN_TIMES_ITS_OWN,
        {"x": MOST / 10, "y": 1, "z": 1},
        [],
    ),
    "what was scaled raises no limit": (
        [_entry("x", 20.0), _entry("y", 1.0)],
        SCALED_BEFORE,
        {"x": MOST / 20, "y": 1},
        [],
    ),
    # Otherwise a replica with a tiny first contribution would get the other one excluded.
    "one of two without a history": ([ONE, _entry("y", 1000.0)], [], {"x": 1, "y": MOST / 1000}, []),
    "small beside another with a history": ([_entry("x", 1e-6), _entry("y", 1.0)], LATER, {"x": 1, "y": 1}, []),
    "one of two with a history": ([ONE, _entry("y", 1000.0)], LATER, {"x": 1}, ["y"]),
    # After a change of the learning rate, for example, all are scaled and the history follows.
    "something is always counted": ([_entry("x", 1e9)], _past({"x": [1.0] * 4}), {"x": MOST / 1e9}, []),
    # If rounds have a fixed duration, a fast replica may take ten times as many steps as a slow one.
    "more steps": ([ONE, _entry("y", 30.0, steps=100), OTHER], [], {"x": 1, "y": 1, "z": 1}, []),
    "steps that are claimed": (
        [ONE, _entry("y", 500.0, steps=2**32), OTHER],
        [],
        {"x": 1, "y": MOST * MOST_TIMES_THE_STEPS / 500, "z": 1},
        [],
    ),
}


@pytest.mark.parametrize(("entries", "before", "scales", "left_out"), BOUNDED.values(), ids=BOUNDED)
def test_what_is_too_large_is_scaled_to_the_most_there_may_be_or_not_counted(
    entries: list[ContributionEntry], before: list[RoundRecord], scales: dict[str, float], left_out: list[str]
) -> None:
    found, out = _bounded(_record(*entries), before)
    assert (found, out) == (pytest.approx(scales), left_out)


@pytest.mark.parametrize("limited", [False, True])
def test_of_two_slow_growth_is_bounded_and_slow_decay_bounds_nobody(limited: bool) -> None:
    """`y` grows 2.5 times every six rounds, so never fivefold within its last eight.

    Its first eight rounds therefore count too.
    """
    for growth, most in [(2.5 ** (1 / 6), 10), (2.5 ** (-1 / 6), 1)]:
        limits = _limits(1e30) if limited else None
        records: list[RoundRecord] = []
        for round_ in range(1, 121):
            record = _record(_entry("x", 1.0), _entry("y", growth**round_), round_=round_)
            before = [one for one in records if one.round in remembered_before(round_)]
            bound(record, before, SETTING, limits=limits)
            assert record.contributions[0].replica == "x"
            assert scale_of(record.contributions[0]) == 1
            assert all(scale_of(one) * one.blobs[1].norm <= most for one in record.contributions)
            assert list(record.left_out) in ([], ["y"] if growth > 1 else [])
            records.append(record)


def _limits(allowed: float, rates: Callable[[int], float] = lambda _: 1.0) -> ContributionLimits:
    """Return limits that allow blocks `a` and `b` a norm of about `allowed` in round 1."""
    inner = InnerSettings(learning_rate=1.0, weight_decay=0.0)
    compression = CompressionSettings(density=1.0, error_feedback_decay=0.0)
    unit = ContributionLimits(inner, OuterSettings(rounds=200, compression=compression), rates)
    unit.begin({"a": torch.zeros(1), "b": torch.zeros(1)}, 0)
    share = allowed / unit.of(1)["b", "norm"]
    found = ContributionLimits(
        inner, OuterSettings(rounds=200, compression=compression), lambda round_: share * rates(round_)
    )
    found.begin({"a": torch.zeros(1), "b": torch.zeros(1)}, 0)
    assert found.of(1)["b", "norm"] == pytest.approx(allowed)
    return found


@pytest.mark.parametrize("new", [2, 3])
def test_whoever_was_there_is_not_held_against_those_that_are_new(new: int) -> None:
    """New replicas begin without moments and error feedback: in one run the others sent 5.2 times as much by then.

    A new one, and one that comes and goes, is still held against all of them, so that nobody gains by leaving.
    """
    before = [_record(_entry("x", 1.0), _entry("y", 1.0), round_=round_) for round_ in range(1, 9)]
    fresh = [_entry(name, 0.15) for name in "abc"[:new]]
    assert set(_bounded(_record(_entry("x", 1.0), _entry("y", 1.0), *fresh), before)[0].values()) == {1.0}
    assert _bounded(_record(_entry("x", 6.0), _entry("y", 1.0), *fresh), before)[0]["x"] == pytest.approx(5 / 6)
    assert _bounded(_record(_entry("x", 1.0), _entry("z", 1.0), *fresh), before)[0]["z"] == pytest.approx(0.75)
    gone = [*before[:-1], _record(_entry("y", 1.0), round_=8)]
    assert _bounded(_record(_entry("x", 1.0), _entry("y", 1.0), *fresh), gone)[0]["x"] == pytest.approx(0.75)


def test_of_two_that_begin_nobody_is_scaled_for_the_others_smallness() -> None:
    record = _record(_entry("x", 1e-6), _entry("y", 1.0, peak=0.1), round_=1)
    bound(record, [], SETTING, limits=_limits(1.2))
    assert [scale_of(one) for one in record.contributions] == [1.0, 1.0]
    assert not record.left_out


@pytest.mark.parametrize("names", ["y", "xy", "xyz"])
def test_what_the_learning_rates_do_not_allow_is_scaled_to_what_they_do(names: str) -> None:
    for times, scales, left_out in [(3.0, 1 / 3, []), (11.0, None, ["y"]), (1e30, None, ["y"])]:
        record = _record(*(_entry(one, 2.0 * times if one == "y" else 2.0, peak=0.1) for one in names), round_=1)
        bound(record, [], SETTING, limits=_limits(2.0))
        found = {one.replica: scale_of(one) for one in record.contributions}
        if names == "y":
            left_out, scales = [], 1 / times
        assert list(record.left_out) == left_out
        expected = min(scales or 1.0, 5 / times if len(names) > 2 else 1.0)
        assert found.pop("y", None) == (None if left_out else pytest.approx(expected, rel=1e-6))
        assert set(found.values()) <= {1.0}


@pytest.mark.parametrize("fragments", [1, 2])
def test_what_was_trained_before_a_missed_round_of_the_fragment_is_allowed(fragments: int) -> None:
    """`gone` was not in the fragment's last two rounds, and `new` in none. Whole models are trained for one round."""
    compression = CompressionSettings(density=1.0, error_feedback_decay=0.0)
    outer = OuterSettings(rounds=200, fragments=fragments, compression=compression)
    limits = ContributionLimits(InnerSettings(learning_rate=1.0, weight_decay=0.0), outer, lambda _: 1.0)
    limits.begin({"a": torch.zeros(1), "b": torch.zeros(1)}, 0)
    once, last = limits.of(90)["b", "norm"], 90 - fragments
    before = [_record(_entry("here", once), _entry("gone", once), round_=last - 2 * fragments)]
    before += [_record(_entry("here", once), round_=round_) for round_ in (last - fragments, last)]
    allowed = {"here": 1, "gone": 3, "new": 2} if fragments == 2 else dict.fromkeys(("here", "gone", "new"), 1)
    for times in (1.0, 1.25):
        record = _record(*(_entry(one, times * most * once, peak=0.1) for one, most in allowed.items()), round_=90)
        bound(record, before, SETTING, limits=limits, fragments=fragments)
        found = {one.replica: scale_of(one) for one in record.contributions}
        assert found == pytest.approx(dict.fromkeys(allowed, 1 / times))


def test_growth_that_follows_the_learning_rates_is_no_growth() -> None:
    """During warm-up, contributions grow forty-fold in eight rounds.

    No replica is scaled if limits know the learning rates.
    """
    for limits, is_scaled in [(_limits(1e9, lambda round_: 1.6**round_), False), (None, True)]:
        past = [_record(*(_entry(one, 1.6**n) for one in "xyz"), round_=n) for n in range(1, 9)]
        record = _record(*(_entry(one, 1.6**9) for one in "xyz"), round_=9)
        bound(record, past, SETTING, limits=limits)
        assert [scale_of(one) < 1 for one in record.contributions] == [is_scaled] * 3


def test_large_batches_come_to_more() -> None:
    """Gradients of large batches have less noise.

    Measured: contributions are 7.3 times as large with 64 times the tokens.
    """
    for times, is_scaled in [(64, False), (1, True)]:
        entries = [_entry("x", 1.0), _entry("y", 7.3), _entry("z", 1.0)]
        for one in entries:
            one.tokens = 10 * (100 * times if one.replica == "y" else 100)
        assert (_bounded(_record(*entries))[0]["y"] < 1) == is_scaled


# ---- in a run ----


def test_of_who_trains_on_all_of_its_way_is_expected() -> None:
    """`x` was excluded from two rounds and sends the sum of three rounds. Only `x` may be that large."""
    past = [_record(*map(_entry, "xyz", (1.0,) * 3), round_=round_) for round_ in range(1, 7)]
    past += [_record(*map(_entry, "yz", (1.0,) * 2), round_=round_) for round_ in (7, 8)]
    for norms, scales in [((12.0, 1.0, 1.0), [1.0, 1.0, 1.0]), ((1.0, 12.0, 1.0), [1.0, 5 / 12, 1.0])]:
        record = _record(*map(_entry, "xyz", norms), round_=9)
        bound(record, past, SETTING, trains_on=True)
        assert [scale_of(one) for one in record.contributions] == pytest.approx(scales)
        assert [one.steps for one in record.contributions] == [10] * 3
    assert _bounded(_record(*map(_entry, "xyz", (12.0, 1.0, 1.0)), round_=9), past)[0]["x"] == pytest.approx(5 / 12)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, {"a": 1, "b": 1, "c": 1}, quorum=1.0, magnitudes=SETTING)


def _deposit(run: Run, round_: int, sizes: Mapping[str, float]) -> None:
    """Deposit contributions of these members, with values scaled by these factors."""
    for member, size in sizes.items():
        for block in sorted(run.roster.blocks[member]):
            address = BlobAddress("run", round_, member, block)
            deposit(run.exchange, member, address, run.blob(address, size=size), steps=1)


def test_what_becomes_of_it_is_in_the_record_and_told(run: Run) -> None:
    run.assign(0)
    _deposit(run, 1, {"a": 1.0, "b": 20.0, "c": 1.0})
    record = run.exchange.record(1)
    assert [(one.replica, scale_of(one) == 1.0) for one in record.contributions] == [
        ("a", True),
        ("b", False),
        ("c", True),
    ]
    run.assign(1)
    _deposit(run, 2, {"a": 1.0, "b": 1.0, "c": 1e4})
    record = run.exchange.record(2)
    assert [one.replica for one in record.contributions] == ["a", "b"]
    assert list(record.left_out) == ["c"]
    assert not record.late
    assert [(one.what, one.replica, one.round) for one in run.told() if one.what in (SCALED, LEFT_OUT)] == [
        (SCALED, "b", 1),
        (LEFT_OUT, "c", 2),
    ]
    assert run.log.read_record(2) == record
    assert REMEMBERED_ROUNDS > 2


def test_replay_applies_the_factor(run: Run) -> None:
    """Compares with the formula theta - eta (a + f b + c) / 3."""
    run.assign(0)
    _deposit(run, 1, {"a": 1.0, "b": 20.0, "c": 1.0})
    record, start = run.exchange.record(1), run.checkpoint.parameters
    theta = {name: tensor.clone() for name, tensor in start.items()}

    def fetch(replica: str, block: str) -> bytes:
        entry = next(one for one in record.contributions if one.replica == replica)
        blob = next(one for one in entry.blobs if one.block == block)
        return run.log.read_blob(key_of(record, entry, blob), blob.sha256)

    plain = SETTINGS.model_copy(update={"momentum": 0.0})
    apply_round(theta, "run", record, fetch, OuterOptimizer(plain))
    for block, shapes in shapes_by_block(shapes_of(start)).items():
        totals = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for entry in record.contributions:
            address = BlobAddress("run", 1, entry.replica, block)
            decoded = decode_blob(fetch(entry.replica, block), address, shapes, SETTINGS.compression)
            for name, one in decoded.items():
                DecodedTensor(one.indices, one.values * scale_of(entry)).add_to(totals[name], 1.0)
        for name, total in totals.items():
            assert theta[name].equal(start[name] - total / 3 * plain.learning_rate), name


def test_steps_that_are_claimed_weigh_a_bounded_number_of_times_as_much(tmp_path: Path) -> None:
    run = Run(tmp_path, {"a": 1, "b": 1, "c": 1}, quorum=1.0, weighs_tokens=True)
    run.assign(0)
    for member, steps in [("a", 2**32), ("b", 7), ("c", 9)]:
        for block in sorted(run.roster.blocks[member]):
            address = BlobAddress("run", 1, member, block)
            deposit(run.exchange, member, address, run.blob(address), steps=steps)
    weights = {one.replica: one.weight for one in run.exchange.record(1).contributions}
    assert weights == {"a": 100.0 * 9 * MOST_TIMES_THE_STEPS, "b": 700.0, "c": 900.0}


LEVELS = CompressionSettings(density=1 / 8, tile=(8, 8), quantiser="levels", value_bits=2)


def _with_levels(run: Run, member: str, levels: Sequence[float]) -> Iterator[tuple[BlobAddress, bytes]]:
    """Yield blobs that differ from honest ones only in the quantiser's levels."""
    for block, shapes in shapes_by_block(shapes_of(run.checkpoint.parameters)).items():
        selections = []
        for name, shape in shapes.items():
            honest = select(torch.zeros(shape), torch.randn(shape), LEVELS)
            told = replace(honest.quantised, levels=torch.tensor(levels))
            selections.append((name, shape, replace(honest, quantised=told)))
        address = BlobAddress("run", 1, member, block)
        yield address, encode_blob(address, selections, LEVELS)


@pytest.mark.parametrize(
    ("levels", "becomes"),
    [
        ([3e38, -3e38, 3e38, -3e38], "left out"),
        ([1e-3, 1e-3, 1e-3, 3e38], "left out"),
        ([1.0, 1.0, 1.0, 30.0], "scaled"),
        ([1e-45, -1e-45, 0.0, -0.0], "counted"),
        ([0.0, -0.0, 0.0, -0.0], "counted"),
        ([math.nan, 0.0, 0.0, 0.0], "refused"),
        ([0.0, 0.0, 0.0, -math.inf], "refused"),
    ],
    ids=str,
)
def test_decoded_values_are_what_is_bounded(
    levels: Sequence[float], becomes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS.model_copy(update={"compression": LEVELS})
    monkeypatch.setattr("small_run.SETTINGS", settings)
    run = Run(tmp_path, {"a": 1, "b": 1, "c": 1}, quorum=0.6, magnitudes=SETTING)
    run.assign(0)
    refused = 0
    for address, data in _with_levels(run, "c", levels):
        try:
            deposit(run.exchange, "c", address, data, steps=1)
        except Refused as error:
            assert str(error).endswith("a value is not finite")
            refused += 1
    _deposit(run, 1, {"a": 1.0, "b": 1.0})
    run.passes(GRACE.most)
    record = run.exchange.record(1)
    found = {one.replica: scale_of(one) for one in record.contributions}
    assert (found.pop("a"), found.pop("b")) == (1.0, 1.0)
    assert list(record.left_out) == (["c"] if becomes == "left out" else [])
    assert list(record.late) == (["c"] if becomes == "refused" else [])
    assert (refused > 0) == (becomes == "refused")
    assert (found.get("c", 1.0) < 1) == (becomes == "scaled")
    theta = {name: tensor.clone() for name, tensor in run.checkpoint.parameters.items()}

    def fetch(replica: str, block: str) -> bytes:
        return run.exchange.fetch("a", 1, replica, block)

    apply_round(theta, "run", record, fetch, OuterOptimizer(settings))
    assert all(bool(tensor.isfinite().all()) for tensor in theta.values())


def test_members_hold_what_replay_gives(tmp_path: Path) -> None:
    """Scaled and excluded members have the same parameters as all.

    An excluded member restores its contribution to error feedback.
    """
    run = Run(tmp_path, dict.fromkeys("abcd", 1), quorum=1.0, magnitudes=SETTING)
    members = [Member(run, name) for name in "abcd"]
    run.assign(0)
    for member, size in zip(members, (1.0, 20.0, 1e4, 1.0), strict=True):
        member.train(1)
        with torch.no_grad():
            for key, parameter in member.parameters.items():
                parameter.copy_(member.start[key] + size * (parameter - member.start[key]))
    synchronised = [in_thread(partial(member.outer.synchronise, 1, 1, 1)) for member in members]
    records = [one.result(TIMEOUT) for one in synchronised]
    assert all(record == records[0] for record in records)
    assert list(records[0].left_out) == ["c"]
    assert [scale_of(one) < 1 for one in records[0].contributions] == [False, True, False]
    for name, tensor in members[0].holds().items():
        assert all(member.holds()[name].equal(tensor) for member in members), name
    given_back = sum(float(tensor.abs().sum()) for tensor in members[2].errors().values())
    kept = sum(float(tensor.abs().sum()) for tensor in members[0].errors().values())
    assert given_back > 1000 * kept
