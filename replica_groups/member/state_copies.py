"""Copies of saved states in the run's store, from which another machine that takes over the slot resumes.

  states/<member>/round-000010-<random>/...
  states/<member>/round-000010-<random>/digests.json

They are sent in the background: with 12 bytes per parameter, an upload over a home line may take many minutes. A newer
checkpoint replaces one that waits to be sent. digests.json is sent last, so a copy without it is incomplete. The newest
two copies are kept.
"""

from __future__ import annotations

import math
import re
import secrets
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from hetero_pp.core.errors import StoreError
from hetero_pp.store.folder import make_folder
from hetero_pp.store.store import Store

KEPT = 2
LAST = "digests.json"
"""Name of the file that is sent last."""


@dataclass(frozen=True)
class _Copy:
    round: int
    folder: str
    """Key of the copy's folder in the store."""


class StateCopies:
    """Copies of one member's checkpoints.

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
        copy = _Copy(round_, f"{self._own}/round-{round_:06d}-{secrets.token_hex(4)}")
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        for name in [*(one for one in files if one != LAST), LAST]:
            self._store.put_file(f"{copy.folder}/{name}", folder / name)
        self._remove_all_but(copy)

    def _remove_all_but(self, newest: _Copy) -> None:
        """Delete all copies except this one and the one before.

        Copies of later rounds predate a rollback of the run.
        """
        before = [copy for copy in self._whole() if copy.round < newest.round]
        kept = {newest.folder, *(copy.folder for copy in sorted(before, key=lambda copy: copy.round)[1 - KEPT :])}
        for copy in self._all():
            if copy.folder not in kept:
                self._store.delete([f"{copy.folder}/{LAST}"])
                self._store.delete(self._store.below(copy.folder))

    def _all(self) -> list[_Copy]:
        found = (re.fullmatch(r"(round-(\d{6,})-[0-9a-f]+)/", name) for name in self._store.names(self._own))
        return [_Copy(int(match[2]), f"{self._own}/{match[1]}") for match in found if match]

    def _whole(self) -> list[_Copy]:
        return [copy for copy in self._all() if LAST in self._store.names(copy.folder)]

    @property
    def _own(self) -> str:
        return f"states/{self._member}"

    def _say(self, line: str) -> None:
        print(f"{self._member}: {line}", file=sys.stderr, flush=True)
