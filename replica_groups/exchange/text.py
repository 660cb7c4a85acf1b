"""The text that a run is trained on: the digest of its tokens, and the members that read it."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from hetero_pp.core.errors import DamagedFile
from hetero_pp.core.files import write_whole
from hetero_pp.store.folder import storing
from hetero_pp.store.store import Store

_SHOWN = 12  # digits of a digest that messages show


@dataclass(frozen=True)
class _TextDigest:
    tokens: str  # sha256 of the tokens, as hexadecimal digits
    by: tuple[str, ...]  # members that read them


class Text:
    """The run's text: the first member that reads it names it, and members that read another text are refused.

    A member names its text by the digest of its tokens, which nobody verifies: this protects against mistakes such as a
    wrong path, not against lies. Until a round is decided, the first member may have been wrong, so once no member that
    named this text is there, another text may be named. Not thread-safe.
    """

    def __init__(
        self,
        path: Path | None,
        is_there: Callable[[str], bool],
        has_trained: Callable[[], bool],
        shared: Store | None = None,
    ) -> None:
        """`path`: the file that keeps the text's digest; one from an earlier start of the run is final.

        `shared`: store that gets a copy of it.

        `is_there`: returns whether a member holds its slot; `has_trained`: whether a round is decided.
        """
        self._shared = shared
        self._path, self._is_there, self._has_trained = path, is_there, has_trained
        self._told = None if path is None else _kept(path)
        self._stays = self._told is not None

    @property
    def tokens(self) -> str:
        """Digest of the text; empty while no member has named one."""
        return "" if self._told is None else self._told.tokens

    def complaint(self, member: str, tokens: str) -> str:
        """Return why a member that reads these tokens may not take part; empty if it may."""
        told = self._told
        if told is None or told.tokens == tokens:
            return ""
        others = [one for one in told.by if one != member and self._is_there(one)]
        if not (self._stays or self._has_trained() or others):
            return ""
        found = f"found tokens whose sha256 begins with {tokens[:_SHOWN]}, expected {told.tokens[:_SHOWN]}"
        by = ", ".join(others or told.by)
        return f"reads another text than the run: {found}{f', as {by} reads' if by else ''}"

    def note(self, member: str, tokens: str) -> None:
        """Note that a member with these tokens takes part. May be repeated after StoreError (file not written)."""
        told = self._told
        by = told.by if told is not None and told.tokens == tokens else ()
        if member in by:
            return
        now = _TextDigest(tokens, (*by, member))
        if self._path is not None:
            content = json.dumps({"tokens": tokens, "by": now.by})
            data = f"{content}\n{_checksum(content)}\n".encode()
            if self._shared is not None:
                self._shared.put(self._path.name, data)
            with storing("written", self._path):
                write_whole(self._path, data)
        self._told = now


def shown_digest(path: Path) -> str:
    """Return the digits that messages show of the digest in a file; empty if the file is missing or damaged."""
    try:
        return _read(path).tokens[:_SHOWN]
    except (OSError, DamagedFile):
        return ""


def _kept(path: Path) -> _TextDigest | None:
    """Return what the file says; None if it is missing or damaged, because members name the text again."""
    try:
        return _read(path)
    except FileNotFoundError:
        return None
    except DamagedFile as error:
        print(f"{error}; the next member that joins determines the text of the run", file=sys.stderr, flush=True)
        return None


def _read(path: Path) -> _TextDigest:
    """Read the file. Raises DamagedFile."""
    try:
        content, checksum = path.read_text(encoding="utf-8").splitlines()
        if checksum != _checksum(content):
            raise ValueError("its checksum does not match")
        return TypeAdapter(_TextDigest).validate_json(content)
    except ValueError as error:
        raise DamagedFile(f"{path} is damaged: {str(error).splitlines()[0]}") from None


def _checksum(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()
