"""What a run asks of the place where it keeps things: whole objects by key, and one that has its key first.

A key is words joined by slashes, such as "round-000007/record.json". What is written is there whole or not at all, and
durable once a call returns. Nobody else's object is ever replaced by `create`: that decides, between any number of
processes on any machines, who was first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol


def checked(key: str) -> str:
    """A key as it is; ValueError if it is none, as one that leads out of the store."""
    if any(word in ("", ".", "..") for word in key.split("/")):
        raise ValueError(f"{key!r} is no key of a store")
    return key


class Store(Protocol):
    """Objects by key. Safe to call from many threads.

    Every call raises StoreError, one line that names the object, if the store cannot be read or written.
    """

    def get(self, key: str) -> bytes:
        """An object's bytes; FileNotFoundError, with the object's name, if there is none."""

    def put(self, key: str, data: bytes) -> None:
        """Keep an object; of several the last one stays."""

    def create(self, key: str, data: bytes) -> bool:
        """Keep an object unless there is one; whether this call did.

        A store that is reached over a network may say False of what it did keep, if its first answer was lost: who has
        to know writes what nobody else would, and reads it.
        """

    def below(self, folder: str = "") -> list[str]:
        """The keys of all objects in a folder and below, sorted."""

    def names(self, folder: str = "") -> list[str]:
        """What is right in a folder, sorted: names of objects, and of folders with a slash at their end.

        A folder that has just become empty may still be named.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; nothing happens for one that is not there."""

    def size(self, key: str) -> int:
        """An object's bytes, counted; FileNotFoundError as `get`."""

    def copy(self, key: str, to: str) -> None:
        """Keep an object under another key, too, of any size; FileNotFoundError as `get`."""

    def put_file(self, key: str, path: Path) -> None:
        """Keep a file's content, which need not fit into memory."""

    def get_to(self, key: str, path: Path) -> None:
        """Write an object to a file, which is there whole or not at all; FileNotFoundError if there is none."""

    def path(self, key: str) -> Path | None:
        """Where an object is as a file of this machine, or will be; None where objects are no files."""

    def url(self, key: str = "") -> str:
        """What messages call an object, or the store."""

    def sign(self, method: Literal["GET", "PUT"], key: str, seconds: float) -> str | None:
        """A URL that lets whoever has it GET or PUT this object, for so long; None where there is no such thing."""

    def forget_parts(self) -> None:
        """Remove what writers that were killed have left; nobody may be writing."""
