"""A run over several hosts, in which hosts die or are stopped, and are started again with the same command."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from host_processes import free_port
from hosts_of_parts import PARTS, Hosts


@pytest.fixture
def endless(tmp_path: Path, corpus: Path) -> Iterator[Hosts]:
    """Yield a run that the test ends. Its messages take a while, so that it needs no whole core meanwhile."""
    found = Hosts(tmp_path, corpus, 100000)
    found.text = re.sub(r"latency: \d ms", "latency: 20 ms", found.text)
    yield found
    found.kill()


@pytest.mark.starts_processes
def test_the_run_goes_on_without_a_host_that_dies_and_with_it_once_it_is_started_again(endless: Hosts) -> None:
    endless.text = endless.text.replace(
        "grace: {least: 5 min, most: 5 min}, lease: {least: 1 min}", "lease: {least: 2 s}"
    )
    for part in PARTS:
        endless.start(part)
    endless.wait_for_round(2)
    endless.processes["dc"].send_signal(signal.SIGKILL)
    endless.wait_for('"what": "silent", "slot": "dc"')
    endless.wait_for_round(endless.rounds_closed() + 2)
    endless.start("dc")
    endless.wait_for('"member": "dc", "event": "joined", "address": "", "incarnation": 2')
    counted = endless.rounds_closed()
    endless.wait_for_contribution(counted + 3, "dc")
    assert [line["member"] for line in endless.told('"joined"')].count("home.0") == 1
    assert all(endless.processes[part].poll() is None for part in PARTS)
    endless.processes["exchange"].terminate()
    said = endless.said("exchange")
    assert re.search(r"^hosts: dc: no heartbeat arrived for \d+ s; its slot is vacant$", said, re.MULTILINE), said
    assert "hosts: dc has joined again (incarnation 2)" in said
    assert re.search(r"^round \d+/100000: .*; excluded: dc\b", said, re.MULTILINE), said  # late if it had sent a part


def _wait_until_free(port: int) -> None:
    """Wait until a port is free: a process ends a moment after its launcher was killed."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return


@pytest.mark.starts_processes
def test_an_exchange_that_is_started_again_takes_over_from_the_one_that_died(endless: Hosts) -> None:
    """Meanwhile members wait in their processes. No round is lost, and every member keeps its slot."""
    for part in PARTS:
        endless.start(part)
    endless.wait_for_round(2)
    endless.processes["exchange"].send_signal(signal.SIGKILL)
    assert endless.ended("exchange")[0] == -signal.SIGKILL
    recorded = endless.rounds_recorded()
    _wait_until_free(endless.port)
    endless.start("exchange", "--resume", "--set", "inner.learning_rate=5e-3")
    code, errors = endless.ended("exchange")
    assert (code, "`inner.learning_rate`: members of the run still train with the old value" in errors) == (1, True), (
        errors
    )
    assert all(endless.processes[part].poll() is None for part in PARTS[1:])
    endless.start("exchange", "--resume")
    endless.wait_for_contribution(recorded + 4, "home")
    assert all(endless.processes[part].poll() is None for part in PARTS)
    assert min(line["last_round"] for line in endless.told('"begun"')[1:]) >= recorded
    assert {line["incarnation"] for line in endless.told('"joined"')} == {1}
    assert not endless.told('"healed"')
    rounds = [line["round"] for line in endless.told('"round_closed"')]
    assert rounds == list(range(1, len(rounds) + 1))
    for part in PARTS:
        endless.processes[part].terminate()
    since_its_first_round = re.split(r"^round \d+/", endless.said("dc"), maxsplit=1, flags=re.MULTILINE)[1]
    # Before its first round, it may not have been told of the first exchange.
    assert "resuming after round" not in since_its_first_round


@pytest.mark.starts_processes
def test_a_run_of_which_no_host_is_left_goes_on_with_all_started_again(endless: Hosts) -> None:
    """All hosts are stopped at once, as by Slurm, and save the state of the last round. Later, all are killed."""
    text, endless.text = endless.text, f"{endless.text}states: {{every: 1000}}\n"
    for part in PARTS:
        endless.start(part)
    endless.wait_for('"event": "round_closed", "round": 2')
    for part in PARTS:
        endless.processes[part].send_signal(signal.SIGUSR1)
    assert [endless.ended(part)[0] for part in PARTS] == [130] * len(PARTS)
    saved = endless.rounds_recorded()
    assert [_states(endless, part) for part in PARTS[1:]] == [{saved}] * 3
    endless.text = text
    endless.start("exchange", "--resume")
    for part in PARTS[1:]:
        endless.start(part)
    endless.wait_for_round(saved + 2)
    for part in PARTS:
        endless.processes[part].send_signal(signal.SIGKILL)
        endless.ended(part)
    held = [_states(endless, part) for part in PARTS[1:]]
    endless.port = free_port()  # the port may change: members are told the new address
    slower = ("--set", "inner.learning_rate=5e-3")  # the exchange tells it to members that do not set it
    endless.start("exchange", "--resume", "--set", f"exchange.listen=127.0.0.1:{endless.port}", *slower)
    for part in PARTS[1:]:
        endless.start(part, *(slower if part == "home.1" else ()))
    endless.wait_for_round(max(set.intersection(*held)) + 3)
    assert _last_rates(endless) == pytest.approx({"dc": 5e-3, "home": 5e-3}, rel=1e-3)  # of 100000 rounds
    assert endless.processes["exchange"].poll() is None


def _last_rates(hosts: Hosts) -> dict[str, float]:
    """Return the newest learning rate that each replica has reported."""
    return {line["replica"]: line["learning_rate"] for line in hosts.told('"learning_rate"')}


def _states(hosts: Hosts, part: str) -> set[int]:
    """Return the rounds after which a host has saved its state."""
    return {int(path.name[-6:]) for path in (hosts.folder / part / "runs/hosts/state").glob("*/round-*")}
