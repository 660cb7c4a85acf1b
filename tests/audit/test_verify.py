"""Evidence of an audit: anybody can check it, and a false or hostile one is refused in one line."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from audited_run import LIAR, audited_spec, flips, lying
from typer.testing import CliRunner

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.cli import app
from hetero_pp.program.launch.in_process import run_in_process


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of a run in which `home` flips the sign of what it contributes."""
    folder, told = RunFolder(tmp_path_factory.mktemp("runs") / "t"), list[Report]()
    folder.path.mkdir()
    with lying({LIAR: flips}):
        run_in_process(audited_spec(corpus), folder, told.append)
    found = [one.judged for one in told if one.HasField("judged") and not one.judged.recomputed.is_equal]
    assert {one.replica for one in found} == {LIAR}
    assert found[0].recomputed.evidence == f"evidence/000001-{LIAR}"
    yield folder.path


def check(*arguments: object) -> tuple[int, str]:
    """Return the exit code and the output of `hetero-pp log verify`."""
    done = CliRunner().invoke(app, ["log", "verify", *map(str, arguments)])
    torch.set_num_threads(1)
    return done.exit_code, done.output


def test_evidence_proves_the_lie(run: Path) -> None:
    code, output = check(run / "evidence" / f"000001-{LIAR}")
    lines = output.strip().splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "files",
        "record",
        "draw",
        "commitments",
        "contribution",
        "theta",
        "recomputed",
        "proven",
    ]
    assert "differs by 2 of its norm" in lines[-2]
    assert lines[-1] == f"proven: {LIAR} computed something else in round 1 of {LIAR}"
    assert code == 0


def test_a_copy_needs_only_the_log(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run / "log" / "evidence" / f"000001-{LIAR}", copy)
    assert check(copy)[0] == 2
    code, output = check(tmp_path / "runs" / "t" / "evidence" / "000001-home")
    assert (code, "found no evidence, expected a folder of evidence" in output) == (2, True)
    assert check(copy, "--log", run / "log")[0] == 0
    code, output = check(copy, "--log", run / "log", "--tolerance", 3)
    assert code == 1
    assert "nothing is proven" in output


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("contributed/layers.0.blob", "does not have the digest"),
        (f"{LIAR}/before.safetensors", "does not have the digest"),
        ("record.json", "does not have the digest"),
        ("evidence.json", "is no evidence"),
    ],
)
def test_an_altered_file_is_found(run: Path, tmp_path: Path, name: str, said: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run / "log" / "evidence" / f"000001-{LIAR}", copy)
    data = bytearray((copy / name).read_bytes())
    data[-1] ^= 1
    (copy / name).write_bytes(data)
    code, output = check(copy, "--log", run / "log")
    assert (code, len(output.strip().splitlines())) == (1, 1)
    assert said in output


def test_a_link_among_the_evidence_is_not_followed(run: Path, tmp_path: Path) -> None:
    copy, name = tmp_path / "copy", f"{LIAR}/before.safetensors"
    shutil.copytree(run / "log" / "evidence" / f"000001-{LIAR}", copy)
    (copy / name).rename(tmp_path / "elsewhere")
    (copy / name).symlink_to(tmp_path / "elsewhere")
    known = json.loads((copy / "evidence.json").read_text())
    del known["files"][name]
    (copy / "evidence.json").write_text(json.dumps(known))
    code, output = check(copy, "--log", run / "log")
    assert code == 1 and f"evidence.json: found no digest of {name}" in output


@pytest.mark.parametrize("change", ["tolerance", "learning_rate", "changes"])
def test_evidence_with_other_settings_than_the_run_convicts_nobody(run: Path, tmp_path: Path, change: str) -> None:
    """All digests in the folder are right. With other settings, an honest round would differ."""
    copy = tmp_path / "copy"
    shutil.copytree(run / "log" / "evidence" / f"000001-{LIAR}", copy)
    known, found = (json.loads((copy / name).read_text()) for name in ("run.json", "evidence.json"))
    if change == "tolerance":
        found["tolerance"] = known["config"]["audit"]["recompute"]["tolerance"] = 0.01
    elif change == "learning_rate":
        known["config"]["inner"]["learning_rate"] = 0.5
        found["run"] = RunSpec(RunConfig.model_validate(known["config"]), 256).run
    else:
        changed = audited_spec(tmp_path).changes.changed(audited_spec(tmp_path).at(1), 2, {"inner.learning_rate": 0.5})
        known["changes"] = changed.to_json()
    (copy / "run.json").write_text(json.dumps(known))
    found["files"]["run.json"] = hashlib.sha256((copy / "run.json").read_bytes()).hexdigest()
    (copy / "evidence.json").write_text(json.dumps(found))
    code, output = check(copy, "--log", run / "log")
    assert code == 1 and "has other settings than the run had in round 1" in output


def test_a_secret_that_is_not_of_the_published_chain_draws_nobody(run: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    shutil.copytree(run / "log", log)
    draw = log / "draws" / "round-000001.json"
    draw.write_text(json.dumps(json.loads(draw.read_text()) | {"secret": "0" * 64}))
    code, output = check(log / "evidence" / f"000001-{LIAR}", "--log", log)
    assert code == 1
    assert f"{LIAR} was not drawn by the secret of round 1" in " ".join(output.split())


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../../etc/passwd": "0" * 64}},
        {"files": {"a": "short"}},
        {"round": -1},
        {"version": 99},
        {"cause": "x" * 10_000},
        {"replica": "nobody"},
        {"theta_sha256": "0" * 64},
        {"run": "another"},
    ],
    ids=["path", "digest", "round", "version", "cause", "replica", "theta", "run"],
)
def test_hostile_evidence_is_refused_with_one_line(run: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run / "log" / "evidence" / f"000001-{LIAR}", copy)
    known = json.loads((copy / "evidence.json").read_text())
    (copy / "evidence.json").write_text(json.dumps(known | change))
    code, output = check(copy, "--log", run / "log")
    assert code == 1
    assert "Traceback" not in output
    assert "proven:" not in output
