"""A run of hosts with tickets whose groups form and go, and that gets another replica while its members stay."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from joined_hosts import SLOTS, Run, ending, written
from preloading import forked_processes
from ruamel.yaml import YAML

from hetero_pp.config.folder import RunFolder


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    yield from ending()


@pytest.mark.starts_processes
def test_a_group_forms_whenever_enough_have_joined_and_goes(runs: list[Run], tmp_path: Path, corpus: Path) -> None:
    """No group is required: the run starts with what is there, and includes a group while it is complete."""
    run = Run(tmp_path, corpus, 100_000, lease="2 s", groups="name: home, count: 0..2")
    runs.append(run)
    run.serve()
    run.join("dc", run.invite("--slot", "dc"))
    run.wait_for_round("dc", 2)
    for host in ("anna", "ben"):
        run.join(host, run.invite())
        if host == "anna":
            run.wait_until(lambda: run.status()["waiting"] == 1)  # it holds no slot meanwhile
            assert run.held()["home-1.0"] is False
    run.wait_for_round("home-1", 3)
    assert run.held() == {"dc": True, "home-1.0": True, "home-1.1": True, "home-2.0": False, "home-2.1": False}
    assert run.ask("leave", host="ben").exit_code == 0
    run.wait("ben")
    run.wait_for_round("dc", max(run.evaluated("dc")) + 3)
    before = run.evaluated("home-1")
    run.wait_for_round("dc", max(run.evaluated("dc")) + 3)
    assert run.evaluated("home-1") == before
    run.join("clara", run.invite())  # she gets a slot of the group with the fewest vacancies
    run.wait_for_round("home-1", max(before) + 6)
    assert run.held() == {"dc": True, "home-1.0": True, "home-1.1": True, "home-2.0": False, "home-2.1": False}
    verified = re.findall(
        r'"event": "round_verified", "round": (\d+), "replica": "[^"]+", "parameters_sha256": "(\w+)', run.metrics()
    )
    assert len({round_ for round_, _ in verified}) == len(set(verified))  # all have the same parameters
    run.processes["exchange"].terminate()
    run.wait("exchange")
    run.serve("--resume")
    run.wait_for_round("home-1", max(run.evaluated("home-1")) + 3)  # its stage link goes through the exchange again too


@pytest.mark.starts_processes
def test_a_replica_is_added_to_a_run_whose_members_stay(runs: list[Run], tmp_path: Path, corpus: Path) -> None:
    """The exchange restarts with one more replica. Present members are told, and read another share of the corpus."""
    run = Run(tmp_path, corpus, 100_000, lease="2 s")
    runs.append(run)
    run.serve()
    for slot in SLOTS:
        run.join(slot, run.invite("--slot", slot))
    run.wait_for_round("home", 2)
    members = {host: _members(run, host) for host in SLOTS}
    run.processes["exchange"].terminate()
    run.wait("exchange")
    with (tmp_path / "run.yaml").open("a") as file:
        file.write("  - {name: second, kind: datacenter, batch_size: 4}\n")
    run.serve("--resume")
    folder = RunFolder(run.runs("exchange") / "homes")
    run.wait_until(lambda: "name: second" in folder.config.read_text())
    run.join("second", run.invite("--slot", "second"))
    run.wait_for_round("second", 2)
    (since,) = set(YAML(typ="safe").load(folder.changes)["replicas"]) - {1}
    readers = ("dc", "home.0", "second")
    run.wait_until(lambda: all(_newest_state(run, host)[0] >= since for host in readers))
    for host in readers:
        assert _newest_state(run, host)[1] | {"rotation": []} == {
            "replica": readers.index(host),
            "replicas": 3,
            "rotation": [],
            "round": since,
            "first_step": 2 * (since - 1),
        }
    assert {host: _members(run, host) for host in SLOTS} == members  # no member had to restart
    assert {slot["incarnation"] for slot in run.status()["slots"].values()} == {1}
    counted = {
        int(path.parent.name.removeprefix("round-")): len(json.loads(path.read_text())["contributions"])
        for path in folder.log.glob("round-*/record.json")
    }
    under_way = since - 1  # a new replica may take part in it at once
    assert {number for round_, number in counted.items() if round_ < under_way} == {2}
    assert {number for round_, number in counted.items() if round_ >= since} | {2} == {2, 3}
    verified = re.findall(r'"event": "round_verified", "round": (\d+), "replica": "(\w+)".*?(\w{64})', run.metrics())
    assert "second" in {replica for _, replica, _ in verified}
    run.processes["exchange"].terminate()
    run.wait("exchange")
    text = (tmp_path / "run.yaml").read_text()
    (tmp_path / "run.yaml").write_text(text.replace("  - {name: second, kind: datacenter, batch_size: 4}\n", ""))
    run.serve("--resume", waits=False)
    code, _, errors = run.wait("second")
    assert (code, "second is no longer a slot of this run" in errors) == (1, True), errors
    run.wait_for_round("dc", max(run.evaluated("dc")) + 3)
    assert len({round_ for round_, _, _ in verified}) == len({(round_, sha256) for round_, _, sha256 in verified})


def _newest_state(run: Run, host: str) -> tuple[int, dict[str, Any]]:
    """Return the round of the newest saved state, and the data share in it.

    The share is empty if it has never changed.
    """
    states = sorted((run.runs(host) / "homes" / "state" / host).glob("*/data.json"))
    with suppress(FileNotFoundError, IndexError):
        found: dict[str, Any] = json.loads(states[-1].read_text()).get("share", {})
        return int(re.findall(r"\d+", states[-1].parent.name)[0]), found
    return 0, {}


def _members(run: Run, host: str) -> set[int]:
    """Return the ids of the processes that a host's launcher has started."""
    pids = {one.pid: written(one) for one in forked_processes()}
    log = str(run.runs(host) / "homes" / "logs" / f"{host}.log")
    return {pid for pid, written in pids.items() if written == log}
