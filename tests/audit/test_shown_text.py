"""Scores of rounds of a fixed time, and of a streamed corpus, whose text is committed to and shown. Over gRPC with TLS.

The hostile replicas of a streamed run: `idle` sends noise, `other` shows another text than it committed to, `silent`
shows nothing, and `much` shows more than it was asked for.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from audited_run import Lie, lying
from lying_run import LyingRun, lying_spec
from members import TIMEOUT
from typer.testing import CliRunner

from hetero_pp.config.audit import GauntletSettings
from hetero_pp.config.spec import Roster, RunSpec
from hetero_pp.config.yaml_file import save_config
from hetero_pp.core.errors import DamagedFile, Refused
from hetero_pp.data.batches import RoundText, SharedBatches, sequence_digests
from hetero_pp.data.sources import open_source
from hetero_pp.messages.messages_pb2 import (
    EXCLUDED,
    Asked,
    BlobHeader,
    Commitment,
    ContributionEntry,
    RoundRecord,
    ShownFile,
)
from hetero_pp.program.cli import app
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.store.folder import FolderStore
from replica_groups.audit.commitments import TEXT, MemberCommitments, shown_text
from replica_groups.audit.gauntlet import AssignedTexts
from replica_groups.audit.judgements import Judgements
from replica_groups.audit.showing import Showing, Shows
from replica_groups.exchange.audits import newest_scores
from replica_groups.exchange.log import ContributionLog
from replica_groups.member.session import MemberSession
from replica_groups.rounds.draws import ROUNDS_TO_SHOW_TEXT, TEXTS, text_key

HONEST = {"a", "b", "c"}
TRIALS = {"evaluated": 8, "sequences": 8, "agreement": None, "excluded_rounds": 100}
INNER = {"learning_rate": 0.01, "final_learning_rate_share": 1}


def noise(trainer: Any, outer: Any) -> None:
    """Contribute noise of the size of what was trained."""
    honest, generator = outer._contributed, torch.Generator().manual_seed(1)

    def contributed(round_: int, name: str) -> Any:
        own = honest(round_, name)
        return own.norm() * torch.randn(own.shape, generator=generator) / math.sqrt(own.numel())

    outer._contributed = contributed


def _spec(corpus: Path, rounds: int, hostile: set[str], **changes: Any) -> RunSpec:
    liars = {name: {"kind": "datacenter", "batch_size": 4} for name in sorted({"c", *hostile})}
    outer = {"rounds": rounds, "compression": {"density": 1 / 8}}
    spec = lying_spec(corpus, rounds, liars, audit={"gauntlet": TRIALS}, outer=outer, **changes)
    replicas = [one.model_copy(update={"batch_size": 4}) for one in spec.config.replicas]
    return RunSpec(spec.config.model_copy(update={"replicas": replicas}), spec.shape.vocabulary)


@contextmanager
def _judged_before(run: LyingRun, rounds: int) -> Iterator[None]:
    """Let no member contribute before the round so many rounds before its own was judged."""
    deposit = ExchangeClient.deposit_blob

    def deposit_later(client: ExchangeClient, header: BlobHeader, data: bytes, caller: Caller) -> None:
        judgements = run.exchange.runner.audits
        assert isinstance(judgements, Judgements)
        with judgements._taking:
            assert judgements._taking.wait_for(lambda: judgements._judged >= header.round - rounds, TIMEOUT)
        deposit(client, header, data, caller)

    with mock.patch.object(ExchangeClient, "deposit_blob", deposit_later):
        yield


def _excluded(run: LyingRun) -> dict[str, str]:
    told = [one.membership_event for one in run.told if one.HasField("membership_event")]
    return {one.replica: one.cause for one in told if one.what == EXCLUDED}


# ---- rounds of a fixed time ----


@pytest.fixture(scope="module")
def timed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LyingRun, dict[str, list[np.ndarray]]]:
    """Return a run of rounds of a fixed time, and the batches that each member trained on."""
    run, read = LyingRun(_spec(corpus, 8, {"idle"}, inner={"seconds": 0.4, **INNER}), tmp_path_factory.mktemp("t")), {}
    train, of = SharedBatches.train, dict[int, list[np.ndarray]]()

    def noted(own: SharedBatches, step: int) -> torch.Tensor:
        tokens = train(own, step)
        of.setdefault(id(own), []).append(tokens.numpy())
        return tokens

    def remember(name: str) -> Lie:
        def lie(trainer: Any, outer: Any) -> None:
            read[name] = of.setdefault(id(trainer.batches), [])
            if name == "idle":
                noise(trainer, outer)

        return lie

    lies = {name: remember(name) for name in run.spec.members}
    with run, lying(lies), mock.patch.object(SharedBatches, "train", noted), _judged_before(run, 1):
        run.until_over()
        assert run.exchange.runner.failure is None
    return run, read


def test_rounds_of_time_have_scores_that_exclude_noise(timed: tuple[LyingRun, Any]) -> None:
    found = _excluded(timed[0])
    assert found.keys() == {"idle"}, found
    kept = newest_scores(timed[0].exchange.log.store)
    assert kept is not None and kept.round == 8
    assert all(one.evaluations == 8 for one in kept.scores.scores if one.replica in HONEST)


def test_the_text_of_a_round_of_time_is_what_its_member_trained_on(
    timed: tuple[LyingRun, dict[str, list[np.ndarray]]], tmp_path: Path
) -> None:
    run, read = timed
    texts = AssignedTexts(run.spec, open_source(run.spec.config.data, tmp_path), 2)
    taken, drawing = defaultdict[str, int](int), np.random.default_rng(1)
    for round_ in range(1, 9):
        record = run.exchange.log.read_record(round_)
        for entry in record.contributions:
            [made] = entry.commitments
            assert made.first == taken[entry.replica]
            own = np.concatenate(read[entry.replica][made.first : made.first + entry.steps])
            taken[entry.replica] += entry.steps
            assigned, other = texts.of(entry.replica, record, 16, drawing)
            trained = {row.tobytes() for row in own}
            assert {row.tobytes() for row in assigned.numpy()} <= trained
            same = [row.tobytes() in trained for row in other.numpy()]
            assert sum(same) < len(same) / 2, "the corpus says some things twice"
            expected = RoundText()
            expected.add(torch.from_numpy(own))
            assert made.text == expected.digest()
    assert min(taken[name] for name in HONEST) > 8, "rounds have several steps"


# ---- a streamed corpus ----


def _altered(show: Callable[..., None], session: MemberSession, header: ShownFile, path: Path, caller: Caller) -> None:
    assert header.name == TEXT
    data = bytearray(path.read_bytes())
    match caller.name:
        case "silent":
            return
        case "other":
            data[-4] ^= 1  # one token of the last drawn sequence
        case "much":
            data += bytes(4)
            header.size += 4
    altered = path.parent.with_name("altered")
    altered.write_bytes(data)
    show(session, header, altered, caller)


@pytest.fixture(scope="module")
def streamed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> LyingRun:
    folder, rounds = tmp_path_factory.mktemp("streamed"), 14
    text = "".join(one.read_text() for one in sorted(corpus.glob("*.txt")))
    for shard in range(2):
        lines = [json.dumps({"text": text[at : at + 200]}) for at in range(200 * shard, min(len(text), 400_000), 400)]
        (folder / f"{shard}.jsonl").write_text("\n".join(lines))
    data = {"corpus": f"hf:{folder}/*.jsonl", "sequence_length": 16, "validation_sequences": 4, "repeat": True}
    data["stream"] = {"validation_documents": 4, "shuffle_buffer": 64}
    spec = _spec(corpus, rounds, {"idle", "other", "silent", "much"}, data=data, inner={"steps": 8, **INNER})
    run, show = LyingRun(spec, folder), MemberSession.show_file
    with run, lying({"idle": noise}), _judged_before(run, ROUNDS_TO_SHOW_TEXT + 2):
        with mock.patch.object(MemberSession, "show_file", lambda *call: _altered(show, *call)):
            run.until_over()
        assert run.exchange.runner.failure is None
    save_config(run.spec.config, run.folder.config)
    return run


def test_streams_have_scores_that_exclude_whoever_does_no_work_or_shows_no_text(streamed: LyingRun) -> None:
    found = _excluded(streamed)
    assert found.keys() == {"idle", "other", "silent", "much"}, found
    assert all("its assigned text hardly improves, or it does not show its text" in cause for cause in found.values())
    for number in range(1, 15):
        assert {one.replica for one in streamed.exchange.log.read_record(number).contributions} >= HONEST
    last = {one.replica for one in streamed.exchange.log.read_record(14).contributions}
    assert last == HONEST


def test_what_is_no_committed_text_is_refused_and_counted(streamed: LyingRun) -> None:
    told = {(one.refusal.sender, one.refusal.reason) for one in streamed.told if one.HasField("refusal")}
    reasons = {sender: {reason for name, reason in told if name == sender} for sender in ("other", "much", "a")}
    assert any("its text from round 1 does not match its commitment" in one for one in reasons["other"])
    sizes = 32 * 8 * 4 + 8 * 4 * 17
    assert f"shows {sizes + 4} bytes of 32 sequences, expected {sizes}" in " ".join(reasons["much"])
    assert not reasons["a"]


def test_the_command_shows_reliability_and_shares(streamed: LyingRun, tmp_path: Path) -> None:
    runs, found = streamed.folder.path.parent, tmp_path / "scores.json"
    done = CliRunner().invoke(app, ["audit", "scores", "t", "--json", str(found), "--runs", str(runs)])
    told = {one["replica"]: one for one in json.loads(found.read_text())["replicas"]}
    assert done.exit_code == 0 and "reliability" in done.output and "share" in done.output
    assert all(told[name]["reliability"] == 1 and told[name]["evaluations"] > 8 for name in HONEST)
    assert all(told[name]["reliability"] == 0 and told[name]["share"] == 0 for name in ("other", "silent", "much"))
    total = sum(one["final"] for one in told.values() if not one["excluded"])
    assert all(
        one["share"] == pytest.approx(one["final"] / total if total else 0)
        for one in told.values()
        if not one["excluded"]
    )
    assert streamed.exchange.log.store.names(TEXTS)


# ---- one text ----


def test_a_text_is_checked_against_all_digests_and_the_vocabulary(tmp_path: Path) -> None:
    tokens, kept = torch.arange(30).reshape(6, 5), RoundText(tmp_path / "text")
    kept.add(tokens[:2])
    kept.add(tokens[2:])
    rows, committed, drawn = tokens.numpy().astype("<i4"), kept.digest(), [1, 4]
    assert (tmp_path / "text").read_bytes() == rows.tobytes()
    right = sequence_digests(rows) + rows[drawn].tobytes()
    assert shown_text(right, drawn, 6, 30, committed).tolist() == rows[drawn].tolist()
    other = sequence_digests(rows[::-1]) + rows[::-1][drawn].tobytes()
    beyond = sequence_digests(rows) + rows[[4, 1]].tobytes()
    for wrong, vocabulary in ((right, 24), (other, 30), (beyond, 30)):
        with pytest.raises(DamagedFile, match="another text than the member committed to"):
            shown_text(wrong, drawn, 6, vocabulary, committed)


def test_a_text_that_the_disk_does_not_take_is_committed_to_and_cannot_be_shown(tmp_path: Path) -> None:
    kept, plain, tokens = RoundText(tmp_path / "missing" / "text"), RoundText(), torch.arange(10).reshape(2, 5)
    for one in (kept, plain):
        one.add(tokens)
        one.add(tokens + 1)
    assert kept.digest() == plain.digest() and not (tmp_path / "missing").exists()


class _Drawing:
    """An exchange's draws over the text of the replica `home`, of which each round has 6 sequences of 5 tokens."""

    def __init__(self, folder: Path) -> None:
        self.last_round, self.text = 0, RoundText()
        self.rows = torch.arange(30).reshape(6, 5)
        self.text.add(self.rows)
        run: Any = SimpleNamespace(
            coordinator=self,
            wait_for_record=self._record,
            retry=lambda do: do(),
            roster=Roster({"home": "home", "dc": "dc"}, {}),
            expect_member=lambda member: None,
            refused=lambda sender, reason, kind=None: Refused(f"{sender}: {reason}"),
        )
        scores = GauntletSettings(evaluated=1, sequences=2)
        shows = Shows(0.0, frozenset({"home"}), {}, {}, False, scores, True, 4, 30)
        self.log, self.path = ContributionLog(FolderStore(folder)), folder / "file"
        self.showing = Showing(run, self.log, shows, lambda found: None)
        self.showing.begin(0)

    def _record(self, round_: int) -> RoundRecord:
        made = Commitment(member="home", text=self.text.digest(), holder=3)
        entry = ContributionEntry(replica="home", tokens=24, commitments=[made])
        return RoundRecord(round=round_, contributions=[entry], sha256=bytes([round_]) * 32)

    def closes(self, round_: int) -> Asked | None:
        self.last_round = round_
        return self.showing.asks("home", 3, 1)

    def shows(self, asked: Asked, rows: torch.Tensor, extra: int = 0, size: int | None = None) -> None:
        own = rows.numpy().astype("<i4")
        self.path.write_bytes(sequence_digests(own) + own[list(asked.sequences)].tobytes() + bytes(extra))
        header = ShownFile(round=asked.round, name=TEXT, size=self.path.stat().st_size if size is None else size)
        self.showing.take(header, self.path, Caller("home", holder=3))


def test_a_text_that_is_shown_is_kept_for_validators_and_what_is_none_is_not(tmp_path: Path) -> None:
    found = _Drawing(tmp_path)
    asked = found.closes(1)
    assert asked is not None and asked.round == 1 and len(asked.sequences) == 2
    for wrong in ({"extra": 4}, {"size": 0}, {"size": 1 << 40}):
        with pytest.raises(Refused, match="bytes of 6 sequences, expected 232"):
            found.shows(asked, found.rows, **wrong)
    assert {*found.showing.owing(found._record(2))} == {"home"} and found.showing.shown(1) == {}
    found.shows(asked, found.rows)
    assert found.showing.shown(1) == {"home": True} and not found.showing.owing(found._record(2))
    assert found.log.store.size(text_key(1, "home")) == 232
    again = found.closes(2)
    assert again is not None
    for _ in range(2):
        with pytest.raises(Refused, match="its text from round 2 does not match its commitment"):
            found.shows(again, found.rows + 1)
    assert found.showing.shown(2) == {"home": False} and found.log.store.get(text_key(2, "home")) == b""


@pytest.mark.parametrize(("is_hindered", "shown"), [(False, {"home": False}), (True, {})])
def test_a_text_that_does_not_come_is_missing_after_two_rounds(
    tmp_path: Path, is_hindered: bool, shown: dict[str, bool]
) -> None:
    found = _Drawing(tmp_path)
    found.closes(1)
    if is_hindered:
        found.showing.lacks_room(ShownFile(round=1, name=TEXT), Caller("home", holder=3))
    found.closes(ROUNDS_TO_SHOW_TEXT)
    assert found.showing.shown(1) == {}
    found.closes(ROUNDS_TO_SHOW_TEXT + 1)
    assert found.showing.shown(1) == shown and found.log.store.get(text_key(1, "home")) == b""


def test_rounds_that_overlap_and_members_that_restart_commit_to_their_own_text(tmp_path: Path) -> None:
    """The text of a round that an earlier process trained ahead comes from its file."""
    batches: Any = SimpleNamespace(text=None, first=0)
    member: Any = SimpleNamespace(batches=batches, moments=dict)
    steps: Any = SimpleNamespace(before=lambda round_: 2 * (round_ - 1))

    def process() -> MemberCommitments:
        own = MemberSession(None, "home", "home"), member, cast(Any, SimpleNamespace()), steps, tmp_path
        return MemberCommitments(*own, states=False, columns=5)

    first, rows = process(), {number: torch.arange(10 * number, 10 * number + 10).reshape(2, 5) for number in (1, 2)}
    for number, tokens in rows.items():
        first.trains(number)
        batches.text.add(tokens)
    for number, own in ((1, first), (2, process())):
        own.contributes(number, 2)
        expected = RoundText()
        expected.add(rows[number])
        made = own._session.commitment
        assert made == Commitment(member="home", text=expected.digest(), first=2 * (number - 1))
