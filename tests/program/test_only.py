"""A run over several hosts, as docs/hosts.md describes it. Loopback addresses of this machine stand for the hosts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_processes import free_port
from hosts_of_parts import PARTS, Hosts
from made_up_run import made_up_spec

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import LAUNCHER
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ConfigError, RunFailed
from hetero_pp.program.launch import supervisor as supervisor_module
from hetero_pp.program.launch.command import Host, print_commands, run_on_this_host, run_topology
from hetero_pp.program.launch.hosts import commands, notes, read_token, require_reachable
from hetero_pp.program.launch.supervisor import Supervisor
from hetero_pp.rpc.identities import Secret, SecretKeys

KEYS = SecretKeys(Secret("a secret"), encrypted=False)


@pytest.fixture
def hosts(tmp_path: Path, corpus: Path) -> Iterator[Hosts]:
    found = Hosts(tmp_path, corpus, 3)
    yield found
    found.kill()


@pytest.mark.starts_processes
def test_five_hosts_are_one_run(hosts: Hosts, tmp_path: Path, corpus: Path) -> None:
    """One stage listens nowhere and dials both neighbours."""
    stages = (
        'stages: [{layers: 1, listen: "127.0.0.2:0"}, {layers: 1, listen: relay}, {layers: 1, listen: "127.0.0.3:0"}]'
    )
    hosts.text = re.sub(r"stages: .*", stages, hosts.text).replace("layers: 2}", "layers: 3}")
    parts = (*PARTS, "home.2")
    for part in parts:
        hosts.start(part)
    assert {part: hosts.ended(part) for part in parts} == dict.fromkeys(parts, (0, ""))
    listen = {one["member"]: one["address"].rpartition(":")[0] or one["address"] for one in hosts.told('"joined"')}
    assert listen == {"dc": "", "home.0": "127.0.0.2", "home.1": "relay", "home.2": "127.0.0.3"}
    for part in parts[1:]:
        rounds = re.findall(rf"^round (\d)/3: {re.escape(part)}: .*, sent ", hosts.said(part), re.MULTILINE)
        assert rounds == ["1", "2", "3"], hosts.said(part)
    together = hosts.summary()
    whole = tmp_path / "whole.yaml"
    whole.write_text(hosts.text)
    run_topology(whole, [], tmp_path / "one", in_process=True)
    alone = json.loads((tmp_path / "one" / "hosts" / "summary.json").read_text())
    assert together["parameters_sha256"] == alone["parameters_sha256"]
    assert together["validation_loss"] == alone["validation_loss"]
    token = tmp_path / "exchange" / "runs" / "hosts" / "token"
    assert token.read_text() == "a-secret-of-this-test-of-two-hosts\n"
    assert token.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "home.1" / "runs" / ".tokens").exists()  # only members that read the corpus encode it


@pytest.mark.starts_processes
def test_a_host_with_another_configuration_text_or_token_is_refused(hosts: Hosts, corpus: Path, tmp_path: Path) -> None:
    hosts.start("exchange", "--set", "threads=1")
    text, hosts.text = hosts.text, hosts.text.replace("learning_rate: 1e-2", "learning_rate: 2e-2")
    hosts.start("dc")
    code, errors = hosts.ended("dc")
    assert code == 1
    told = (
        "dc: was started with another configuration than the exchange: inner.learning_rate: found 0.02, expected 0.01"
    )
    assert told in errors
    hosts.text = text
    hosts.start("dc")
    hosts.wait_for('"member": "dc", "event": "joined"')
    shutil.copytree(corpus, tmp_path / "other")
    (tmp_path / "other" / "one more.txt").write_text("that nobody else has")
    hosts.text = text.replace(str(corpus), str(tmp_path / "other"))
    hosts.start("home.0")
    code, errors = hosts.ended("home.0")
    told = r"home\.0: reads another text than the run: found tokens whose sha256 begins with \w{12}, expected \w{12}"
    assert (code, errors.count("\n"), bool(re.search(f"{told}, as dc reads", errors))) == (1, 1, True), errors
    hosts.text = text
    (tmp_path / "another").write_text("another-secret-of-this-test-of-two-hosts")
    hosts.start("home.1", "--token-file", str(tmp_path / "another"))
    code, errors = hosts.ended("home.1")
    there = f"the exchange at 127.0.0.1:{hosts.port} was started with another token than this host"
    assert (code, f"home.1: {there}, which has the token in {tmp_path / 'another'}" in errors) == (1, True), errors
    hosts.processes["exchange"].terminate()
    hosts.ended("exchange")
    assert hosts.summary()["refusals"] == 2
    again = hosts.said("exchange").splitlines()[-1]
    assert "hosts: resume with (on other hosts, repeat their commands): " in again
    assert again.endswith("--set threads=1 --resume")


@pytest.mark.starts_processes
def test_without_tls_another_token_is_told_on_both_sides(hosts: Hosts, tmp_path: Path) -> None:
    hosts.text = hosts.text.replace("exchange: {", "exchange: {insecure: true, ")
    hosts.start("exchange")
    (tmp_path / "other").write_text("another-secret-of-this-test-of-two-hosts")
    hosts.start("home.1", "--token-file", str(tmp_path / "other"))
    code, errors = hosts.ended("home.1")
    there = f"the exchange at 127.0.0.1:{hosts.port} was started with another token than this host"
    assert (code, f"home.1: {there}, which has the token in {tmp_path / 'other'}" in errors) == (1, True), errors
    hosts.wait_for('"event": "refusal"')
    hosts.processes["exchange"].terminate()
    hosts.ended("exchange")
    assert "hosts: refused home.1 at ipv4:127.0.0.1: found another token than the run's" in hosts.said("exchange")


def test_a_token_that_can_be_guessed(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    with pytest.raises(
        ConfigError, match=r"found 6 characters, expected at least 32 .*; make one with: openssl rand -hex 16"
    ):
        read_token(tmp_path / "token")


def _config(tmp_path: Path, corpus: Path, exchange: str | None = None, stages: str | None = None) -> ConfigFile:
    """Return the configuration with other lines for the exchange and the stages, if given."""
    path, text = tmp_path / "run.yaml", Hosts(tmp_path, corpus, 3).text
    text = text if exchange is None else re.sub("exchange: .*", exchange, text)
    if stages is not None:
        count = stages.count("layers")
        text = re.sub("stages: .*", stages, text).replace("layers: 2}", f"layers: {count}}}")
    path.write_text(text)
    return ConfigFile(path)


def test_commands_for_all_hosts(tmp_path: Path, corpus: Path) -> None:
    # Commands for all hosts.
    file = _config(tmp_path, corpus)
    found = commands(file.config, Path("run.yaml"), ["inner.steps=3"])
    port = file.config.exchange.listen.rpartition(":")[2]
    assert found[0] == "hetero-pp launch run.yaml --set inner.steps=3 --only exchange --token-file token"
    assert [line.split("--only ")[1].split()[0] for line in found] == list(PARTS)
    assert all(f"--exchange EXCHANGE_HOST:{port} --token-file token" in line for line in found[1:])

    # A group that names no address is one hosts.
    for listen, members in (("", ["home"]), (', listen: "127.0.0.2:0"', ["home.0", "home.1"])):
        file = _config(tmp_path, corpus, stages=f"stages: [{{layers: 1{listen}}}, {{layers: 1}}]")
        found = commands(file.config, Path("run.yaml"), [])
        assert [line.split("--only ")[1].split()[0] for line in found] == ["exchange", "dc", *members]
    assert any("found no address, so home.1 dials home.0" in line for line in notes(file))
    with pytest.raises(ConfigError, match=r"expected the address at which home\.1 can dial this host"):
        anywhere = _config(tmp_path, corpus, stages='stages: [{layers: 1, listen: "0.0.0.0:7"}, {layers: 1}]').config
        require_reachable(anywhere, ["home.0"])


def test_what_to_do_before_the_commands_with_key_and_line(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hints also concern settings that the YAML leaves out."""
    stages = 'stages: [{layers: 1}, {layers: 1}, {layers: 1, listen: "ben.invalid:7"}]'
    path = _config(tmp_path, corpus, 'exchange: {listen: "0.0.0.0:47600"}', stages).path
    print_commands(path, [])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "# make one token, and copy it to every host: openssl rand -hex 16 > token"
    assert said[1].startswith(f"# {path}:8: exchange.listen: the exchange listens at `0.0.0.0:47600`; replace EXCHAN")
    assert said[2] == f"# {path}:8: exchange.relay: its relay listens at `0.0.0.0:47601`, which other hosts dial, too"
    assert said[3] == (
        f"# {path}:16: replicas[1].stages[1].listen: found no address, so home.1 is reached through the exchange"
    )
    assert all(line.startswith("hetero-pp launch ") for line in said[4:])
    print_commands(path, ["exchange.listen=127.0.0.1:5"])
    assert (
        "--set exchange.listen=127.0.0.1:5: found `127.0.0.1:5`, expected an address that other hosts can reach"
        in capsys.readouterr().out
    )
    _config(tmp_path, corpus, "", stages)
    with pytest.raises(ConfigError, match=r"run\.yaml:1: exchange\.listen: .* expected a fixed port"):
        print_commands(path, [])


NODES = """
name: hosts
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 2}
data: {corpus: CORPUS, sequence_length: 32, validation_share: 0.2, validation_sequences: 8}
inner: {steps: 2, learning_rate: 1e-2, warmup_steps: 2}
outer: {rounds: ROUNDS, compression: {density: 1/32}}
exchange: {listen: "127.0.0.1:PORT"}
replicas:
  - name: titan
    kind: datacenter
    engine: deepspeed
    nodes: 2
    rendezvous: 127.0.0.1:MEETING
    batch_size: 4
    device: cpu
"""


@pytest.mark.starts_processes
def test_a_replica_on_two_nodes(hosts: Hosts) -> None:
    """The same command runs on each node. Both nodes share one folder."""
    text = NODES.replace("ROUNDS", "2").replace("PORT", str(hosts.port)).replace("MEETING", str(free_port()))
    hosts.text = text.replace("CORPUS", re.findall(r"corpus: (\S+),", hosts.text)[0])
    hosts.start("exchange")
    first = hosts.start("titan")
    hosts.start("titan")
    assert hosts.ended("titan") == (0, "")
    assert first.wait(150) == 0
    assert hosts.ended("exchange") == (0, "")
    assert hosts.summary()["rounds"] == 2


def test_a_replica_on_two_nodes_is_not_started_on_one(tmp_path: Path, corpus: Path) -> None:
    path = tmp_path / "run.yaml"
    text = NODES.replace("ROUNDS", "2").replace("PORT", str(free_port())).replace("CORPUS", str(corpus))
    path.write_text(text.replace("127.0.0.1:MEETING", "nowhere.invalid:7"))
    with pytest.raises(ConfigError, match=r"run\.yaml:12: replicas\[0\]\.nodes: found 2, .*--print-commands"):
        run_topology(path, [], tmp_path / "runs", in_process=False)
    host = Host("titan", "127.0.0.1:1", tmp_path / "token")
    with pytest.raises(
        ConfigError, match=r"run\.yaml:13: replicas\[0\]\.rendezvous: .* nowhere\.invalid cannot be resolved"
    ):
        run_on_this_host(path, [], tmp_path / "runs", host, in_process=False, resume=False)


@pytest.mark.starts_processes
def test_members_that_do_not_notice_that_the_run_has_failed_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that waits for other nodes does not notice that one of them has failed."""
    monkeypatch.setattr(supervisor_module, "_SECONDS_TO_NOTICE", 0.0)
    with Supervisor(made_up_spec(), RunFolder(tmp_path), lambda _: None, LAUNCHER, KEYS) as supervisor:
        supervisor.start(["dc"])
        supervisor.end_soon("nodeb: out of memory")
        with pytest.raises(RunFailed, match="dc: nodeb: out of memory"):
            supervisor.wait()
