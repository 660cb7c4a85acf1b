"""Rehearsals from the command line: one on this machine, and one in which hosts join by tickets."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from started import run_program, start_program
from typer.testing import CliRunner

from hetero_pp.config.folder import RunFolder
from hetero_pp.program.cli import app
from hetero_pp.program.operate.metrics import RunCollector
from hetero_pp.program.operate.observed import Observed
from hetero_pp.program.view.sources import Record

pytestmark = pytest.mark.starts_processes

YAML = """\
name: homes
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 2, vocabulary: 256}
data: {corpus: nowhere, sequence_length: 32, validation_sequences: 4}
inner: {steps: 9}
outer: {rounds: 9}
exchange: {listen: "127.0.0.1:PORT"}
lines: {dsl: {up: 20 Mbit/s, down: 100 Mbit/s, latency: 1 ms}}
replicas:
  - {name: home, kind: participants, stages: {count: 2, line: dsl}, batch_size: 4, micro_batches: 2,
     boundary: {rank: 8}}
"""
NAME = "homes-rehearsal"


def asked(*arguments: str) -> tuple[int, str]:
    """Return the exit code and all output of a command that starts no process."""
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = tmp_path_factory.mktemp("rehearse") / "homes.yaml"
    path.write_text(YAML.replace("PORT", str(port)))
    return path


@pytest.fixture(scope="module")
def rehearsed(yaml: Path) -> tuple[Path, str]:
    """Return the folder of a rehearsal, and what it printed."""
    more = ["--rounds", "2", "--steps", "2", "--json", str(yaml.parent / "found.json")]
    done = run_program("rehearse", str(yaml), *more, "--runs", str(yaml.parent / "runs"))
    assert done.returncode == 0, done.stdout + done.stderr
    return yaml.parent / "runs" / NAME, done.stdout


def test_a_rehearsal_is_shown_beside_its_prediction(rehearsed: tuple[Path, str]) -> None:
    folder, said = rehearsed
    found = json.loads((folder / "rehearsal.json").read_text())
    assert found == json.loads((folder.parents[1] / "found.json").read_text())
    assert (found["rehearsal"], found["rounds"], found["steps"], found["timed"]) == (True, 2, 2, 1)
    sent = {name: size for name, size in found["predicted"].items() if name.endswith("_bytes")}
    assert len(sent) == 6 and found["measured"] == pytest.approx(found["measured"] | sent, rel=0.01)
    assert f"{NAME}: a rehearsal, which trained nothing. Links, messages" in " ".join(said.split())
    assert re.search(r"^round 1/2: rehearsed, ", said, re.MULTILINE)
    assert "The run itself (9 rounds of 9 inner steps) would take" in " ".join(said.split())


def test_a_rehearsal_is_marked_wherever_it_is_shown(rehearsed: tuple[Path, str]) -> None:
    folder, _ = rehearsed
    assert json.loads((folder / "summary.json").read_text())["rehearsal"] is True
    code, said = asked("status", NAME, "--runs", str(folder.parent), "--json", str(folder / "status.json"))
    assert code == 0 and f"{NAME}: a rehearsal, which trains nothing: over after round 2 of 2" in said
    assert json.loads((folder / "status.json").read_text())["rehearsal"] is True
    record = Record(RunFolder(folder))
    assert record.view.history("")["rehearsal"] is True
    observed = Observed()
    observed.follow(record.view.state)
    info = next(one for one in RunCollector(observed).collect() if one.name == "hetero_pp_run_info")
    assert [one.labels for one in info.samples] == [{"run": NAME, "kind": "rehearsal"}]


def test_nothing_resumes_or_exports_a_rehearsal(rehearsed: tuple[Path, str], yaml: Path) -> None:
    folder, _ = rehearsed
    (folder.parent / "text.txt").write_text("a rehearsal reads no text, but what resumes does. " * 500)
    sets = ["--set", f"name={NAME}", "--set", f"data.corpus={folder.parent / 'text.txt'}"]
    resume = ["--resume", "--runs", str(folder.parent), *sets]
    for command in (
        ["launch", str(yaml), *resume],
        ["serve", str(yaml), *resume],
        ["export", str(folder), "--to", str(folder / "hf")],
        ["log", "replay", str(folder)],
        [
            "view",
            str(folder),
            str(shutil.copytree(folder, folder.parent / "other")),
            "--compare",
            str(folder / "c.png"),
        ],
    ):
        code, said = asked(*command)
        assert code == 2 and "found a rehearsal, which trained nothing, expected a run" in said, (command, said)
    code, said = asked("launch", str(folder / "config.yaml"), "--resume", "--runs", str(folder.parent))
    assert code == 2 and "found the mark of a rehearsal" in said and "restore it" not in said
    code, said = asked("serve", str(yaml), "--rehearse", "--resume")
    assert code == 2 and "--resume: found --rehearse, too" in said


def test_hosts_rehearse_their_lines(yaml: Path) -> None:
    """The host of the exchange gets the report, with the lines that the hosts measured; each host gets a verdict."""
    runs, tickets = yaml.parent / "served", dict[str, str]()
    address = re.findall(r'listen: "(\S+)"', yaml.read_text())[0]
    serving = start_program("serve", str(yaml), "--rehearse", "--runs", str(runs))
    metrics = runs / NAME / "metrics.jsonl"
    try:
        while not metrics.exists() or '"waiting"' not in metrics.read_text():
            with suppress(subprocess.TimeoutExpired):  # leaves the CPU to the process that is waited for
                serving.wait(0.1)
                pytest.fail(str(serving.communicate()))
        for slot in ("home.0", "home.1"):
            code, said = asked("invite", NAME, "--slot", slot, "--address", address, "--runs", str(runs))
            assert code == 0 and "of a rehearsal, so `join` needs --rehearse" in said
            tickets[slot] = next(line for line in said.splitlines() if line.startswith("hpp1."))
        code, said = asked("join", tickets["home.0"], "--runs", str(yaml.parent / "no"))
        assert code == 2 and "the ticket is for a rehearsal, which trains nothing: join it with --rehearse" in said
        own = {slot: ["--rehearse", "--runs", str(yaml.parent / slot)] for slot in tickets}
        joining = {slot: start_program("join", text, *own[slot]) for slot, text in tickets.items()}
        for slot, process in joining.items():
            said, errors = process.communicate()
            assert process.wait(0) == 0, errors
            assert re.search(r"the line of this host reached .* up, .* down$", said, re.MULTILINE)
            assert re.search(rf"the line is .*waited .* of a step for {slot}, .*; home would train ", said)
        said, errors = serving.communicate()
        assert serving.wait(0) == 0, errors
    finally:
        serving.kill()
    found: dict[str, Any] = json.loads((runs / NAME / "rehearsal.json").read_text())
    assert found["lines"].keys() == {"home.0", "home.1"} and "as each host measured it before it joined" in said
    plan = yaml.parent / "plan.yaml"
    measured = ["--measured", str(runs / NAME / "rehearsal.json"), "--target-utilization", "1%"]
    code, said = asked("plan", str(yaml), *measured, "--write", str(plan))
    assert code == 0 and "Measured by a rehearsal: lines of home.0 " in said
    assert "line: measured-home.0" in plan.read_text()


def test_the_ticket_of_a_run_refuses_a_rehearsal(yaml: Path) -> None:
    from hetero_pp.rpc.identities import Authority, Ticket, make_ticket, new_secret

    ticket = make_ticket("homes", "127.0.0.1:1", Authority(new_secret()), "0123456789abcdef", 4e9)
    assert not Ticket.from_text(ticket.to_text()).rehearsal
    code, said = asked("join", ticket.to_text(), "--rehearse", "--runs", str(yaml.parent / "no"))
    assert code == 2 and "found the ticket of a run, expected that of `hetero-pp serve --rehearse`" in said
