"""A round that is interrupted anywhere is undone and trained again, with the bits of an uninterrupted one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from stage_members import StageMembers, group_spec, links_of
from torch import Tensor

from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import LinkClosed
from hetero_pp.link.in_process import in_process_pair
from hetero_pp.link.protocol import LinkEnds
from hetero_pp.pipeline.schedule import Action
from stages.worker import StageWorker


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return different documents, fewer than three rounds read."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(3):
        texts = [f"{chr(ord('A') + 8 * shard + number)}{number % 5} " * 23 for number in range(8)]
        (folder / f"{shard}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture(params=["anchors", "stream"])
def spec(request: pytest.FixtureRequest, corpus: Path, shards: Path) -> RunSpec:
    """Return a run with an encoded corpus and anchors, and one with a streamed corpus and no anchors."""
    if request.param == "anchors":
        return group_spec(str(corpus), {"anchors": {"rank": 4}})
    stream = {"validation_documents": 4, "shuffle_buffer": 5}
    data = {"corpus": f"hf:{shards}", "stream": stream, "sequence_length": 16, "validation_sequences": 4}
    return group_spec("", data=data)


def _fresh(spec: RunSpec) -> list[LinkEnds]:
    pairs = [in_process_pair(link, seed=1) for link in links_of(spec)]
    above = [None, *(second for _, second in pairs)]
    below = [*(first for first, _ in pairs), None]
    return [LinkEnds(*ends) for ends in zip(above, below, strict=True)]


class _BrokenOff(Exception):
    pass


class _Breaker:
    """Counts the events of one stage, and interrupts the stage at one of them."""

    def __init__(self, worker: StageWorker, events: set[Action]) -> None:
        self.seen = 0
        self.at: int | None = None
        for action in events:
            worker._actions[action] = self._counted(worker._actions[action])

    def _counted(self, act: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: object) -> None:
            if self.seen == self.at:
                raise _BrokenOff
            self.seen += 1
            act(*arguments)

        return counted

    def break_off_at(self, event: int | None) -> None:
        self.seen, self.at = 0, event


Outcome = tuple[object, dict[str, Tensor], list[Tensor]]


def _trained(group: StageMembers, round_: int) -> Outcome:
    reports = [[step.SerializeToString() for step in steps] for steps in group.train(round_)]
    return (reports, group.evaluate(round_)), group.parameters(), group.moments()


def _assert_equal(found: Outcome, expected: Outcome) -> None:
    assert found[0] == expected[0]
    for name, tensor in expected[1].items():
        assert found[1][name].equal(tensor), name
    assert len(found[2]) == len(expected[2])
    for ours, theirs in zip(found[2], expected[2], strict=True):
        assert ours.equal(theirs)


def _break_off(group: StageMembers, breaker: _Breaker, event: int, round_: int) -> None:
    """Interrupt a stage at one of its events, and undo the round."""
    breaker.break_off_at(event)
    with pytest.raises(_BrokenOff):
        _trained(group, round_)
    breaker.break_off_at(None)
    group.undo(_fresh(group.spec))


def test_broken_off_at_any_event_of_any_stage(spec: RunSpec, tmp_path: Path) -> None:
    """Interrupt every stage at every nineteenth of its events, in rounds 1 and 2.

    Round 1 starts without moments. A round has three steps and an evaluation.

    After every interruption the data, the parameters and the moments are those of the round's start.

    The round is trained again after every third interruption, because what an interruption leaves elsewhere stays until
    then.
    """
    untouched, group = (StageMembers(spec, _fresh(spec), tmp_path) for _ in range(2))
    breakers = [_Breaker(member.worker, set(Action)) for member in group.members]
    batches = group.members[0].batches
    assert batches is not None
    for round_ in (1, 2):
        start, theta, moments = batches.state(), group.parameters(), group.moments()
        expected = _trained(untouched, round_)
        _assert_equal(_trained(group, round_), expected)
        breaks = [(breaker, event) for breaker in breakers for event in range(round_, breaker.seen, 19)]
        group.undo(_fresh(spec))
        for number, (breaker, event) in enumerate(breaks):
            _break_off(group, breaker, event, round_)
            assert batches.state() == start
            assert all(tensor.equal(theta[name]) for name, tensor in group.parameters().items())
            assert all(ours.equal(theirs) for ours, theirs in zip(group.moments(), moments, strict=True))
            if number % 3 == 2 or number == len(breaks) - 1:
                _assert_equal(_trained(group, round_), expected)
                group.undo(_fresh(spec))
        _assert_equal(_trained(group, round_), expected)
        for one in (untouched, group):
            one.keep_what_was_trained()
            one.start_round()
        for breaker in breakers:
            breaker.break_off_at(None)


def test_a_wait_for_a_neighbour_that_says_nothing_ends_by_abort(spec: RunSpec, tmp_path: Path) -> None:
    """A stage is gone. Its neighbours wait until they are told, then all train the round again."""
    untouched, group = (StageMembers(spec, _fresh(spec), tmp_path) for _ in range(2))
    expected = _trained(untouched, 1)
    gone = group.members[1]

    def say_nothing(round_: int, step: int, global_step: int) -> None:
        for ends in (group.ends[0], group.ends[2]):
            ends.abort("home.1 is gone")
        raise LinkClosed("gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gone, "inner_step", say_nothing)
        with pytest.raises(LinkClosed):
            group.train(1)
    group.undo(_fresh(spec))
    _assert_equal(_trained(group, 1), expected)


def test_moments_that_are_not_copied_stay_as_they_are(corpus: Path, tmp_path: Path) -> None:
    """With `states.undo: false`, parameters and data are restored, but moments are not."""
    spec = group_spec(str(corpus), states={"undo": False})
    group = StageMembers(spec, _fresh(spec), tmp_path)
    start = group.parameters()
    group.train(1)
    moments = group.moments()
    group.undo(_fresh(spec))
    for name, tensor in group.parameters().items():
        assert tensor.equal(start[name]), name
    assert all(ours.equal(theirs) for ours, theirs in zip(group.moments(), moments, strict=True))
    group.train(1)
