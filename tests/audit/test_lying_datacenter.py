"""Datacenter replicas that lie in one run over gRPC with TLS: recomputation names each of them, and no honest one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from audited_run import flips, lying, rereads, skips
from lying_run import HONEST, LyingRun, lying_spec

from hetero_pp.core.errors import HeteroPPError
from hetero_pp.messages.messages_pb2 import Commitment, Judgement, Recomputed, ShownFile
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.audit import showing
from replica_groups.audit.commitments import CommittedState, MemberCommitments, state_sha256
from replica_groups.audit.judgements import Judgements
from replica_groups.audit.showing import EVIDENCE
from replica_groups.exchange.audits import read_audit
from replica_groups.rounds.draws import DRAWS

ROUNDS = 4
CAUSES = {
    "skips": "differs by",
    "invents": "differs by",
    "rereads": "trained on another text",
    "forges": "does not match its commitment, 2 times",
    "hides": "did not show its checkpoint",
    "swaps": "another state than its round ends with",
    "returns": "differs by",
}
"""Replica -> part of the cause by which it is found. `returns` leaves before each round, and joins again."""
INVENTS, CRASHES = "anchors", "crashes"
"""A replica that returns with error feedback of its own, and an honest one that is killed before each round."""


def _commit(commit: Callable[[MemberCommitments, int, int], None]) -> Callable[[MemberCommitments, int, int], None]:
    """Return a `commit` with which some members commit to states that they never had."""

    def lied(own: MemberCommitments, round_: int, steps: int) -> None:
        commit(own, round_, steps)
        made = own._session.commitment
        assert made is not None
        if made.member == "swaps":
            made.after = hashlib.sha256(b"another state").digest()

    return lied


def _begin(begin: Callable[[MemberCommitments, int, bytes], None]) -> Callable[[MemberCommitments, int, bytes], None]:
    began, told = set[int](), set[str]()

    def changed(own: MemberCommitments, round_: int, committed: bytes) -> None:
        if own._name in ("returns", CRASHES):
            if id(own) in began:
                raise HeteroPPError("killed")
            began.add(id(own))
        if own._name == INVENTS and round_ > 1 and not told:
            told.add(own._name)
            for tensor in own._outer.error.values():
                tensor.fill_(-6e-3)
            committed = own._state(own._steps.known(round_)).sha256
        begin(own, round_, committed)

    return changed


def _show(show: Callable[..., None]) -> Callable[..., None]:
    def hidden(client: ExchangeClient, header: ShownFile, path: Path, caller: Caller) -> None:
        if caller.name == "forges":
            path = path.with_suffix(".forged")
            CommittedState({"error:a": torch.ones(1)}, {}).save(path)
            header.size = path.stat().st_size
        if caller.name != "hides":
            show(client, header, path, caller)

    return hidden


@pytest.fixture(scope="module", params=[1, 2], ids=["whole", "in fragments"])
def run(request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LyingRun]:
    liars = {name: {"kind": "datacenter"} for name in [*CAUSES, INVENTS, CRASHES]}
    outer = {"rounds": ROUNDS, "compression": {"density": 1 / 8}, "fragments": request.param}
    audit = {"recompute": {"share": 1}}
    spec = lying_spec(corpus, ROUNDS, liars, layers=request.param, audit=audit, outer=outer)
    with LyingRun(spec, tmp_path_factory.mktemp("run")) as one, ExitStack() as stack:
        for owner, name, change in (
            (MemberCommitments, "commit", _commit),
            (MemberCommitments, "begin", _begin),
            (ExchangeClient, "show_file", _show),
        ):
            stack.enter_context(mock.patch.object(owner, name, change(getattr(owner, name))))
        stack.enter_context(lying({"skips": skips, "invents": flips, "returns": flips, "rereads": rereads}))
        stack.enter_context(mock.patch.object(showing, "ROUNDS_TO_SHOW", 2))
        one.until_over()
        yield one


def _found(run: LyingRun) -> list[Judgement]:
    return [one.judged for one in run.told if one.HasField("judged")]


def _committed(run: LyingRun, replica: str) -> dict[int, Commitment]:
    """Return what a replica committed to, by round, in the rounds that count it."""
    records = map(run.exchange.log.read_record, range(1, ROUNDS + 1))
    found = [(one.round, entry) for one in records for entry in one.contributions if entry.replica == replica]
    return {round_: entry.commitments[0] for round_, entry in found}


def test_no_round_counts_a_state_that_a_member_invents(run: LyingRun) -> None:
    """It would be a new beginning of its chain, from which all that it contributes follows."""
    assert any("began round 2 with an unknown state" in str(error) for error in run.errors[INVENTS])
    made, known = _committed(run, INVENTS), {b""}
    for round_, one in made.items():
        assert one.before in known or one.before == state_sha256(one.rest, hashlib.sha256().digest()), round_
        known = {one.after}
    assert made


def test_who_is_killed_before_each_round_goes_on_from_its_state(run: LyingRun) -> None:
    made = list(_committed(run, CRASHES).values())
    assert len(made) >= 2 and len(run.errors[CRASHES]) >= 2
    assert all(one.after == then.before for one, then in pairwise(made))


def test_no_round_counts_a_member_that_owes_a_checkpoint(run: LyingRun) -> None:
    counted, audits = _committed(run, "hides"), run.exchange.runner.audits
    assert isinstance(audits, Judgements)
    assert audits.showing is not None
    made = {round_: one for (round_, name, _), one in audits.showing.commitments._kept.items() if name == "hides"}
    own = [round_ for round_, one in made.items() if one.holder == counted[1].holder]
    assert max(own) > 1
    assert [round_ for round_ in own if round_ in counted] == [1], "once it is named, its slot is given to another"
    assert {made[round_].before for round_ in own[1:]} == {counted[1].after}, "what it trains meanwhile is undone"


@pytest.mark.parametrize("replica", CAUSES)
def test_a_liar_is_named(run: LyingRun, replica: str) -> None:
    causes = [one.recomputed.cause for one in _found(run) if one.replica == replica and not one.recomputed.is_equal]
    assert any(CAUSES[replica] in cause for cause in causes), causes


def test_no_honest_replica_is_named(run: LyingRun) -> None:
    honest = {*HONEST, INVENTS, CRASHES}  # what it invented was never taken
    own: list[Recomputed] = [one.recomputed for one in _found(run) if one.replica in honest]
    assert len(own) >= len(honest)
    assert all(one.is_equal and one.difference == 0 for one in own)
    assert not any(run.errors[name] for name in HONEST)


def test_the_run_goes_on_without_the_liars(run: LyingRun) -> None:
    log = run.exchange.log
    assert log.last_record() == ROUNDS
    assert read_audit(log.store, ROUNDS)
    assert {one.replica for one in log.read_record(ROUNDS).contributions} >= {*HONEST}


def test_only_evidence_against_liars_is_kept(run: LyingRun) -> None:
    store = run.exchange.log.store
    kept = {key.split("/")[1] for key in store.below(EVIDENCE) if key.endswith("evidence.json")}
    assert {"skips", "invents", "rereads"} <= {one.partition("-")[2] for one in kept} <= CAUSES.keys()
    assert len(store.names(DRAWS)) == ROUNDS + 1
