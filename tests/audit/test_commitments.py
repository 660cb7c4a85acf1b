"""Commitments of members: what the exchange requires, what the record keeps, and whose chain is broken."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from hetero_pp.core.errors import DamagedFile, Refused, TooMuch
from hetero_pp.messages.messages_pb2 import (
    Commitment,
    ContributionEntry,
    RoundRecord,
    ShownFile,
    StageMessages,
    Statement,
)
from hetero_pp.outer.exchange_service import Caller
from hetero_pp.rpc.framing import header_and_payload_frames
from hetero_pp.run.spec import Roster
from hetero_pp.store.folder import FolderStore
from replica_groups.audit.recompute.chains import Broken, Chains
from replica_groups.exchange.commitments import Commitments
from replica_groups.exchange.log import ContributionLog, record_digest
from replica_groups.exchange.server import _Servicer
from replica_groups.exchange.showing import (
    ARRIVED,
    LEFT,
    MANIFEST,
    ROUNDS_TO_JUDGE,
    ROUNDS_TO_SHOW,
    Showing,
    Shows,
    draw_key,
    evidence_key,
)
from replica_groups.member.committed_state import BEFORE, CommittedState, load_state, messages_sha256, sha256_in
from replica_groups.protocol.draws import leads_to

MEMBERS = {"home.0": "home", "home.1": "home", "dc": "dc"}
READERS = frozenset({"home.0", "dc"})


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def commitment(
    member: str, before: bytes = digest(1), after: bytes = digest(2), text: bytes | None = None, messages: bytes = b""
) -> Commitment:
    read = digest(9) if member in READERS else b""
    text = read if text is None else text
    return Commitment(member=member, before=before, after=after, text=text, messages=messages)


# ---- what the exchange requires ----


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (Commitment(), "found a contribution without a commitment, expected `audit.recompute`"),
        (commitment("home.0"), "found a commitment of `home.0`, expected its own"),
        (commitment("dc", text=b""), r"found a commitment with digests of \[32, 32, 0, 0\] bytes"),
        (commitment("dc", after=b"short"), r"digests of \[32, 5, 32, 0\] bytes"),
        (commitment("dc", messages=b"short"), r"digests of \[32, 32, 32, 5\] bytes, expected \[32, 32, 32, 0\]"),
    ],
)
def test_a_contribution_needs_a_sound_commitment(found: Commitment, complaint: str) -> None:
    kept = Commitments(MEMBERS, READERS)
    with pytest.raises(AssertionError, match=complaint):
        assert kept.take("dc", 1, 1, found, 0) is None, kept.take("dc", 1, 1, found, 0)


def test_a_stage_commits_to_its_messages() -> None:
    """One that did not could not be told from its neighbours."""
    kept, own = Commitments(MEMBERS, READERS), commitment("home.1", messages=digest(4))
    assert kept.take("home.1", 1, 1, own, 0) is None
    own.messages = b""
    expected = "found a commitment with digests of [32, 32, 0, 0] bytes, expected [32, 32, 0, 32]"
    assert kept.take("home.1", 1, 1, own, 0) == expected


def test_a_member_commits_once_in_a_generation() -> None:
    kept = Commitments(MEMBERS, READERS)
    assert kept.take("dc", 1, 1, commitment("dc"), 7) is None
    assert kept.take("dc", 1, 1, commitment("dc"), 7) is None
    assert kept.take("dc", 1, 1, commitment("dc", digest(5)), 7) == "a second, different commitment for round 1"
    assert kept.take("dc", 1, 2, commitment("dc", digest(5)), 7) is None


def test_the_record_says_who_committed_not_who_the_member_says_it_is() -> None:
    kept, claimed = Commitments(MEMBERS, READERS), commitment("dc")
    claimed.holder = 3
    kept.take("dc", 1, 1, claimed, 7)
    record = RoundRecord(round=1, contributions=[ContributionEntry(replica="dc", epoch=1)])
    kept.add_to(record)
    [found] = record.contributions[0].commitments
    assert found.holder == 7
    sealed = record_digest(record)
    found.holder = 8
    assert record_digest(record) != sealed


def test_the_record_keeps_the_commitments_of_its_generation() -> None:
    kept = Commitments(MEMBERS, READERS)
    for member, epoch, number in (("home.1", 2, 3), ("home.0", 2, 4), ("home.0", 1, 5), ("dc", 1, 6)):
        messages = digest(8) if member != "dc" else b""
        kept.take(member, 1, epoch, commitment(member, digest(number), messages=messages), 0)
    record = RoundRecord(round=1, contributions=[ContributionEntry(replica="home", epoch=2)])
    before = record_digest(record)
    kept.add_to(record)
    assert [(one.member, one.before) for one in record.contributions[0].commitments] == [
        ("home.0", digest(4)),
        ("home.1", digest(3)),
    ]
    changed = record_digest(record)
    record.contributions[0].commitments[0].after = digest(0)
    assert len({before, changed, record_digest(record)}) == 3


def test_a_round_that_is_trained_twice_has_one_commitment() -> None:
    """Signatures differ each time. A group whose link breaks trains a round again, in the same generation."""
    kept = Commitments(MEMBERS, READERS)
    for signature in (b"once", b"again"):
        shown = StageMessages(records=bytes(47), from_next=Statement(signature=signature)).SerializeToString()
        found = commitment("home.1", messages=messages_sha256(shown))
        assert kept.take("home.1", 1, 1, found, 0) is None
    with pytest.raises(DamagedFile, match="2 bytes that are no digests of messages"):
        messages_sha256(b"\xff\xff")


# ---- chains ----


def record(round_: int, *states: tuple[str, int, int, int]) -> RoundRecord:
    """Return a record of (replica, generation, before, after)."""
    entries = [
        ContributionEntry(replica=name, epoch=epoch, commitments=[commitment(name, digest(before), digest(after))])
        for name, epoch, before, after in states
    ]
    return RoundRecord(round=round_, contributions=entries)


@pytest.mark.parametrize(
    ("records", "broken", "anchors"),
    [
        ([record(1, ("dc", 1, 1, 2)), record(2, ("dc", 1, 2, 3))], [], 1),
        ([record(1, ("dc", 1, 1, 2)), record(2, ("dc", 1, 7, 3))], [Broken("dc", "dc")], 1),
        ([record(1, ("dc", 1, 1, 2)), record(2, ("dc", 2, 7, 3))], [], 2),  # it was formed anew
        ([record(1, ("dc", 1, 1, 2)), record(2), record(3, ("dc", 1, 7, 3))], [], 2),  # it was excluded
    ],
    ids=["whole", "broken", "formed anew", "excluded"],
)
def test_chains(records: Sequence[RoundRecord], broken: list[Broken], anchors: int) -> None:
    chains = Chains()
    assert [found for one in records for found in chains.follow(one)] == broken
    assert chains.anchors["dc"] == anchors


# ---- states ----


def state(value: float = 1.0, **rest: Any) -> CommittedState:
    tensors = {"error:a": torch.full((2, 3), value), "moments:0.0.step": torch.tensor(4.0)}
    return CommittedState(tensors, {"data": {"tokens": "x"}, "steps": None} | rest)


def test_a_digest_is_of_the_content_and_not_of_the_file(tmp_path: Path) -> None:
    state().save(tmp_path / BEFORE)
    assert state().sha256 == load_state(tmp_path / BEFORE).sha256 == sha256_in(tmp_path / BEFORE)
    others = [state(2.0), state(steps={"first": 1}), CommittedState({"error:a": torch.ones(3, 2)}, state().rest)]
    assert len({one.sha256 for one in [state(), *others]}) == 4


def _no_object(path: Path) -> None:
    save_file({"a": torch.ones(1)}, path, {"rest": json.dumps([1])})


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b"junk"),
        lambda path: save_file({"a": torch.ones(1)}, path),
        lambda path: save_file({"a": torch.ones(1)}, path, {"rest": "{"}),
        lambda path: save_file({"a": torch.ones(1)}, path, {"rest": "[" * 100_000}),
        _no_object,
        lambda path: path.write_bytes(b"\xff" * 8 + b"{}"),
    ],
    ids=["junk", "no rest", "no JSON", "deep", "no object", "header"],
)
def test_a_hostile_file_is_refused(tmp_path: Path, write: Callable[[Path], object]) -> None:
    write(tmp_path / BEFORE)
    with pytest.raises(DamagedFile, match="found no member checkpoint"):
        sha256_in(tmp_path / BEFORE)


# ---- showing ----


def _held(found: Commitment) -> Commitment:
    """Return a commitment as holder 3 of the slot made it."""
    found.holder = 3
    return found


class Shown:
    """An exchange's draws, in a run in which each round includes `home` and `dc`."""

    def __init__(self, folder: Path) -> None:
        self.last_round = 0
        self.right = state()
        decisions = SimpleNamespace(wait_for_record=self._record, patiently=lambda do: do())
        run: Any = SimpleNamespace(
            coordinator=self,
            decisions=decisions,
            roster=Roster(MEMBERS, {}),
            expect_member=lambda member: None,
            refused=lambda sender, reason, kind=None: Refused(f"{sender}: {reason}"),
        )
        self.log = ContributionLog(FolderStore(folder))
        self.showing = Showing(run, self.log, Shows(1.0, READERS, dict.fromkeys(MEMBERS, 10_000)))
        self.showing.begin(0)

    def _record(self, round_: int) -> RoundRecord:
        entries = [
            ContributionEntry(
                replica=name,
                epoch=1,
                commitments=[_held(commitment(one, before=self.right.sha256)) for one in members],
            )
            for name, members in (("dc", ["dc"]), ("home", ["home.0", "home.1"]))
        ]
        return RoundRecord(round=round_, contributions=entries, sha256=digest(round_))

    def close(self, round_: int) -> None:
        self.last_round = round_

    def take(self, member: str, round_: int, shown: CommittedState, path: Path, **changes: Any) -> None:
        shown.save(path)
        header = ShownFile(round=round_, name=BEFORE, size=path.stat().st_size)
        for field, value in changes.items():
            setattr(header, field, value)
        self.showing.take(header, path, Caller(member, holder=3))

    def arrived(self, name: str) -> Any:
        return json.loads(self.log.store.get(f"evidence/{name}/{ARRIVED}"))["missing"]


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    return Shown(tmp_path / "log")


def test_who_is_drawn_is_asked_and_the_secret_is_revealed(shown: Shown) -> None:
    assert shown.showing.asks("dc", 3) is None
    chain = json.loads(shown.log.store.get(next(key for key in shown.log.store.below("draws"))))
    shown.close(1)
    assert shown.showing.asks("dc", 3) == 1
    assert shown.showing.asks("home.1", 3) == 1
    assert shown.showing.asks("home.0", 4) is None, "the slot has another holder"
    draw = json.loads(shown.log.store.get(draw_key(1)))
    assert draw["drawn"] == ["dc", "home"]
    assert leads_to(bytes.fromhex(draw["secret"]), 1, chain["first"], bytes.fromhex(chain["end"]))


def test_who_left_and_comes_back_with_its_ticket_is_asked_again(shown: Shown) -> None:
    shown.close(1)
    shown.showing.guests = cast(Any, SimpleNamespace(ticket_of=lambda place, number: "his" if number != 4 else "other"))
    assert [shown.showing.asks("dc", holder) for holder in (4, 5)] == [None, 1]


def test_files_of_all_members_arrive(shown: Shown, tmp_path: Path) -> None:
    shown.close(1)
    for member in ("home.0", "home.1"):
        assert shown.showing.asks(member, 3) == 1
        shown.take(member, 1, shown.right, tmp_path / "file")
        assert shown.showing.asks(member, 3) is None
    assert shown.arrived("000001-home") == {}
    assert shown.log.store.size(f"evidence/000001-home/home.0/{BEFORE}") > 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"round": 2}, "was not asked for it"),
        ({"name": "../../x"}, r"shows '../../x', expected one of \['before.safetensors'\]"),
        ({"size": 10_001}, "shows 10001 bytes of before.safetensors, expected at most 10000"),
        ({"size": 0}, "shows 0 bytes"),
    ],
)
def test_what_nobody_asked_for_is_refused(shown: Shown, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    shown.close(1)
    shown.showing.asks("dc", 3)
    with pytest.raises(Refused, match=reason):
        shown.take("dc", 1, shown.right, tmp_path / "file", **changes)


def test_another_checkpoint_counts_after_one_retry(shown: Shown, tmp_path: Path) -> None:
    shown.close(1)
    shown.showing.asks("dc", 3)
    for _ in range(2):
        with pytest.raises(Refused, match="does not match its commitment"):
            shown.take("dc", 1, state(2.0), tmp_path / "file")
    assert shown.arrived("000001-dc") == {"dc": f"showed {BEFORE} that does not match its commitment, 2 times"}


def test_who_shows_nothing_is_named_and_who_is_gone_is_not(shown: Shown) -> None:
    shown.close(1)
    shown.showing.asks("dc", 3)
    shown.close(1 + ROUNDS_TO_SHOW)
    shown.showing.asks("dc", 3)
    assert shown.arrived("000001-dc") == {"dc": f"did not show its checkpoint within {ROUNDS_TO_SHOW} rounds"}
    assert shown.arrived("000001-home") == {"home.0": LEFT, "home.1": LEFT}


def test_who_finds_a_full_disk_is_not_named(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    shown.close(1)
    shown.showing.asks("dc", 3)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", mock.Mock(side_effect=full), raising=False)
    servicer: Any = SimpleNamespace(
        exchange=SimpleNamespace(shown_by=lambda caller: shown.showing),
        callers=SimpleNamespace(of=lambda context: Caller("dc", holder=3)),
        _moving=lambda frames, context: frames,
    )
    frames = header_and_payload_frames(ShownFile(round=1, name=BEFORE, size=9), [bytes(9)])
    with pytest.raises(TooMuch, match="the exchange has no room for a file of 9 bytes"):
        _Servicer.Show(servicer, frames, cast(Any, None))
    shown.close(1 + ROUNDS_TO_SHOW)
    shown.showing.asks("dc", 3)
    assert shown.arrived("000001-dc") == {"dc": LEFT}


def test_what_no_validator_judges_is_removed_and_evidence_is_not(shown: Shown, tmp_path: Path) -> None:
    shown.close(2)
    for round_ in (1, 2):
        shown.showing.asks("dc", 3)
        shown.take("dc", round_, shown.right, tmp_path / "file")
    shown.log.store.put(f"{evidence_key(1, 'dc')}/{MANIFEST}", b"{}")
    shown.close(2 + ROUNDS_TO_JUDGE)
    shown.showing.asks("dc", 3)
    kept = {key.split("/")[1] for key in shown.log.store.below("evidence")}
    assert "000001-dc" in kept and "000002-dc" not in kept and "000003-dc" in kept


def test_an_exchange_that_begins_again_has_another_chain(shown: Shown) -> None:
    shown.log.store.put("evidence/000007-dc/dc/x", b"of a later round")
    shown.log.store.put("evidence/000002-dc/dc/x", b"of an earlier round")
    shown.showing.begin(5)
    assert len(shown.log.store.names("draws")) == 2
    assert shown.log.store.names("evidence") == ["000002-dc/"]
