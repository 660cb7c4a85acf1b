"""Validators: beside the exchange and as processes, one that dies, one that is slow, and what cannot be audited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from lying_run import SECRET, LyingRun, lying_spec
from members import TIMEOUT
from small_run import SETTINGS, Run
from torch import Tensor
from typer.testing import CliRunner

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.yaml_file import save_config
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.sources import open_source, tokens_digest
from hetero_pp.messages.messages_pb2 import AUDITED, UNAUDITED, Judgement, Report, RoundRecord
from hetero_pp.outer.apply_round import FetchBlob
from hetero_pp.outer.step import OuterOptimizer
from hetero_pp.program.audits import Access, FollowedRun, RunChanged, access_to, require_same_text, validate
from hetero_pp.program.cli import app
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.program.launch.inputs import settled
from hetero_pp.program.report.lines import words_of
from hetero_pp.program.report.state import RunState
from hetero_pp.program.report.summary import summary_of
from hetero_pp.rpc.exchange_client import ExchangeClient
from replica_groups.audit import validator as module
from replica_groups.audit.gauntlet import GauntletCheck
from replica_groups.audit.judgements import Judgements
from replica_groups.audit.validator import Validator
from replica_groups.exchange.audits import newest_scores
from replica_groups.exchange.log import key_of
from replica_groups.exchange.replay import Follower
from replica_groups.exchange.text import Text

GAUNTLET = {"gauntlet": {"evaluated": 2, "sequences": 2}}


def test_a_validator_that_dies_ends_nothing_and_the_run_says_so(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, told = lying_spec(corpus, 3, {}, audit=GAUNTLET), list[Report]()
    check = GauntletCheck.check

    def dies(self: GauntletCheck, record: RoundRecord, *rest: Any) -> Iterator[Judgement]:
        if record.round == 2:
            raise OSError("no memory is left")
        yield from check(self, record, *rest)

    monkeypatch.setattr(GauntletCheck, "check", dies)
    folder = RunFolder(tmp_path / "t")
    folder.path.mkdir()
    run_in_process(spec, folder, told.append)
    state = RunState(spec)
    lines = [words_of(one, spec) for report in told if state.apply(report) and (one := state.news) and one.is_line]
    assert state.is_over and state.failed is None
    cause = "the validator has ended (OSError: no memory is left); the run goes on"
    assert lines == [f"unaudited: {cause}"]
    audit = summary_of(state)["audit"]
    assert audit["unaudited"] == cause and {one["evaluations"] for one in audit["scores"]} == {1}


def test_a_validator_elsewhere_judges_over_grpc(corpus: Path, tmp_path: Path) -> None:
    """Each round waits until the one before is judged, so that the run does not end too early for the test."""
    spec = lying_spec(corpus, 4, {}, audit={"by": "validators", **GAUNTLET})
    run, pass_, judge, names = LyingRun(spec, tmp_path), tmp_path / "pass", Judgements.take, set[str]()

    def judged(own: Judgements, judgements: Any, validator: str) -> None:
        names.add(validator)
        judge(own, judgements, validator)

    deposit = ExchangeClient.deposit_blob

    def deposit_later(client: ExchangeClient, header: Any, *rest: Any) -> None:
        judgements = run.exchange.runner.audits
        assert isinstance(judgements, Judgements)
        with judgements._taking:
            assert judgements._taking.wait_for(lambda: judgements._judged >= header.round - 1, TIMEOUT)
        deposit(client, header, *rest)

    patched = mock.patch.object(ExchangeClient, "deposit_blob", deposit_later)
    with run, patched, mock.patch.object(Judgements, "take", judged):
        save_config(spec.config, run.folder.config)
        run.folder.token.write_text(SECRET.text)
        runs = ["--runs", str(run.folder.path.parent)]
        told = CliRunner().invoke(app, ["invite", "t", "--validator", "one", "--address", run.address, *runs])
        pass_.write_text(told.stdout)
        assert told.exit_code == 0 and SECRET.text not in told.stdout
        command = ["audit", "validate", "t", "--pass", str(pass_), "--device", "cpu", *runs]
        with ThreadPoolExecutor(1) as members:
            trained = members.submit(run.until_over)
            done = CliRunner().invoke(app, command)
            trained.result(TIMEOUT)
        assert done.exit_code == 0 and run.exchange.runner.failure is None
        kept = newest_scores(run.exchange.log.store)
    assert kept is not None and kept.round == 4
    assert [one.evaluations for one in kept.scores.scores] == [4, 4]
    assert not {one.membership_event.what for one in run.told} & {UNAUDITED, AUDITED}
    assert "round 4: 2 judgements" in done.output
    assert names == {"one"}, "its name is that of its pass"


class _Log:
    """The log of a small run, followed by a validator whose checks note the rounds. Implements ValidatedRun."""

    def __init__(self, run: Run) -> None:
        self.log, self.judged = run.log, list[int]()

    def record(self, round_: int) -> RoundRecord:
        return self.log.read_record(round_)

    def last_round(self) -> int:
        return self.log.last_record()

    def retry(self, do: Any) -> Any:
        return do()

    def wait_for(self, find: Any) -> Any:
        return find()

    def take(self, judgements: Any) -> None:
        self.judged += [one.round for one in judgements]

    def check(self, record: RoundRecord, theta: Mapping[str, Tensor], fetch: FetchBlob) -> Iterator[Judgement]:
        yield Judgement(round=record.round)

    def finish(self) -> Iterator[Judgement]:
        yield from ()


def test_a_slow_validator_skips_old_rounds_and_goes_on_where_the_log_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BEHIND", 4)
    monkeypatch.setattr(module, "round_optimizer", lambda spec, basis: OuterOptimizer(SETTINGS))
    run = Run(tmp_path / "log", {"a": 1, "b": 1})
    for number in range(1, 10):
        run.assign(number - 1)
        run.deposit(number, "a", "b")
    spec: Any = SimpleNamespace(run="run", latest=SimpleNamespace(outer=SETTINGS))
    followed = _Log(run)
    slow = Validator(spec, followed, [followed], run.checkpoint)
    slow.run()
    assert followed.judged == [5, 6, 7, 8, 9]
    right = slow._follower.theta()

    follower = Follower("run", run.checkpoint, OuterOptimizer(SETTINGS))
    for number in range(1, 8):
        record = run.log.read_record(number)
        follower.apply(record, run.log.blobs_of(record))
    run.log.write_checkpoint(follower.checkpoint())
    record = run.log.read_record(3)
    run.log.store.delete([key_of(record, one, blob) for one in record.contributions for blob in one.blobs])
    followed.judged.clear()
    late = Validator(spec, followed, [followed], run.checkpoint)
    late.run()
    assert followed.judged == [8, 9]
    assert all(tensor.equal(right[name]) for name, tensor in late._follower.theta().items())


def test_a_validator_with_another_text_does_not_begin(corpus: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    spec = lying_spec(corpus, 2, {})
    source = open_source(spec.config.data, tmp_path / "cache")
    require_same_text(folder, source)
    for tokens, is_same in ((tokens_digest(source), True), ("0" * 64, False)):
        folder.text.unlink(missing_ok=True)
        Text(folder.text, lambda member: True, lambda: True).note("home.0", tokens)
        if is_same:
            require_same_text(folder, source)
    with pytest.raises(ConfigError, match=r"data\.corpus: reads another text than the run: found tokens"):
        require_same_text(folder, source)


@pytest.mark.parametrize("what", ["records", "changes"])
def test_a_run_that_resumes_is_followed_anew(corpus: Path, what: str) -> None:
    """Otherwise a validator would blame honest members: it has other parameters, or other settings."""
    spec, records = lying_spec(corpus, 9, {}), {number: RoundRecord(round=number, sha256=b"a") for number in (1, 2)}
    log: Any = SimpleNamespace(read_record=records.__getitem__)
    access = Access.by_secret("v", "127.0.0.1:1", SECRET, encrypted=False)
    followed = FollowedRun(spec, log, access, lambda line: None)
    known = [spec.changes]
    followed.client = cast(Any, SimpleNamespace(changes=lambda: known[0]))
    followed.record(1)
    followed.record(2)
    if what == "records":
        records |= {number: RoundRecord(round=number, sha256=b"b") for number in (2, 3)}
    else:
        records[3] = RoundRecord(round=3, sha256=b"a")
        known[0] = spec.changes.changed(spec.at(1), 3, {"inner.learning_rate": 0.5})
    with pytest.raises(RunChanged, match="the run has resumed"):
        followed.record(3)


def test_settings_of_audits_without_their_other_half(corpus: Path, tmp_path: Path) -> None:
    weighs = {"rounds": 2, "weights": "scores"}
    with pytest.raises(ConfigError, match=r"outer\.weights: found `scores` without scores"):
        lying_spec(corpus, 2, {}, outer=weighs).config.check()
    with pytest.raises(ConfigError, match=r"audit\.by: found nothing to audit"):
        lying_spec(corpus, 2, {}, audit={"by": "validators"}).config.check()
    spec = lying_spec(corpus, 2, {}, audit={"by": "validators", **GAUNTLET})
    with pytest.raises(ConfigError, match=r"audit\.by: found `validators`, expected `exchange` with --in-process"):
        run_in_process(spec, RunFolder(tmp_path), lambda report: None)


def test_without_openskill_one_line_names_the_extra(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "openskill.models", None)
    with pytest.raises(ConfigError, match=r"pip install 'hetero-pp\[audit\]'"):
        settled(lying_spec(corpus, 2, {}, audit=GAUNTLET).config, None, resume=False)


def test_a_validator_that_cannot_reach_the_exchange(corpus: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "t")
    folder.path.mkdir()
    save_config(lying_spec(corpus, 2, {}).config, folder.config)
    with pytest.raises(ConfigError, match="t: found a run without audits"):
        validate(tmp_path, "t", None, "cpu", None)
    save_config(lying_spec(corpus, 2, {}, audit={"by": "validators", **GAUNTLET}).config, folder.config)
    command = ["audit", "validate", "t", "--pass", str(folder.config), "--name", "first", "--runs", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and "--name: found `first` with --pass, which has a name" in done.stderr
    with pytest.raises(ConfigError, match=r"--pass .*: cannot be read .*, expected what `hetero-pp invite RUN"):
        access_to(folder, folder.config, None)
    with pytest.raises(ConfigError, match=r"validators\.json: found no address of an exchange on this host"):
        access_to(folder, None, None)
