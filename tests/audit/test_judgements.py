"""Judgements: what is refused, medians over validators, exclusions, and what records have of scores."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from small_run import GRACE, Run

from hetero_pp.config.audit import AuditSettings
from hetero_pp.core.errors import Refused, StoreError
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.audit import judgements as module
from replica_groups.audit.gauntlet import SignCheck
from replica_groups.audit.judgements import Judgements
from replica_groups.exchange.audits import newest_scores
from replica_groups.exchange.log import record_digest
from replica_groups.exchange.memberships import Memberships
from replica_groups.rounds.draws import draw_key

GROUPS = {"a": 1, "b": 1, "c": 1}
GOOD = {"assigned_before": 4.0, "assigned_after": 3.0, "other_before": 4.0, "other_after": 3.9}
BAD = {"assigned_before": 4.0, "assigned_after": 4.5, "other_before": 4.0, "other_after": 3.9}
NAN = math.nan


def _audited(
    run: Run, weighs: bool = False, by: str = "exchange", alike: Sequence[tuple[str, str]] = (), **gauntlet: Any
) -> Judgements:
    """`alike`: contributions that overlap."""
    own = {"grace": 2, "alpha": 1, "excluded_rounds": 3, **gauntlet}
    settings = AuditSettings.model_validate({"by": by, "gauntlet": own})
    exchange = run.exchange
    parts = exchange.runner, exchange.reports, exchange.held_by
    judgements = Judgements(*parts, settings, weighs=weighs, overlapping=lambda record: alike)
    exchange.runner.audits = judgements
    judgements.begin(exchange.coordinator.last_round)
    return judgements


def _round(run: Run, number: int, *members: str) -> pb.RoundRecord:
    """Close a round to which these members contribute, in this order."""
    run.assign(number - 1, *sorted(members))
    run.deposit(number, *members)
    if run.exchange.coordinator.last_round < number:
        run.passes(GRACE.most, members)
    return run.exchange.log.read_record(number)


def _losses(round_: int, **losses: dict[str, float]) -> list[pb.Judgement]:
    return [pb.Judgement(round=round_, replica=name, losses=pb.Losses(**told)) for name, told in losses.items()]


def _wrong(round_: int, replica: str, member: str = "") -> pb.Judgement:
    found = pb.Recomputed(is_equal=False, difference=0.5, member=member, cause="block.0: other values")
    return pb.Judgement(round=round_, replica=replica, recomputed=found)


def _draws(run: Run, round_: int, *replicas: str) -> None:
    """Publish a draw, as the exchange does."""
    draw = {"record": run.log.read_record(round_).sha256.hex(), "drawn": replicas}
    run.log.store.put(draw_key(round_), json.dumps(draw).encode())


def _membership_state(run: Run) -> list[tuple[int, str, str]]:
    return [(one.what, one.replica, one.cause) for one in run.told()]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "log", GROUPS, quorum=0.3)


@pytest.mark.parametrize(
    ("validator", "judgement", "found"),
    [
        ("v", pb.Judgement(round=1, replica="a"), "without a finding"),
        ("v", _losses(1, d=GOOD)[0], "`replica`: got `d`"),
        ("v", _losses(0, a=GOOD)[0], "about round 0"),
        ("v", _losses(2, a=GOOD)[0], "about round 2"),
        ("v", _losses(1, a=GOOD | {"assigned_before": 0.0})[0], "assigned_before"),
        ("v", _losses(1, a=GOOD | {"other_before": math.inf})[0], "other_before"),
        ("v", _losses(1, a=GOOD | {"other_after": NAN})[0], "other_after"),
        ("v", _losses(1, a=GOOD | {"assigned_after": -1.0})[0], "assigned_after"),
        ("v", _losses(1, a=GOOD | {"assigned_after": 2e6})[0], "assigned_after"),
        ("v", _losses(1, c=GOOD)[0], "no contribution of c"),
        ("v", pb.Judgement(round=1, replica="a", copies="a"), "expected another replica"),
        ("v", pb.Judgement(round=1, replica="a", copies="c"), "no contribution of c"),
        ("v", pb.Judgement(round=1, replica="a", agreement=-5.0), "the exchange compares signs itself"),
        ("v", _wrong(1, "a", "b"), "expected a member of a"),
        ("v", pb.Judgement(round=1, replica="a", recomputed=pb.Recomputed(difference=NAN)), "difference"),
        ("v", pb.Judgement(round=1, replica="a", recomputed=pb.Recomputed(cause="x" * 401)), "more than 400"),
    ],
)
def test_a_judgement_out_of_bounds_is_refused(run: Run, validator: str, judgement: pb.Judgement, found: str) -> None:
    judgements = _audited(run)
    _round(run, 1, "a", "b")
    with pytest.raises(Refused, match=found):
        judgements.take([*_losses(1, b=GOOD), judgement], validator)
    assert dict(run.exchange.runner.refusals.counts) == {Kind.MALFORMED: 1}
    assert newest_scores(run.log.store) is None, "what was right in the same request does not count either"


def test_only_so_many_validators_judge_and_each_once(run: Run) -> None:
    judgements = _audited(run)
    _round(run, 1, *GROUPS)
    for number in range(module.MOST_VALIDATORS):
        judgements.take(_losses(1, a=GOOD), f"v{number}")
    with pytest.raises(Refused, match="second judgement about a in round 1"):
        judgements.take(_losses(1, a=BAD), "v1")
    with pytest.raises(Refused, match="second judgement"):
        judgements.take(_losses(1, b=GOOD, c=GOOD) + _losses(1, b=BAD), "v1")
    with pytest.raises(Refused, match="more than 16 validators"):
        judgements.take(_losses(1, a=GOOD), "one.more")


def test_a_validator_that_is_gone_leaves_its_place_to_another(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JUDGED_ROUNDS", 2)
    judgements = _audited(run)
    for number in (1, 2, 3):
        _round(run, number, *GROUPS)
        for name in range(module.MOST_VALIDATORS - 1) if number == 1 else ():
            judgements.take(_losses(1, a=GOOD), f"v{name}")
        judgements.take(_losses(number, a=GOOD), "stays")
    judgements.take(_losses(3, a=GOOD), "another")
    assert judgements._validators.keys() == {"stays", "another"}


def test_a_lying_minority_of_validators_changes_nothing(tmp_path: Path) -> None:
    tables = []
    for validators in (["v"], ["v", "w", "liar"]):
        run = Run(tmp_path / str(len(validators)), GROUPS, quorum=0.3)
        judgements = _audited(run, grace=20)
        for number in range(1, 4):
            _round(run, number, *GROUPS)
            for name in validators:
                lies = {"a": BAD, "b": GOOD, "c": BAD} if name == "liar" else {"a": GOOD, "b": BAD, "c": GOOD}
                copies = [pb.Judgement(round=number, replica="c", copies="a")] if name == "liar" else []
                judgements.take([*copies, *_losses(number, **lies)], name)
        kept = newest_scores(run.log.store)
        assert kept is not None and kept.round == 3
        tables.append(kept.table)
        assert [one.replica for one in run.exchange.log.read_record(3).contributions] == ["a", "b", "c"]
    assert tables[0] == tables[1]


def test_a_contribution_that_one_of_three_validators_tried_has_no_losses(run: Run) -> None:
    """A validator that lies could otherwise judge any replica, beside the drawn ones."""
    judgements = _audited(run)
    for number in (1, 2):
        _round(run, number, *GROUPS)
        for name in ("v", "w", "liar"):  # all are known from the second round on
            lies = {"c": BAD} if (name, number) == ("liar", 2) else {}
            judgements.take(_losses(number, a=GOOD, **lies), name)
    kept = newest_scores(run.log.store)
    assert kept is not None
    assert kept.round == 2 and {one.replica: one.evaluations for one in kept.scores.scores} == {"a": 2, "b": 0, "c": 0}


def test_a_replica_below_the_bound_is_excluded_for_some_rounds_and_then_returns(tmp_path: Path) -> None:
    run = Run(tmp_path, GROUPS, quorum=0.3)
    judgements = _audited(run)
    for number in (1, 2):
        _round(run, number, *GROUPS)
        judgements.take(_losses(number, a=GOOD, b=GOOD, c=BAD), "v")
    assert "c" in judgements.exclusions.in_force
    run.take_over()  # another exchange goes on: it knows from the log who is excluded
    judgements = _audited(run)
    assert _round(run, 3, "a", "b").left_out == []
    told = [one.WhichOneof("event") for one in run.exchange.watch(is_asked=lambda: False)]
    assert told == []
    for number in (4, 5):
        _round(run, number, "a", "b")
        judgements.take(_losses(number, a=GOOD, b=GOOD), "v")
    assert run.assign(5) == {"a": 6, "b": 6, "c": 6}
    [(_, replica, cause)] = [one for one in _membership_state(run) if one[0] == pb.EXCLUDED]
    assert replica == "c"
    assert "its assigned text improves too rarely" in cause and "takes part in no round before 6" in cause


def test_a_contribution_that_was_on_its_way_is_left_out_with_the_reason(run: Run) -> None:
    judgements = _audited(run)
    for number in (1, 2):
        _round(run, number, *GROUPS)
        if number == 2:
            run.assign(2)  # all train round 3 already
        judgements.take(_losses(number, a=GOOD, b=GOOD, c=BAD), "v")
    run.deposit(3, *GROUPS)
    record = run.exchange.log.read_record(3)
    assert [one.replica for one in record.contributions] == ["a", "b"] and record.left_out == ["c"]
    assert record.sha256 == record_digest(record)
    [(_, replica, cause)] = [one for one in _membership_state(run) if one[0] == pb.LEFT_OUT]
    assert replica == "c" and "improves too rarely" in cause


def test_records_have_the_best_replicas_and_their_weights(run: Run) -> None:
    judgements = _audited(run, weighs=True, grace=1, threshold=-1.0)
    assert {one.weight for one in _round(run, 1, *GROUPS).contributions} == {1.0}
    judgements.take(_losses(1, a=GOOD, b=GOOD | {"assigned_after": 2.0, "other_after": 3.0}, c=BAD), "v")
    weights = {one.replica: one.weight for one in _round(run, 2, *GROUPS).contributions}
    assert weights["b"] == 1.0 > max(weights["a"], weights["c"])
    judgements._settings = AuditSettings.model_validate({"gauntlet": {"include": 2}})
    judgements._book._settings = judgements._settings.gauntlet  # type: ignore[union-attr]
    record = _round(run, 3, *GROUPS)
    assert ([one.replica for one in record.contributions], record.left_out) == (["a", "b"], ["c"])
    [(_, _, cause)] = [one for one in _membership_state(run) if one[0] == pb.LEFT_OUT]
    assert cause == "its score is not among the best 2"


def test_a_validator_that_dies_is_awaited_for_a_few_rounds(run: Run) -> None:
    judgements = _audited(run)
    for number in range(1, 8):
        _round(run, number, *GROUPS)
        judgements.take(_losses(number, a=GOOD), "v")
        if number == 1:
            judgements.take(_losses(1, b=GOOD), "dies")
        kept = newest_scores(run.log.store)
        assert kept is not None and kept.round == (1 if number < 6 else 2 if number == 6 else 3)


@pytest.mark.parametrize("order", [("c", "b", "a"), ("a", "b", "c")])
def test_the_copy_is_the_one_that_most_validators_name_whatever_arrives_first(run: Run, order: list[str]) -> None:
    judgements = _audited(run, alike=[("a", "c")])
    _round(run, 1, *order)
    for validator, copy, original in (("u", "a", "c"), ("v", "c", "a"), ("w", "a", "c")):
        judgements.take([*_losses(1, b=GOOD), pb.Judgement(round=1, replica=copy, copies=original)], validator)
    if not judgements.exclusions.in_force:  # the first of them was alone, and is settled with the next round
        _round(run, 2, *order)
    [(_, replica, cause)] = [one for one in _membership_state(run) if one[0] == pb.EXCLUDED]
    assert replica == "a" and "is a copy of that of c" in cause


def test_a_contribution_against_the_others_is_in_no_round_and_is_told_once(run: Run) -> None:
    """The record is decided twice, because the store is full at first. Nobody else may judge signs."""
    judgements, compared = _audited(run), list[set[str]]()

    def against(record: pb.RoundRecord, fetch: object) -> dict[str, float]:
        compared.append({one.replica for one in record.contributions})
        return {"b": -1.0} if "b" in compared[-1] else {}

    judgements._signs = cast(SignCheck, SimpleNamespace(against=against))
    create = run.log.create_record
    with mock.patch.object(run.log, "create_record", side_effect=[StoreError("no room"), mock.DEFAULT], wraps=create):
        record = _round(run, 1, *GROUPS)
    assert list(record.left_out) == ["b"] and {one.replica for one in record.contributions} == {"a", "c"}
    assert compared == [{"a", "b", "c"}, {"a", "c"}], "an excluded replica has no part in the comparison"
    [(_, replica, cause)] = [one for one in _membership_state(run) if one[0] == pb.EXCLUDED]
    assert replica == "b" and "goes another way than the others: agreement -1.00" in cause
    judgements.take(_losses(1, a=GOOD), "v")
    assert len([one for one in _membership_state(run) if one[0] == pb.EXCLUDED]) == 1


def test_validators_cannot_call_a_contribution_a_copy_that_is_none(run: Run) -> None:
    judgements = _audited(run, alike=[("a", "b")])
    _round(run, 1, *GROUPS)
    judgements.take([*_losses(1, b=GOOD), pb.Judgement(round=1, replica="c", copies="a")], "liar")
    assert not judgements.exclusions.in_force


def test_recomputation_excludes_a_replica_once_most_validators_agree(run: Run) -> None:
    judgements = _audited(run)
    _round(run, 1, *GROUPS)
    _draws(run, 1, "b", "c")
    equal = pb.Judgement(round=1, replica="c", recomputed=pb.Recomputed(is_equal=True))
    judgements.take([equal], "w")
    judgements.take([_wrong(1, "b")], "v")
    assert not judgements.exclusions.in_force, "one of two validators is no majority"
    judgements.take([_wrong(1, "b")], "w")
    assert judgements.exclusions.in_force["b"].cause == "its round 1 was computed again: block.0: other values"


def test_only_who_was_drawn_can_be_accused(run: Run) -> None:
    judgements = _audited(run)
    _round(run, 1, *GROUPS)
    with pytest.raises(Refused, match="b was not drawn in round 1"):
        judgements.take([_wrong(1, "b")], "liar")
    _draws(run, 1, "c")
    with pytest.raises(Refused, match="b was not drawn in round 1"):
        judgements.take([_wrong(1, "b")], "liar")
    assert not judgements.exclusions.in_force


def test_a_validator_that_never_came_to_the_same_excludes_nobody(run: Run) -> None:
    """Its machine may have other bits. Its findings count once it has computed the same as another replica."""
    judgements, different = _audited(run), _wrong(1, "b")
    different.recomputed.evidence = "evidence/000001-b"
    _round(run, 1, *GROUPS)
    _draws(run, 1, "b", "c")
    judgements.take([different], "v")
    assert not judgements.exclusions.in_force
    judgements.take([pb.Judgement(round=1, replica="c", recomputed=pb.Recomputed(is_equal=True))], "v")
    assert "b" in judgements.exclusions.in_force


def test_validators_that_name_others_are_no_majority(run: Run) -> None:
    """A validator that has judged losses counts, too, before its first recomputation."""
    judgements = _audited(run)
    _round(run, 1, *GROUPS)
    _draws(run, 1, "b")
    for validator in ("v", "w"):
        judgements.take(_losses(1, a=GOOD), validator)
    judgements.take([_wrong(1, "b", "b")], "v")
    judgements.take([_wrong(1, "b")], "liar")
    assert not judgements.exclusions.in_force
    judgements.take([_wrong(1, "b", "b")], "w")
    assert "b" in judgements.exclusions.in_force


def test_recomputation_revokes_the_ticket_of_a_member_that_it_names(run: Run, tmp_path: Path) -> None:
    judgements, guests = _audited(run), Memberships(tmp_path / "members.sqlite")
    judgements.admit(guests, None)
    holder = guests.enrol(guests.invite("b", 3600), b"key", [], 3600).number
    _committed_by(judgements, holder)
    run.assign(0, "a", "c")
    run.exchange.assign(Caller("b", holder=holder), 0)
    run.deposit(1, *GROUPS)
    _draws(run, 1, "b")
    judgements.take([_wrong(1, "b", "b")], "v")
    with pytest.raises(Refused, match="its round 1 was computed again"):
        guests.require_in("b", holder)
    assert not run.exchange.coordinator.slots["b"].is_heard and not judgements.exclusions.in_force
    guests.close()


def test_the_next_holder_of_a_slot_keeps_its_ticket(run: Run, tmp_path: Path) -> None:
    """The last one committed, and left before the round closed."""
    judgements, guests = _audited(run), Memberships(tmp_path / "members.sqlite")
    judgements.admit(guests, None)
    tickets = guests.invite("b", 3600), guests.invite("b", 3600)
    last = guests.enrol(tickets[0], b"key", [], 3600).number
    guests.end("b", last, "it left")
    holder = guests.enrol(tickets[1], b"other key", [], 3600).number
    _committed_by(judgements, last)
    run.assign(0, "a", "c")
    run.exchange.assign(Caller("b", holder=holder), 0)
    run.deposit(1, *GROUPS)
    _draws(run, 1, "b")
    judgements.take([_wrong(1, "b", "b")], "v")
    guests.require_in("b", holder)
    assert [one.id for one in guests.tickets()] == [tickets[1]]
    guests.close()


def _committed_by(judgements: Judgements, holder: int) -> None:
    """Let the records say that this holder of slot `b` committed."""

    def add_to(record: pb.RoundRecord) -> None:
        for entry in record.contributions:
            entry.commitments.extend([pb.Commitment(member="b", holder=holder)] if entry.replica == "b" else [])

    made: Any = SimpleNamespace(
        take=lambda *of_a_blob: None, add_to=add_to, closed=lambda record: None, expected=lambda member: b""
    )
    judgements.showing = cast(
        Any, SimpleNamespace(commitments=made, owing=lambda record: {}, asks=lambda *of_a_member: None)
    )


def test_a_run_without_a_validator_says_so_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNAUDITED_ROUNDS", 2)
    judgements = _audited(run, by="validators")
    for number in range(1, 6):
        _round(run, number, *GROUPS)
    judgements.take(_losses(5, a=GOOD), "v")
    told = [(what, cause) for what, _, cause in _membership_state(run)]
    assert [what for what, _ in told] == [pb.UNAUDITED, pb.AUDITED]
    assert told[0][1] == "no validator has judged a round since round 0; `hetero-pp audit validate` starts one"


def test_damaged_scores_begin_anew_and_say_so(run: Run) -> None:
    judgements = _audited(run)
    _round(run, 1, *GROUPS)
    judgements.take(_losses(1, a=GOOD), "v")
    [key] = [key for key in run.log.store.below("audited") if "scores" in key]
    run.log.store.put(key, run.log.store.get(key).replace(b"evaluations", b"valuations"))
    _audited(run)
    [(_, _, cause)] = [one for one in _membership_state(run) if one[0] == pb.UNAUDITED]
    assert "does not match its digest; all scores begin anew" in cause
