"""Predictions for topologies so small that every second and byte is computed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.model.transformer import block_of
from hetero_pp.pipeline.schedule import Action, one_forward_one_backward
from hetero_pp.simulator.prediction import Prediction, predict
from hetero_pp.simulator.traffic import message_bytes

WIDTH, FEED_FORWARD, VOCABULARY, LENGTH, ROWS = 8, 12, 200, 64, 2
STEPS = 3
LAYERS_OF_BLOCKS = {"home.0": 2, "home.1": 3, "dc": 5}
"""Number of blobs that each member sends.

home.0 has the token embedding and a layer. home.1 has a layer, the last norm and the head. dc has all.
"""

LINKS = {
    "stages": {
        "forward": {"bandwidth": "1 kbit/s", "latency": "0.5 s"},
        "backward": {"bandwidth": "400 bit/s", "latency": "0.25 s"},
    },
    "up and down": {
        "jitter": "0.2 s",
        "forward": {"bandwidth": "10 kbit/s", "latency": "7 s"},
        "backward": {"bandwidth": "40 kbit/s", "latency": "3 s"},
    },
}
HOME = {
    "name": "home",
    "kind": "participants",
    "stages": 2,
    "batch_size": ROWS,
    "link": "stages",
    "uplink": "up and down",
    "boundary": {"rank": 1, "dtype": "bf16"},
}
DC = {"name": "dc", "kind": "datacenter", "batch_size": ROWS, "uplink": "up and down"}


def _cost(forward: float, backward: float, update: float, contribute: float, apply: float, evaluate: float) -> Any:
    names = ("forward", "backward", "update", "contribute", "apply", "evaluate")
    values = (forward, backward, update, contribute, apply, evaluate)
    return {name: f"{value} s" for name, value in zip(names, values, strict=True)}


FIRST, LAST = (20.0, 6.0, 0.75, 30.0, 11.0, 1.5), (3.0, 5.0, 0.5, 32.0, 13.0, 1.25)
QUICK = (0.01, 0.01, 0.01, 0.01, 0.01, 0.01)
GROUP = {"home.0": _cost(*FIRST), "home.1": _cost(*LAST)}


def _spec(
    replicas: list[dict[str, Any]], layers: int = 2, top: dict[str, Any] | None = None, **simulate: Any
) -> RunSpec:
    return RunSpec(
        RunConfig.model_validate(
            {
                "name": "tiny",
                "model": {"width": WIDTH, "heads": 2, "feed_forward": FEED_FORWARD, "layers": layers},
                "data": {"sequence_length": LENGTH, "validation_sequences": ROWS},
                "inner": {"steps": STEPS},
                "outer": {"rounds": 4},
                "links": LINKS,
                "replicas": replicas,
                "simulate": simulate,
            }
            | (top or {})
        ),
        VOCABULARY,
    )


def _messages(spec: RunSpec) -> tuple[float, float]:
    """Return the wire bytes of an activation and of a gradient, with headers and framing."""
    sizes = message_bytes(spec, spec.config.replicas[0])
    ids, coefficients = ROWS * (LENGTH + 1), ROWS * LENGTH * 2  # 200 ids take 8 bits, a bf16 number 16
    assert ids + coefficients < sizes["activation"] < ids + coefficients + 64
    assert coefficients < sizes["gradient"] < coefficients + 64
    assert sizes["evaluation"] == pytest.approx(sizes["activation"], abs=4)
    return sizes["activation"], sizes["gradient"]


def _step(activation: float, gradient: float, forward_rate: float = 1000.0, backward_rate: float = 400.0) -> float:
    """Return the seconds of a step with one micro-batch.

    The last stage makes its update when the next activation arrives.
    """
    there = FIRST[0] + activation * 8 / forward_rate + 0.5 + LAST[2] + LAST[0]
    return there + LAST[1] + gradient * 8 / backward_rate + 0.25 + FIRST[1] + FIRST[2]


def test_a_step_is_there_and_back() -> None:
    spec = _spec([HOME], measured=GROUP)
    assert predict(spec).step_seconds == pytest.approx(_step(*_messages(spec)))


def test_links_are_busy_with_what_crosses_them() -> None:
    spec = _spec([HOME], measured=GROUP)
    activation, gradient = _messages(spec)
    found = predict(spec)
    link = found.replicas[0].links[0]
    evaluation = link.forward_bytes - STEPS * activation
    assert evaluation == pytest.approx(activation, abs=4)
    assert link.backward_bytes == STEPS * gradient
    assert link.forward_busy == pytest.approx(link.forward_bytes * 8 / 1000 / found.round_seconds)
    assert link.backward_busy == pytest.approx(link.backward_bytes * 8 / 400 / found.round_seconds)


def _seconds_without_steps(found: Prediction, member: str, cost: tuple[float, ...]) -> float:
    """Return the seconds of a round beside its steps: contribute and send, receive, apply and evaluate."""
    stage = next(stage for replica in found.replicas for stage in replica.stages if stage.member == member)
    return stage.sent_seconds + stage.received_seconds + sum(cost[3:])


def _timed(seconds: float) -> dict[str, Any]:
    return {"inner": {"seconds": seconds}}


@pytest.mark.parametrize("steps", [2, 3, 40])
def test_in_a_round_of_time_each_does_what_fits(steps: int) -> None:
    """Steps get the round's time without what the first stage needs before its first step and for its contribution.

    The group runs beside a datacenter whose steps take 0.03 s. The group's first step has no update before it.
    """
    costs = GROUP | {"dc": _cost(*QUICK)}
    counted = predict(_spec([HOME, DC], measured=costs, top={"inner": {"steps": steps}}))
    a_step = _step(*_messages(_spec([HOME], measured=GROUP)))
    closing = FIRST[3] + _exchange_seconds(counted, "home.0")[0]
    of_home = closing + _seconds_until_all_ask(counted)
    seconds = of_home + steps * a_step - LAST[2] + 0.4 * a_step
    found = predict(_spec([HOME, DC], measured=costs, top=_timed(seconds)))
    home, dc = found.replicas
    assert (home.steps, dc.steps) == (steps, int((seconds - _seconds_without_steps(counted, "dc", QUICK)) / 0.03))
    assert found.round_seconds == pytest.approx(seconds, abs=0.06)  # the datacenter's last step ends just then
    assert (home.tokens, dc.tokens) == (home.steps * ROWS * LENGTH, dc.steps * ROWS * LENGTH)
    assert home.step_seconds == found.step_seconds == pytest.approx(a_step)
    assert home.inner_seconds == pytest.approx(counted.replicas[0].inner_seconds)
    for link, same in zip(home.links, counted.replicas[0].links, strict=True):
        assert (link.forward_bytes, link.backward_bytes) == (same.forward_bytes, same.backward_bytes)
    assert dc.inner_seconds == pytest.approx(0.03 * dc.steps)
    assert dc.training == pytest.approx(dc.inner_seconds / found.round_seconds)
    assert found.tokens_per_second == pytest.approx((home.tokens + dc.tokens) / found.round_seconds)
    assert found.tokens == 4 * (home.tokens + dc.tokens)
    assert found.rounds == 4


def test_at_least_one_step_is_done_however_short_a_round() -> None:
    spec = _spec([HOME, DC], measured=GROUP | {"dc": _cost(*QUICK)}, top=_timed(1.0))
    home, dc = predict(spec).replicas
    assert (home.steps, dc.steps) == (1, 1)
    assert home.inner_seconds > 30


def test_links_that_cost_nothing_would_give_more_steps() -> None:
    """In equal time, the utilization is the ratio of tokens per second."""
    a_step, top = _step(*_messages(_spec([HOME], measured=GROUP))), _timed(2000.0)
    found = predict(_spec([HOME], measured=GROUP, top=top))
    without = {key: value for key, value in HOME.items() if key not in ("link", "uplink")}
    free = predict(_spec([without], measured=GROUP, top=top))
    free_step, free_left = sum(FIRST[:3]) + sum(LAST[:3]), 2000.0 + LAST[2] - sum(FIRST[3:])
    left = 2000.0 + LAST[2] - _seconds_without_steps(found, "home.0", FIRST)
    [home], [free_home] = found.replicas, free.replicas
    assert (home.steps, free_home.steps) == (int(left / a_step), int(free_left / free_step))
    assert found.utilization["relative"] == pytest.approx(found.tokens_per_second / free.tokens_per_second)
    assert home.exposed_communication == pytest.approx(1 - free_step / a_step, rel=0.01)
    trained = home.steps * free_step / 2 / found.round_seconds
    assert found.utilization["absolute"] == pytest.approx(trained)


def test_steps_that_take_no_time_are_refused() -> None:
    free = {"dc": _cost(0, 0, 0, 1, 1, 1)}
    with pytest.raises(ConfigError, match="found steps that take 0 s"):
        predict(_spec([DC], measured=free, top=_timed(1.0)))


def _exchange_seconds(found: Prediction, member: str) -> tuple[float, float]:
    """Return the seconds of sending and receiving.

    They have the bytes of the member's blobs and, for each blob, the latency and the mean jitter.
    """
    stage = next(stage for replica in found.replicas for stage in replica.stages if stage.member == member)
    blobs = LAYERS_OF_BLOCKS[member]
    fetched = blobs + 2 * (member == "home.1")  # it follows the token embedding: its group's and the other's
    up = stage.sent_bytes * 8 / 10e3 + blobs * (7 + 0.1)
    down = stage.received_bytes * 8 / 40e3 + fetched * (3 + 0.1)
    assert stage.sent_seconds == pytest.approx(up)
    assert stage.received_seconds == pytest.approx(down)
    return up, down


def _seconds_until_all_ask(found: Prediction) -> float:
    """Return the seconds from the close of a round until both stages have applied and evaluated it."""
    (_, down), (_, last_down) = (_exchange_seconds(found, member) for member in ("home.0", "home.1"))
    spec = _spec([HOME], measured=GROUP)
    there = message_bytes(spec, spec.config.replicas[0])["evaluation"] * 8 / 1000 + 0.5
    return max(down + FIRST[4] + FIRST[5] + there, last_down + LAST[4]) + LAST[5]


def test_a_round_is_its_steps_the_way_to_the_exchange_and_back_and_an_evaluation() -> None:
    """A group runs beside a datacenter that is always ready first. The last stage is ready last and sends most."""
    spec = _spec([HOME, DC], measured=GROUP | {"dc": _cost(*QUICK)})
    found = predict(spec)
    step = _step(*_messages(spec))
    (up, down), (last_up, last_down) = (_exchange_seconds(found, member) for member in ("home.0", "home.1"))
    inner = STEPS * step - LAST[2]  # the first step has no update before it
    flush = 0.5 + LAST[2]
    assert last_up + flush > up
    closed = inner + flush + LAST[3] + last_up
    assert found.replicas[0].inner_seconds == pytest.approx(inner + flush)
    assert found.outer_seconds == pytest.approx(closed - inner - flush + max(down + FIRST[4], last_down + LAST[4]))
    assert found.round_seconds == pytest.approx(closed + _seconds_until_all_ask(found))


def test_an_outer_round_has_the_latency_of_every_blob() -> None:
    """Two datacenters begin together."""
    measured = {"dc": _cost(*QUICK), "d2": _cost(*QUICK)}
    spec = _spec([DC, {**DC, "name": "d2"}], measured=measured)
    found, blobs = predict(spec), LAYERS_OF_BLOCKS["dc"]
    assert len({block_of(name) for name in spec.parameter_shapes}) == blobs
    one = found.replicas[0]
    seconds = one.sent_bytes * 8 / 10e3 + one.received_bytes * 8 / 40e3
    delays = blobs * (7 + 0.1) + blobs * (3 + 0.1)  # the other replica's, as many
    assert found.outer_seconds == pytest.approx(QUICK[3] + seconds + delays + QUICK[4])


def test_a_slow_exchange_has_the_latency_of_every_blob_too() -> None:
    """All bytes share the exchange's bandwidth. Only the longest of the latencies counts."""
    measured = {"dc": _cost(*QUICK), "d2": _cost(*QUICK)}
    top = {"lines": {"hub": {"bandwidth": "1 kbit/s"}}, "exchange": {"line": "hub"}}
    found = predict(_spec([DC, {**DC, "name": "d2"}], measured=measured, top=top))
    one, blobs = found.replicas[0], LAYERS_OF_BLOCKS["dc"]
    seconds = 2 * (one.sent_bytes + one.received_bytes) * 8 / 1e3
    delays = blobs * (7 + 0.1) + blobs * (3 + 0.1)
    assert found.outer_seconds == pytest.approx(QUICK[3] + seconds + delays + QUICK[4])


@pytest.mark.parametrize("forward", [0.01, 100.0], ids=["the exchange takes longer", "training takes longer"])
def test_a_round_that_overlaps_is_training_or_the_exchange(forward: float) -> None:
    """The round takes the longer of the two, plus the member's own work. Without overlap, it takes both."""
    cost = (forward, *QUICK[1:])
    measured, two = {"dc": _cost(*cost), "d2": _cost(*cost)}, [DC, {**DC, "name": "d2"}]
    overlapped = predict(_spec(two, measured=measured, top={"outer": {"rounds": 4, "overlap": 1}}))
    one, blobs = overlapped.replicas[0], LAYERS_OF_BLOCKS["dc"]
    carried = one.sent_bytes * 8 / 10e3 + one.received_bytes * 8 / 40e3 + blobs * (7 + 3 + 0.2)
    inner = STEPS * (forward + QUICK[1] + QUICK[2])
    own = QUICK[3] + QUICK[4]
    assert overlapped.round_seconds == pytest.approx(max(inner, carried) + own + QUICK[5])
    assert overlapped.outer_seconds == pytest.approx(max(0.0, carried - inner) + own)
    assert overlapped.replicas[0].inner_seconds == pytest.approx(inner)
    assert overlapped.step_seconds == pytest.approx(inner / STEPS)
    assert predict(_spec(two, measured=measured)).round_seconds == pytest.approx(inner + carried + own + QUICK[5])


def _behind_a_narrow_line(steps: int, overlap: int) -> Prediction:
    """Predict a group whose stages send by a line of 2 kbit/s each."""
    measured = dict.fromkeys(("home.0", "home.1"), _cost(*QUICK))
    home = {key: value for key, value in HOME.items() if key not in ("link", "uplink")} | {"line": "narrow"}
    narrow = {"narrow": {"up": "2 kbit/s", "down": "1 Mbit/s"}}
    top = {"lines": narrow, "inner": {"steps": steps}, "outer": {"rounds": 4, "overlap": overlap}}
    return predict(_spec([home], top=top, measured=measured))


def test_a_round_that_overlaps_takes_as_long_as_its_fullest_line() -> None:
    """Links between stages and to the exchange are used at once, and carry no more than their line."""
    found = _behind_a_narrow_line(1, 1)
    fullest = max(line.up_bytes for line in found.lines)
    assert found.round_seconds == pytest.approx(fullest * 8 / 2e3)
    assert max(line.up_busy for line in found.lines) == pytest.approx(1.0)


@pytest.mark.parametrize("steps", [1, 40])
def test_contributions_in_transit_slow_training_on_the_same_line(steps: int) -> None:
    """They take turns, and training loses time on a line that it needs more than half of."""
    alone, shared = (_behind_a_narrow_line(steps, overlap).replicas[0] for overlap in (0, 1))
    evaluation = alone.links[0].forward_bytes / (steps + 1)  # as many bytes as an activation, nearly
    trained = 8 * (alone.links[0].forward_bytes - evaluation) / 2e3
    share, contribution = trained / alone.inner_seconds, 8 * alone.stages[0].sent_bytes / 2e3
    assert share > 0.5
    if steps == 40:
        longer = contribution * (2 - 1 / share)
    else:  # half of the line until the inner loop is over
        longer = 2 * trained - alone.inner_seconds
        assert contribution > trained
    assert shared.inner_seconds == pytest.approx(alone.inner_seconds + longer, rel=0.01)


SLOW = {"up": "10 kbit/s", "down": "40 kbit/s", "latency": "3 s", "jitter": "0.2 s"}
"""Settings of a line."""
LINED = {"name": "dc", "kind": "datacenter", "batch_size": ROWS, "line": "slow"}


def _lined(simulate: dict[str, Any] | None = None, **top: Any) -> Prediction:
    """Predict two datacenters with lines that begin together. `top` are sections of the YAML."""
    measured = {"dc": _cost(*QUICK), "d2": _cost(*QUICK)}
    replicas = [LINED, {**LINED, "name": "d2"}]
    return predict(_spec(replicas, top={"lines": {"slow": SLOW}} | top, measured=measured, **(simulate or {})))


def _outer_seconds(found: Prediction, up: float, down: float) -> float:
    """Return the outer seconds by hand: one replica's blobs at these bits per second, and every blob's latency."""
    one, blobs = found.replicas[0], LAYERS_OF_BLOCKS["dc"]
    bytes_ = one.sent_bytes * 8 / up + one.received_bytes * 8 / down
    return QUICK[3] + bytes_ + 2 * blobs * (3 + 0.1) + QUICK[4]


def test_an_outer_round_passes_the_lines() -> None:
    found = _lined()
    assert found.outer_seconds == pytest.approx(_outer_seconds(found, 10e3, 40e3))
    assert [line.up_bytes for line in found.lines] == [one.sent_bytes for one in found.replicas]
    assert [line.down_bytes for line in found.lines] == [one.received_bytes for one in found.replicas]
    assert found.lines[0].up_busy == pytest.approx(found.lines[0].up_bytes * 8 / 10e3 / found.round_seconds)


def test_a_link_may_be_slower_than_its_line() -> None:
    top = {"lines": {"slow": SLOW}, "links": {"narrow": {"forward": {"bandwidth": "2 kbit/s"}}}}
    found = predict(_spec([LINED | {"uplink": "narrow"}], top=top, measured={"dc": _cost(*QUICK)}))
    one, blobs = found.replicas[0], LAYERS_OF_BLOCKS["dc"]
    assert found.outer_seconds == pytest.approx(QUICK[3] + one.sent_bytes * 8 / 2e3 + blobs * 3.1 + QUICK[4])


def test_members_of_a_site_share_its_line() -> None:
    found = _lined(sites={"office": {"line": "slow", "members": ["dc", "d2"]}})
    assert [line.name for line in found.lines] == ["office"]
    assert found.outer_seconds == pytest.approx(_outer_seconds(found, 10e3 / 2, 40e3 / 2))
    assert found.lines[0].up_bytes == 2 * found.replicas[0].sent_bytes


def test_all_share_the_line_of_the_exchange() -> None:
    """The exchange's line has 40 kbit/s for the uploads of both, which their own 10 kbit/s do not fill."""
    found = _lined(exchange={"line": "slow"})
    one, blobs = found.replicas[0], LAYERS_OF_BLOCKS["dc"]
    bytes_ = one.sent_bytes * 8 / 10e3 + 2 * one.received_bytes * 8 / 10e3
    assert found.outer_seconds == pytest.approx(QUICK[3] + bytes_ + 2 * blobs * (6 + 0.2) + QUICK[4])


def test_at_the_exchanges_site_no_line_is_passed() -> None:
    """d2 is at the exchange's site, so the other datacenter alone uses the line."""
    found = _lined(sites={"office": {"line": "slow", "members": ["d2", "exchange"]}})
    one, other = found.replicas
    assert found.lines[0].up_bytes == one.received_bytes
    assert found.lines[0].down_bytes == one.sent_bytes
    bytes_ = one.sent_bytes * 8 / 10e3 + one.received_bytes * 8 / 10e3
    blobs = LAYERS_OF_BLOCKS["dc"]
    assert found.outer_seconds == pytest.approx(QUICK[3] + bytes_ + 2 * blobs * (6 + 0.2) + QUICK[4])
    assert other.stages[0].sent_seconds == 0


OFFICE = {"office": {"line": "slow", "members": ["dc", "d2"]}}


@pytest.mark.parametrize(
    ("simulate", "top", "message"),
    [
        ({"exchange": "ring_all_gather"}, {"exchange": {"line": "slow"}}, "expected no sites and no exchange.line"),
        ({"fleets": {"dc": {"count": 3}}}, {"sites": OFFICE}, "one of 3 replicas"),
    ],
)
def test_lines_that_no_prediction_can_have(simulate: dict[str, Any], top: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _lined(simulate, **top)


def _most_in_flight(stage: int, stages: int, micro_batches: int, extra: int) -> int:
    """Return the most micro-batches between forward and backward, counted over the events that the stage runs."""
    now = most = 0
    for event in one_forward_one_backward(stage, stages, micro_batches, extra):
        now += {Action.FORWARD: 1, Action.BACKWARD: -1}.get(event.action, 0)
        most = max(most, now)
    return most


@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 12])
def test_memory_holds_all_micro_batches_in_flight(micro_batches: int, extra: int) -> None:
    """Each micro-batch takes 10 D + 4 F numbers of 4 bytes per layer, on a CPU.

    The one in its backward pass also takes 4 V numbers in fp32 for the head, or 2 D + 2 F for a layer's gradients.

    Parameters take 24 bytes each, and 20 during the only micro-batch of a step, which has no gradients yet. T_perp
    takes 4 bytes a number, as does the followed embedding after the first stage.
    """
    stages = 3
    many = {"batch_size": ROWS * micro_batches, "micro_batches": micro_batches}
    group = {**HOME, "stages": stages, "extra_in_flight": extra, **many}
    spec = _spec([group, {**DC, **many}], layers=3)
    home, dc = predict(spec).replicas
    tokens, per_layer = ROWS * LENGTH, 4 * (10 * WIDTH + 4 * FEED_FORWARD)
    gradients, head = 4 * (2 * WIDTH + 2 * FEED_FORWARD), 16 * VOCABULARY
    for index, stage in enumerate(home.stages):
        held = _most_in_flight(index, stages, micro_batches, extra)
        own = max(gradients, head) if index == stages - 1 else gradients
        assert stage.memory_bytes["activations"] == tokens * (held * per_layer + own), index
    assert dc.stages[0].memory_bytes["activations"] == tokens * (3 * per_layer + max(gradients, head))
    layer = 4 * WIDTH**2 + 3 * WIDTH * FEED_FORWARD + 2 * WIDTH
    parameters = [VOCABULARY * WIDTH + layer, layer, layer + WIDTH + VOCABULARY * WIDTH]
    table, each = 4 * VOCABULARY * WIDTH, 20 if micro_batches == 1 else 24
    for index, (stage, owned) in enumerate(zip(home.stages, parameters, strict=True)):
        tables = table if index == 0 else 2 * table
        assert _of_parameters(stage.memory_bytes) == each * owned + tables
    assert _of_parameters(dc.stages[0].memory_bytes) == each * (2 * VOCABULARY * WIDTH + 3 * layer + WIDTH)


def _of_parameters(held: Mapping[str, float]) -> float:
    return sum(held.values()) - sum(held[name] for name in ("process", "allocator", "activations"))
