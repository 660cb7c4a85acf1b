"""Datacenter replicas that lie in one run over gRPC with TLS: recomputation names each of them, and no honest one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from audited_run import flips, lying, rereads, skips
from lying_run import HONEST, LyingRun, lying_spec

from hetero_pp.messages.messages_pb2 import Judgement, Recomputed, ShownFile
from hetero_pp.outer.exchange_service import Caller
from hetero_pp.rpc.exchange_client import ExchangeClient
from replica_groups.exchange import showing
from replica_groups.exchange.audits import read_audit
from replica_groups.exchange.showing import DRAWS, EVIDENCE
from replica_groups.loop.commitments import Commitments

ROUNDS = 4
CAUSES = {
    "skips": "differs by",
    "invents": "differs by",
    "rereads": "trained on another text",
    "forges": "does not match its commitment, 2 times",
    "hides": "did not show its checkpoint",
    "swaps": "another state than it ended the one before",
}
"""Replica -> part of the cause by which it is found."""


def _commit(commit: Callable[[Commitments, int, int], None]) -> Callable[[Commitments, int, int], None]:
    """Return a `commit` with which some members commit to states that they never had."""

    def lied(own: Commitments, round_: int, steps: int) -> None:
        commit(own, round_, steps)
        made = own._exchange.commitment
        assert made is not None
        if made.member == "forges":  # a chain of made-up digests
            made.before, made.after = (hashlib.sha256(str(one).encode()).digest() for one in (round_, round_ + 1))
        elif made.member == "swaps":
            made.after = hashlib.sha256(b"another state").digest()

    return lied


def _show(show: Callable[..., None]) -> Callable[..., None]:
    def hidden(client: ExchangeClient, header: ShownFile, path: Path, caller: Caller) -> None:
        if caller.name != "hides":
            show(client, header, path, caller)

    return hidden


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LyingRun]:
    spec = lying_spec(
        corpus, ROUNDS, {name: {"kind": "datacenter"} for name in CAUSES}, audit={"recompute": {"share": 1}}
    )
    with LyingRun(spec, tmp_path_factory.mktemp("run")) as one, ExitStack() as stack:
        for owner, name, change in (
            (Commitments, "commit", _commit),
            (ExchangeClient, "show_file", _show),
        ):
            stack.enter_context(mock.patch.object(owner, name, change(getattr(owner, name))))
        stack.enter_context(lying({"skips": skips, "invents": flips, "rereads": rereads}))
        stack.enter_context(mock.patch.object(showing, "ROUNDS_TO_SHOW", 2))
        one.until_over()
        yield one


def _found(run: LyingRun) -> list[Judgement]:
    return [one.judged for one in run.told if one.HasField("judged")]


@pytest.mark.parametrize("replica", CAUSES)
def test_a_liar_is_named(run: LyingRun, replica: str) -> None:
    causes = [one.recomputed.cause for one in _found(run) if one.replica == replica and not one.recomputed.is_equal]
    assert any(CAUSES[replica] in cause for cause in causes), causes


def test_no_honest_replica_is_named(run: LyingRun) -> None:
    own: list[Recomputed] = [one.recomputed for one in _found(run) if one.replica in HONEST]
    assert len(own) >= len(HONEST)
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
