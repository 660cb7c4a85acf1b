"""Joining a run by tickets from the command line. Each host has its own folder, and no host has the YAML."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from listening import listening
from members import TIMEOUT
from ruamel.yaml import YAML
from started import Started, run_program, start_program
from typer.testing import CliRunner

from hetero_pp.core.errors import ConfigError, LinkClosed, NewRun, RunFailed
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.messages.messages_pb2 import Report, StatusReply
from hetero_pp.planner.grouping import group_spares
from hetero_pp.program.cli import app
from hetero_pp.program.join.command import Here, join
from hetero_pp.program.join.invite import good_for, invite, revoke, seconds_of
from hetero_pp.program.join.leave import leavable, leave
from hetero_pp.program.join.membership import take_place
from hetero_pp.program.join.status import print_status, status
from hetero_pp.program.launch import hosts
from hetero_pp.program.operate.operations import Operations
from hetero_pp.program.report.own_rounds import OwnRounds
from hetero_pp.rpc.certificates import Authority
from hetero_pp.rpc.credentials import Keys, Secret, new_secret
from hetero_pp.rpc.tickets import Ticket, make_ticket
from hetero_pp.run.config import RunConfig
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.shared import keep_tokenizer, kept_tokenizer, own_configuration, require_data, told_of
from hetero_pp.run.spec import RunSpec
from hetero_pp.run.yaml_file import ConfigFile
from replica_groups.exchange.admission import Told
from replica_groups.exchange.host import make_exchange
from replica_groups.exchange.lobby import Lobby
from replica_groups.exchange.memberships import Memberships
from replica_groups.exchange.server import OpenHouse, serve_exchange

CONFIG = """
name: homes
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 2}
data: {corpus: CORPUS, sequence_length: 32, validation_share: 0.2, validation_sequences: 8}
inner: {steps: 2, learning_rate: 1e-2, warmup_steps: 2}
outer: {rounds: ROUNDS, compression: {density: 1/32}}
exchange: {listen: "127.0.0.1:PORT", grace: {least: 5 min, most: 5 min}, lease: {least: LEASE}}
replicas:
  - {name: dc, kind: datacenter, batch_size: 4}
  - {name: home, kind: participants, stages: 2, batch_size: 4, micro_batches: 2, boundary: {rank: 8}}
"""
PLACES = ("dc", "home.0", "home.1")


class Run:
    """A run with one folder and one process per host. The first host serves the run."""

    def __init__(
        self, folder: Path, corpus: Path, rounds: int, lease: str = "1 min", groups: str = "name: home"
    ) -> None:
        self.folder, self.corpus = folder, corpus
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        self.address = f"localhost:{port}"
        text = CONFIG.replace("ROUNDS", str(rounds)).replace("PORT", port).replace("LEASE", lease)
        text = text.replace("name: home,", f"{groups},")
        (folder / "run.yaml").write_text(text.replace("CORPUS", str(corpus)))
        self.processes: dict[str, Started] = {}

    def serve(self, *more: str, waits: bool = True) -> None:
        """Start the exchange.

        With `waits`, return once it waits for members, which it never does if all are present.
        """
        self.processes["exchange"] = start_program(
            "serve", str(self.folder / "run.yaml"), "--runs", str(self.runs("exchange")), *more
        )
        if waits:
            self.wait_for('"event": "waiting"')

    def runs(self, host: str) -> Path:
        return self.folder / host / "runs"

    def ask(self, command: str, *more: str, host: str = "exchange") -> subprocess.CompletedProcess[str]:
        return run_program(command, "homes", *more, "--runs", str(self.runs(host)))

    def invite(self, *more: str) -> str:
        done = self.ask("invite", *more)
        assert done.returncode == 0, done.stderr
        named = more[more.index("--slot") + 1] if "--slot" in more else "a stage of group"
        assert re.search(rf"^homes: this ticket is for .*{re.escape(named)}", done.stderr)
        return done.stdout.strip()

    def join(self, host: str, ticket: str, data: Path | None = None) -> None:
        own = ["--data", str(data or self.corpus)]
        self.processes[host] = start_program("join", ticket, *own, "--runs", str(self.runs(host)))

    def said(self, host: str) -> str:
        """Return what the host has printed so far."""
        path = self.processes[host]._files[0]
        return path.read_text() if path.exists() else ""

    def wait(self, host: str, seconds: float = 150) -> tuple[int, str, str]:
        """Wait for a host's process. Return its exit code, stdout and stderr."""
        said, errors = self.processes[host].communicate(timeout=seconds)
        return self.processes[host].wait(seconds), said, errors

    def wait_for(self, event: str) -> None:
        """Wait until the exchange has recorded this text in its metrics."""
        self.wait_until(lambda: event in self.metrics())

    def wait_for_round(self, replica: str, round_: int) -> None:
        """Wait until a replica has evaluated this round or a later one."""
        self.wait_until(lambda: max(self.evaluated(replica), default=-1) >= round_)

    def evaluated(self, replica: str) -> list[int]:
        """Return the rounds that a replica has evaluated."""
        pattern = rf'"event": "evaluation", "replica": "{replica}", "round": (\d+)'
        return [int(round_) for round_ in re.findall(pattern, self.metrics())]

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition holds. Fail if the exchange ends before."""
        while not is_so():
            with suppress(subprocess.TimeoutExpired):
                self.processes["exchange"].wait(0.1)
                pytest.fail(str(self.processes["exchange"].communicate()))

    def metrics(self) -> str:
        """Return the metrics of the exchange so far."""
        path = self.runs("exchange") / "homes" / "metrics.jsonl"
        return path.read_text() if path.exists() else ""

    def data(self, corpus: Path) -> DataSettings:
        """Return the run's data settings with another corpus."""
        return ConfigFile(self.folder / "run.yaml").config.data.model_copy(update={"corpus": str(corpus)})

    def summary(self, host: str = "exchange") -> dict:
        return json.loads((self.runs(host) / "homes" / "summary.json").read_text())


@pytest.fixture
def runs(tmp_path: Path, corpus: Path) -> Iterator[list[Run]]:
    """Yield a list for the runs of a test, and end their processes afterwards."""
    made: list[Run] = []
    yield made
    for run in made:
        for host, process in run.processes.items():
            process.kill()  # members whose exchange has ended would try for a while to save their states
            run.wait(host)


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
    run.wait_until(lambda: _status(run)["waiting"] == 1)
    _require_same_text(run, "dc.example", tickets["dc.example"])
    run.join("dc.example", tickets["dc.example"], data=messy)
    assert all(ticket.startswith("hpp1.") and "\n" not in ticket for ticket in tickets.values())
    skipped = f"data.corpus: {messy}: read 20 files; skipped 1 hidden file and 1 repeated link"
    for host in tickets:
        code, said, errors = run.wait(host)
        assert (code, errors) == (0, ""), errors
        assert said.splitlines().count(skipped) == (host != "anna")
        (place,) = re.findall(r"^homes: this host has joined as (\S+)$", said, re.MULTILINE)
        assert (place == "home.1") == (host == "anna")
        assert re.findall(rf"^round (\d)/3: {re.escape(place)}: ", said, re.MULTILINE) == ["1", "2", "3"]
    assert run.wait("exchange")[0] == 0
    for host in tickets:
        secrets = {path.name: path.stat().st_mode & 0o777 for path in run.runs(host).rglob("*.pem")}
        assert secrets == {"key.pem": 0o600, "certificate.pem": 0o600}, host
    code, said, errors = run.wait("waits")
    assert (code, errors) == (0, "")
    assert said.endswith("homes: the run is over (round 3 of 3); no round was left to train\n")
    assert run.ask("status").stdout.startswith("homes: over after round 3 of 3, at 20")
    assert run.ask("status", host="waits").stdout.startswith("homes: the run is over (round 3 of 3), as reported 20")
    alone = run_program("launch", "--in-process", str(tmp_path / "run.yaml"), "--runs", str(run.runs("alone")))
    assert alone.returncode == 0, alone.stderr
    for found in ("parameters_sha256", "validation_loss"):
        assert run.summary()[found] == run.summary("alone")[found]
    assert str(corpus.parent) not in Ticket.from_text(tickets["anna"]).to_text()


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
def test_places_are_left_given_back_and_taken_again(runs: list[Run], tmp_path: Path, corpus: Path) -> None:
    run = Run(tmp_path, corpus, 100_000, lease="2 s")
    runs.append(run)
    run.serve()
    tickets = {place: run.invite("--slot", place) for place in PLACES}
    for place in PLACES:
        run.join(place, tickets[place])
    run.wait_for('"evaluation", "replica": "home", "round": 2')
    assert _listening(run) == {"exchange": {("127.0.0.1", int(run.address.rpartition(":")[2]))}}

    done = run.ask("leave", host="home.1")
    assert (done.returncode, done.stdout) == (0, "homes: home.1 has left\n")
    code, said, errors = run.wait("home.1")
    assert (code, errors) == (130, "hetero-pp: interrupted; all processes of this command have ended\n")
    assert said.endswith("homes: home.1 is free again\n")
    assert _held(run) == {"dc": True, "home.0": True, "home.1": False}
    run.join("another", run.invite())  # it gets the only vacant slot
    run.wait_for('"member": "home.1", "event": "joined", "address": "relay')
    run.wait_for('"term": 2')
    assert _held(run) == {"dc": True, "home.0": True, "home.1": True}
    places = _status(run)["places"]
    assert {name: place["address"] for name, place in places.items()} == {"dc": "", "home.0": "", "home.1": "relay"}
    while (relayed := _relayed(run))["home.0"] != relayed["home.1"]:  # read while messages are on their way
        pass
    assert relayed["home.0"] > relayed["dc"] == 0

    assert run.ask("revoke", "home.1").stdout == "homes: revoked home.1 (holder number 2)\n"
    code, _, errors = run.wait("another")
    assert (code, "home.1: it was taken back" in errors) == (1, True), errors
    run.processes["dc"].send_signal(signal.SIGUSR1)  # Slurm sends it before a job's time is over; Ctrl-C does the same
    assert run.wait("dc")[1].endswith("homes: dc is free again\n")
    run.join("dc", tickets["dc"])  # a member that left may return with its ticket
    run.wait_for('"member": "dc", "event": "joined", "address": "", "term": 2')
    done = run.ask("status", "--json", str(tmp_path / "status.json"), host="dc")
    assert "homes: training round " in done.stdout
    found = json.loads((tmp_path / "status.json").read_text())["places"]
    assert (found["dc"]["holder"], found["dc"]["term"]) == (2, 2)

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
            run.wait_until(lambda: _status(run)["waiting"] == 1)  # it holds no slot meanwhile
            assert _held(run)["home-1.0"] is False
    run.wait_for_round("home-1", 3)
    assert _held(run) == {"dc": True, "home-1.0": True, "home-1.1": True, "home-2.0": False, "home-2.1": False}
    assert run.ask("leave", host="ben").returncode == 0
    run.wait("ben")
    run.wait_for_round("dc", max(run.evaluated("dc")) + 3)
    before = run.evaluated("home-1")
    run.wait_for_round("dc", max(run.evaluated("dc")) + 3)
    assert run.evaluated("home-1") == before
    run.join("clara", run.invite())  # she gets a slot of the group with the fewest vacancies
    run.wait_for_round("home-1", max(before) + 6)
    assert _held(run) == {"dc": True, "home-1.0": True, "home-1.1": True, "home-2.0": False, "home-2.1": False}
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
    for place in PLACES:
        run.join(place, run.invite("--slot", place))
    run.wait_for_round("home", 2)
    members = {host: _members(run, host) for host in PLACES}
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
    assert {host: _members(run, host) for host in PLACES} == members  # no member had to restart
    assert {place["term"] for place in _status(run)["places"].values()} == {1}
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
    pids = {one.pid: _written(one) for one in psutil.Process().children(recursive=True)}
    log = str(run.runs(host) / "homes" / "logs" / f"{host}.log")
    return {pid for pid, written in pids.items() if written == log}


def _listening(run: Run) -> dict[str, set[tuple[str, int]]]:
    """Return all listening addresses of the run's processes, by the name of the process.

    The name is that of the log that the process writes.
    """
    everything = psutil.Process().children(recursive=True)  # the launchers' members are forked from one server
    logs = {str(log): log.stem for log in run.folder.glob("*/runs/homes/logs/*.log")}
    names = {one.pid: logs[written] for one in everything if (written := _written(one)) in logs}
    assert sorted(names.values()) == ["dc", "exchange", "home.0", "home.1"]
    return {names.get(number, "another process"): found for number, found in listening(everything).items()}


def _written(process: psutil.Process) -> str:
    return str((Path("/proc") / str(process.pid) / "fd" / "2").resolve())


def _held(run: Run) -> dict[str, bool]:
    return {name: place["held"] for name, place in _status(run)["places"].items()}


def _relayed(run: Run) -> dict[str, int]:
    return {name: place["relayed_bytes"] for name, place in _status(run)["places"].items()}


def _status(run: Run) -> dict[str, Any]:
    path = run.folder / "status.json"
    assert run.ask("status", "--json", str(path)).returncode == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


class Served:
    """A run that this process serves, and its folder as `serve` writes it."""

    def __init__(self, folder: Path, corpus: Path, stack: ExitStack) -> None:
        secret = new_secret()
        text = CONFIG.replace("ROUNDS", "3").replace("LEASE", "1 min").replace("PORT", "0")
        run = RunFolder(folder / "runs" / "homes")
        run.path.mkdir(parents=True)
        run.config.write_text(text.replace("CORPUS", str(corpus)))
        run.token.write_text(secret)
        self.runs, self.config = folder / "runs", ConfigFile(run.config).config
        exchange, self.memberships = make_exchange(RunSpec(self.config, 256), run), Memberships(run.memberships)
        house = OpenHouse(self.memberships, Told(*told_of(self.config)), Lobby({}, group_spares))
        server, port = serve_exchange(exchange, Secret(secret), "127.0.0.1:0", encrypted=True, open_house=house)
        self.address = f"127.0.0.1:{port}"
        stack.callback(self.memberships.close)
        stack.callback(lambda: server.stop(None).wait(TIMEOUT))

    def invite(self, place: str, capsys: pytest.CaptureFixture[str], seconds: float = 3600.0) -> str:
        invite(self.runs, "homes", place, seconds, self.address)
        return capsys.readouterr().out


@pytest.fixture
def served(tmp_path: Path, corpus: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(tmp_path, corpus, stack)


def test_tickets_by_which_nobody_comes_in(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, there = Here(tmp_path / "here"), Here(tmp_path / "there")
    used, over = served.invite("home.0", capsys), served.invite("home.1", capsys, 0.0)
    for text, who, told in (
        ("made up", here, r"found 'madeup', expected a ticket, which begins with hpp1\."),
        (used[:-7], here, "the ticket is incomplete: copy all of it, as one line"),
        (over, here, r"the ticket has expired: ask for another \(or is the clock of this host wrong\?\)"),
        (used, here, r"home\.0 reads the run's text; give the path of the text on this host with --data PATH"),
        (
            served.invite("dc", capsys),
            here,
            "dc reads the run's text; give the path of the text on this host with --data PATH",
        ),
        (used, there, "the ticket was used already, and admits one process: join in the folder in which it was used"),
    ):
        with pytest.raises(ConfigError, match=told):
            join(text, who)
    assert served.memberships.held_by("home.0") is None  # this host's missing package has not cost the slot


def test_invitations_that_cannot_be(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"--slot home\.2: expected one of dc, home\.0, home\.1"):
        served.invite("home.2", capsys)
    with pytest.raises(
        ConfigError,
        match=r"--slot home: found the name of a group: leave out --slot .*, or name a stage, such as home\.0",
    ):
        served.invite("home", capsys)
    with pytest.raises(ConfigError, match=r"--expires: found `soon`, expected a number and a unit such as `24h`"):
        seconds_of("soon")
    assert seconds_of("24h") == 24 * 3600
    with pytest.raises(ConfigError, match="found no run that this host serves; start one with: hetero-pp serve CONFIG"):
        invite(tmp_path, "another", None, 1.0, None)
    with pytest.raises(ConfigError, match=r"found no host that was invited to home\.0, and no ticket with this id"):
        revoke(served.runs, "homes", "home.0")
    with pytest.raises(ConfigError, match="found no `hetero-pp join` of this run on this host"):
        leave(served.runs, "homes", None)
    path = served.runs / "homes" / "config.yaml"
    path.write_text(path.read_text().replace("127.0.0.1:0", "0.0.0.0:47600"))
    with pytest.raises(ConfigError, match=r"the exchange listens at 0\.0\.0\.0:47600, which other hosts cannot dial"):
        invite(served.runs, "homes", None, 1.0, None)
    path.write_text(path.read_text().replace("exchange: {", "exchange: {insecure: true, "))
    with pytest.raises(ConfigError, match=r"exchange\.insecure: found true, expected false: tickets need TLS"):
        invite(served.runs, "homes", None, 1.0, None)


def test_an_invitation_says_what_its_ticket_is_good_for(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    def told(place: str | None) -> list[str]:
        invite(served.runs, "homes", place, 3600.0, served.address)
        return capsys.readouterr().err.splitlines()

    first, dc = told(None)
    assert first.startswith("homes: this ticket is for a stage of group home; it admits one host until 20")
    command = "`hetero-pp invite homes --slot dc`"
    assert dc == f"homes: dc is still free; a datacenter replica needs a ticket with its name: {command}"
    (one,) = told("home.1")
    assert one.startswith("homes: this ticket is for home.1, a stage of group home; ")
    (one,) = told("dc")
    assert one.startswith("homes: this ticket is for the datacenter replica dc; ")
    assert len(told(None)) == 1  # dc has a ticket already


@pytest.mark.parametrize("option", ["--slot", "--place"])
def test_the_slot_of_a_ticket_is_an_option_that_also_has_its_earlier_name(option: str, served: Served) -> None:
    arguments = ["invite", "homes", option, "home.1", "--address", served.address, "--runs", str(served.runs)]
    result = CliRunner().invoke(app, arguments)
    assert "this ticket is for home.1, a stage of group home" in result.stderr


def test_groups_of_one_entry_are_called_by_its_name() -> None:
    dc, group = {"name": "dc", "kind": "datacenter"}, {"kind": "participants", "stages": 2}
    groups = [{"name": "home", "count": "0..50", **group}, {"name": "lab-2", **group}]
    config = _config("standard-library", replicas=[dc, *groups])
    assert good_for(config, None) == "a stage of group home or lab-2"
    slots = {f"{group}.{stage}" for group in [*(f"home-{n + 1}" for n in range(50)), "lab-2"] for stage in (0, 1)}
    assert RunSpec(config, 256).unnamed_slots == slots
    alone = _config("standard-library", replicas=[dc])
    assert good_for(alone, None) == "the first of dc with a free slot"
    assert RunSpec(alone, 256).unnamed_slots == {"dc"}


def test_who_joins_twice_is_refused_and_takes_nothing_from_who_joined_first(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ticket = served.invite("home.1", capsys)
    take_place(Ticket.from_text(ticket), tmp_path)
    with (
        leavable(RunFolder(tmp_path / "homes"), "home.1"),
        pytest.raises(ConfigError, match=rf"home\.1 is already held by process {os.getpid()} on this host"),
    ):
        join(ticket, Here(tmp_path))
    assert served.memberships.held_by("home.1") is not None


def test_a_place_that_is_taken(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    take_place(Ticket.from_text(served.invite("home.1", capsys)), tmp_path / "here")
    with pytest.raises(ConfigError, match=r"--slot: home\.1 is taken: `hetero-pp revoke` frees it"):
        served.invite("home.1", capsys)


def test_who_is_there_is_asked_by_the_name_of_the_run_or_where_its_exchange_is(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "here"
    (runs / "of another kind").mkdir(parents=True)
    take_place(Ticket.from_text(served.invite("home.1", capsys)), runs)
    later = shutil.copytree(runs / "homes", runs / "later at that address, and over")
    (about,) = later.rglob("about.json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"authority": Authority("another").certificate}))
    os.utime(later, (2e9, 2e9))
    damaged = shutil.copytree(runs / "homes", runs / "damaged")
    (about,) = damaged.rglob("about.json")
    about.write_text("{")
    for run in ("homes", served.address):
        status(runs, run, None, None)
        assert capsys.readouterr().out.startswith("homes: not started; waiting for members to join: ")
    with pytest.raises(ConfigError, match=r"found no run at 127\.0\.0\.1:1 that this host serves or joined"):
        status(runs, "127.0.0.1:1", None, None)


def test_status_says_what_a_ticket_is_good_for(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(text: str, runs: Path) -> str:
        status(runs, text, None, tmp_path / "ticket.json")
        return capsys.readouterr().out

    text, here = served.invite("dc", capsys).strip(), tmp_path / "here"
    ticket = Ticket.from_text(text)
    begins = f"homes: ticket {ticket.id} is for the datacenter replica dc; it "
    assert told(text, here).startswith(f"{begins}admits one host until 20")
    take_place(ticket, here)
    for runs in (here, served.runs):  # the folder of the host that used it, and of the exchange
        assert told(text, runs).startswith(f"{begins}was used; the host that used it may return with it until 20")
    assert json.loads((tmp_path / "ticket.json").read_text())["state"] == "used"
    old = Ticket(ticket.run, ticket.address, ticket.identity)
    assert "is for a slot that it does not name (it was made by an older version); " in told(old.to_text(), here)
    assert told(served.invite("home.1", capsys, 0.0), here).count("; it expired 20") == 1
    with pytest.raises(ConfigError, match="the ticket is incomplete"):
        status(here, text[:-7], None, None)


def test_a_run_by_any_other_name_is_no_folder(tmp_path: Path) -> None:
    """A ticket cannot make a host write outside its folder."""
    for name in ("../up", "/etc", "..", "", "a/b"):
        ticket = make_ticket(name, "127.0.0.1:1", Authority("a secret"), "0123456789abcdef", 2e9)
        with pytest.raises(ConfigError, match="expected the name of a run"):
            join(ticket.to_text(), Here(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_ticket_to_the_run_that_was_served_before_is_told_so(served: Served, tmp_path: Path) -> None:
    ticket = make_ticket("homes", served.address, Authority("the run before"), "0123456789abcdef", time.time() + 60)
    told = f"^a new run has started at {served.address}; your ticket belongs to the previous run; ask for a new ticket$"
    with pytest.raises(ConfigError, match=told):
        join(ticket.to_text(), Here(tmp_path / "here"))


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_member_whose_run_was_replaced_ends_as_one_that_the_user_can_mend(
    goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It first waits for its own run in vain. The refusal is the cause only if it is what ends the member."""
    cause, lines = "a new run has started at host:1; your certificate belongs to the previous run", list[str]()

    class Ended:
        """Processes of a host that end with the cause that they are told."""

        credentials = None

        def __init__(self, *_: object) -> None:
            self.told: queue.SimpleQueue[str] = queue.SimpleQueue()

        def __enter__(self) -> Ended:
            return self

        def __exit__(self, *_: object) -> None: ...

        def start(self, *_: object) -> None: ...

        join_exchange = on_report = start

        def end_soon(self, cause: str) -> None:
            self.told.put(cause)

        def wait(self) -> None:
            raise RunFailed(f"home.1: {self.told.get(timeout=TIMEOUT)} (all it said: a log)")

    def told(*arguments: Any, beside: Sequence[str]) -> Iterator[Report]:
        arguments[-1](cause)
        raise LinkClosed("the disk is full") if goes_on else NewRun(cause)
        yield

    monkeypatch.setattr(hosts, "Supervisor", Ended)
    monkeypatch.setattr(hosts, "reports_to_members", told)
    spec = RunSpec(_config(str(tmp_path)), 256)
    exchange = hosts.Exchange("host:1", cast(Keys, None), tmp_path, timeout=3600.0)
    rounds = OwnRounds(spec, ["home.1"], lines.append)
    with pytest.raises(RunFailed if goes_on else ConfigError, match="the disk is full" if goes_on else f"^{cause}$"):
        hosts.launch_members(spec, "home.1", ["home.1"], RunFolder(tmp_path), exchange, rounds, Operations())
    waits = "waiting for the exchange of this run, for up to 1:00:00"
    assert lines == [f"{cause} (not verified, because its certificate is not of this run; {waits})"]


def test_how_a_place_is_reached_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    reply = StatusReply(last_round=3, rounds=9)
    for address, relayed in (("", 5_000_000), ("relay", 0), ("relay", 5_000_000), ("ben:\x1b7", 0), ("ben:7", 9_000)):
        reply.places.add(name="p", held=True, address=address, relayed_bytes=relayed)
    reply.places.add(name="p", held=True, address="relay", dials="ann:\x1b7")
    reply.places.add(name="p", held=True, address="relay", dials="a:7", relayed_bytes=9)
    print_status("homes", reply)
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    links = ["", "relayed", "5 MB relayed", r"ben:\x1b7", "ben:7, 9 kB relayed"]
    links += [r"dials ann:\x1b7", "dials a:7, 9 B relayed"]
    assert [row[5].strip() for row in rows] == links


def test_groups_that_nobody_has_joined_are_counted_and_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    reply = StatusReply(last_round=3, rounds=9)
    for group in range(6):
        for stage in range(2):
            reply.places.add(
                name=f"g{group}.{stage}", replica=f"g{group}", held=(group, stage) == (3, 1), term=int(group == 4)
            )
    print_status("homes", reply)
    said = capsys.readouterr().out
    shown = [line.split("│")[1].strip() for line in said.splitlines() if line.startswith("│")]
    assert shown == ["g0.0", "g0.1", "g1.0", "g1.1", "g3.0", "g3.1", "g4.0", "g4.1"]
    assert "2 more replicas without any member" in said


def _config(corpus: str, **more: object) -> RunConfig:
    replicas = [
        {"name": "dc", "kind": "datacenter"},
        {
            "name": "home",
            "kind": "participants",
            "stages": [{"layers": 2}, {"layers": 2, "listen": "ben.example:47601"}],
        },
    ]
    found = {"name": "homes", "model": {"preset": "micro"}, "replicas": replicas, "data": {"corpus": corpus}} | more
    found |= {"outer": {"rounds": 3}, "inner": {"steps": 2, "learning_rate": 1e-2}}
    return RunConfig.model_validate(found)


def test_a_host_is_told_no_path_and_keeps_nothing_where_it_is_told_to(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text('{"of": "the run"}')
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    config = _config(str(tmp_path / "text"), store={"url": str(tmp_path / "store")}, states={"to": "store"})
    data = config.data.model_copy(update={"tokenizer": str(tmp_path / "tokenizer")})
    configuration, files = told_of(config.model_copy(update={"data": data}))
    assert files == {"tokenizer.json": b'{"of": "the run"}', "tokenizer_config.json": b"{}"}
    assert json.loads(configuration)["data"]["corpus"] == "text"
    assert str(tmp_path) not in configuration
    keep_tokenizer(files, tmp_path / "here")
    kept = kept_tokenizer(tmp_path / "here")
    assert kept is not None
    own = own_configuration(configuration, "home.1", "mine", kept)
    assert own.data.corpus == str(Path("mine").absolute())
    assert own.data.tokenizer == str(tmp_path / "here" / "tokenizer.json")
    assert (own.store.url, own.states.to) == (None, "folder")
    assert [stage.listen for stage in own.replicas[1].stages] == [None, None]  # type: ignore[union-attr]


def test_who_reads_text_has_to_say_where(tmp_path: Path) -> None:
    for member in ("dc", "home.0"):
        with pytest.raises(ConfigError, match=f"{member} reads the run's text"):
            require_data(_config(str(tmp_path)), member, None)
        require_data(_config(str(tmp_path)), member, "here")
        require_data(_config("standard-library"), member, None)
        require_data(_config("hf:owner/text"), member, None)
    require_data(_config(str(tmp_path)), "home.1", None)
