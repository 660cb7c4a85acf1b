"""Checks of `hetero-pp check`, with a good and a bad case each; tickets and runs have an exchange over gRPC and TLS."""

from __future__ import annotations

import fcntl
import json
import math
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from members import TIMEOUT
from served_run import CONFIG, Served
from typer.testing import CliRunner

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.core.errors import ConfigError, LinkTimeout
from hetero_pp.core.proxies import Proxy, Route
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.program.check import checks, command, subject
from hetero_pp.program.check.checks import check_proxy, clock_verdict, gpu_verdict, line_verdict, step_bytes
from hetero_pp.program.check.command import find
from hetero_pp.program.check.findings import Finding, FindingState, fail, make_checks, ok, warn
from hetero_pp.program.check.subject import Subject
from hetero_pp.program.cli import app
from hetero_pp.program.join.membership import RunOfHost, note_left
from hetero_pp.program.join.status import status
from hetero_pp.program.launch.earlier import LOCKS, Unfinished, claim
from hetero_pp.rpc.admission_client import Rate, ask
from hetero_pp.rpc.channels import PROTOCOL_VERSION
from hetero_pp.rpc.identities import Secret, Ticket, make_ticket
from replica_groups.exchange import admission

HOUR = 3600.0
SECONDS = 60.0
"""Far more than the checks take, so that a busy machine fails no test."""


def check(named: str | Path | None = None, runs: Path = Path("runs"), data: Path | None = None) -> dict[str, Finding]:
    return find(None if named is None else str(named), runs, None if data is None else str(data), SECONDS)


@pytest.fixture
def write(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that writes the YAML with some texts replaced; the test runs in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def write(*changes: tuple[str, str]) -> Path:
        content = CONFIG
        for old, new in [*changes, ("CORPUS", str(corpus)), ("PORT", "0")]:
            content = content.replace(old, new)
        path = tmp_path / "homes.yaml"
        path.write_text(content)
        return path

    return write


# ---- this machine ----


def test_without_an_argument_only_the_machine_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "SECONDS", SECONDS)
    done = CliRunner().invoke(app, ["check", "--json", "-"])
    found = json.loads(done.stdout)
    assert (done.exit_code, found["ok"]) == (0, True)
    states = {one["check"]: one["state"] for one in found["checks"]}
    made = {"python", "packages", "gpu", "disk", "open files", "proxy"}
    assert {states[name] for name in made} == {"OK"}
    assert {state for name, state in states.items() if name not in made} == {"SKIP"}
    assert list(tmp_path.iterdir()) == []


def test_python_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: ["numpy>=99", "no-such-package>=1", "old; extra == 'x'"])
    monkeypatch.setattr(metadata, "metadata", lambda _: {"Requires-Python": ">=9.1"})
    found = check()
    assert found["python"].line.endswith(", expected >=9.1: make a virtual environment with a newer Python")
    line = found["packages"].line
    assert f"found numpy {metadata.version('numpy')}, expected >=99; no-such-package is not installed" in line
    assert line.endswith("pip install 'numpy>=99' 'no-such-package>=1'")
    assert {found[name].state for name in ("python", "packages")} == {FindingState.FAIL}


@pytest.mark.parametrize(
    ("gpu", "state", "said"),
    [
        (("CUDA 13.0", True, ("cuda:0 H100",)), FindingState.OK, "cuda:0 H100; torch"),
        (("CUDA 13.0", False, ()), FindingState.OK, "found no GPU"),
        (("", True, ()), FindingState.WARN, "is a build without CUDA"),
        (("CUDA 13.0", True, (), "The NVIDIA driver is too old"), FindingState.WARN, "driver is too old; update"),
        (("CUDA 13.0", True, ()), FindingState.WARN, "no GPU is visible"),
    ],
)
def test_the_driver_and_the_build_of_torch(gpu: tuple[Any, ...], state: FindingState, said: str) -> None:
    found = gpu_verdict(*gpu)
    assert (found.state, said in found.line) == (state, True)


def test_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Secret("s").authority
    near, far = (
        Subject(runs=Path("runs"), peer=RunOfHost(RunFolder(Path("runs/run")), address, authority.identity("a"), False))
        for address in ("127.0.0.1:9", "192.0.2.1:9")
    )
    assert check_proxy(far) == ok("the environment names no proxy")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert check()["proxy"] == ok("http://127.0.0.1:9 (http_proxy) outside of private networks")
    assert check_proxy(near) == ok("the environment names a proxy, which is not used for the exchange")
    found = check_proxy(far)
    assert (found.state, "failed: Connection refused): correct the variable" in found.line) == (FindingState.WARN, True)
    used = Route(Proxy("http_proxy", "http://proxy.example:3128"))
    monkeypatch.setattr(checks, "route_to", lambda _: used)
    assert check_proxy(far) == ok("the exchange is reached through http://proxy.example:3128 (http_proxy)")


def test_a_check_that_hangs_delays_no_other() -> None:
    over = threading.Event()

    def hangs() -> Finding:
        over.wait(TIMEOUT)
        return ok("late")

    def breaks() -> Finding:
        raise LinkTimeout("made up")

    def errs() -> Finding:
        raise KeyError("made up")

    others = {"other": lambda: ok("fine"), "lies": lambda: fail("no\nOK\x1b[2K")}
    found = make_checks({"hangs": hangs, "breaks": breaks, "errs": errs, **others}, 0.5)
    over.set()
    assert found["other"] == ok("fine")
    assert found["breaks"] == Finding(FindingState.FAIL, "made up")
    assert found["lies"] == fail("no OK\\x1b[2K")
    assert found["errs"] == Finding(FindingState.FAIL, "this check failed (KeyError: 'made up')")
    assert (found["hangs"].state, "no result within 0.5 s" in found["hangs"].line) == (FindingState.WARN, True)


# ---- a YAML ----


def test_a_good_yaml_passes_all_checks_that_it_allows(write: Callable[..., Path]) -> None:
    found = check(write())
    skipped = {"store", "text", "exchange", "clock", "neighbours", "relay", "line", "certificate"}
    assert {name for name, one in found.items() if one.state is FindingState.SKIP} == skipped
    assert {one.state for name, one in found.items() if name not in skipped | {"output"}} == {FindingState.OK}
    assert "starts exchange, dc, home.0, home.1 here" in found["settings"].line
    assert [path.name for path in Path("runs").iterdir()] == [".tokens"]


def test_an_error_of_the_yaml_is_one_line(write: Callable[..., Path]) -> None:
    for change, said in (
        (("rounds: 3", "rounds: three"), "homes.yaml:4: outer.rounds: found "),
        (("CORPUS", "CORPUS, tokenizer: missing.json"), "homes.yaml:3: data.tokenizer: found "),
        (("CORPUS", "nowhere"), "homes.yaml:3: data.corpus: found "),
    ):
        done = CliRunner().invoke(app, ["check", str(write(change))])
        assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
        assert said in done.stderr


def test_too_little_disk_and_a_folder_that_cannot_be_written(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write()
    told = f"{path.parent}: cannot be written (Not a directory): choose another folder with --runs"
    monkeypatch.setattr(tempfile, "TemporaryFile", mock.Mock(side_effect=NotADirectoryError(20, "Not a directory")))
    assert check(path, runs=path.parent)["disk"] == warn(told)
    monkeypatch.undo()
    monkeypatch.chdir(path.parent)
    usage = shutil.disk_usage(path.parent)
    monkeypatch.setattr(checks, "needed_bytes", lambda _: {"checkpoints": 1e6})
    for free, state in ((500_000, FindingState.WARN), (1_050_000, FindingState.WARN), (1_200_000, FindingState.OK)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert check(path)["disk"].state is state


def test_addresses_of_this_host_are_tried(write: Callable[..., Path]) -> None:
    # A port in use.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        stages = f'[{{layers: 1}}, {{layers: 1, listen: "{address}"}}]'
        of_stage = check(write(("{count: 2, line: dsl}", stages)))["ports"]
        path = write(("PORT", address.rpartition(":")[2]))
        found = check(path)["ports"]
    told = f"found `{address}`, expected a free port"
    assert (found.state, of_stage.state) == (FindingState.FAIL, FindingState.FAIL)
    assert found.line.startswith(f"{path}:5: exchange.listen: {told}")
    assert of_stage.line.startswith(f"{path}:9: replicas[1].stages[1].listen: {told}")
    assert check(path)["ports"] == ok(f"{address} (free)")

    # The address at which the nodes of a replica meet is tried.
    def of_nodes(address: str) -> dict[str, Finding]:
        return check(
            write(("batch_size: 4}", f'batch_size: 4, engine: torchtitan, nodes: 2, rendezvous: "{address}"}}'))
        )

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ports = of_nodes(address)["ports"]
    assert (ports.state, f"replicas[0].rendezvous: found `{address}`" in ports.line) == (FindingState.WARN, True)
    assert of_nodes(address)["ports"] == ok(f"{address} (free)")
    silent = "the nodes of dc at 192.0.2.1:9 cannot be dialled: it is not started, or a firewall is between"
    assert of_nodes("192.0.2.1:9")["neighbours"] == warn(silent)


def test_leftovers(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path, runs = write(), Path("runs").absolute()
    with claim(runs, "homes", ["dc"]):
        found = check(path)["leftovers"]
        assert (found.state, "a launch on this host runs dc" in found.line) == (FindingState.FAIL, True)
    with (runs / LOCKS / "homes" / "dc").open("rb") as asked:
        fcntl.flock(asked, fcntl.LOCK_SH)  # another check or command asks at the same moment
        assert check(path)["leftovers"].state is FindingState.OK
    unfinished = Unfinished("runs/homes", "homes", 2, 3, 0, False)
    monkeypatch.setattr(checks, "find_unfinished", lambda *_: unfinished)
    assert check(path)["leftovers"].line.startswith(f"{unfinished}; `launch --resume`")


# ---- a ticket, and a run ----


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(admission, "ALL_MEASUREMENTS_AT_ONCE", 1000)  # the tests measure more often than hosts
        run = Served(tmp_path_factory.mktemp("served"), corpus, stack)
        run.exchange.agree("dc", run.spec.agreed, run.tokens)
        run.exchange.join("dc", "")
        yield run


@pytest.fixture
def ticket_of_nobody() -> str:
    """Return a ticket to an exchange that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return make_ticket("homes", address, Secret("s").authority, "0" * 16, time.time() + HOUR).to_text()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty `runs` folder of another host, on which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_a_ticket_passes_and_stays_usable(served: Served, host: Path) -> None:
    before = served.memberships.tickets()
    ticket = served.ticket()
    found = check(ticket, host, served.corpus)
    assert [(name, one) for name, one in found.items() if one.state is not FindingState.OK] == [
        ("store", Finding(FindingState.SKIP, "the run log is in a folder"))
    ]
    assert "open now: home.0, home.1" in found["settings"].line
    assert "is the same as the run's" in found["text"].line
    assert "a step of home.0 needs" in found["line"].line
    assert "the ticket is valid for 2 h" in found["certificate"].line
    [own] = [one for one in served.memberships.tickets() if one not in before]
    assert not own.is_used
    assert (served.waiting_room.here, served.exchange.vacant()) == (0, ["home.0", "home.1"])
    assert not host.exists()
    slot = served.joined(ticket, host).slot
    served.memberships.revoke(slot)


def test_a_host_that_has_joined_checks_its_run(served: Served, host: Path) -> None:
    ticket = served.ticket("home.1")
    joined = served.joined(ticket, host)
    found = check("homes", host)
    assert check(ticket, host)["certificate"] == found["certificate"]  # the ticket itself is not needed any more
    assert found["settings"] == ok("the run homes, which this host joined as home.1, starts home.1 here")
    assert found["text"] == Finding(FindingState.SKIP, "no member that starts here reads the text")
    assert found["certificate"].line == "the certificate of home.1 is valid for 24 h"
    checks = ("memory", "disk", "exchange", "clock", "neighbours", "relay", "line", "leftovers")
    assert {found[name].state for name in checks} == {FindingState.OK}
    assert found["relay"] == ok(f"127.0.0.1:{served.meeting_point.port} answers")
    served.memberships.revoke(joined.slot)
    assert (check("homes", host)["exchange"].state) is FindingState.FAIL


def test_a_host_that_has_left_checks_whether_it_may_join_again(served: Served, host: Path) -> None:
    """Its certificate is no longer admitted, and its ticket is. No refusal is counted."""
    membership = served.joined(ticket := served.ticket("home.1"), host)
    before = served.exchange.runner.refusals.counts.total()
    ask(membership.address, membership.identity, "Give")
    note_left(membership)
    for named in ("homes", ticket):
        found = check(named, host)
        assert found["settings"].line == "the run homes, which this host left as home.1, starts home.1 here"
        assert found["exchange"].state is FindingState.OK
        assert found["certificate"].line.startswith("the ticket is valid for ")
    with pytest.raises(ConfigError, match=r"homes: home\.1 has left the run; the same `join` command returns to it"):
        status(host, "homes", None, None)
    assert served.exchange.runner.refusals.counts.total() == before
    assert not served.joined(ticket, host).has_left
    served.memberships.revoke("home.1")


def test_a_relay_that_does_not_answer_fails_for_stages_only(served: Served, host: Path) -> None:
    with ExitStack() as stack, mock.patch.object(served, "meeting_point", None):
        address, port = served.serve(stack, served.house), served.meeting_point.port
        served.meeting_point.close()
        found = check(served.ticket("home.1", address=address), host)["relay"]
        of_whole = check(served.ticket("dc", address=address), host)["relay"]
    assert found.state is FindingState.FAIL
    assert f"127.0.0.1:{port} does not answer" in found.line
    assert f"open this port in the firewall and forward it as {port}" in found.line
    assert of_whole == Finding(FindingState.SKIP, "no stage starts here")


def test_the_host_that_serves_checks_its_run(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = served.folder.path.parent
    told = f"resume it with: hetero-pp serve {runs}/homes/config.yaml --resume --runs {runs}"
    assert check("homes", runs)["exchange"] == warn(f"the exchange of homes does not run now; {told}")
    listens = served.folder.config.read_text()
    served.folder.config.write_text(listens.replace("127.0.0.1:0", served.address))
    with claim(runs, "homes", [EXCHANGE]):
        found = check("homes", runs)
    served.folder.config.write_text(listens)
    assert {found[name].state for name in ("exchange", "clock", "leftovers", "ports")} == {FindingState.OK}
    assert found["ports"] == ok(f"{served.address} (used by this run)")
    assert found["line"] == Finding(FindingState.SKIP, "the exchange is on this host")


def test_a_mistyped_name_of_a_shipped_yaml_lists_all(host: Path) -> None:
    found = check("quikstart", host)["settings"]
    assert found.state is FindingState.FAIL
    assert "found no run quikstart" in found.line and ", quickstart, " in found.line


def test_expired_revoked_and_full(served: Served, host: Path) -> None:
    found = check(served.ticket(seconds=-7200.0), host)
    assert (found["certificate"].state, "expired 2 h ago" in found["certificate"].line) == (FindingState.FAIL, True)
    assert (found["exchange"].state, found["memory"].state) == (FindingState.FAIL, FindingState.SKIP)
    assert check(served.ticket(seconds=600.0), host)["certificate"].state is FindingState.WARN
    ticket = served.ticket()
    served.memberships.revoke(Ticket.from_text(ticket).id)
    assert "the ticket was revoked" in check(ticket, host)["exchange"].line


def test_an_exchange_that_does_not_answer(ticket_of_nobody: str, host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "SECONDS_TO_ASK", 0.5)
    found = check(ticket_of_nobody, host)
    assert found["exchange"].state is FindingState.FAIL
    assert "did not answer within 500 ms; the run homes is over, is not served now" in found["exchange"].line
    unknown = Finding(FindingState.SKIP, "the exchange did not answer, or refused this host")
    assert {found[name] for name in ("settings", "clock", "neighbours")} == {unknown}


def test_clocks_that_differ(served: Served, host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "time", SimpleNamespace(time=lambda: time.time() + 600))
    found = check(served.ticket(), host)["clock"]
    assert (found.state, "is 10 min behind the exchange's" in found.line) == (FindingState.WARN, True)
    assert clock_verdict(-7200.0, 0.1).state is FindingState.FAIL
    assert clock_verdict(90.0, 50.0).state is FindingState.OK  # the call took so long that the clocks may be equal


def test_neighbours_that_listen(served: Served, host: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        served.exchange.join("home.1", f"127.0.0.1:{listener.getsockname()[1]}")
        assert check(served.ticket(), host)["neighbours"] == ok("dialled home.1")
    found = check(served.ticket(), host)["neighbours"]
    assert (found.state, "the exchange relays instead" in found.line) == (FindingState.WARN, True)
    served.exchange.died("home.1", "the test is over")


def test_a_hostile_exchange_is_one_line(served: Served, host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = {
        "settings": pb.PreviewReply(version=PROTOCOL_VERSION, configuration="[]", slots=["home.0"]),
        "slots": pb.PreviewReply(
            version=PROTOCOL_VERSION, configuration=served.house.told.configuration, slots=["away"], vocabulary=256
        ),
        "neighbours": pb.PreviewReply(
            version=PROTOCOL_VERSION,
            configuration=served.house.told.configuration,
            slots=["home.0"],
            vocabulary=256,
            neighbours={"home.1": "nowhere:x", "other": "127.0.0.1:1"},
        ),
        "clock": pb.PreviewReply(version=PROTOCOL_VERSION, clock=math.nan),
    }
    replies["neighbours"].clock = replies["slots"].clock = replies["settings"].clock = time.time()
    found = {}
    for what, reply in replies.items():
        monkeypatch.setattr(admission.Admission, "Preview", lambda *_, reply=reply: reply)
        with ExitStack() as stack:
            found[what] = check(served.ticket(address=served.serve(stack, served.house)), host)
    assert found["settings"]["settings"].line.endswith("this version of hetero-pp cannot read")
    assert found["slots"]["settings"].line == "the exchange offers slots that its run does not have"
    assert "sent nan as its time" in found["clock"]["exchange"].line
    assert found["neighbours"]["neighbours"].line.startswith("home.1 at nowhere:x cannot be dialled")


def test_another_text_than_the_run(served: Served, host: Path, tmp_path: Path) -> None:
    assert "give the path of the text on this host with --data" in check(served.ticket("home.0"), host)["text"].line
    other = tmp_path / "other.txt"
    other.write_text("another text " * 2000)
    found = check(served.ticket("home.0"), host, other)["text"]
    assert (found.state, f"the run's with {served.tokens[:12]}" in found.line) == (FindingState.FAIL, True)
    assert check(served.ticket("home.1"), host)["text"].state is FindingState.SKIP


def test_the_verdict_on_a_line(served: Served) -> None:
    spec = served.spec
    assert step_bytes(spec, "home.0") == dict(zip(("down", "up"), step_bytes(spec, "home.1").values(), strict=True))
    fast, slow = Rate(9.5e6, True), Rate(8.5e6, True)
    assert line_verdict(spec, "home.0", {"up": fast, "down": Rate(40e6, False)}).state is FindingState.OK
    found = line_verdict(spec, "home.0", {"up": slow, "down": Rate(40e6, False)})
    assert (found.state, "expects 10 Mbit/s up of home.0" in found.line) == (FindingState.WARN, True)
    found = line_verdict(spec, "dc", {"up": slow, "down": Rate(40e6, False)})
    assert found == ok("8.5 Mbit/s up, at least 40 Mbit/s down")
