"""Learning rates of runs with rounds of fixed duration, by hand and beside those of equal steps."""

from __future__ import annotations

import pytest

from hetero_pp.model.inner import InnerSettings

SECONDS = InnerSettings.model_validate(
    {"seconds": 10, "learning_rate": 0.4, "warmup_rounds": 1, "final_learning_rate_share": 0}
)
ROUNDS = 5


def test_as_many_steps_in_every_round_have_the_rates_of_counted_ones() -> None:
    steps = 6
    counted = InnerSettings(steps=steps, learning_rate=0.4, warmup_steps=9, final_learning_rate_share=0.25)
    timed = InnerSettings.model_validate(
        {"seconds": 1, "learning_rate": 0.4, "warmup_rounds": 1.5, "final_learning_rate_share": 0.25}
    )
    expected = counted.rates(steps * ROUNDS)
    for round_ in range(1, ROUNDS + 1):
        first = (round_ - 1) * steps
        found = timed.rates_in(round_, ROUNDS, first, steps)
        for step in range(first, first + steps):
            assert found.at(step) == pytest.approx(expected.at(step), rel=1e-12), f"round {round_}, step {step}"


def test_unequal_replicas_end_a_round_at_the_same_rate() -> None:
    """After the warm-up, a round of 4 steps and one of 400 have the same rate at their start and in their middle."""
    slow, fast = SECONDS.rates_in(3, ROUNDS, 8, 4), SECONDS.rates_in(3, ROUNDS, 900, 400)
    assert slow.at(8) == fast.at(900) == pytest.approx(0.4 * (0.5 + 0.5 * 2**-0.5))  # a quarter of the cosine
    assert slow.at(10) == pytest.approx(fast.at(1100))
    assert slow.at(10) < slow.at(9) < slow.at(8)


def test_more_steps_than_expected_do_not_begin_the_next_round() -> None:
    rates, following = SECONDS.rates_in(2, ROUNDS, 0, 4), SECONDS.rates_in(3, ROUNDS, 0, 4)
    assert rates.at(4) == rates.at(40) == pytest.approx(following.at(0), rel=1e-12)
    assert rates.at(40) >= following.at(0)
    last = SECONDS.rates_in(ROUNDS, ROUNDS, 0, 4)
    assert last.at(40) == pytest.approx(0, abs=1e-12)


def test_a_first_round_rises_though_nobody_knows_how_long_it_is() -> None:
    """The warm-up is half done after ten steps, three quarters after thirty, and never complete."""
    rates = SECONDS.rates_in(1, ROUNDS, 0, None)
    assert [rates.at(step) for step in (0, 9, 29)] == pytest.approx([0.4 / 11, 0.2, 0.3])
    assert 0.39 < rates.at(10_000) < 0.4
    joined = SECONDS.rates_in(4, ROUNDS, 0, None)
    assert joined.at(0) == SECONDS.rates_in(4, ROUNDS, 50, 7).at(50)


def test_a_warm_up_may_be_longer_than_the_run_or_not_be() -> None:
    long = SECONDS.model_copy(update={"warmup_rounds": 10.0}).rates_in(ROUNDS, ROUNDS, 0, 2)
    assert [long.at(step) for step in (0, 1)] == pytest.approx([0.18, 0.2])
    none = SECONDS.model_copy(update={"warmup_rounds": 0.0}).rates_in(1, ROUNDS, 0, 2)
    assert none.at(0) == 0.4
    whole = SECONDS.model_copy(update={"warmup_rounds": float(ROUNDS)}).rates_in(ROUNDS, ROUNDS, 0, 2)
    assert whole.at(5) == pytest.approx(0.4)
