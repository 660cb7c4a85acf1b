"""How a member keeps contributions that were not included, and how it catches up: error feedback, undo and the log."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from log_files import stored_bytes
from members import TIMEOUT, in_thread
from small_run import GRACE, ROUNDS, SETTINGS, Run
from torch import Tensor, nn

from hetero_pp.config.checkpoint import MOMENTUM
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.core.errors import HeteroPPError, IncarnationOver, Refused, Suspended
from hetero_pp.messages.messages_pb2 import HEALED, AssignReply, BlobHeader, RoundRecord
from hetero_pp.model.transformer import shapes_by_block, shapes_of
from hetero_pp.pseudo_gradient import contribution
from hetero_pp.pseudo_gradient.contribution import BlobAddress, decode_blob
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.engines.engine import LocalParameters
from replica_groups.exchange.auditor import Auditor
from replica_groups.exchange.log import checkpoint_key
from replica_groups.member.error_feedback import is_named
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession

DECAY = SETTINGS.compression.error_feedback_decay


class Member:
    """A replica of one member. Its training is a random change that depends only on its name and the round."""

    def __init__(
        self, run: Run, name: str, returned: float = 1.0, keeps_undo: bool = True, keep_local: bool = False
    ) -> None:
        self.run, self.name = run, name
        self.start = run.checkpoint.parameters
        self.parameters = {key: nn.Parameter(tensor.clone()) for key, tensor in self.start.items()}
        settings = SETTINGS.model_copy(update={"returned": returned, "keep_local": keep_local})
        held = LocalParameters(self.parameters)
        self.outer = OuterRound(
            MemberSession(run.exchange, name, name, "run"), held, dict(self.start), settings, keeps_undo=keeps_undo
        )

    def change(self, key: str, round_: int) -> Tensor:
        seed = 1000 * round_ + sum(map(ord, f"{self.name}{key}"))
        return torch.randn(self.start[key].shape, generator=torch.Generator().manual_seed(seed)) * 0.1

    @torch.no_grad()
    def train(self, round_: int) -> dict[str, Tensor]:
        """Train, and return the pseudo-gradient by parameter as the outer round computes it."""
        for key, parameter in self.parameters.items():
            parameter.add_(self.change(key, round_))
        return {key: self.outer.theta[key] - parameter.detach() for key, parameter in self.parameters.items()}

    def errors(self) -> dict[str, Tensor]:
        return {key: tensor.clone() for key, tensor in self.outer.error.items()}

    def sent(self, round_: int, blobs: Mapping[str, bytes]) -> dict[str, Tensor]:
        """Return the dense values of this member's blobs."""
        found: dict[str, Tensor] = {}
        for block, shapes in shapes_by_block(shapes_of(self.start)).items():
            address = BlobAddress("run", round_, self.name, block)
            for key, decoded in decode_blob(blobs[block], address, shapes, SETTINGS.compression).items():
                dense = torch.zeros(self.start[key].shape)
                dense.view(-1)[decoded.indices] = decoded.values
                found[key] = dense
        return found

    def logged(self, round_: int, generation: int) -> dict[str, Tensor]:
        log = self.run.exchange.log
        blobs = {
            block: stored_bytes(log, round_, self.name, generation, block)
            for block in shapes_by_block(shapes_of(self.start))
        }
        return self.sent(round_, blobs)

    def holds(self) -> dict[str, Tensor]:
        return {key: parameter.detach().clone() for key, parameter in self.parameters.items()}


def _assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].equal(tensor), name


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, {"a": 1, "b": 1})


def _round(round_: int, *members: Member) -> dict[str, dict[str, Tensor]]:
    """Let all members train a round that includes them. Return each member's change."""
    run, moved = members[0].run, dict[str, dict[str, Tensor]]()
    work = {member.name: in_thread(partial(run.exchange.assign, member.name, round_ - 1)) for member in members}
    for member in members:
        assert work[member.name].result(TIMEOUT).round == round_
        moved[member.name] = member.train(round_)
    ends = [in_thread(partial(member.outer.synchronise, round_)) for member in members]
    for end in ends:
        end.result(TIMEOUT)
    assert run.counted(round_).keys() == {member.name for member in members}
    return moved


class _NoRound:
    whole: tuple[str, ...] = ()


_NONE = _NoRound()


def _late(run: Run, a: Member, b: Member, round_: int) -> None:
    """Let `a` train, and close the round before `b` contributes what it trained."""
    a.train(round_)
    counted = in_thread(lambda: a.outer.synchronise(round_))
    run.exchange.runner.wait_until(lambda: "a" in (run.exchange.coordinator.open or _NONE).whole)
    run.passes(GRACE.most)
    counted.result(TIMEOUT)
    record = b.outer.synchronise(round_)
    assert ([one.replica for one in record.contributions], list(record.late)) == (["a"], ["b"])


def _saved_uncounted(run: Run, folder: Path) -> tuple[Member, Member, dict[str, Tensor]]:
    """Return `a`, `b` and the parameters that `b` trained in round 2.

    Round 1 includes `b`, round 2 does not. The state of `b` was saved after round 2.
    """
    a, b = Member(run, "a"), Member(run, "b", keep_local=True)
    _round(1, a, b)
    run.assign(1)
    b.train(2)
    way = b.holds()
    _late(run, a, b, 2)
    b.outer.save(folder)
    return a, b, way


def test_a_member_that_diverged_says_so_and_sends_nothing(run: Run, tmp_path: Path) -> None:
    a = Member(run, "a")
    run.assign(0)
    with torch.no_grad():
        a.parameters["norm.weight"][3] = float("nan")
    with pytest.raises(HeteroPPError, match=r"a diverged: norm\.weight is not finite after round 1"):
        a.outer.contribute(1)
    assert not list((tmp_path / "round-000001" / "a" / "1").glob("norm.*"))


@pytest.mark.parametrize("returned", [1.0, 0.5, 0.0])
def test_what_was_not_counted_goes_back(run: Run, returned: float) -> None:
    """Checks e <- decay e + d - D as for an included one, then e <- e + r D. Theta follows the other replicas."""
    a, b = Member(run, "a"), Member(run, "b", returned)
    _round(1, a, b)
    before = b.errors()
    run.assign(1)
    moved = b.train(2)
    contributed: dict[str, bytes] = {}
    contribute = b.outer.contribute

    def noted(*arguments: Any) -> dict[str, bytes]:
        contributed.update(contribute(*arguments))
        return contributed

    b.outer.contribute = noted  # type: ignore[method-assign, assignment]
    _late(run, a, b, 2)
    for key, sent in b.sent(2, contributed).items():
        kept = before[key] * DECAY + moved[key] - sent
        expected = kept + returned * sent
        torch.testing.assert_close(b.outer.error[key], expected, rtol=0, atol=1e-7, msg=key)
        assert sent.count_nonzero() > 0
    _assert_equal(b.holds(), a.holds())
    _round(3, a, b)
    _assert_equal(b.holds(), a.holds())


def test_who_was_not_counted_goes_on_from_its_own_parameters(run: Run, tmp_path: Path) -> None:
    """It holds theta in between.

    Its own parameters and its error feedback are unchanged, also after a save and load.
    """
    a, b = Member(run, "a"), Member(run, "b", keep_local=True)
    _round(1, a, b)
    before = b.errors()
    run.assign(1)
    b.train(2)
    way = b.holds()
    _late(run, a, b, 2)
    _assert_equal(b.errors(), before)
    _assert_equal(b.holds(), a.holds())
    for _ in range(2):
        b.outer.start_local(3, b.outer.own.beyond(2))
        _assert_equal(b.holds(), way)
        b.outer.undo()
        b.outer.restore()
        _assert_equal(b.holds(), a.holds())
    b.outer.save(tmp_path)
    b.outer.own.local = None
    b.outer.load(tmp_path)
    run.assign(2)
    b.outer.start_local(3, b.outer.own.beyond(2))
    _assert_equal(b.holds(), way)
    moved = b.train(3)
    a.train(3)
    ends = [in_thread(partial(one.outer.synchronise, 3)) for one in (a, b)]
    counted, _ = (end.result(TIMEOUT).contributions for end in ends)
    assert [one.replica for one in counted] == ["a", "b"]
    sent = b.logged(3, counted[1].generation)
    for key, error in b.errors().items():
        torch.testing.assert_close(error, DECAY * before[key] + moved[key] - sent[key], rtol=0, atol=1e-7, msg=key)
    _assert_equal(b.holds(), a.holds())
    b.outer.start_local(4, b.outer.own.beyond(3))
    _assert_equal(b.holds(), a.holds())


def test_its_own_parameters_are_void_once_they_were_counted(run: Run, tmp_path: Path) -> None:
    """The own parameters are in a state that was saved before the round that included them."""
    a, b, _ = _saved_uncounted(run, tmp_path)
    b.outer.start_local(3, 2)
    _round(3, a, b)
    late = Member(run, "b", keep_local=True)
    late.outer.load(tmp_path)
    assert late.outer.own.local is not None and late.outer.own.local.rows.keys() == late.start.keys()
    late.outer.catch_up(range(1, 4), range(3, 4))
    assert late.outer.own.beyond(3) == 0
    late.outer.start_local(4, 2)
    _assert_equal(late.holds(), a.holds())


@pytest.mark.parametrize(
    ("round_", "trained", "is_of_use"), [(3, 2, True), (4, 2, True), (5, 2, False), (3, 0, False), (3, 1, False)]
)
def test_its_own_parameters_are_void_if_its_group_has_others_or_they_are_old(
    run: Run, tmp_path: Path, round_: int, trained: int, is_of_use: bool
) -> None:
    """All members of the group must have trained that round (`trained`).

    After more than one missed round, a member starts from theta.
    """
    a, b, way = _saved_uncounted(run, tmp_path)
    b.outer.start_local(round_, trained)
    _assert_equal(b.holds(), way if is_of_use else a.holds())
    assert b.outer.own.beyond(2) == (2 if is_of_use else 0)


def test_a_round_that_is_undone_and_trained_again_has_the_same_bits(run: Run) -> None:
    """Error feedback is that of the round's start, and then that of one contribution, whatever was sent before."""
    a, b = Member(run, "a"), Member(run, "b")
    _round(1, a, b)
    before = a.errors()
    run.assign(1)
    a.train(2)
    a.outer.contribute(2)
    after = a.errors()
    assert any(not after[key].equal(before[key]) for key in before)
    for _ in range(2):
        a.outer.undo()
        a.outer.restore()
        _assert_equal(a.errors(), before)
    a.train(2)
    a.outer.contribute(2)
    _assert_equal(a.errors(), after)


def test_an_undo_in_the_midst_of_contributing_is_exact_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Member(run, "a"), Member(run, "b")
    _round(1, a, b)
    before = a.errors()
    run.assign(1)
    a.train(2)
    deposit, done = run.exchange.deposit_blob, list[BlobHeader]()

    def suspended(header: BlobHeader, data: bytes, caller: Caller) -> None:
        if done:
            raise Suspended("a test says so")
        done.append(header)
        deposit(header, data, caller)

    monkeypatch.setattr(contribution, "BATCH_BYTES_MAX", 1)  # so that each blob goes alone
    monkeypatch.setattr(run.exchange, "deposit_blob", suspended)
    with pytest.raises(Suspended):
        a.outer.synchronise(2)
    assert any(not a.outer.error[key].equal(before[key]) for key in before)
    a.outer.undo()
    _assert_equal(a.errors(), before)


# ---- coming back ----


def test_who_missed_rounds_catches_up_with_the_others(run: Run) -> None:
    """Its parameters have the same bits as the others'.

    Its error feedback is unchanged, because no round included it.
    """
    a, b = Member(run, "a"), Member(run, "b")
    _round(1, a, b)
    before = b.errors()
    run.exchange.died("b", "its host said so")
    for round_ in (2, 3):
        _round(round_, a)
    b.outer.catch_up(range(2, 4), range(2, 4))
    _assert_equal(b.holds(), a.holds())
    _assert_equal(dict(b.outer.optimizer.state), dict(a.outer.optimizer.state))
    _assert_equal(b.errors(), before)
    assert run.exchange.join("b", "") == 2
    _round(4, a, b)
    _assert_equal(b.holds(), a.holds())


def test_a_saved_state_forgets_what_was_counted_since(run: Run, tmp_path: Path) -> None:
    """For each round that included its replica, the sent positions become zero and the rest decays."""
    a, b = Member(run, "a"), Member(run, "b")
    _round(1, a, b)
    (tmp_path / "state").mkdir()
    b.outer.save(tmp_path / "state")
    for round_ in (2, 3):
        _round(round_, a, b)
    again = Member(run, "b")
    again.outer.reset(b.outer.theta, {}, 3)
    again.outer.load(tmp_path / "state")
    saved = again.errors()
    again.outer.catch_up(range(0), range(2, 4))
    for key, error in saved.items():
        expected = error.clone()
        for round_ in (2, 3):
            expected = expected * DECAY
            expected[b.logged(round_, 1)[key] != 0] = 0.0
        assert again.outer.error[key].equal(expected), key
        assert not expected.equal(error)


@pytest.mark.parametrize("keeps_undo", [True, False])
def test_what_is_counted_after_all_is_in_error_feedback_no_more(run: Run, keeps_undo: bool) -> None:
    """Its incarnation ends while it waits for the record, which then includes it.

    That contribution is not sent a second time.
    """
    a, b = Member(run, "a"), Member(run, "b", keeps_undo=keeps_undo)
    _round(1, a, b)
    run.assign(1)
    a.train(2)
    before, moved = b.errors(), b.train(2)
    waits = in_thread(lambda: b.outer.synchronise(2, 1))
    run.exchange.runner.wait_until(lambda: "b" in (run.exchange.coordinator.open or _NONE).whole)
    run.exchange.died("b", "frozen, as a test says")
    with pytest.raises(IncarnationOver):
        waits.result(TIMEOUT)
    b.outer.undo()
    b.outer.restore()
    a.outer.synchronise(2, 1)
    assert run.counted(2) == {"a": 1, "b": 1}
    b.outer.catch_up(range(2, 3), range(2, 3))
    _assert_equal(b.holds(), a.holds())
    for key, sent in b.logged(2, 1).items():
        if keeps_undo:  # the undo data is dropped with the round
            expected = before[key] * DECAY
            expected[sent != 0] = 0.0
        else:
            expected = before[key] * DECAY + moved[key] - sent
        torch.testing.assert_close(b.outer.error[key], expected, rtol=0, atol=1e-7, msg=key)


# ---- recovery, and late joins ----


def test_a_damaged_checkpoint_is_passed_over_by_who_comes_then(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """The previous run checkpoint and the rounds since give the same parameters."""
    auditor = Auditor(run.exchange, run.checkpoint, SETTINGS, checkpoint_every=1)
    auditor.start()
    a, b = Member(run, "a"), Member(run, "b")
    for round_ in (1, 2):
        _round(round_, a, b)
    run.exchange.runner.wait_until(lambda: run.exchange.decided._newest == 2)
    data = bytearray(run.log.store.get(checkpoint_key(2)))
    data[-3] ^= 1
    run.log.store.put(checkpoint_key(2), bytes(data))
    round_, names = run.exchange.newest_checkpoint()
    assert round_ == 1
    assert run.exchange.checkpoint(names, round_).keys() == set(names)
    assert "checkpoint-000002.safetensors is damaged" in capfd.readouterr().err
    with pytest.raises(Refused, match=r"no run checkpoint after round 2: .*/checkpoint-000002\.safetensors is damaged"):
        run.exchange.checkpoint(names, 2)
    auditor.join(0)


def test_who_holds_other_bits_comes_back_to_those_of_replay(run: Run) -> None:
    """It loads a run checkpoint and replays the rounds since, with the outer momentum, as take_part does."""
    auditor = Auditor(run.exchange, run.checkpoint, SETTINGS, checkpoint_every=2)
    auditor.start()
    a, b = Member(run, "a"), Member(run, "b")
    for round_ in (1, 2):
        _round(round_, a, b)
    run.exchange.runner.wait_until(lambda: run.exchange.decided._newest == 2)
    b.outer.theta["norm.weight"][3] += 1.0
    _round(3, a, b)
    assert not b.holds()["norm.weight"].equal(a.holds()["norm.weight"])
    run.exchange.runner.wait_until(lambda: run.exchange.coordinator.slots["b"].differs)
    heals: list[AssignReply] = [in_thread(lambda: run.exchange.assign("b", 3)).result(TIMEOUT)]
    assert [one.heals for one in heals] == [True]
    assert not run.exchange.assign("a", 3).heals
    round_, names = run.exchange.newest_checkpoint()
    assert round_ == 2
    tensors = run.exchange.checkpoint(names, round_)
    momentum = {name.removeprefix(MOMENTUM): tensors[name] for name in names if name.startswith(MOMENTUM)}
    assert momentum
    b.outer.reset(tensors, momentum, round_)
    b.outer.catch_up(range(3, 4))
    _assert_equal(b.holds(), a.holds())
    _assert_equal(dict(b.outer.optimizer.state), dict(a.outer.optimizer.state))
    _round(4, a, b)
    _assert_equal(b.holds(), a.holds())
    assert not run.exchange.assign("b", 4).heals
    _assert_equal(run.exchange.checkpoint(list(a.start), 0), dict(run.checkpoint.parameters))
    run.exchange.fail("the test is over")
    auditor.join(TIMEOUT)


def test_blobs_of_another_group_of_the_same_generation_are_not_its_own(run: Run) -> None:
    """Two coordinators may have formed two groups at once. The record's digests say which of the blobs it includes."""
    a, b = Member(run, "a"), Member(run, "b")
    run.assign(0)
    a.train(1)
    b.train(1)
    b.outer.contribute(1, 1, 7)
    a.outer.synchronise(1, 1)
    record, other = run.exchange.record(1), RoundRecord()
    other.CopyFrom(record)
    (counted,) = (one for one in other.contributions if one.replica == "b")
    counted.blobs[0].sha256 = bytes(32)
    sent = b.outer.feedback.sent
    assert sent is not None
    assert is_named(b.outer.session.entry(record), sent.generation, sent.digests)
    assert not is_named(b.outer.session.entry(other), sent.generation, sent.digests)


def test_hashes_of_rounds_to_come_do_not_keep_others_from_being_looked_at(tmp_path: Path) -> None:
    """Hashes are kept for a few rounds only, the latest."""
    run = Run(tmp_path, {"a": 1, "b": 1, "c": 1})
    run.assign(0)
    run.deposit(1, "a", "b", "c")
    right = dict.fromkeys(run.checkpoint.parameters, bytes(32))
    run.exchange.confirm("b", 1, right | {"norm.weight": b"\1" * 32})
    for round_ in range(2, ROUNDS + 1):
        run.exchange.confirm("a", round_, right)
    run.exchange.confirm(EXCHANGE, 1, right)
    assert [(one.slot, one.round) for one in run.told() if one.what == HEALED] == [("b", 1)]
