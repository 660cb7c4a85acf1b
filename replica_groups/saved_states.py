"""What a member needs to go on after a round, beside the run's snapshot: its optimizer, its error feedback, its data.

    <folder>/round-000010/...

A folder appears under its name only when it is whole. The newest two are kept: a run that dies while its members save
goes on from the newest round that all of them have.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetero_pp.errors import HeteroPPError
from replica_groups.ranks import ALONE, Ranks

KEPT = 2


@dataclass(frozen=True)
class SavedStates:
    """One member's, every so many rounds; on several ranks all of them make every call, and see one file system."""

    folder: Path
    every: int
    ranks: Ranks = ALONE

    def path(self, round_: int) -> Path:
        """Where the state after a round is."""
        return self.folder / f"round-{round_:06d}"

    def rounds(self) -> set[int]:
        """After which rounds it was saved."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return {int(match[1]) for path in found if (match := re.fullmatch(r"round-(\d+)", path.name))}

    def require(self, round_: int) -> None:
        """Raise HeteroPPError if there is no state of this round."""
        if not self.path(round_).is_dir():
            raise HeteroPPError(f"the run goes on after round {round_}, and {self.folder} has no state of it")

    def clear(self) -> None:
        """Forget what an earlier run left."""
        if self.ranks.is_first:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.ranks.wait()

    def is_due(self, round_: int) -> bool:
        return round_ % self.every == 0

    def save(self, round_: int, write: Callable[[Path], None]) -> None:
        """Let `write` fill a folder for this round; forget all but the newest."""
        part = self.folder / "part"
        if self.ranks.is_first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        self.ranks.wait()
        write(part)
        self.ranks.wait()
        if self.ranks.is_first:
            shutil.rmtree(self.path(round_), ignore_errors=True)
            part.rename(self.path(round_))
            for old in sorted(self.rounds())[:-KEPT]:
                shutil.rmtree(self.path(old))
