"""What a member needs to go on after a round, beside the run's snapshot: its optimizer, its error feedback, its data.

    <folder>/round-000010/...
    <folder>/round-000010/digests.json

A folder appears under its name only when it is whole and on the disk. The newest two are kept: a run that dies while
its members save goes on from the newest round that all of them have. Nothing else is ever deleted: what a run that
begins anew, or goes on from an earlier round, has no use for is moved to <folder>/aside-1, aside-2, ...
"""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from hetero_pp.errors import HeteroPPError
from hetero_pp.files import complaint, file_sha256, keep_trying, naming, rename_whole, write_whole
from hetero_pp.outer.exchange_service import AvailableStates
from replica_groups.ranks import ALONE, Ranks
from replica_groups.state_copies import StateCopies

KEPT = 2
DIGESTS = "digests.json"

_UNREAD = "cannot be read: "
"""What stands, with the reason, instead of the digest of a file that the disk does not give."""

T = TypeVar("T")


class _Noted(BaseModel):
    """What digests.json says: which run a state is of, and the sha256 of each of its files."""

    run: str
    files: dict[str, str]


@dataclass(frozen=True)
class SavedStates:
    """One member's, every so many rounds; on several ranks all of them make every call, and see one file system."""

    folder: Path
    run: str
    """Names the run; states of another are no use to this one."""
    every: int
    ranks: Ranks = ALONE
    copies: StateCopies | None = None
    """On the first rank, if another machine may go on with them."""

    def find(self) -> AvailableStates:
        """What is here and sound; and the newest sound copy from the store, if that is newer."""
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
        """Have what was fetched as the state after a round. It may be called again."""
        if part.exists():
            if self.path(round_).exists():
                self.path(round_).rename(self._new_aside() / self.path(round_).name)
            rename_whole(part, self.path(round_))

    def path(self, round_: int) -> Path:
        """Where the state after a round is."""
        return self.folder / f"round-{round_:06d}"

    def rounds(self) -> list[int]:
        """After which rounds something was saved, whatever it is worth."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(int(match[1]) for path in found if (match := re.fullmatch(r"round-(\d{6,})", path.name)))

    def check(self) -> AvailableStates:
        """Read all states of this run and hold them against their digests."""
        whole, damaged = [], []
        for round_ in self._broadcast(self.rounds()):
            digests = self._digests(self.path(round_))
            complaint = self._broadcast(self._complaint(round_, digests))
            if complaint is None:
                whole.append(round_)
            elif complaint:
                damaged.append(f"{self.path(round_)} is damaged: {complaint}")
        return AvailableStates(frozenset(whole), tuple(damaged))

    def _broadcast(self, seen: T) -> T:
        """What the first rank sees, on all of them: they have to go the same way."""
        return json.loads(self.ranks.broadcast_bytes(json.dumps(seen).encode()))

    def _complaint(self, round_: int, digests: dict[str, str]) -> str | None:
        """What is wrong with a state: None if nothing, empty if it is another run's."""
        try:
            noted = _Noted.model_validate_json((self.path(round_) / DIGESTS).read_bytes())
        except (OSError, ValidationError):
            return f"{DIGESTS} cannot be read"
        if noted.run != self.run:
            return ""
        expected = noted.files
        wrong = sorted(name for name in {*expected, *digests} if expected.get(name) != digests.get(name))
        return f"{wrong[0]!r} does not match its digest" if wrong else None

    def _digests(self, folder: Path) -> dict[str, str]:
        """sha256 of every file in a folder, each read by one rank."""
        own: dict[str, str] = {}
        try:
            files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != DIGESTS)
            mine = files[self.ranks.rank :: self.ranks.world]
            own = {path.relative_to(folder).as_posix(): _sha256(path) for path in mine}
        except OSError as error:  # the other ranks wait for this one's
            own = {".": f"{_UNREAD}{error.strerror}"}
        parts = self.ranks.gather_bytes(json.dumps(own).encode())
        return {name: digest for part in parts for name, digest in json.loads(part).items()}

    def require(self, round_: int) -> None:
        """Raise HeteroPPError if there is no state of this round."""
        if not self.path(round_).is_dir():
            raise HeteroPPError(f"{self.folder} has no state of round {round_}, after which the run resumes")

    def set_aside_all_but(self, kept: frozenset[int]) -> Path | None:
        """Move what this run has no use for out of the way; where to, if there is any."""
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
        """Return whether a state after this round is saved; the same on all ranks."""
        return round_ in self._broadcast(self.rounds())

    def is_due(self, round_: int) -> bool:
        return round_ % self.every == 0

    def save(self, round_: int, write: Callable[[Path], object]) -> str:
        """Let `write` fill a folder for this round; forget all but the newest.

        Returns why that failed on the disk of one of the ranks, on all of them, empty if it did not. What was saved
        before then stays, and nothing of this round is left.
        """
        part = self.folder / "part"
        failure = (
            self._failure_of(partial(self._begin, part), self.ranks.is_first)
            or self._failure_of(partial(write, part))
            or self._failure_of(partial(self._end, part, round_, self._digests(part)), self.ranks.is_first)
        )
        if self.ranks.is_first:
            if failure:
                shutil.rmtree(part, ignore_errors=True)
            elif self.copies is not None:
                self.copies.saved(round_, self.path(round_))
        return failure

    def _failure_of(self, do: Callable[[], object], is_mine: bool = True) -> str:
        """Do something on those ranks whose it is; what an OSError of any of them says, on all of them."""
        failure = ""
        if is_mine:
            try:
                with naming(self.folder):
                    do()
            except OSError as error:
                failure = complaint(error)
        failures = (one.decode() for one in self.ranks.gather_bytes(failure.encode()))
        return next(filter(None, failures), "")

    def _begin(self, part: Path) -> None:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)

    def _end(self, part: Path, round_: int, files: dict[str, str]) -> None:
        for name, digest in files.items():
            if digest.startswith(_UNREAD):
                raise OSError(errno.EIO, digest, str(part / name))
        write_whole(part / DIGESTS, _Noted(run=self.run, files=files).model_dump_json(indent=1).encode())
        rename_whole(part, self.path(round_))
        for old in self.rounds()[:-KEPT]:
            shutil.rmtree(self.path(old), ignore_errors=True)  # else after the next state

    def _say(self, line: str) -> None:
        print(f"{self.folder.name}: {line}", file=sys.stderr, flush=True)


def _sha256(path: Path) -> str:
    """Of a file; of one that cannot be read, nothing that it could be."""
    try:
        return file_sha256(path)
    except OSError as error:
        return f"{_UNREAD}{error.strerror}"
