"""Two hosts may serve the exchange of one run: the run goes on if one dies, freezes or loses the store, and has the
bits of a run without that.
"""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asking import ask
from hosts_with_standby import MEMBERS, HostsWithStandby
from started import run_program

from hetero_pp.core.errors import StoreError
from hetero_pp.program.launch import command
from hetero_pp.store.opening import open_store
from replica_groups.exchange.log import record_key
from replica_groups.exchange.memberships import Memberships

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from fault_injection.dying_host import PHASES
from object_service import KEY, SECRET, object_service

ROUNDS = 5
DIES_IN = 3
WITH_S3 = ("part", "checkpoint") if sys.platform == "linux" else ()
"""Phases with an object store instead of a folder, if SeaweedFS has a package: it has one for Linux."""


@pytest.fixture
def made() -> Iterator[list[HostsWithStandby]]:
    found: list[HostsWithStandby] = []
    yield found
    for one in found:
        one.kill()


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the hashes of the same run without a fault."""
    folder = tmp_path_factory.mktemp("whole")
    run = HostsWithStandby(folder, corpus, ROUNDS, str(folder / "store"))
    try:
        run.start("exchange")
        for part in MEMBERS:
            run.start(part)
        assert run.wait("exchange")[0] == 0, run.printed("exchange")
        found: dict[str, str] = run.summary()["parameters_sha256"]
        return found
    finally:
        run.kill()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with object_service(tmp_path_factory.mktemp("seaweedfs")) as address:
        yield address


def _to_its_end(run: HostsWithStandby, expected: dict[str, str], last: str = "standby") -> None:
    """Wait until a run is over, and require the hashes of one without a fault."""
    for part in (last, *MEMBERS):
        assert run.wait(part)[0] == 0, run.printed(part)
    assert run.summary(last)["parameters_sha256"] == expected
    assert run.summary(last)["rounds"] == ROUNDS
    closed = [line["round"] for line in run.told('"round_closed"', last)]
    assert closed == list(range(1, ROUNDS + 1))  # those of the first host are read from the store


@pytest.mark.starts_processes
@pytest.mark.parametrize(("phase", "kind"), [(one, "s3" if one in WITH_S3 else "folder") for one in PHASES])
def test_a_host_that_dies_in_any_phase_is_followed(
    phase: str,
    kind: str,
    corpus: Path,
    tmp_path: Path,
    made: list[HostsWithStandby],
    expected: dict[str, str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = str(tmp_path / "store")
    if kind == "s3":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        url = f"s3://{phase}/runs?endpoint={request.getfixturevalue('service')}"
        open_store(url).put("first", b"")  # the service makes a bucket with its first object
        open_store(url).delete(["first"])
    run = HostsWithStandby(tmp_path, corpus, ROUNDS, url)
    made.append(run)
    run.serve("exchange", dies=(phase, DIES_IN, "KILL"))
    run.serve("standby", dies=("never", 1, "KILL") if kind == "s3" else None)  # which has the store's credentials
    for part in MEMBERS:
        run.start(part)
    assert run.wait("exchange")[0] == -signal.SIGKILL, run.printed("exchange")
    _to_its_end(run, expected)


@pytest.mark.starts_processes
@pytest.mark.parametrize("is_killed", [False, True], ids=["whole", "without its exchange"])
def test_a_host_that_was_frozen_writes_nothing_and_becomes_the_standby(
    is_killed: bool, corpus: Path, tmp_path: Path, made: list[HostsWithStandby], expected: dict[str, str]
) -> None:
    """Its exchange may have been killed meanwhile. The launcher then restarts it, and hears from it."""
    run = HostsWithStandby(tmp_path, corpus, ROUNDS, str(tmp_path / "store"))
    made.append(run)
    run.serve("exchange", dies=("part", DIES_IN, "STOP"))
    run.start("standby")
    for part in MEMBERS:
        run.start(part)
    run.wait_until(lambda: run.log.last_record() >= DIES_IN)
    record = run.log.store.get(record_key(DIES_IN))
    for one in run.of_host("exchange")[1:] if is_killed else ():
        one.kill()
    run.stop_host("exchange", signal.SIGCONT)
    run.wait_until(lambda: "this host is a standby now" in run.printed("exchange"))
    _to_its_end(run, expected)
    assert run.log.store.get(record_key(DIES_IN)) == record
    assert run.wait("exchange")[0] == 0, run.printed("exchange")
    assert run.printed("exchange").rstrip().endswith(f"extend it with `--resume --set outer.rounds=N`, N > {ROUNDS}")


@pytest.mark.starts_processes
@pytest.mark.parametrize("phase", ["part", "all"])
def test_a_host_without_its_store_stops_and_becomes_the_standby(
    phase: str, corpus: Path, tmp_path: Path, made: list[HostsWithStandby], expected: dict[str, str]
) -> None:
    """Members reach both hosts all the time. The one that serves is cut off in a phase of a round."""
    run = HostsWithStandby(tmp_path, corpus, ROUNDS, str(tmp_path / "store"))
    made.append(run)
    (tmp_path / "store").mkdir()
    own = tmp_path / "store-of-the-first"
    own.symlink_to(tmp_path / "store")
    run.serve("exchange", "--set", f"store.url={own}", dies=(phase, DIES_IN, "STOP"))
    run.start("standby")
    for part in MEMBERS:
        run.start(part)
    run.wait_until((run.runs("exchange") / "hosts" / "died").exists)
    own.unlink()
    own.write_text("a file instead of a folder")
    run.stop_host("exchange", signal.SIGCONT)
    run.wait_until(lambda: "this host is a standby now" in run.printed("exchange"))
    run.wait_until(lambda: run.log.last_record() >= DIES_IN)
    own.unlink()
    own.symlink_to(tmp_path / "store")
    _to_its_end(run, expected)
    assert run.wait("exchange")[0] == 0, run.printed("exchange")
    assert run.printed("exchange").rstrip().endswith(f"extend it with `--resume --set outer.rounds=N`, N > {ROUNDS}")


@pytest.mark.starts_processes
def test_a_host_that_served_before_takes_over_with_the_changes_since(
    corpus: Path, tmp_path: Path, made: list[HostsWithStandby]
) -> None:
    """The run was over, and is extended on the other host. The command of this host says the rounds of its time."""
    run, rounds = HostsWithStandby(tmp_path, corpus, 2, str(tmp_path / "store")), ("--set", "outer.rounds=2")
    made.append(run)
    run.serve("exchange", dies=("checkpoint", 1, "KILL"))
    run.serve("standby", *rounds)
    for part in MEMBERS:
        run.start(part)
    for part in ("standby", *MEMBERS):
        assert run.wait(part)[0] == 0, run.printed(part)
    (run.runs("exchange") / "hosts" / "died").unlink()
    run.serve("exchange", "--resume", "--set", f"outer.rounds={ROUNDS}", dies=("part", 4, "KILL"))
    run.wait_until(lambda: "Members need" in run.printed("exchange"))  # else it finds that the run is over
    run.serve("standby", *rounds)
    for part in MEMBERS:
        run.start(part)
    assert run.wait("standby")[0] == 0, run.printed("standby")
    assert run.summary("standby")["rounds"] == ROUNDS
    assert [run.wait(part)[0] for part in MEMBERS] == [0] * len(MEMBERS)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (StoreError("the store: cannot be read"), "hosts: the store: cannot be read; this host is a standby now"),
        (OSError(errno.ENOSPC, "a full disk"), "cannot be written (a full disk"),
    ],
)
def test_a_standby_whose_store_or_disk_fails_as_it_takes_over_stays_one(
    error: Exception, told: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, serves = HostsWithStandby(tmp_path, corpus, ROUNDS, str(tmp_path / "store")), list[Any]()
    (tmp_path / "run.yaml").write_text(run.text)
    open_store(str(tmp_path / "store" / "hosts")).put("config.yaml", run.text.encode())

    def serve(*arguments: Any, takes_over: bool) -> None:
        serves.append(takes_over)
        if len(serves) == 1:
            raise error

    monkeypatch.setattr(command, "_run_and_record", serve)
    monkeypatch.setattr(command, "start_fork_server", lambda: None)
    token = ["--token-file", tmp_path / "token", "--runs", tmp_path / "runs"]
    code, printed, errors = ask("serve", tmp_path / "run.yaml", "--standby", *token)
    assert (code, serves) == (0, [True, True]), errors
    assert told in printed and "; this host is a standby now" in printed


# ---- bad input: one line ----


@pytest.mark.starts_processes
def test_a_standby_with_another_runs_token(corpus: Path, tmp_path: Path) -> None:
    run = HostsWithStandby(tmp_path, corpus, ROUNDS, str(tmp_path / "store"))
    (tmp_path / "run.yaml").write_text(run.text)
    Memberships(tmp_path / "members.sqlite", store=open_store(str(tmp_path / "store" / "hosts")), token="a").close()
    more = ["--standby", "--token-file", str(tmp_path / "token"), "--runs", str(tmp_path / "runs")]
    done = run_program("serve", str(tmp_path / "run.yaml"), *more)
    assert done.returncode == 2
    told = "found another token, expected that of the run: copy it from a host that has served it, and give it with"
    assert f"{tmp_path / 'store' / 'hosts'}: {told} --token-file" in done.stderr


def test_a_standby_without_another_host_or_a_token(corpus: Path, tmp_path: Path) -> None:
    run = HostsWithStandby(tmp_path, corpus, ROUNDS, str(tmp_path / "store"))
    (tmp_path / "run.yaml").write_text(run.text)
    more = ["--standby", "--runs", str(tmp_path / "runs")]
    code, _, errors = ask("serve", tmp_path / "run.yaml", *more)
    assert code == 2
    assert "--standby: expected --token-file FILE, too" in errors
    code, _, errors = ask("serve", tmp_path / "run.yaml", "--set", "exchange.hosts=[]", *more)
    assert code == 2
    assert "exchange.hosts=[]: found 0 hosts with --standby, expected every host that may serve it" in errors


def test_two_hosts_without_a_store(corpus: Path, tmp_path: Path) -> None:
    run = HostsWithStandby(tmp_path, corpus, ROUNDS, "unused")
    (tmp_path / "run.yaml").write_text(run.text.partition("store:")[0])
    code, _, errors = ask("check", tmp_path / "run.yaml", "--runs", tmp_path / "runs")
    line = 1 + run.text.partition("exchange:")[0].count("\n")
    told = "exchange.hosts: found 2 hosts without a `store.url`, expected a store that all of them reach, too"
    assert code == 2
    assert f"run.yaml:{line}: {told}" in errors
