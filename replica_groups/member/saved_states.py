"""Saved states: optimizer, error feedback and data position of one member after a round.

  <folder>/round-000010/...
  <folder>/round-000010/digests.json
  <folder>/pending-000020/...

A folder gets its final name only once it is complete and on disk. The newest two are kept. If a run dies while its
members save, it resumes from the newest round that all members have. Nothing else is deleted. A run that starts again,
or resumes from an earlier round, moves unused checkpoints to <folder>/aside-1, aside-2, ...

A *pending* checkpoint is that after a round whose record the member does not know yet. It is on disk before the
exchange can include the contribution from which it follows. A record that includes exactly that contribution makes it
the checkpoint after the round, and any other record makes it void. So a member that is killed in between returns to the
same bits.
"""

from __future__ import annotations

import errno
import json
import math
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import Refused, StoreError
from hetero_pp.core.files import complaint, file_sha256, keep_trying, naming, rename_whole, write_whole
from hetero_pp.messages.messages_pb2 import ContributionEntry
from hetero_pp.rpc.exchange_service import AvailableStates
from hetero_pp.store.folder import make_folder
from hetero_pp.store.store import Store
from replica_groups.engines.ranks import ALONE, Ranks
from replica_groups.member.error_feedback import Undecided, is_named
from replica_groups.member.session import MemberSession

KEPT = 2
DIGESTS = "digests.json"

_UNREAD = "cannot be read: "  # prefix, before the reason, that replaces the digest of an unreadable file

T = TypeVar("T")


class _StateDigests(BaseModel):
    """Content of digests.json: the run of a saved state, and the sha256 of each of its files."""

    run: str
    files: dict[str, str]
    generation: int | None = None
    blobs: dict[str, str] | None = None
    """Block -> sha256 of the contribution without which the checkpoint is void; None if it is not pending."""


@dataclass(frozen=True)
class SavedStates:
    """Checkpoints of one member, every `every` rounds. All its ranks make every call and share one file system."""

    folder: Path
    run: str  # name of the run; saved states of other runs are ignored
    every: int
    ranks: Ranks = ALONE
    copies: StateCopies | None = None
    """Copies in the store, on the first rank, if another machine may take over the slot."""

    def drain(self) -> None:
        """Wait until the newest state is copied to the store, or that has failed."""
        if self.copies is not None:
            self.copies.drain()

    def end(self) -> None:
        if self.copies is not None:
            self.copies.end()

    def find(self) -> AvailableStates:
        """Return the intact local checkpoints, after fetching the newest intact copy from the store if it is newer."""
        found, tried = self.check(), math.inf
        while (fetched := self._broadcast(self._fetch(max(found.rounds, default=0), tried))) is not None:
            again, tried = self.check(), fetched
            found = AvailableStates(again.rounds, tuple(dict.fromkeys((*found.damaged, *again.damaged))))
        return found

    def _fetch(self, after: int, before: float) -> int | None:
        part = self.folder / "fetched"
        round_ = None if self.copies is None else self.copies.fetch(part, after, before)
        if round_ is not None:
            keep_trying(partial(self._take, part, round_), self._say)
        return round_

    def _take(self, part: Path, round_: int) -> None:
        """Move a fetched copy to the final path of the checkpoint after a round. It is safe to repeat."""
        if part.exists():
            if self.path(round_).exists():
                self.path(round_).rename(self._new_aside() / self.path(round_).name)
            rename_whole(part, self.path(round_))

    def path(self, round_: int) -> Path:
        return self.folder / f"round-{round_:06d}"

    def _pending(self, round_: int) -> Path:
        return self.folder / f"pending-{round_:06d}"

    def rounds(self, kind: str = "round") -> list[int]:
        """Return the rounds that have a checkpoint folder, intact or not."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(int(match[1]) for path in found if (match := re.fullmatch(rf"{kind}-(\d{{6,}})", path.name)))

    @property
    def pending(self) -> int:
        """Round of the pending checkpoint; 0 if there is none. The same on all ranks."""
        return max(self._broadcast(self.rounds("pending")), default=0)

    def written_by(self) -> int | None:
        """Return how many ranks wrote the newest checkpoint of this run; None without one."""
        for round_ in reversed(self.rounds()):
            with suppress(OSError, ValidationError):
                noted = _StateDigests.model_validate_json((self.path(round_) / DIGESTS).read_bytes())
                worlds = [match[1] for name in noted.files if (match := re.fullmatch(r"outer-\d+-of-(\d+)\..*", name))]
                if noted.run == self.run and worlds:
                    return int(worlds[0])
        return None

    def check(self) -> AvailableStates:
        """Read all checkpoints of this run and compare them with their digests."""
        whole, damaged = [], []
        for round_ in self._broadcast(self.rounds()):
            complaint = self._complaint_of(self.path(round_))
            if complaint is None:
                whole.append(round_)
            elif complaint:
                damaged.append(f"{self.path(round_)} is damaged: {complaint}")
        return AvailableStates(frozenset(whole), tuple(damaged))

    def _broadcast(self, seen: T) -> T:
        """Return the first rank's value on all ranks, because they all have to take the same branches."""
        return json.loads(self.ranks.broadcast_bytes(json.dumps(seen).encode()))

    def _complaint_of(self, folder: Path) -> str | None:
        """Return what is wrong with a checkpoint: None if nothing, an empty string if it belongs to another run."""
        digests, complaint = self._digests(folder), None
        try:
            noted = _StateDigests.model_validate_json((folder / DIGESTS).read_bytes())
            both = {*noted.files, *digests}
            wrong = sorted(name for name in both if noted.files.get(name) != digests.get(name))
            if wrong:
                complaint = f"{wrong[0]!r} does not match its digest"
            if noted.run != self.run:
                complaint = ""
        except (OSError, ValidationError):
            complaint = f"{DIGESTS} cannot be read"
        return self._broadcast(complaint)

    def _digests(self, folder: Path) -> dict[str, str]:
        """Return the sha256 of every file in a folder; each file is read by one rank."""
        own: dict[str, str] = {}
        try:
            files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != DIGESTS)
            for path in files[self.ranks.rank :: self.ranks.world]:
                name = path.relative_to(folder).as_posix()
                try:
                    own[name] = file_sha256(path)
                except OSError as error:
                    own[name] = f"{_UNREAD}{error.strerror}"
        except OSError as error:  # the other ranks wait for this rank's list
            own = {".": f"{_UNREAD}{error.strerror}"}
        parts = self.ranks.gather_bytes(json.dumps(own).encode())
        return {name: digest for part in parts for name, digest in json.loads(part).items()}

    def set_aside_all_but(self, kept: frozenset[int]) -> Path | None:
        """Move the other checkpoints to a new folder; return that folder, or None if there are none."""
        others = [round_ for round_ in self._broadcast(self.rounds()) if round_ not in kept]
        if not others:
            return None
        aside = None
        if self.ranks.is_first:
            aside = keep_trying(self._new_aside, self._say)
            for round_ in others:
                keep_trying(partial(self.path(round_).rename, aside / self.path(round_).name), self._say)
        return Path(self._broadcast(str(aside)))

    def _new_aside(self) -> Path:
        number = 1
        while (aside := self.folder / f"aside-{number}").exists():
            number += 1
        aside.mkdir()
        return aside

    def has(self, round_: int) -> bool:
        """Return whether there is a checkpoint after this round; the same on all ranks."""
        return round_ in self._broadcast(self.rounds())

    def is_due(self, round_: int) -> bool:
        return round_ % self.every == 0

    def save(self, round_: int, write: Callable[[Path], object], awaits: Undecided | None = None) -> str:
        """Let `write` fill a folder for this round, and delete all but the newest checkpoints.

        With `awaits` the checkpoint is pending until `settle` knows whether the round includes that contribution.

        If writing fails on the disk of any rank, return the reason on all ranks; otherwise return an empty string.
        After a failure the earlier checkpoints stay, and nothing of this round is left.
        """
        part, is_first = self.folder / "part", self.ranks.is_first

        def begin() -> None:
            for left in (part, *map(self._pending, self.rounds("pending"))):  # of a failed save, and of a round in vain
                if left.exists():
                    shutil.rmtree(left)
            part.mkdir(parents=True)

        def end(files: dict[str, str]) -> None:
            for name, digest in files.items():
                if digest.startswith(_UNREAD):
                    raise OSError(errno.EIO, digest, str(part / name))
            noted = _StateDigests(run=self.run, files=files)
            if awaits is not None:
                noted.generation, noted.blobs = awaits.generation, awaits.digests
            write_whole(part / DIGESTS, noted.model_dump_json(indent=1).encode())
            rename_whole(part, self.path(round_) if awaits is None else self._pending(round_))

        failure = self._failure_of(begin, is_first) or self._failure_of(partial(write, part))
        failure = failure or self._failure_of(partial(end, self._digests(part)), is_first)
        if self.ranks.is_first:
            if failure:
                shutil.rmtree(part, ignore_errors=True)
            elif awaits is None:
                self._saved(round_)
        return failure

    def settle(self, round_: int, counted: ContributionEntry | None, reads: bool = False) -> bool:
        """Make the pending checkpoint that of this round if `counted`, the record's entry, is what it awaits.

        Return whether it is; else remove it. `reads`: whether to compare its files with their digests first.
        """
        pending, is_named_ = self._pending(round_), False
        if self.ranks.is_first and pending.exists():
            with suppress(OSError, ValidationError):
                noted = _StateDigests.model_validate_json((pending / DIGESTS).read_bytes())
                is_named_ = noted.blobs is not None and is_named(counted, noted.generation, noted.blobs)
        is_taken = self._broadcast(is_named_)
        if is_taken and reads and (complaint := self._complaint_of(pending)) is not None:
            self._say(f"{pending} is damaged: {complaint}")
            is_taken = False
        if not is_taken:
            if self.ranks.is_first:
                shutil.rmtree(pending, ignore_errors=True)
            return False
        failure = self._failure_of(partial(rename_whole, pending, self.path(round_)), self.ranks.is_first)
        if self.ranks.is_first and not failure:
            self._saved(round_)
        return not failure

    def settled_in(self, rounds: range, session: MemberSession) -> int:
        """Return the round of the pending checkpoint, if it is one of these and includes what the checkpoint awaits.

        Else return 0. The files are compared with their digests.
        """
        round_ = self.pending if rounds else 0
        if round_ not in rounds:
            return 0
        return round_ if self.settle(round_, session.entry(session.record_of(round_)), reads=True) else 0

    def _saved(self, round_: int) -> None:
        """Remove all but the newest checkpoints, and copy this one to the store."""
        with suppress(OSError):  # the next save tries again
            for old in self.rounds()[:-KEPT]:
                shutil.rmtree(self.path(old), ignore_errors=True)
        if self.copies is not None:
            self.copies.saved(round_, self.path(round_))

    def _failure_of(self, do: Callable[[], object], is_mine: bool = True) -> str:
        """Call `do` on the ranks with `is_mine`; return the message of any rank's OSError on all ranks."""
        failure = ""
        if is_mine:
            try:
                with naming(self.folder):
                    do()
            except OSError as error:
                failure = complaint(error)
        failures = (one.decode() for one in self.ranks.gather_bytes(failure.encode()))
        return next(filter(None, failures), "")

    def _say(self, line: str) -> None:
        print(f"{self.folder.name}: {line}", file=sys.stderr, flush=True)


def states_of(spec: RunSpec, session: MemberSession, folder: RunFolder) -> SavedStates:
    """Return the saved states of a member, which has agreed with its run."""
    config, copies = spec.config, None
    if session.ranks.is_first and config.states.to == "store":  # another machine may take over the slot
        copies = StateCopies(config.store.open(config.name, folder.log), session.member)
    return SavedStates(folder.state(session.member), session.run, config.states_every, session.ranks, copies)


def newest_usable_state(session: MemberSession, states: SavedStates, available: AvailableStates) -> int | None:
    """Return the newest decided round of which a member has an undamaged state; None if there is none.

    States that this run cannot use are moved aside, not removed, because they may be all that is left of another run.
    """
    last_round = session.last_round()
    settled = states.settled_in(range(1, last_round + 1), session)  # the record came while the member was gone
    useful = frozenset(round_ for round_ in (*available.rounds, settled) if 0 < round_ <= last_round)
    # The log may have removed the contributions since then, older ones first. Without the first of this replica's that
    # a round included, what was counted cannot be taken out of the state's error feedback.
    for round_ in range(max(useful) + 1, last_round + 1) if useful else ():
        if (entry := session.entry(session.record(round_, session.member))) is not None:
            try:
                session.fetch(session.member, round_, session.replica, entry.blobs[0].block)
            except Refused:
                useful = frozenset()
            break
    aside = states.set_aside_all_but(useful)
    if aside is not None:
        print(f"{session.member}: states of later rounds were moved to {aside}", file=sys.stderr, flush=True)
    return max(useful, default=None)


# Copies of saved states in the run's store, from which another machine that takes over the slot resumes.


@dataclass(frozen=True)
class _Copy:
    round: int
    folder: str  # key of the copy's folder in the store


class StateCopies:
    """Copies of one member's saved states.

      states/<member>/round-000010-<random>/...
      states/<member>/round-000010-<random>/digests.json

    They are sent in the background: with 12 bytes per parameter, an upload over a home line may take many minutes. A
    newer state replaces one that waits to be sent. digests.json is sent last, so a copy without it is incomplete.

    Only `fetch` and `drain` block. An unavailable store does not stop the member.
    """

    def __init__(self, store: Store, member: str) -> None:
        self._store = store
        self._member = member
        self._changed = threading.Condition()
        self._waiting: tuple[int, Path] | None = None
        self._is_sending = False
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def fetch(self, to: Path, after: int, before: float = math.inf) -> int | None:
        """Download the newest copy of a round after `after` and before `before`; return its round, or None.

        The caller has to check the digests, as with any saved state.
        """
        try:
            copies = [copy for copy in self._whole() if after < copy.round < before]
            newest = max(copies, key=lambda copy: copy.round, default=None)
            if newest is None:
                return None
            shutil.rmtree(to, ignore_errors=True)
            for key in self._store.below(newest.folder):
                path = to / key.removeprefix(f"{newest.folder}/")
                make_folder(path.parent)
                self._store.get_to(key, path)
            self._say(f"fetched the state after round {newest.round} from {self._store.url(newest.folder)}")
            return newest.round
        except (StoreError, OSError) as error:
            self._say(f"its states cannot be fetched from the store: {error}")
            return None

    def saved(self, round_: int, folder: Path) -> None:
        """Queue a newer checkpoint in this folder."""
        with self._changed:
            self._waiting = round_, folder
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"states of {self._member}", daemon=True)
                self._thread.start()

    def drain(self) -> None:
        """Wait until the queued checkpoint is sent or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and not self._is_sending)

    def end(self) -> None:
        with self._changed:
            self._waiting, self._has_ended = None, True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._has_ended)
                if self._waiting is None:
                    return
                (round_, folder), self._waiting, self._is_sending = self._waiting, None, True
            try:
                self._send(round_, folder)
            except (StoreError, OSError) as error:  # the next checkpoint is tried again
                self._say(f"its state after round {round_} could not be copied to the store: {error}")
            finally:
                with self._changed:
                    self._is_sending = False
                    self._changed.notify_all()

    def _send(self, round_: int, folder: Path) -> None:
        """Send a state, and delete all copies except this one and the one before.

        Copies of later rounds predate a rollback of the run.
        """
        copy = _Copy(round_, f"{self._own}/round-{round_:06d}-{secrets.token_hex(4)}")
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        for name in [*(one for one in files if one != DIGESTS), DIGESTS]:
            self._store.put_file(f"{copy.folder}/{name}", folder / name)
        before = [old for old in self._whole() if old.round < copy.round]
        kept = {copy.folder, *(old.folder for old in sorted(before, key=lambda old: old.round)[1 - KEPT :])}
        for old in self._all():
            if old.folder not in kept:
                self._store.delete([f"{old.folder}/{DIGESTS}"])
                self._store.delete(self._store.below(old.folder))

    def _all(self) -> list[_Copy]:
        found = (re.fullmatch(r"(round-(\d{6,})-[0-9a-f]+)/", name) for name in self._store.names(self._own))
        return [_Copy(int(match[2]), f"{self._own}/{match[1]}") for match in found if match]

    def _whole(self) -> list[_Copy]:
        return [copy for copy in self._all() if DIGESTS in self._store.names(copy.folder)]

    @property
    def _own(self) -> str:
        return f"states/{self._member}"

    def _say(self, line: str) -> None:
        print(f"{self._member}: {line}", file=sys.stderr, flush=True)
