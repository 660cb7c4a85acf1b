"""Joining a run by tickets from the command line. Each host has its own folder, and no host has the YAML."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from joined_hosts import SLOTS, Run, ending, written
from listening import listening
from preloading import forked_processes
from typer.testing import CliRunner

from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.program.cli import app
from hetero_pp.program.launch.command import run_topology
from hetero_pp.rpc.identities import Ticket


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    yield from ending()


@pytest.mark.starts_processes
def test_three_hosts_join_by_tickets_and_come_to_the_bits_of_one_process(
    runs: list[Run], tmp_path: Path, corpus: Path
) -> None:
    """One first has another text. A fourth host waits for a group to form until it is told that the run is over."""
    run = Run(tmp_path, corpus, 3)
    runs.append(run)
    with (tmp_path / "run.yaml").open("a") as file:
        file.write("  - {name: more, kind: participants, count: 0..2, stages: 2, batch_size: 4, micro_batches: 2}\n")
    run.serve()
    messy = Path(shutil.copytree(corpus, tmp_path / "messy"))
    (messy / "._00.txt").write_text("is hidden")
    (messy / "loop").symlink_to(".")
    tickets = {
        "anna": run.invite("--slot", "home.1", "--address", run.address),
        "ben": run.invite(),
        "dc.example": run.invite("--slot", "dc"),
    }
    run.join("anna", tickets["anna"], data=messy)
    run.join("ben", tickets["ben"], data=messy)
    run.wait_for('"member": "home.0", "event": "joined"')
    run.join("waits", run.invite())
    run.wait_until(lambda: run.status()["waiting"] == 1)
    _require_same_text(run, "dc.example", tickets["dc.example"])
    run.join("dc.example", tickets["dc.example"], data=messy)
    assert all(ticket.startswith("hpp1.") and "\n" not in ticket for ticket in tickets.values())
    skipped = f"data.corpus: {messy}: read 20 files; skipped 1 hidden file and 1 repeated link"
    for host in tickets:
        code, said, errors = run.wait(host)
        assert (code, errors) == (0, ""), errors
        assert said.splitlines().count(skipped) == (host != "anna")
        (slot,) = re.findall(r"^homes: this host has joined as (\S+)$", said, re.MULTILINE)
        assert (slot == "home.1") == (host == "anna")
        assert re.findall(rf"^round (\d)/3: {re.escape(slot)}: ", said, re.MULTILINE) == ["1", "2", "3"]
        replica = slot.partition(".")[0]
        farewell = f"homes: {replica} added 768 tokens in 3 rounds, 50 % of all; the exchange's host has the model, "
        there = "and writes it with: hetero-pp export homes --to FOLDER\n"
        assert said.endswith(f"homes: the run is over (round 3 of 3)\n{farewell}{there}")
    assert run.wait("exchange")[0] == 0
    for command in (["export", "homes", "--to", str(tmp_path / "model")], ["log", "replay", "homes"]):
        refused = CliRunner().invoke(app, [*command, "--runs", str(run.runs("anna"))])
        told = "this host joined the run, and its exchange has both; export the model there: hetero-pp export homes"
        assert (refused.exit_code, told in refused.stderr) == (2, True), refused.output
    for host in tickets:
        secrets = {path.name: path.stat().st_mode & 0o777 for path in run.runs(host).rglob("*.pem")}
        assert secrets == {"key.pem": 0o600, "certificate.pem": 0o600}, host
    code, said, errors = run.wait("waits")
    assert (code, errors) == (0, "")
    assert said.endswith("homes: the run is over (round 3 of 3); no round was left to train\n")
    assert run.ask("status").stdout.startswith("homes: over after round 3 of 3, at 20")
    assert run.ask("status", host="waits").stdout.startswith("homes: the run is over (round 3 of 3), as reported 20")
    _require_no_more_hosts(run, tickets["anna"])
    run_topology(tmp_path / "run.yaml", [], run.runs("alone"), in_process=True)
    for found in ("parameters_sha256", "validation_loss"):
        assert run.summary()[found] == run.summary("alone")[found]
    assert str(corpus.parent) not in Ticket.from_text(tickets["anna"]).to_text()


def _require_no_more_hosts(run: Run, ticket: str) -> None:
    """Require that nobody is invited to a run that is over, or waits for it in vain."""
    refused = run.ask("invite")
    told = "homes: the run is over (round 3 of 3); extend it with `--resume --set outer.rounds=N`, N > 3\n"
    assert (refused.exit_code, refused.stderr.endswith(told)) == (2, True), refused.stderr
    again = CliRunner().invoke(app, ["join", ticket, "--data", str(run.corpus), "--runs", str(run.runs("anna"))])
    told = f"homes: the run is over (round 3 of 3), and nothing answers at {run.address} any more\n"
    assert (again.exit_code, again.stdout) == (0, told), again.output


def _require_same_text(run: Run, host: str, ticket: str) -> None:
    """Require that a host with another text is refused in one line before it trains. The slot is vacant again."""
    other = run.folder / "other"
    shutil.copytree(run.corpus, other)
    (other / "one more.txt").write_text("that nobody else has")
    mine, own = (prepare_tokens(run.data(path), run.folder / "tokens").digest[:12] for path in (other, run.corpus))
    run.join(host, ticket, data=other)
    code, said, errors = run.wait(host)
    found = f"found tokens whose sha256 begins with {mine}, expected {own}, as home.0 reads"
    assert (code, errors) == (2, f"hetero-pp: dc: reads another text than the run: {found}\n")
    assert said.endswith("homes: dc is free again\n")
    assert '"member": "dc", "event": "joined"' not in run.metrics()


@pytest.mark.starts_processes
def test_slots_are_left_given_back_and_taken_again(runs: list[Run], tmp_path: Path, corpus: Path) -> None:
    run = Run(tmp_path, corpus, 100_000, lease="2 s")
    runs.append(run)
    run.serve()
    tickets = {slot: run.invite("--slot", slot) for slot in SLOTS}
    for slot in SLOTS:
        run.join(slot, tickets[slot])
    run.wait_for('"evaluation", "replica": "home", "round": 2')
    listening = _listening(run)
    assert listening.keys() == {"exchange"}
    own = ("127.0.0.1", int(run.address.rpartition(":")[2]))
    [(host, _)] = listening["exchange"] - {own}
    assert (host, len(listening["exchange"])) == ("127.0.0.1", 2), "expected the exchange and its relay, on loopback"

    done = run.ask("leave", host="home.1")
    assert (done.exit_code, done.stdout) == (0, "homes: home.1 has left\n")
    code, said, errors = run.wait("home.1")
    assert (code, errors) == (130, "hetero-pp: interrupted; all processes of this command have ended\n")
    assert said.endswith("homes: home.1 is free again\n")
    assert run.held() == {"dc": True, "home.0": True, "home.1": False}
    run.join("another", run.invite())  # it gets the only vacant slot
    run.wait_for('"member": "home.1", "event": "joined", "address": "relay')
    run.wait_for('"incarnation": 2')
    assert run.held() == {"dc": True, "home.0": True, "home.1": True}
    slots = run.status()["slots"]
    assert {name: slot["address"] for name, slot in slots.items()} == {"dc": "", "home.0": "", "home.1": "relay"}
    while (relayed := _relayed(run))["home.0"] != relayed["home.1"]:  # read while messages are on their way
        pass
    assert relayed["home.0"] > relayed["dc"] == 0

    assert run.ask("revoke", "home.1").stdout == "homes: revoked home.1 (holder number 2)\n"
    code, _, errors = run.wait("another")
    assert (code, "home.1: it was taken back" in errors) == (1, True), errors
    run.processes["dc"].send_signal(signal.SIGUSR1)  # Slurm sends it before a job's time is over; Ctrl-C does the same
    assert run.wait("dc")[1].endswith("homes: dc is free again\n")
    run.join("dc", tickets["dc"])  # a member that left may return with its ticket
    run.wait_for('"member": "dc", "event": "joined", "address": "", "incarnation": 2')
    done = run.ask("status", "--json", str(tmp_path / "status.json"), host="dc")
    assert "homes: training round " in done.stdout
    found = json.loads((tmp_path / "status.json").read_text())["slots"]
    assert (found["dc"]["holder"], found["dc"]["incarnation"]) == (2, 2)

    run.processes["exchange"].terminate()
    run.wait("exchange")
    interrupted, go_on = run.ask("status").stdout.splitlines()
    assert re.match(r"homes: interrupted after round \d+ of 100000, at 20", interrupted)
    folder = run.runs("exchange")
    assert go_on == f"homes: resume with: hetero-pp serve {folder}/homes/config.yaml --resume --runs {folder}"
    run.serve(waits=False)  # a new run would lock out all members
    code, _, errors = run.wait("exchange")
    stopped = rf"hetero-pp: {run.runs('exchange')}/homes: run homes stopped after round \d+ of 100000; resume it with"
    assert (code, bool(re.match(rf"{stopped} --resume, or start a new run with --new", errors))) == (2, True), errors
    run.serve("--resume")  # members are admitted again by their certificates
    run.wait_for('"event": "begun"')
    assert run.processes["home.0"].poll() is None
    run.processes["exchange"].terminate()
    run.wait("exchange")
    run.serve("--new")
    new = (
        "a new run has started at 127.0.0.1:{}; your certificate belongs to the previous run; ask for a new ticket (not"
    )
    new = new.format(run.address.partition(":")[2])
    run.wait_until(lambda: new in run.said("home.0"))
    assert run.processes["home.0"].poll() is None  # its own run may return


def _listening(run: Run) -> dict[str, set[tuple[str, int]]]:
    """Return all listening addresses of the run's processes, by the name of the process.

    The name is that of the log that the process writes. Launchers write no log. One server forks all processes, also
    those of other tests.
    """
    logs = {str(log): log.stem for log in run.folder.glob("*/runs/homes/logs/*.log")}
    launchers = {str(process.files[1].resolve()) for process in run.processes.values()}
    own = {one: path for one in forked_processes() if (path := written(one)) in logs or path in launchers}
    names = {one.pid: logs[path] for one, path in own.items() if path in logs}
    assert sorted(names.values()) == ["dc", "exchange", "home.0", "home.1"]
    assert len(own) >= len(names) + len(run.processes)
    return {names.get(number, "another process"): found for number, found in listening(own).items()}


def _relayed(run: Run) -> dict[str, int]:
    return {name: slot["relayed_bytes"] for name, slot in run.status()["slots"].items()}
