"""States that a member keeps to show: across a restart, and on a disk that is full."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hetero_pp.messages.messages_pb2 import StageMessages
from replica_groups.audit.commitments import BEFORE, INHERITED_ROUNDS, MemberCommitments
from replica_groups.member.session import MemberSession


def _member(folder: Path) -> MemberCommitments:
    member: Any = SimpleNamespace(
        batches=None, moments=dict, message_digests=StageMessages(records=b"r").SerializeToString
    )
    steps: Any = SimpleNamespace(known=lambda round_: None, known_after=lambda round_, steps: None)
    outer: Any = SimpleNamespace(error={})
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
