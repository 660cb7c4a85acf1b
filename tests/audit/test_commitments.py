"""Commitments of members: what the exchange requires, what the record keeps, and whose chain is broken."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import DamagedFile, Refused
from hetero_pp.messages.messages_pb2 import (
    Asked,
    Commitment,
    ContributionEntry,
    Judgement,
    RoundRecord,
    ShownFile,
    StageMessages,
    Statement,
)
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.store.folder import FolderStore
from replica_groups.audit.commitments import (
    BEFORE,
    INHERITED_ROUNDS,
    ROUNDS_REMEMBERED,
    Commitments,
    CommittedState,
    MemberCommitments,
    load_state,
    messages_sha256,
    sha256_in,
    state_sha256,
)
from replica_groups.audit.showing import (
    ARRIVED,
    LEFT,
    MANIFEST,
    MOST_LEFT,
    ROUNDS_TO_JUDGE,
    ROUNDS_TO_SHOW,
    WITHIN,
    Showing,
    Shows,
    draw_key,
    evidence_key,
)
from replica_groups.exchange.log import ContributionLog, record_digest
from replica_groups.member.outer_round import PendingRounds
from replica_groups.member.session import MemberSession
from replica_groups.rounds.draws import leads_to

MEMBERS = {"home.0": "home", "home.1": "home", "dc": "dc"}
READERS = frozenset({"home.0", "dc"})
NO_TENSORS = hashlib.sha256().digest()


def digest(number: int) -> bytes:
    return bytes([number]) * 32


FRESH = state_sha256(digest(3), NO_TENSORS)


def commitments() -> Commitments:
    return Commitments(MEMBERS, READERS, dict.fromkeys(MEMBERS, NO_TENSORS))


def of_text() -> Commitments:
    """Return the commitments of a run in which only text is committed to."""
    return Commitments(MEMBERS, READERS, {}, states=False)


def commitment(
    member: str, before: bytes = FRESH, after: bytes = digest(2), text: bytes | None = None, messages: bytes = b""
) -> Commitment:
    read = digest(9) if member in READERS else b""
    text = read if text is None else text
    return Commitment(member=member, before=before, after=after, rest=digest(3), text=text, messages=messages)


# ---- what the exchange requires ----


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (Commitment(), "found a contribution without a commitment, expected `audit` as on the exchange"),
        (commitment("home.0"), "found a commitment of `home.0`, expected its own"),
        (commitment("dc", text=b""), r"found a commitment with digests of \[32, 32, 32, 0, 0\] bytes"),
        (commitment("dc", after=b"short"), r"digests of \[32, 5, 32, 32, 0\] bytes"),
        (
            commitment("dc", messages=b"short"),
            r"digests of \[32, 32, 32, 32, 5\] bytes, expected \[32, 32, 32, 32, 0\]",
        ),
    ],
)
def test_a_contribution_needs_a_sound_commitment(found: Commitment, complaint: str) -> None:
    told = commitments().take("home.1" if found.member == "home.1" else "dc", 1, 1, found, 0)
    assert told is not None and re.search(complaint, told), told


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (Commitment(), "found a contribution without a commitment"),
        (Commitment(member="dc"), r"digests of \[0, 0, 0, 0, 0\] bytes, expected \[0, 0, 0, 32, 0\]"),
        (commitment("dc"), r"digests of \[32, 32, 32, 32, 0\] bytes, expected \[0, 0, 0, 32, 0\]"),
        (
            Commitment(member="dc", text=digest(9), first=1 << 50),
            "found batch 1125899906842624 as the first of round 1",
        ),
        (Commitment(member="dc", text=digest(9), first=7), None),
    ],
)
def test_without_recomputation_a_reader_commits_to_its_text_alone(found: Commitment, complaint: str | None) -> None:
    kept = of_text()
    told = kept.take("dc", 1, 1, found, 0)
    assert told is None if complaint is None else told is not None and re.search(complaint, told), told
    assert kept.take("home.1", 1, 1, Commitment(), 0) is None, "it reads no text"
    record = RoundRecord(round=1, contributions=[ContributionEntry(replica="dc", generation=1)])
    kept.add_to(record)
    assert [one.first for one in record.contributions[0].commitments] == ([] if complaint else [7])


def test_a_member_commits_once_in_a_generation() -> None:
    kept = commitments()
    assert kept.take("dc", 1, 1, commitment("dc"), 7) is None
    assert kept.take("dc", 1, 1, commitment("dc"), 7) is None
    assert kept.take("dc", 1, 1, commitment("dc", after=digest(5)), 7) == "a second, different commitment for round 1"
    assert kept.take("dc", 1, 2, commitment("dc", after=digest(5)), 7) is None


def test_the_record_keeps_the_commitments_of_its_generation_and_says_who_committed() -> None:
    kept = commitments()
    for member, generation, number in (("home.1", 2, 3), ("home.0", 2, 4), ("home.0", 1, 5), ("dc", 1, 6)):
        claimed = commitment(member, after=digest(number), messages=digest(8) if member != "dc" else b"")
        claimed.holder = 3  # whatever the member says
        assert kept.take(member, 1, generation, claimed, 7) is None
    record = RoundRecord(round=1, contributions=[ContributionEntry(replica="home", generation=2)])
    digests = {record_digest(record)}
    kept.add_to(record)
    first, second = record.contributions[0].commitments
    assert [(one.member, one.after, one.holder) for one in (first, second)] == [
        ("home.0", digest(4), 7),
        ("home.1", digest(3), 7),
    ]
    digests.add(record_digest(record))
    first.after = digest(0)
    digests.add(record_digest(record))
    second.holder = 8
    assert len(digests | {record_digest(record)}) == 4


def test_a_round_that_is_trained_twice_has_one_commitment() -> None:
    """Signatures differ each time. A group whose link breaks trains a round again, in the same generation."""
    kept = commitments()
    for signature in (b"once", b"again"):
        shown = StageMessages(records=bytes(47), from_next=Statement(signature=signature)).SerializeToString()
        found = commitment("home.1", messages=messages_sha256(shown))
        assert kept.take("home.1", 1, 1, found, 0) is None
    with pytest.raises(DamagedFile, match="2 bytes that are no digests of messages"):
        messages_sha256(b"\xff\xff")


# ---- the state that a round begins with ----


def record(round_: int, replica: str, after: bytes) -> RoundRecord:
    made = commitment(replica, after=after)
    return RoundRecord(round=round_, contributions=[ContributionEntry(replica=replica, commitments=[made])])


def _unknown(kept: Commitments, round_: int, before: bytes, rest: bytes = digest(3)) -> bool:
    """Return whether a member cannot begin a round with a state."""
    made = commitment("dc", before)
    made.rest = rest
    complaint = kept.take("dc", round_, round_, made, 0)
    assert complaint is None or "with an unknown state" in complaint
    return complaint is not None


def test_a_round_begins_with_the_state_of_the_last_one_that_counted_the_member_or_fresh() -> None:
    kept = commitments()
    kept.closed(record(1, "dc", digest(5)))
    for last_round in (1, 2):  # also if the rounds since did not count it, and in any incarnation
        assert kept.expected("dc") == digest(5)
        assert _unknown(kept, last_round + 1, digest(4))
        assert not _unknown(kept, last_round + 1, digest(5))
        kept.closed(RoundRecord(round=last_round + 1))
    assert not _unknown(kept, 4, FRESH)
    assert _unknown(kept, 5, FRESH, rest=digest(9)), "the digest of another position in the data"
    assert not _unknown(kept, 1, digest(8)), "a round that has closed since: it may have counted the member"


def test_a_run_that_goes_on_knows_the_states_and_forgets_those_of_long_ago() -> None:
    records = {1: record(1, "dc", digest(5)), 2: record(2, "home.0", digest(6))}
    kept = commitments()
    kept.closed(record(3, "dc", digest(7)))  # of a round that the run has removed as it resumed
    kept.begin(2, records.__getitem__)
    assert [kept.expected(name) for name in ("dc", "home.0")] == [digest(5), digest(6)]
    kept.closed(RoundRecord(round=ROUNDS_REMEMBERED + 1))
    assert [kept.expected(name) for name in ("dc", "home.0")] == [b"", digest(6)]


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
    with pytest.raises(DamagedFile, match="found no saved state"):
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
        self.generation: Callable[[int], int] = lambda round_: 1
        self.counts: Callable[[int], bool] = lambda round_: True
        self.right = state()
        run: Any = SimpleNamespace(
            coordinator=self,
            wait_for_record=self._record,
            retry=lambda do: do(),
            roster=Roster(MEMBERS, {}),
            expect_member=lambda member: None,
            refused=lambda sender, reason, kind=None: Refused(f"{sender}: {reason}"),
        )
        self.log = ContributionLog(FolderStore(folder))
        self.accused: list[Judgement] = []
        shows = Shows(1.0, READERS, dict.fromkeys(MEMBERS, 10_000), {})
        self.showing = Showing(run, self.log, shows, self.accused.append)
        self.showing.begin(0)

    def _record(self, round_: int) -> RoundRecord:
        entries = [
            ContributionEntry(
                replica=name,
                generation=self.generation(round_),
                commitments=[_held(commitment(one, before=self.right.sha256)) for one in members],
            )
            for name, members in (("dc", ["dc"]), ("home", ["home.0", "home.1"]))
        ]
        return RoundRecord(
            round=round_, contributions=entries if self.counts(round_) else (), sha256=digest(round_ % 256)
        )

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
    assert shown.showing.asks("dc", 3, 1) is None
    chain = json.loads(shown.log.store.get(next(key for key in shown.log.store.below("draws"))))
    shown.close(1)
    assert shown.showing.asks("dc", 3, 1) == Asked(round=1)
    assert shown.showing.asks("home.1", 3, 1) == Asked(round=1)
    assert shown.showing.asks("home.0", 4, 1) is None, "the slot has another holder"
    draw = json.loads(shown.log.store.get(draw_key(1)))
    assert draw["drawn"] == ["dc", "home"]
    assert leads_to(bytes.fromhex(draw["secret"]), 1, chain["first"], bytes.fromhex(chain["end"]))


def test_who_left_and_comes_back_with_its_ticket_is_asked_again(shown: Shown) -> None:
    shown.close(1)
    shown.showing.guests = cast(Any, SimpleNamespace(ticket_of=lambda slot, number: "his" if number != 4 else "other"))
    assert [shown.showing.asks("dc", holder, 1) for holder in (4, 5)] == [None, Asked(round=1)]


def test_files_of_all_members_arrive(shown: Shown, tmp_path: Path) -> None:
    shown.close(1)
    for member in ("home.0", "home.1"):
        assert shown.showing.asks(member, 3, 1) == Asked(round=1)
        shown.take(member, 1, shown.right, tmp_path / "file")
        assert shown.showing.asks(member, 3, 1) is None
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
    shown.showing.asks("dc", 3, 1)
    with pytest.raises(Refused, match=reason):
        shown.take("dc", 1, shown.right, tmp_path / "file", **changes)


def test_another_checkpoint_counts_after_one_retry(shown: Shown, tmp_path: Path) -> None:
    shown.close(1)
    shown.showing.asks("dc", 3, 1)
    for _ in range(2):
        with pytest.raises(Refused, match="does not match its commitment"):
            shown.take("dc", 1, state(2.0), tmp_path / "file")
    assert shown.arrived("000001-dc") == {"dc": f"showed {BEFORE} that does not match its commitment, 2 times"}


def test_who_shows_nothing_is_named_and_who_is_gone_is_not(shown: Shown) -> None:
    shown.close(1)
    for member, holder, incarnation in (("dc", 3, 1), ("dc", 3, 1), ("home.0", 3, 1), ("home.0", 3, 2)):
        assert shown.showing.asks(member, holder, incarnation) == Asked(round=1)
    shown.close(1 + ROUNDS_TO_SHOW)
    shown.showing.asks("dc", 3, 1)
    assert shown.arrived("000001-dc") == {"dc": f"did not show its checkpoint within {ROUNDS_TO_SHOW} rounds"}
    assert shown.arrived("000001-home") == {"home.0": LEFT, "home.1": LEFT}, "one was killed as soon as it was asked"
    [found] = shown.accused
    assert (found.replica, found.recomputed.member, found.recomputed.is_equal) == ("dc", "dc", False)


@pytest.mark.parametrize("distance", [ROUNDS_TO_SHOW + 1, WITHIN])
def test_who_leaves_before_each_draw_is_named_and_who_seldom_does_is_not(shown: Shown, distance: int) -> None:
    shown.showing.guests = cast(Any, SimpleNamespace(ticket_of=lambda slot, number: f"of {slot}"))
    shown.generation = lambda round_: round_ // distance
    shown.counts = lambda round_: round_ % distance < 2  # two rounds each time, of which the second was not shown
    for round_ in range(1, MOST_LEFT * distance + ROUNDS_TO_SHOW):
        shown.close(round_)
        shown.showing._draw()
    assert not shown.accused, f"{MOST_LEFT} times are allowed"
    for round_ in range(shown.last_round + 1, (MOST_LEFT + 1) * distance + ROUNDS_TO_SHOW + 2):
        shown.close(round_)
        shown.showing._draw()
    expected = f"left before it showed a drawn round, {MOST_LEFT + 1} times in {WITHIN} rounds"
    named = {one.recomputed.cause for one in shown.accused}
    assert named == ({f"{member} {expected}" for member in MEMBERS} if distance < WITHIN else set())


def test_a_replica_is_left_out_while_its_holder_owes_a_checkpoint(shown: Shown, tmp_path: Path) -> None:
    def owing(holder: int = 3) -> set[str]:
        record = shown._record(2)
        for entry in record.contributions:
            for made in entry.commitments:
                made.holder = holder
        return {*shown.showing.owing(record)}

    shown.close(1)
    shown.showing.asks("home.1", 3, 1)
    assert owing() == {"home"}, "the others were not asked yet"
    assert owing(holder=4) == set(), "another holder is not to blame"
    shown.take("home.1", 1, shown.right, tmp_path / "file")
    assert owing() == set()


def test_what_no_validator_judges_is_removed_and_evidence_is_not(shown: Shown, tmp_path: Path) -> None:
    shown.close(2)
    for round_ in (1, 2):
        shown.showing.asks("dc", 3, 1)
        shown.take("dc", round_, shown.right, tmp_path / "file")
    shown.log.store.put(f"{evidence_key(1, 'dc')}/{MANIFEST}", b"{}")
    shown.close(2 + ROUNDS_TO_JUDGE)
    shown.showing.asks("dc", 3, 1)
    kept = {key.split("/")[1] for key in shown.log.store.below("evidence")}
    assert "000001-dc" in kept and "000002-dc" not in kept and "000003-dc" in kept


def test_an_exchange_that_begins_again_has_another_chain(shown: Shown) -> None:
    shown.log.store.put("evidence/000007-dc/dc/x", b"of a later round")
    shown.log.store.put("evidence/000002-dc/dc/x", b"of an earlier round")
    shown.showing.begin(5)
    assert len(shown.log.store.names("draws")) == 2
    assert shown.log.store.names("evidence") == ["000002-dc/"]


def _member(folder: Path) -> MemberCommitments:
    member: Any = SimpleNamespace(
        batches=None, moments=dict, message_digests=StageMessages(records=b"r").SerializeToString
    )
    steps: Any = SimpleNamespace(known=lambda round_: None, known_after=lambda round_, steps: None)
    outer: Any = SimpleNamespace(own=PendingRounds(), error={})
    return MemberCommitments(MemberSession(None, "home.0", "home"), member, outer, steps, folder)


def _rounds(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("round-")) for path in folder.glob("round-*"))


def test_a_member_that_restarts_keeps_what_it_may_be_asked_for(tmp_path: Path) -> None:
    first = _member(tmp_path)
    for number in range(1, 4):
        first.begin(number, b"")
    assert _rounds(tmp_path) == [2, 3]
    second = _member(tmp_path)
    for number in range(4, 8):
        second.begin(number, b"")
    assert _rounds(tmp_path) == [2, 3, 6, 7]
    second.begin(4 + INHERITED_ROUNDS, b"")
    assert 2 not in _rounds(tmp_path)


def test_digests_that_find_a_full_disk_are_not_shown_in_part(tmp_path: Path) -> None:
    member = _member(tmp_path)
    member.begin(1, b"")

    def writes_a_part(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(Path, "write_bytes", writes_a_part):
        member.commit(1, 2)
    assert [path.name for path in (tmp_path / "round-000001").iterdir()] == [BEFORE]
