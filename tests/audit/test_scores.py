"""Scores of contributions: exclusions, inclusions and weights. Each hole of a naive score has a test."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lying_run import lying_spec
from small_run import GRACE, Run
from table_config import tiny

from hetero_pp.config.audit import GauntletSettings
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import save_config
from hetero_pp.core.errors import ConfigError, DamagedFile
from hetero_pp.messages.messages_pb2 import Losses, Score, Scores
from hetero_pp.program.audits import print_scores
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.store.folder import FolderStore
from replica_groups.audit.gauntlet import share_of_compute
from replica_groups.audit.replica_scores import RECENT_ROUNDS, ReplicaScores, RoundFacts
from replica_groups.exchange.audits import Exclusion, keep_scores, newest_scores, scores_key
from replica_groups.rounds.draws import drawn_for_trials

EIGHT = [f"r{index}" for index in range(8)]


def _losses(score: float, clearness: float = 3.0) -> Losses:
    """Return the losses of a contribution with this relative improvement on other text.

    `clearness`: how many standard errors more the assigned text improves.
    """
    assigned = score + clearness * 0.001
    return Losses(
        assigned_before=4, assigned_after=4 * (1 - assigned), other_before=4, other_after=4 * (1 - score), error=0.001
    )


def _facts(
    round_: int,
    included: Iterable[str],
    missed: Iterable[str] = (),
    copies: Mapping[str, str] | None = None,
    synchronisation: Mapping[str, float] | None = None,
    left_out: Iterable[str] = (),
) -> RoundFacts:
    sent, out = frozenset(included), frozenset(left_out)
    return RoundFacts(round_, sent, frozenset(missed), synchronisation or {}, copies or {}, out)


def _after(
    scores: Mapping[str, float], rounds: int = 20, noise: float = 1e-4, **settings: float | None
) -> ReplicaScores:
    """Return the book after rounds in which each replica had this score, give or take the noise."""
    book, chance = ReplicaScores(GauntletSettings.model_validate(settings), scores), random.Random(1)
    for round_ in range(1, rounds + 1):
        found = {name: _losses(score + chance.gauss(0, noise)) for name, score in scores.items()}
        book.update(_facts(round_, scores), found)
    return book


def test_two_negative_factors_make_no_good_score() -> None:
    book = ReplicaScores(GauntletSettings(excluded_rounds=1000), [])
    for round_ in range(1, 40):
        good = {name: _losses(0.02) for name in EIGHT[:6]}
        found = good | {"bad": _losses(-0.02, -3), "worse": _losses(-0.03)}
        book.update(_facts(round_, found), found)
    scores = book.scores()
    assert scores["bad"].rating < 0 and scores["bad"].average == 0 and scores["bad"].final == 0
    assert scores["worse"].rating < 0 and scores["worse"].average > 0 and scores["worse"].final == 0
    assert book.weights(scores)["bad"] == 0


def test_a_pair_that_meets_only_each_other_gains_nothing() -> None:
    book = ReplicaScores(GauntletSettings(), EIGHT)
    before = book.scores()["r0"].rating
    for round_ in range(1, 100):
        pair = {"r0": _losses(0.5), "r1": _losses(0.0)}
        book.update(_facts(round_, pair, missed=EIGHT[2:]), pair)
    assert book.scores()["r0"].rating == before


def test_matches_go_on_when_replicas_have_left() -> None:
    book = ReplicaScores(GauntletSettings(), EIGHT)
    everybody = {name: _losses(0.01) for name in EIGHT}
    book.update(_facts(1, everybody), everybody)
    before = book.scores()["r0"].rating
    for round_ in range(2, 2 + RECENT_ROUNDS):
        two = {"r0": _losses(0.02), "r1": _losses(0.01)}
        book.update(_facts(round_, two), two)
    assert book.scores()["r0"].rating > before


def test_a_new_replica_is_neither_preferred_nor_excluded_after_a_few_good_rounds() -> None:
    book = _after(dict(zip(EIGHT[:7], (0.01, 0.011, 0.012, 0.013, 0.014, 0.015, 0.016), strict=True)), include=4)
    with_new = {name: _losses(0.01) for name in EIGHT[:7]} | {"r7": _losses(0.5)}
    book.update(_facts(21, with_new), with_new)
    weights = book.weights(EIGHT)
    assert weights["r7"] == pytest.approx(sum(weights[name] for name in EIGHT[:7]) / 7)


def test_without_scores_all_are_equal_and_take_turns() -> None:
    book, turns = ReplicaScores(GauntletSettings(include=6), EIGHT), dict.fromkeys(EIGHT, 0)
    assert book.weights(EIGHT) == dict.fromkeys(EIGHT, 1.0)
    for round_ in range(1, 9):
        chosen = book.chosen(EIGHT)
        turns = {name: turns[name] + (name in chosen) for name in turns}
        facts = _facts(round_, chosen, left_out=frozenset(EIGHT) - frozenset(chosen))
        book.update(facts, {})
    assert set(turns.values()) == {6}


def test_few_scores_decide_nothing() -> None:
    book = ReplicaScores(GauntletSettings(), EIGHT)
    for round_ in range(1, 40):
        drawn = EIGHT if round_ % 5 == 0 else EIGHT[:3]
        book.update(_facts(round_, EIGHT), {name: _losses(0.01 * (8 - index)) for index, name in enumerate(drawn)})
    assert len({score.final for score in book.scores().values()}) > 4
    assert book.weights(EIGHT) == dict.fromkeys(EIGHT, 1.0)


def test_a_copy_is_excluded_and_its_original_is_not() -> None:
    book = _after(dict.fromkeys(EIGHT, 0.02))
    found = dict.fromkeys(EIGHT, _losses(0.02))
    book.update(_facts(21, EIGHT, copies={"r5": "r2"}), found)
    assert book.to_exclude() == {"r5": "its contribution to round 21 is a copy of that of r2"}
    weights = book.weights(EIGHT)
    assert weights["r5"] < weights["r2"]


def test_two_that_share_one_contribution_weigh_no_more_than_its_owner_would() -> None:
    """Each of them sends half of the positions; the assigned text of both was trained on."""
    others = {f"h{index}": 0.005 + 0.001 * index for index in range(5)}
    alone = _after({**others, "owner": 0.02}, noise=0.001).weights([*others, "owner"])
    shared = _after({**others, "one": 0.01, "two": 0.01}, noise=0.001).weights([*others, "one", "two"])
    honest = [sum(weights[name] for name in others) for weights in (shared, alone)]
    assert (shared["one"] + shared["two"]) / honest[0] <= 1.05 * alone["owner"] / honest[1]


def test_a_replica_with_other_parameters_has_no_score() -> None:
    book = _after({"a": 0.02, "b": 0.02, "c": 0.03})
    before = book.scores()["c"].average
    book.update(_facts(21, "abc", synchronisation={"c": 0.0}), {"c": _losses(0.05)})
    score = book.scores()["c"]
    assert score.final == 0 and score.synchronisation == 0 and score.average < before


def test_a_replica_without_own_work_is_excluded_after_the_grace_and_again_after_its_return() -> None:
    book, excluded = ReplicaScores(GauntletSettings(excluded_rounds=4), EIGHT), []
    for round_ in range(1, 30):
        included = [name for name in EIGHT if name not in book.to_exclude()]
        found = {name: _losses(0.02, 0.0) if name == "r3" else _losses(0.02) for name in included}
        book.update(_facts(round_, included, left_out=book.to_exclude()), found)
        excluded.append("r3" in book.to_exclude())
        assert book.to_exclude().keys() <= {"r3"}
    assert excluded[:9] == [False] * 9 and excluded[9:13] == [True] * 4
    assert excluded[13:16] == [False, False, True], "two rounds after its return are enough"
    assert "expected at least 0.1" in book.to_exclude()["r3"]


def test_a_replica_that_was_away_keeps_its_score_and_a_new_holder_begins_anew() -> None:
    book = _after({"a": 0.01, "b": 0.02, "c": 0.03})
    kept = book.scores()["c"]
    for round_ in range(21, 24):
        book.update(_facts(round_, "ab"), {name: _losses(0.02) for name in "abc"})
    left = book.scores()["c"]
    left.share = kept.share  # of what the others have now
    assert left == kept, "losses of a replica that was away are ignored"
    book.forget("c")
    assert book.scores()["c"].evaluations == 0 and book.scores()["c"].average == 0


@pytest.mark.parametrize(("clearness", "excluded"), [(0.5, set()), (3.0, {"r0", "r1", "r2"})])
def test_nobody_is_excluded_unless_the_text_separates_the_others(clearness: float, excluded: set[str]) -> None:
    book = ReplicaScores(GauntletSettings(excluded_rounds=100), EIGHT)
    for round_ in range(1, 30):
        book.update(_facts(round_, EIGHT), {name: _losses(0.01, clearness if name > "r2" else -3.0) for name in EIGHT})
    assert book.to_exclude().keys() == excluded


@pytest.mark.parametrize(("tokens", "excluded"), [(8, {"r0"}), (256, set())])
def test_a_replica_is_only_compared_with_those_that_read_as_much_text(tokens: int, excluded: set[str]) -> None:
    book = ReplicaScores(GauntletSettings(excluded_rounds=100), EIGHT)
    for round_ in range(1, 13):
        facts = replace(_facts(round_, EIGHT), texts=dict.fromkeys(EIGHT, 8) | {"r0": tokens})
        book.update(facts, {name: _losses(0.02, 0.1 if name == "r0" else 3.0) for name in EIGHT})
    assert book.to_exclude().keys() == excluded


def _ten_rounds(seed: int, bad: str | None, hides: bool = False) -> dict[str, int]:
    """Return the round after which each excluded one of 20 replicas was excluded. With `hides` it shows no text.

    The improvements and errors of honest work and of noise are as measured in the first rounds at small scale.
    """
    settings, chance, names = GauntletSettings(), random.Random(seed), [f"r{index}" for index in range(20)]
    book, out = ReplicaScores(settings, names), dict[str, int]()
    for round_ in range(1, 11):
        left = [name for name in names if name not in out]
        record, count = round_.to_bytes(4, "big"), settings.sizes(len(left), 0).evaluated
        drawn = drawn_for_trials(str(seed).encode(), record, left, count, *book.preferred())
        found = dict[str, Losses]()
        for name in drawn:
            assigned = chance.gauss(-0.001, 0.003) if name == bad else chance.gauss(0.03, 0.004)
            other, error = chance.gauss(0.8 * assigned, 0.003), 0.003
            found[name] = Losses(assigned_before=1, assigned_after=1 - assigned, other_before=1, error=error)
            found[name].other_after = 1 - other
        shown = {name: not (hides and name == bad) for name in drawn}
        losses = {name: one for name, one in found.items() if shown[name]}
        book.update(replace(_facts(round_, left), shown=shown), losses)
        out |= {name: round_ for name in book.to_exclude() if name not in out}
    return out


@pytest.mark.parametrize("hides", [False, True])
def test_one_bad_replica_of_20_is_excluded_within_ten_rounds_and_no_honest_one_is(hides: bool) -> None:
    found = [_ten_rounds(seed, "r7", hides) for seed in range(100)]
    assert all(one.keys() == {"r7"} for one in found), [one for one in found if one.keys() != {"r7"}]
    assert max(one["r7"] for one in found) <= 9
    assert not any(_ten_rounds(seed, None) for seed in range(100))


def test_reliability_and_uptime_lower_the_final_score_and_the_shares_add_up_to_1() -> None:
    book = _after(dict.fromkeys("abcd", 0.02), rounds=30, noise=0.01)
    before = book.scores()
    assert sum(one.share for one in before.values()) == pytest.approx(1) and before["a"].share > before["b"].share > 0
    facts = replace(_facts(31, "abd", missed="c"), shown={"a": True, "b": False})
    book.update(facts, {})
    after = book.scores()
    assert (after["a"].reliability, after["b"].reliability, after["d"].reliability) == (1, 0, 1)
    assert after["b"].final == after["b"].share == 0 and after["a"].final == before["a"].final
    assert after["c"].uptime == pytest.approx(30 / 31) and after["c"].final == pytest.approx(
        before["c"].final * 30 / 31
    )
    book.update(_facts(32, "abcd", copies={"d": "c"}), {})
    after = book.scores()
    assert after["d"].share == 0 < after["d"].final and sum(one.share for one in after.values()) == pytest.approx(1)


@pytest.mark.parametrize("replicas", [4, 8, 20])
def test_honest_replicas_are_never_excluded_in_1000_rounds(replicas: int) -> None:
    """Their assigned text improves by 2 standard errors more on average, as measured with the default settings."""
    settings, chance, names = GauntletSettings(), random.Random(3), [f"r{index}" for index in range(replicas)]
    book = ReplicaScores(settings, names)
    for round_ in range(1, 1001):
        record, count = round_.to_bytes(4, "big"), settings.sizes(replicas, 0).evaluated
        drawn = drawn_for_trials(b"secret", record, names, count, *book.preferred())
        found = {name: _losses(chance.gauss(0.002, 0.0008), chance.gauss(2, 1)) for name in drawn}
        book.update(_facts(round_, names), found)
        assert book.to_exclude() == {}
    assert min(score.evaluations for score in book.scores().values()) > 200


@pytest.mark.parametrize("replicas", [4, 20])
def test_work_on_a_fragment_is_compared_with_work_on_that_fragment(replicas: int) -> None:
    """The embedding and the head improve text ten times as much as other layers. One replica does not work."""
    settings, chance = GauntletSettings(excluded_rounds=1000), random.Random(7)
    book = ReplicaScores(settings, names := [f"r{index}" for index in range(replicas)])
    for round_ in range(1, 201):
        usual = (0.03, 0.003, 0.003, 0.03)[(round_ - 1) % 4]
        left = [name for name in names if name not in book.to_exclude()]
        count = settings.sizes(len(left), 0).evaluated
        drawn = drawn_for_trials(b"secret", round_.to_bytes(4, "big"), left, count, *book.preferred())
        found = {name: _losses(0.0 if name == "r1" else chance.gauss(usual, 0.1 * usual), 0.0) for name in drawn}
        for one in found.values():
            one.error = 0.1 * usual
        book.update(replace(_facts(round_, left), fragments=4), found)
        assert book.to_exclude().keys() <= {"r1"}
    assert book.to_exclude().keys() == {"r1"}


def test_a_run_tells_the_scores_of_its_fragments(corpus: Path, tmp_path: Path) -> None:
    replicas = [{"name": name, "kind": "datacenter", "batch_size": 2} for name in "abc"]
    values = tiny(corpus, 16, 2) | {"outer": {"rounds": 3, "fragments": 3}, "audit": {"gauntlet": {"evaluated": 3}}}
    spec = RunSpec(RunConfig.model_validate(values | {"inner": {"steps": 1}, "replicas": replicas}), 256)
    run_in_process(spec, RunFolder(tmp_path), lambda _: None)
    kept = newest_scores(FolderStore(tmp_path / "log"))
    assert kept is not None and kept.book is not None
    for entry in json.loads(kept.book)["replicas"].values():
        assert {fragment: tried for fragment, (_, tried) in entry["trials"].items()} == {"1": 1, "2": 2, "0": 3}


def test_of_replicas_without_the_assigned_text_few_are_left_after_20_evaluations() -> None:
    """With the sign alone of the difference, twice as many are left."""
    honest, cheats, chance, left = EIGHT, [f"c{index}" for index in range(4)], random.Random(5), 0
    for _ in range(30):
        book = ReplicaScores(GauntletSettings(excluded_rounds=100), [*honest, *cheats])
        for round_ in range(1, 21):
            found = {name: _losses(0.0, chance.gauss(2 if name in honest else 0, 1)) for name in [*honest, *cheats]}
            book.update(_facts(round_, found), found)
        excluded = book.to_exclude().keys()
        assert not excluded & {*honest}
        left += len({*cheats} - excluded)
    assert left <= 8


def test_a_book_has_the_same_bits_after_it_was_saved() -> None:
    settings, chance, copies = GauntletSettings(excluded_rounds=3), random.Random(2), {9: {"r1": "r0"}}
    book, restored = ReplicaScores(settings, EIGHT), ReplicaScores(settings, EIGHT)
    for round_ in range(1, 20):
        found = {name: _losses(chance.gauss(0.01, 0.01), chance.gauss(1, 1)) for name in EIGHT}
        facts = _facts(round_, EIGHT, copies=copies.get(round_))
        book.update(facts, found)
        restored = ReplicaScores.from_json(settings, restored.to_json())
        restored.update(facts, found)
    assert restored.to_json() == book.to_json() and restored.weights(EIGHT) == book.weights(EIGHT)
    with pytest.raises(DamagedFile, match="no book of scores"):
        ReplicaScores.from_json(settings, '{"round": 1}')


def test_all_are_drawn_equally_often_also_those_drawn_before() -> None:
    drawn = [drawn_for_trials(b"secret", index.to_bytes(4, "big"), EIGHT, 2) for index in range(2000)]
    counts = [sum(name in one for one in drawn) for name in EIGHT]
    assert all(430 < count < 570 for count in counts)
    again = sum("r0" in one and "r0" in then for one, then in pairwise(drawn))
    assert 85 < again < 165, "a quarter of the rounds after those in which it was drawn"
    assert [drawn_for_trials(b"other", index.to_bytes(4, "big"), EIGHT, 2) for index in range(20)] != drawn[:20]
    assert drawn_for_trials(b"secret", b"0", EIGHT, 20) == EIGHT


def test_half_of_the_places_are_for_the_most_doubtful_and_then_come_new_replicas() -> None:
    for index in range(100):
        record = index.to_bytes(4, "big")
        drawn = drawn_for_trials(b"secret", record, EIGHT, 4, ["gone", "r5", "r1", "r2"], ["r7"])
        assert {"r5", "r1", "r7"} <= {*drawn} and len(drawn) == 4
    others = [drawn_for_trials(b"secret", index.to_bytes(4, "big"), EIGHT, 4, ["r5"], []) for index in range(700)]
    counts = {name: sum(name in one for one in others) for name in EIGHT}
    assert counts.pop("r5") == 700 and all(240 < count < 360 for count in counts.values()), "3 of 7 places"


def test_cost_is_that_of_the_forward_passes() -> None:
    settings = GauntletSettings(evaluated=2, sequences=8)
    assert share_of_compute(settings, replicas=8, sequences=8 * 10 * 4) == pytest.approx(64 / 960)
    assert share_of_compute(settings, replicas=1, sequences=40) == pytest.approx(32 / 120)


def _folder(corpus: Path, runs: Path, audit: dict[str, Any]) -> RunFolder:
    folder = RunFolder(runs / "t")
    folder.path.mkdir()
    save_config(lying_spec(corpus, 2, {}, audit=audit).config, folder.config)
    return folder


def test_of_a_run_without_audits_and_of_one_that_is_not_judged(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _folder(corpus, tmp_path, {})
    print_scores(tmp_path, "t", None)
    expected = "t: its contributions are not scored; `audit: {gauntlet: {}}` in the YAML turns scores on\n"
    assert capsys.readouterr().out == expected
    save_config(lying_spec(corpus, 2, {}, audit={"gauntlet": {}}).config, RunFolder(tmp_path / "t").config)
    print_scores(tmp_path, "t", None)
    assert capsys.readouterr().out == "t: no round has been judged yet; 0 rounds are closed\n"
    with pytest.raises(ConfigError, match="found no run u"):
        print_scores(tmp_path, "u", None)


def test_of_a_replica_that_left(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _folder(corpus, tmp_path, {"gauntlet": {}})
    run = Run(folder.log, {"a": 1, "b": 1, "c": 1, "d": 1}, quorum=0.5)
    run.assign(0)
    run.deposit(1, "a", "b", "c", "d")
    run.assign(1, "a", "b")
    run.deposit(2, "a", "b")
    run.passes(GRACE.most, ("a", "b"))
    names = {"a": "", "b": "", "c": "", "d": "it cheats", "e": ""}
    scores = Scores(round=2, scores=[Score(replica=name, final=1.0, excluded=why) for name, why in names.items()])
    keep_scores(run.log.store, scores, None, {"d": Exclusion(until=9, cause="it cheats")})
    print_scores(tmp_path, "t", None)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("t: ")]
    assert lines == [
        "t: scores after round 2",
        "t: c took no part in round 2; its last contribution is in round 1, and its score stays as it was",
        "t: e took no part in round 2; it has not contributed, and its score stays as it was",
    ]
    key = scores_key(2)
    run.log.store.put(key, run.log.store.get(key).replace(b"cheats", b"works!"))
    with pytest.raises(DamagedFile, match="does not match its digest"):
        print_scores(tmp_path, "t", None)
