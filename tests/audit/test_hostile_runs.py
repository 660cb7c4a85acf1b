"""Planted cheats in a live run over gRPC with TLS: a datacenter that lies, a copier that is first, and two sybils."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from lying_run import SECRET, LyingRun, lying_spec
from members import TIMEOUT
from typer.testing import CliRunner

from hetero_pp.config.audit import GauntletSettings
from hetero_pp.config.member_inputs import round_optimizer
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import save_config
from hetero_pp.messages.messages_pb2 import EXCLUDED, LEFT_OUT, UNAUDITED, BlobHeader
from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.program.cli import app
from hetero_pp.program.defences import defended
from hetero_pp.pseudo_gradient.contribution import BlobAddress, decode_blob, encode_blob, split_blobs
from hetero_pp.pseudo_gradient.error_feedback import select
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.audit import gauntlet
from replica_groups.audit.judgements import Judgements
from replica_groups.exchange.replay import LogCheck

ROUNDS = 6
HONEST = {"a", "b", "s1"}
"""`s1` works, and `s2` of the same owner sends the same."""
COPIES = {"copier": "a", "s2": "s1"}
"""Copy -> original. `copier` sends first, as one that trains on the text of a slower replica."""
TRIALS = {"evaluated": 6, "sequences": 6, "alpha": 0.3, "grace": 2, "threshold": 0}
"""Scores of so little text are noise, so they exclude nobody: what is compared does."""
AUDIT = {"gauntlet": {**TRIALS, "excluded_rounds": 16}}


class _Cheats:
    """Alters what members deposit. A round closes only after the rounds before it were judged."""

    def __init__(self, run: LyingRun, deposit: Callable[..., None], factor: float = -1.0) -> None:
        self._run, self._deposit, self._factor = run, deposit, factor
        self._sent: dict[tuple[str, int, str], bytes] = {}

    def deposit_all(self, client: ExchangeClient, header: BlobHeader, data: bytes, caller: Caller) -> None:
        for one, part in split_blobs(header, data):
            self.deposit(client, one, part, caller)

    def deposit(self, client: ExchangeClient, header: BlobHeader, data: bytes, caller: Caller) -> None:
        judgements = self._run.exchange.runner.audits
        assert isinstance(judgements, Judgements)
        if self._run.spec.config.audit.scores is not None:
            with judgements._taking:
                assert judgements._taking.wait_for(lambda: judgements._judged >= header.round - 1, TIMEOUT)
        if header.replica == "liar":
            data = self._flipped(header, data)
        elif header.replica in COPIES:
            data = self._copied(COPIES[header.replica], header)
        header.size = len(data)
        is_copied = header.replica == COPIES["copier"] and "copier" in self._run.spec.roster.replicas
        key, changed = (header.replica, header.round, header.block), self._run.exchange.runner.changed
        if not is_copied:
            self._deposit(client, header, data, caller)
        with changed:
            self._sent[key] = data
            changed.notify_all()
            if is_copied:
                copier, copy = self._run.exchange.coordinator.replicas["copier"], ("copier", *key[1:])
                changed.wait_for(lambda: copy in self._sent or copier.round != header.round, TIMEOUT)
        if is_copied:
            self._deposit(client, header, data, caller)

    def _flipped(self, header: BlobHeader, data: bytes) -> bytes:
        """Return a contribution of the same size that goes the other way."""
        return self._encoded(header, header.replica, data, self._factor)

    def _copied(self, original: str, header: BlobHeader) -> bytes:
        """Return what another replica has deposited, under the own name."""
        key, changed = (original, header.round, header.block), self._run.exchange.runner.changed
        with changed:
            assert changed.wait_for(lambda: key in self._sent, TIMEOUT)
        return self._encoded(header, original, self._sent[key], 1.0)

    def _encoded(self, header: BlobHeader, of: str, data: bytes, factor: float) -> bytes:
        spec = self._run.spec
        settings = spec.config.outer.compression
        shapes = shapes_by_block(spec.parameter_shapes)[header.block]
        found = decode_blob(data, BlobAddress(spec.run, header.round, of, header.block), shapes, settings)
        tensors = []
        for name, shape in shapes.items():
            dense = torch.zeros(shape)
            found[name].add_to(dense, factor)
            tensors.append((name, shape, select(torch.zeros(shape), dense, settings)))
        return encode_blob(BlobAddress(spec.run, header.round, header.replica, header.block), tensors, settings)


def _spec(corpus: Path) -> RunSpec:
    liars = {name: {"kind": "datacenter"} for name in ("copier", "liar", "s1", "s2")}
    inner = {"steps": 8, "learning_rate": 0.01, "final_learning_rate_share": 1}
    outer = {"rounds": ROUNDS, "weights": "scores", "compression": {"density": 1 / 8}}
    return lying_spec(corpus, ROUNDS, liars, audit=AUDIT, inner=inner, outer=outer)


@pytest.fixture(scope="module")
def cheated(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> LyingRun:
    run = LyingRun(_spec(corpus), tmp_path_factory.mktemp("hostile"))
    with run:
        cheats = _Cheats(run, ExchangeClient.deposit_blob)
        little = mock.patch.object(gauntlet, "CLEAR", 1.0)  # a round has little text
        with little, mock.patch.object(ExchangeClient, "deposit_blob", lambda *found: cheats.deposit_all(*found)):
            run.until_over()
        assert run.exchange.runner.failure is None
    save_config(run.spec.config, run.folder.config)
    return run


def _excluded(run: LyingRun) -> Mapping[str, str]:
    told = [one.membership_event for one in run.told if one.HasField("membership_event")]
    return {one.replica: one.cause for one in told if one.what == EXCLUDED}


def test_cheats_are_excluded_and_honest_replicas_are_not(cheated: LyingRun) -> None:
    found = _excluded(cheated)
    assert found.keys() == {"copier", "liar", "s2"}, found
    assert "a copy of that of a" in found["copier"] and "a copy of that of s1" in found["s2"]
    assert "its contribution to round 1 goes another way than the others" in found["liar"]


def test_records_have_no_excluded_replica_and_replay_has_their_bits(cheated: LyingRun) -> None:
    log, spec = cheated.exchange.log, cheated.spec
    last = [one.replica for one in log.read_record(ROUNDS).contributions]
    assert set(last) == HONEST
    assert {one.replica for one in log.read_record(1).contributions} == HONEST | {"copier", "s2"}
    assert list(log.read_record(1).left_out) == ["liar"]
    checked = list(LogCheck(log, spec.run, partial(round_optimizer, spec)).rounds(ROUNDS))
    assert [one.round for one in checked if one.damaged or (one.round and not one.is_audited)] == []
    told = [one.membership_event for one in cheated.told if one.HasField("membership_event")]
    assert {one.replica for one in told if one.what == LEFT_OUT} <= {"copier", "liar", "s2"}
    assert not [one for one in told if one.what == UNAUDITED]


def test_the_command_shows_who_is_excluded_and_why(cheated: LyingRun, tmp_path: Path) -> None:
    runs, found = cheated.folder.path.parent, tmp_path / "scores.json"
    out = CliRunner().invoke(app, ["audit", "scores", "t", "--json", str(found), "--runs", str(runs)]).output
    assert "copy of" in out and f"t: scores after round {ROUNDS}" in out
    told = json.loads(found.read_text())
    excluded = {one["replica"]: one["excluded_until"] for one in told["replicas"] if one["excluded"]}
    assert excluded.keys() == {"copier", "liar", "s2"} and min(excluded.values()) > ROUNDS
    assert all(one["evaluations"] >= ROUNDS - 1 for one in told["replicas"] if one["replica"] in HONEST)
    assert SECRET.text not in found.read_text() + out


def test_one_liar_of_four_is_in_no_round_of_the_default_run_and_streams_are_compared_too(
    corpus: Path, tmp_path: Path
) -> None:
    """A guest sends the negative of its contribution at four times the size."""
    text = "".join(one.read_text() for one in corpus.glob("*.txt"))
    lines = [json.dumps({"text": text[at : at + 200]}) for at in range(0, min(len(text), 400_000), 200)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    guests = {name: {"kind": "datacenter", "optional": name == "liar"} for name in ("c", "liar")}
    data = {"corpus": f"hf:{tmp_path}/text.jsonl", "sequence_length": 16, "validation_sequences": 4}
    data["stream"] = {"validation_documents": 4}
    run = LyingRun(defended(lying_spec(corpus, 4, guests, data=data), is_served=True), tmp_path)
    scores = run.spec.config.audit.gauntlet
    with run:
        cheats = _Cheats(run, ExchangeClient.deposit_blob, factor=-4.0)
        with mock.patch.object(ExchangeClient, "deposit_blob", lambda *found: cheats.deposit_all(*found)):
            run.until_over()
    assert isinstance(scores, GauntletSettings) and scores.evaluated is None, "streams have scores by default, too"
    assert _excluded(run).keys() == {"liar"}
    rounds = [run.exchange.log.read_record(number) for number in range(1, 5)]
    assert all({one.replica for one in record.contributions} == {"a", "b", "c"} for record in rounds)
