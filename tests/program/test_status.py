"""`status` of a run in every state, with and without its exchange."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from made_up_run import KILLED, START, back, killed, there
from rewritten import agree
from test_view_data import recorded, run_folder

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.core.errors import ConfigError
from hetero_pp.messages.messages_pb2 import StatusReply
from hetero_pp.program.join.membership import runs_at
from hetero_pp.program.join.status import as_json, print_status, status
from hetero_pp.program.launch.earlier import LOCKS

CONFIG = """
name: solo
model: {preset: micro}
data: {sequence_length: 32}
inner: {steps: 2, learning_rate: 1e-2}
outer: {rounds: 9}
replicas: [{name: dc, kind: datacenter}]
"""


def reply(state: str = "training") -> StatusReply:
    """Return the status of a run with a complete replica, an incomplete group and a group without members."""
    found = StatusReply(last_round=3, rounds=9, has_begun=state != "joining", is_over=state == "over", missing=["dc"])
    found.paused = "1 of 3 replicas are present, 2 are required" if state == "paused" else ""
    found.slots.add(name="dc", replica="dc", held=True, incarnation=1, round=4, seconds=125)
    found.slots.add(name="one.0", replica="one", held=True, incarnation=3, holder=3)
    found.slots.add(name="one.1", replica="one", incarnation=1, seconds=41, cause="no heartbeat arrived for 15 s")
    found.slots.add(name="two.0", replica="two", holder=1)
    found.slots.add(name="two.1", replica="two")
    found.credits.add(replica="one", included=82, missed=4, tokens=2_000_000)
    found.credits.add(replica="dc", included=270, missed=2, tokens=6_000_000)
    return found


def test_what_is_told_of_a_run_in_every_state(capsys: pytest.CaptureFixture[str]) -> None:
    """A group trains since its last member came, and a round waits for complete groups only."""
    replies = {state: reply(state) for state in ("joining", "training", "paused", "over")}
    for name in ("a group is incomplete", "a group is complete", "its disk is full"):
        replies[name] = reply()
    replies["a group is incomplete"].missing.append("one.0")
    replies["a group is complete"].slots[2].held, replies["a group is complete"].slots[1].seconds = True, 300
    full = replies["its disk is full"]
    full.store_error, full.store_error_seconds = "/log/a: cannot be written (No space left on device)", 11.2
    for name in ("a host waits for a group", "a spare waits"):
        replies[name] = reply()
        replies[name].in_waiting_room, replies[name].needed_in_lobby = 1, 2
        replies[name].guests.add(ticket="0a1b", seconds=7)
    replies["a spare waits"].slots[3].held = replies["a spare waits"].slots[4].held = True
    found: dict[str, Any] = {}
    for name, told in replies.items():
        print_status("solo", told)
        found[name], found[f"{name}: json"] = capsys.readouterr().out.splitlines(), as_json(told)
    agree(Path(__file__).with_name("status.json"), found)


# ---- without an exchange ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a run with six recorded rounds."""
    path = tmp_path / "runs" / "solo"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(CONFIG)
    rounds = [{"event": "round_closed", "round": round_} for round_ in range(1, 7)]
    whole = "".join(json.dumps(one) + "\n" for one in rounds)
    (path / "metrics.jsonl").write_text(whole + '{"event": "round_closed", "r')  # the process was killed while it wrote
    return path


@pytest.mark.parametrize(
    ("summary", "state", "told"),
    [
        ({"rounds": 9}, "over", "over after round 9 of 9"),
        ({"rounds": 6, "failed": "interrupted"}, "interrupted", "interrupted after round 6 of 9"),
        ({"rounds": 6, "failed": "dc: made up"}, "failed", "failed after round 6 of 9: dc: made up"),
        (None, "killed", "ended without a summary after round 6 of 9: it was killed, or its host stopped"),
    ],
)
def test_a_run_that_has_ended_says_how_and_how_to_go_on(
    folder: Path,
    summary: dict[str, object] | None,
    state: str,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    for run in ("solo", str(folder)):
        status(folder.parent, run, None, tmp_path / "found.json")
        said = capsys.readouterr().out
        assert re.sub(r", at 20\S+ \d\d:\d\d:\d\d", "", said.splitlines()[0]) == f"solo: {told}"
    command = f"hetero-pp launch {folder}/config.yaml --resume --runs {folder.parent}"
    assert said.endswith(f"solo: resume with: {command}\n") == (state != "over")
    assert json.loads((tmp_path / "found.json").read_text())["state"] == state
    (folder / "token").write_text("a secret")
    status(folder.parent, "solo", None, None)
    assert ("resume with: hetero-pp serve " in capsys.readouterr().out) == (state != "over")


def test_a_run_that_a_launch_carries_now_names_members_that_are_away(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    locks = folder.parent / LOCKS / "mixed"
    locks.mkdir(parents=True)
    run_folder(folder.parent / "mixed", [*recorded([*there(), *killed(START + 1)]), b'"membership_event" {\n'])
    with FileLock(locks / EXCHANGE):
        status(folder.parent, "mixed", None, tmp_path / "found.json")
    told = f"{KILLED}; its slot is vacant"
    assert f"mixed: {told}\n" in " ".join(capsys.readouterr().out.split(" "))
    assert json.loads((tmp_path / "found.json").read_text())["trouble"] == [told]
    with (folder.parent / "mixed" / "metrics.jsonl").open("ab") as file:
        file.write(b"".join(recorded([back(START + 2)])))
    with FileLock(locks / EXCHANGE):
        status(folder.parent, "mixed", None, None)
    assert capsys.readouterr().out.count("\n") == 1


def test_runs_that_this_host_cannot_ask_about(folder: Path, tmp_path: Path) -> None:
    # A name that does not exist.
    with pytest.raises(ConfigError, match=r"found no run sola that this host .*: did you mean solo\?"):
        status(folder.parent, "sola", None, None)
    with pytest.raises(ConfigError, match=r"found no run another that .*: known runs: solo"):
        status(folder.parent, "another", None, None)
    with pytest.raises(ConfigError, match=r"found no run solo that .*: this folder has no runs"):
        status(tmp_path, "solo", None, None)

    # A host that carries a part by the runs token.
    (folder / "config.yaml").rename(folder / "config-home.0.yaml")
    with pytest.raises(
        ConfigError, match=r"it runs home\.0 with the run's token; run `status` on the host of the exchange"
    ):
        status(folder.parent, "solo", None, None)


def test_an_exchange_that_does_not_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_pp.program.join.status.SECONDS", 0.3)
    (folder / "token").write_text("0" * 32)
    with pytest.raises(
        ConfigError, match=r"solo: the exchange at 127\.0\.0\.1:1 did not answer within 300 ms: `serve` runs"
    ):
        status(folder.parent, "solo", "127.0.0.1:1", None)
    with pytest.raises(ConfigError, match=r"found no run at 127\.0\.0\.1:1 that .*: known addresses: 127\.0\.0\.1:0"):
        runs_at(folder.parent, "127.0.0.1:1")
