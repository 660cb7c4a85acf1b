"""Attacks do what their papers say; defences of tables find them; honest replicas are as without attacks."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from table_config import tiny
from torch import Tensor

from hetero_pp.config.spec import RunSpec
from hetero_pp.data.tokens import TokenStore, prepare_tokens
from hetero_pp.messages.messages_pb2 import Losses
from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.research import attacks as formulas
from hetero_pp.research.attacks import ATTACKS, Attack, Known
from hetero_pp.research.settings import ResearchConfig
from hetero_pp.research.trainer import hostile
from hetero_pp.research.trainer.hostile import HostileContributions, Told
from hetero_pp.research.trainer.train import AllReplicas, FastResult, train_fast
from replica_groups.audit import gauntlet
from replica_groups.audit.gauntlet import overlap

NAMES = [f"r{index}" for index in range(8)]
HOSTILE = NAMES[-2:]
ROUNDS = 2
SCORES: dict[str, Any] = {"evaluated": 8, "sequences": 2, "overlap": 1.0, "alpha": 0.5, "grace": 1, "threshold": 0.0}


def _config(
    corpus: Path, attacks: dict[str, Any] | None, replicas: int = 8, steps: int = 2, **outer: Any
) -> ResearchConfig:
    values: dict[str, Any] = {
        **tiny(corpus, 16, 2, seed=3),
        "inner": {"steps": steps, "warmup_steps": 0, "learning_rate": 0.01},
        "outer": {"rounds": ROUNDS, "compression": {"density": 1 / 4, "value_bits": 32}, **outer},
        "replicas": [{"name": name, "kind": "datacenter", "batch_size": 2} for name in NAMES[:replicas]],
        "research": {} if attacks is None else {"attacks": attacks},
    }
    return ResearchConfig.model_validate(values)


@pytest.fixture(scope="module")
def text(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    torch.set_num_threads(1)
    return prepare_tokens(_config(corpus, None).data, tmp_path_factory.mktemp("tokens"))


def _trained(corpus: Path, text: TokenStore, attacks: dict[str, Any] | None, **outer: Any) -> FastResult:
    return train_fast(RunSpec(_config(corpus, attacks, **outer), 256), text)


def _told(corpus: Path, text: TokenStore, attacks: dict[str, Any], **outer: Any) -> Told:
    told = dict(_trained(corpus, text, attacks, **outer).attacks)
    assert 0 <= told.pop("backdoor") <= 1
    return Told(**told)


def _known(place: int = 0, round_: int = 1, kept: int = 40, size: int = 400) -> Known:
    """Return what a replica knows where six are honest and two are not; the format keeps the largest values."""
    draw = torch.Generator().manual_seed(7)
    everyone = torch.randn(8, size, generator=draw) + 0.5

    def format_(vector: Tensor) -> Tensor:
        return torch.zeros_like(vector).index_copy_(0, (at := vector.abs().topk(kept).indices), vector[at])

    return Known(
        round=round_,
        place=place,
        theta=torch.zeros(size),
        fellows=[format_(one) for one in everyone[6:]],
        honest=torch.stack([format_(one) for one in everyone[:6]]),
        first=torch.full((size,), 3.0),
        parts=[slice(0, size // 2), slice(size // 2, size)],
        kept=format_,
        draw=torch.Generator().manual_seed(place),
    )


def test_attacks_send_what_their_papers_say() -> None:
    known, other = _known(), _known(place=1)
    mean, deviation = known.honest.mean(0), ((known.honest - known.honest.mean(0)) ** 2).mean(0).sqrt()
    assert formulas.no_work(known).count_nonzero() == 0
    assert formulas.stale_copy(known).equal(known.first)
    assert formulas.copy_of_another(other).equal(known.honest[1])
    assert formulas.sign_flip(other).equal(-known.fellows[1])
    assert formulas.scaled_by_10(known).equal(10 * known.own)
    torch.testing.assert_close(formulas.inner_product(known), -4 * mean)
    noise = formulas.noise(known)
    for part in known.parts:
        assert noise[part].norm() == pytest.approx(known.own[part].norm().item(), rel=1e-5)
    assert abs(torch.cosine_similarity(noise, known.own, dim=0)) < 0.5
    # ALIE: if 24 of 50 are hostile, 2 of the 26 honest ones make a majority, and 24/26 of a normal distribution are
    # below z.
    assert formulas.deviations(50, 24) == pytest.approx(NormalDist().inv_cdf(24 / 26))
    torch.testing.assert_close(formulas.alie(known), mean - 1.5 * deviation)
    # Min-max is as far from any honest one as two honest ones are from each other.
    sent = formulas.min_max(known)
    farthest = max((one - two).norm().item() for one in known.honest for two in known.honest)
    assert 0.9 * farthest < (known.honest - sent).norm(dim=1).max().item() <= farthest * (1 + 1e-6)
    assert (sent - known.kept(mean)) @ known.honest.std(0) < 0
    # A drift keeps its direction, and grows to just below the bound.
    rounds = [formulas.drift(_known(round_=round_)) for round_ in (1, 5, 60)]
    for sent, factor in zip(rounds, (1, 1.2**4, formulas.LARGEST), strict=True):
        assert torch.cosine_similarity(sent, rounds[0], dim=0) > 0.99
        for part in known.parts:
            median = known.honest[:, part].norm(dim=1).median().item()
            assert sent[part].norm() == pytest.approx(factor * median, rel=1e-4)
    # The second sybil sends a disguised copy, which overlaps by less than the bound.
    large = _known(place=1, kept=400, size=12_800)
    copies = [large.fellows[0], large.kept(formulas.sybils(large))]
    at = [one.nonzero().flatten() for one in copies]
    sparse = [{"all": DecodedTensor(where, one[where])} for where, one in zip(at, copies, strict=True)]
    assert 0.25 < overlap(*sparse) < 0.4


@pytest.mark.parametrize(
    ("name", "excluded"), [("sign_flip", HOSTILE), ("inner_product", HOSTILE), ("scaled_by_10", []), ("backdoor", [])]
)
def test_whoever_goes_another_way_is_excluded_after_one_round(
    name: str, excluded: list[str], corpus: Path, text: TokenStore
) -> None:
    scores = SCORES | {"agreement": 0.1, "grace": 100}
    assert _told(corpus, text, {"attack": name, "scores": scores}).excluded == dict.fromkeys(excluded, 1)


def test_without_attackers_defences_change_no_bit(corpus: Path, text: TokenStore) -> None:
    """Also the key of a row without attacks is what it was: research has no such key then."""
    plain_run = _trained(corpus, text, None)
    defended = {"bounds": {}, "scores": {**SCORES, "threshold": -1.0}, "recomputes": {"share": 0.3}}
    found = _trained(corpus, text, defended)
    assert found.validation_loss == plain_run.validation_loss
    assert plain_run.attacks == {} and found.attacks["excluded"] == {}
    assert found.attacks["recomputations"] > 0 and found.attacks["audit_bytes"] > 0
    assert found.attacks["evaluation_share"] == pytest.approx(8 * 4 * 2 / (3 * 8 * 2 * 2))


def test_an_attack_changes_what_hostile_replicas_send_and_nothing_else(corpus: Path, text: TokenStore) -> None:
    honest = AllReplicas(RunSpec(_config(corpus, {"attack": "none"}), 256), text)
    attacked = AllReplicas(RunSpec(_config(corpus, {"attack": "sign_flip"}), 256), text)
    before = {name: tensor.clone() for name, tensor in honest.theta.items()}
    for group in (honest, attacked):
        assert group.round(1)
        assert isinstance(group.contributions, HostileContributions)
    sent = [group.contributions._sent for group in (honest, attacked)]  # type: ignore[attr-defined]
    for name in NAMES:
        sign = -1 if name in HOSTILE else 1
        for parameter, one in sent[0][name].items():
            found = sent[1][name][parameter]
            assert found.values.sort().values.equal((sign * one.values).sort().values)
    for name, theta in attacked.theta.items():
        total = torch.zeros_like(theta)
        for one in sent[1].values():
            one[name].add_to(total, 1.0)
        torch.testing.assert_close(theta, before[name] - total / 8)


def test_a_replica_that_is_excluded_is_not_in_the_mean_and_does_not_train(corpus: Path, text: TokenStore) -> None:
    """A whole share is recomputed: the cheats are out from round 2 on, and the mean is of the six others."""
    told = _told(corpus, text, {"attack": "noise", "recomputes": {"share": 1.0}})
    assert told.excluded == dict.fromkeys(HOSTILE, 1)
    assert told.recomputations == 8 + 6 * (ROUNDS - 1)
    group = AllReplicas(RunSpec(_config(corpus, {"attack": "noise", "recomputes": {"share": 1.0}}), 256), text)
    assert group.round(1)
    before = {name: tensor.clone() for name, tensor in group.theta.items()}
    assert group.round(2)
    assert [group.settings[index].name for index in group.taking_part] == NAMES[:6]
    assert list(group.contributions._sent) == NAMES[:6]  # type: ignore[attr-defined]
    _require_mean_of_six(group, before)


@pytest.mark.parametrize("attack", ["stale_copy", "backdoor", "flipped_stage", "alie", "sybils"])
def test_recomputation_finds_whoever_sends_something_else(attack: str, corpus: Path, text: TokenStore) -> None:
    """A stale copy is honest in the first round, and the sybil that works is honest in all."""
    told = _told(corpus, text, {"attack": attack, "recomputes": {"share": 1.0}})
    expected = {"sybils": {"r7": 1}, "stale_copy": dict.fromkeys(HOSTILE, 2)}
    assert told.excluded == expected.get(attack, dict.fromkeys(HOSTILE, 1))


def test_bounds_scale_down_what_is_too_large_or_leave_it_out(corpus: Path, text: TokenStore) -> None:
    told = _told(corpus, text, {"attack": "scaled_by_10", "bounds": {}})
    assert (told.scaled, told.excluded) == (dict.fromkeys(HOSTILE, ROUNDS), {})
    left_out = {"attack": "scaled_by_10", "bounds": {"scale": 2, "leave_out": 3}}
    group = AllReplicas(RunSpec(_config(corpus, left_out), 256), text)
    for round_ in (1, 2):
        before = {name: tensor.clone() for name, tensor in group.theta.items()}
        assert group.round(round_)
        assert len(group.taking_part) == 8
        _require_mean_of_six(group, before)
    assert group.contributions.told.excluded == dict.fromkeys(HOSTILE, 1)  # type: ignore[attr-defined]


def _require_mean_of_six(group: AllReplicas, before: dict[str, Tensor]) -> None:
    """Compare theta after a round with theta before and the contributions of the six honest replicas."""
    sent = group.contributions._sent  # type: ignore[attr-defined]
    for name, theta in group.theta.items():
        total = torch.zeros_like(theta)
        for replica in NAMES[:6]:
            sent[replica][name].add_to(total, 1.0)
        torch.testing.assert_close(theta, before[name] - total / 6)


def test_scores_exclude_who_does_no_work_and_a_validator_that_lies_changes_nothing(
    corpus: Path, text: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are set by hand: honest contributions help assigned text, flipped ones harm it. One of three lies."""

    def losses_of(theta: Any, contribution: Any, *others: Any) -> Losses:
        return Losses(assigned_before=5, assigned_after=4, other_before=5, other_after=4.5, error=0.01)

    def judged(attack: Attack, validators: int) -> Told:
        monkeypatch.setitem(ATTACKS, "mine", attack)
        return _told(corpus, text, {"attack": "mine", "scores": SCORES | {"threshold": 0.2}, "validators": validators})

    monkeypatch.setattr(hostile, "losses_of", losses_of)

    def slandered(is_hostile: bool, losses: Losses) -> Losses:
        harmed = Losses(assigned_before=5, assigned_after=6, other_before=5, other_after=5, error=0.01)
        return harmed if is_hostile else losses

    assert judged(Attack(formulas.sign_flip, losses=slandered), 3).excluded == {}
    assert set(judged(Attack(formulas.sign_flip, losses=slandered), 1).excluded) == set(HOSTILE)


def test_a_copy_is_the_contribution_that_does_not_show_its_text(
    corpus: Path, text: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauntlet, "CLEAR", 1.0)  # a round has little text
    scores = {**SCORES, "overlap": 0.9, "threshold": -1.0}
    told = _told(corpus, text, {"attack": "copy_of_another", "scores": scores}, steps=16)
    assert told.excluded.keys() == {*HOSTILE}
    assert "copy" in told.causes["r6"] and "r0" in told.causes["r6"]


def test_a_row_with_attacks_resumes_with_the_same_bits(corpus: Path, text: TokenStore, tmp_path: Path) -> None:
    attacks = {"attack": "stale_copy", "bounds": {}, "scores": SCORES, "recomputes": {"share": 0.1}}
    spec = RunSpec(_config(corpus, attacks, rounds=3), 256)
    whole = train_fast(spec, text)
    stopped = tmp_path / "row.pt"

    def stop(round_: int, loss: float) -> None:
        if round_ == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_fast(spec, text, stop, checkpoint=stopped, checkpoint_seconds=0)
    resumed = train_fast(spec, text, checkpoint=stopped, checkpoint_seconds=0)
    assert resumed.validation_loss == whole.validation_loss
    assert resumed.attacks == whole.attacks


def test_every_attack_trains_a_round(corpus: Path, text: TokenStore) -> None:
    ends = {}
    for name in ATTACKS:
        group = AllReplicas(RunSpec(_config(corpus, {"attack": name}, replicas=4), 256), text)
        assert group.round(1)
        ends[name] = group.evaluate()
    assert all(math.isfinite(loss) for loss in ends.values())
    same = {name for name, loss in ends.items() if loss == ends["none"]}
    assert same == {"none", "stale_copy"}
    assert ends["lying_validator"] == ends["sign_flip"]
    assert hostile.FOR_EVER > 10**6


def test_an_attack_sends_what_was_trained_if_it_needs_honest_contributions_and_all_are_excluded(
    corpus: Path, text: TokenStore
) -> None:
    ends = {}
    for name in ATTACKS:
        group = AllReplicas(RunSpec(_config(corpus, {"attack": name}, replicas=4), 256), text)
        assert isinstance(group.contributions, HostileContributions)
        for honest in NAMES[:2]:
            group.contributions._exclude(honest, ROUNDS, "a validator lied")
        assert group.round(1)
        ends[name] = group.evaluate()
    same = {name for name, loss in ends.items() if loss == ends["none"]}
    assert same == {"none", "stale_copy", "copy_of_another", "drift", "alie", "min_max", "inner_product"}
