"""Tickets and slots of a run that the test's process serves: what hosts are told, and what is refused."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from served_run import Served
from typer.testing import CliRunner

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.shared import keep_tokenizer, kept_tokenizer, own_configuration, told_of
from hetero_pp.core.errors import ConfigError, RunOver
from hetero_pp.program.cli import app
from hetero_pp.program.join.command import JoiningHost, join
from hetero_pp.program.join.invite import invite, revoke, seconds_of
from hetero_pp.program.join.membership import leavable, leave, take_slot
from hetero_pp.program.launch.earlier import keep_over
from hetero_pp.rpc.identities import Authority, Ticket, make_ticket


@pytest.fixture
def served(tmp_path: Path, corpus: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(tmp_path, corpus, stack)


def test_tickets_by_which_nobody_comes_in(served: Served, tmp_path: Path) -> None:
    here, there = JoiningHost(tmp_path / "here"), JoiningHost(tmp_path / "there")
    used, over = served.invite("home.0"), served.invite("home.1", 0.0)
    for text, who, told in (
        ("made up", here, r"found 'made up', expected a ticket, which begins with hpp1\."),
        (used[:-7], here, "the ticket is incomplete: copy all of it, as one line"),
        (over, here, r"the ticket has expired: ask for another \(or is the clock of this host wrong\?\)"),
        (used, here, r"home\.0 reads the run's text; give the path of the text on this host with --data PATH"),
        (
            served.invite("dc"),
            here,
            "dc reads the run's text; give the path of the text on this host with --data PATH",
        ),
        (used, there, "the ticket was used already, and admits one process: join in the folder in which it was used"),
    ):
        with pytest.raises(ConfigError, match=told):
            join(text, who)
    assert served.memberships.held_by("home.0") is None  # this host's missing package has not cost the slot


def test_invitations_that_cannot_be(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--slot home\.2: expected one of dc, home\.0, home\.1"):
        served.invite("home.2")
    with pytest.raises(
        ConfigError,
        match=r"--slot home: found the name of a group: leave out --slot .*, or name a stage, such as home\.0",
    ):
        served.invite("home")
    with pytest.raises(ConfigError, match=r"--address: found here:0, expected the port at which"):
        invite(served.runs, "homes", "home.1", 1.0, "here:0")
    with pytest.raises(ConfigError, match=r"listens at a free port \(127\.0\.0\.1:0\), so its port is not"):
        invite(served.runs, "homes", "home.1", 1.0, None)
    with pytest.raises(ConfigError, match=r"--expires: found `soon`, expected a number and a unit such as `24h`"):
        seconds_of("soon")
    assert seconds_of("24h") == 24 * 3600
    with pytest.raises(ConfigError, match="found no run another that this host started, serves or joined"):
        invite(tmp_path, "another", None, 1.0, None)
    with pytest.raises(ConfigError, match=r"found no host that was invited to home\.0, and no ticket with this id"):
        revoke(served.runs, "homes", "home.0")
    with pytest.raises(ConfigError, match="found no `hetero-pp join` of this run on this host"):
        leave(served.runs, "homes", None)
    path = served.runs / "homes" / "config.yaml"
    path.write_text(path.read_text().replace("127.0.0.1:0", "0.0.0.0:47600"))
    with pytest.raises(ConfigError, match=r"the exchange listens at 0\.0\.0\.0:47600, which other hosts cannot dial"):
        invite(served.runs, "homes", None, 1.0, None)
    hosts = f'store: {{url: {tmp_path / "store"}}}\nexchange: {{hosts: ["one:1", "two:2"], '
    path.write_text(path.read_text().replace("0.0.0.0:47600", served.address).replace("exchange: {", hosts))
    invite(served.runs, "homes", "home.1", 1.0, None)  # this host serves the run; a standby would not be heard
    path.write_text(path.read_text().replace(served.address, "127.0.0.1:1"))
    for change in (partial(invite, served.runs, "homes", None, 1.0, None), partial(revoke, served.runs, "homes", "dc")):
        with pytest.raises(
            ConfigError, match=r"this host does not serve the run now; use the one of `exchange\.hosts`"
        ):
            change()
    path.write_text(path.read_text().replace("exchange: {", "exchange: {insecure: true, "))
    with pytest.raises(ConfigError, match=r"exchange\.insecure: found true, expected false: tickets need TLS"):
        invite(served.runs, "homes", None, 1.0, None)


def test_an_invitation_says_what_its_ticket_is_good_for(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    def told(slot: str | None) -> list[str]:
        invite(served.runs, "homes", slot, 3600.0, served.address)
        lines = capsys.readouterr().err.splitlines()
        [down] = [line for line in lines if "its exchange does not run now, so no host can join; resume" in line]
        assert down.endswith(f"hetero-pp serve {served.runs}/homes/config.yaml --resume --runs {served.runs}")
        return [line for line in lines if line != down]

    first, dc = told(None)
    assert first.startswith("homes: this ticket is for a stage of group home; it admits one host until 20")
    command = "`hetero-pp invite homes --slot dc`"
    assert dc == f"homes: dc is still free; a datacenter replica needs a ticket with its name: {command}"
    (one,) = told("home.1")
    assert one.startswith("homes: this ticket is for home.1, a stage of group home; ")
    (one,) = told("dc")
    assert one.startswith("homes: this ticket is for the datacenter replica dc; ")
    assert len(told(None)) == 1  # dc has a ticket already


@pytest.mark.parametrize("command", ["status", "check", "view", "leave", "invite", "export"])
def test_no_command_prints_a_pasted_ticket(command: str, served: Served) -> None:
    """A ticket with other text around it is taken, or refused in one line. A part of a ticket is refused."""
    text = served.invite("home.1").strip()
    rest = ["--to", "a folder"] if command == "export" else []
    for pasted in (f"\u200b{text}", f"here it is: {text}", text[:-9], text[5:], f"{text[:40]} {text[40:]}"):
        result = CliRunner().invoke(app, [command, "--runs", str(served.runs), *rest, "--", pasted])
        said = result.stdout + result.stderr
        assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
        assert text[45:75] not in said.replace("\n", "")
        assert command == "check" or len(said.splitlines()) < 4


def test_who_joins_twice_is_refused_and_takes_nothing_from_who_joined_first(served: Served, tmp_path: Path) -> None:
    ticket = served.invite("home.1")
    take_slot(Ticket.from_text(ticket), tmp_path)
    with (
        leavable(RunFolder(tmp_path / "homes"), "home.1"),
        pytest.raises(ConfigError, match=rf"home\.1 is already held by process {os.getpid()} on this host"),
    ):
        join(ticket, JoiningHost(tmp_path))
    assert served.memberships.held_by("home.1") is not None
    with pytest.raises(ConfigError, match=r"--slot: home\.1 is taken: `hetero-pp revoke` frees it"):
        served.invite("home.1")


def test_a_run_by_any_other_name_is_no_folder(tmp_path: Path) -> None:
    """A ticket cannot make a host write outside its folder."""
    for name in ("../up", "/etc", "..", "", "a/b"):
        ticket = make_ticket(name, "127.0.0.1:1", Authority("a secret"), "0123456789abcdef", 2e9)
        with pytest.raises(ConfigError, match="expected the name of a run"):
            join(ticket.to_text(), JoiningHost(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_ticket_to_the_run_that_was_served_before_is_told_so(served: Served, tmp_path: Path) -> None:
    ticket = make_ticket("homes", served.address, Authority("the run before"), "0123456789abcdef", time.time() + 60)
    told = f"^a new run has started at {served.address}; your ticket belongs to the previous run; ask for a new ticket$"
    with pytest.raises(ConfigError, match=told):
        join(ticket.to_text(), JoiningHost(tmp_path / "here"))


def test_join_reads_a_ticket_from_stdin_up_to_the_line_that_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mail has wrapped it, after a greeting. The command does not wait for the end of the input."""
    keep_over(RunFolder(tmp_path / "homes"), RunOver.after(9, 9))
    text = make_ticket("homes", "127.0.0.1:1", Authority("a secret"), "0123456789abcdef", 2e9).to_text()
    given = iter(("Your ticket:\n", "\n", f"  {text[:70]}\n", f"  {text[70:]}\n"))  # reading more would be an error
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(readline=lambda _: next(given)))
    with pytest.raises(SystemExit) as ended:
        app(["join", "-", "--runs", str(tmp_path)])
    told = "homes: the run is over (round 9 of 9), and nothing answers at 127.0.0.1:1 any more\n"
    assert (ended.value.code, capsys.readouterr().out) == (0, told)


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
