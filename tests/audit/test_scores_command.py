"""`hetero-pp audit scores`: of a run without audits, of one that is not judged yet, and of a replica that left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lying_run import lying_spec
from small_run import GRACE, Run

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.yaml_file import save_config
from hetero_pp.core.errors import ConfigError, DamagedFile
from hetero_pp.messages.messages_pb2 import Score, Scores
from hetero_pp.program.audits import print_scores
from replica_groups.exchange.audits import Exclusion, keep_scores, scores_key


def _folder(corpus: Path, runs: Path, audit: dict[str, Any]) -> RunFolder:
    folder = RunFolder(runs / "t")
    folder.path.mkdir()
    save_config(lying_spec(corpus, 2, {}, audit=audit).config, folder.config)
    return folder


def test_of_a_run_without_audits_and_of_one_that_is_not_judged(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _folder(corpus, tmp_path, {})
    print_scores(tmp_path, "t", None)
    expected = "t: its contributions are not scored; `audit: {gauntlet: {}}` in the YAML turns scores on\n"
    assert capsys.readouterr().out == expected
    save_config(lying_spec(corpus, 2, {}, audit={"gauntlet": {}}).config, RunFolder(tmp_path / "t").config)
    print_scores(tmp_path, "t", None)
    assert capsys.readouterr().out == "t: no round has been judged yet; 0 rounds are closed\n"
    with pytest.raises(ConfigError, match="found no run u"):
        print_scores(tmp_path, "u", None)


def test_of_a_replica_that_left(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _folder(corpus, tmp_path, {"gauntlet": {}})
    run = Run(folder.log, {"a": 1, "b": 1, "c": 1, "d": 1}, quorum=0.5)
    run.assign(0)
    run.deposit(1, "a", "b", "c", "d")
    run.assign(1, "a", "b")
    run.deposit(2, "a", "b")
    run.passes(GRACE.most, ("a", "b"))
    names = {"a": "", "b": "", "c": "", "d": "it cheats", "e": ""}
    scores = Scores(round=2, scores=[Score(replica=name, final=1.0, excluded=why) for name, why in names.items()])
    keep_scores(run.log.store, scores, None, {"d": Exclusion(until=9, cause="it cheats")})
    print_scores(tmp_path, "t", None)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("t: ")]
    assert lines == [
        "t: scores after round 2",
        "t: c took no part in round 2; its last contribution is in round 1, and its score stays as it was",
        "t: e took no part in round 2; it has not contributed, and its score stays as it was",
    ]
    key = scores_key(2)
    run.log.store.put(key, run.log.store.get(key).replace(b"cheats", b"works!"))
    with pytest.raises(DamagedFile, match="does not match its digest"):
        print_scores(tmp_path, "t", None)
