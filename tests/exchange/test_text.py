"""A member with a different training text than the run is refused before it takes a slot.

It does not change the run's text.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_run import SETTINGS, Run

from hetero_pp.config.folder import RunFolder
from hetero_pp.core.errors import Refused
from replica_groups.exchange.exchange import Exchange

OURS, ANOTHER = "0123456789ab" * 5 + "cdef", "ba9876543210" * 5 + "cdef"
TOLD = "found tokens whose sha256 begins with ba9876543210, expected 0123456789ab, as"


def _opened(run: Run, folder: Path) -> Exchange:
    """Return an exchange that no member has joined, with the text that an earlier exchange stored in the folder."""
    text = RunFolder(folder).text
    return Exchange("run", run.roster, None, SETTINGS, run.log, rules=run.rules, text=text, clock=run.clock)


def _join(exchange: Exchange, member: str, tokens: str = "") -> None:
    assert exchange.agree(member, "{}", tokens) == "run"
    exchange.join(member, "")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "log", {"dc": 1, "home": 2, "lab": 1})


@pytest.fixture
def exchange(run: Run, tmp_path: Path) -> Exchange:
    return _opened(run, tmp_path)


def test_the_first_that_reads_a_text_says_which_the_run_is_of(exchange: Exchange, tmp_path: Path) -> None:
    _join(exchange, "home.1")  # this member reads no text
    _join(exchange, "dc", OURS)
    with pytest.raises(Refused, match=rf"^home\.0: reads another text than the run: {TOLD} dc reads$"):
        exchange.agree("home.0", "{}", ANOTHER)
    assert (exchange.runner.refusals.counts.total(), exchange.vacant()) == (1, ["home.0", "lab"])
    _join(exchange, "home.0", OURS)
    with pytest.raises(Refused, match=rf"^lab: reads another text than the run: {TOLD} dc, home\.0 reads$"):
        exchange.agree("lab", "{}", ANOTHER)


def test_of_two_that_agree_at_once_the_first_to_take_its_slot_counts(exchange: Exchange) -> None:
    exchange.agree("dc", "{}", OURS)
    exchange.agree("lab", "{}", ANOTHER)
    exchange.join("dc", "")
    with pytest.raises(Refused, match=f"lab: reads another text .* {TOLD} dc reads"):
        exchange.join("lab", "")
    assert "lab" in exchange.vacant()


def test_who_was_wrong_and_has_left_keeps_nobody_out(exchange: Exchange) -> None:
    """Until a round is decided, a member that has left no longer fixes the text. It may return with another one."""
    _join(exchange, "dc", OURS)
    exchange.died("dc", "it has left")
    _join(exchange, "dc", ANOTHER)
    exchange.died("dc", "it has left")
    _join(exchange, "lab", OURS)
    with pytest.raises(Refused, match=f"dc: reads another text .* {TOLD} lab reads"):
        exchange.agree("dc", "{}", ANOTHER)


def test_an_exchange_that_takes_over_knows_it(exchange: Exchange, run: Run, tmp_path: Path) -> None:
    _join(exchange, "dc", OURS)
    after = _opened(run, tmp_path)
    with pytest.raises(Refused, match=f"lab: reads another text .* {TOLD} dc reads"):
        after.agree("lab", "{}", ANOTHER)
    after.agree("lab", "{}", OURS)


@pytest.mark.parametrize("damage", ["another", "a part", "nothing"])
def test_what_was_kept_is_not_believed_if_it_is_damaged(
    exchange: Exchange, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    _join(exchange, "dc", OURS)
    path = RunFolder(tmp_path).text
    whole = path.read_text()
    path.write_text({"another": whole.replace("0123", "3210"), "a part": whole[:40], "nothing": ""}[damage])
    after = _opened(run, tmp_path)
    assert f"{path} is damaged: " in capsys.readouterr().err
    _join(after, "lab", OURS)
    assert json.loads(path.read_text().splitlines()[0]) == {"tokens": OURS, "by": ["lab"]}


@pytest.mark.parametrize("tokens", ["0123", "G" * 64, "0" * 63 + "\n", "A" * 64])
def test_what_is_no_digest(exchange: Exchange, tokens: str) -> None:
    with pytest.raises(Refused, match="dc: an invalid digest of tokens"):
        exchange.agree("dc", "{}", tokens)


def test_a_store_that_other_hosts_reach_gets_the_text(run: Run, tmp_path: Path) -> None:
    text = RunFolder(tmp_path).text
    own = Exchange(
        "run", run.roster, None, SETTINGS, run.log, rules=run.rules, text=text, clock=run.clock, is_shared=True
    )
    _join(own, "dc", OURS)
    assert run.log.store.get("text") == text.read_bytes()
