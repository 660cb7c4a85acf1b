"""Interface of a store: whole objects by key, with atomic creation.

A key consists of words joined by slashes, such as "round-000007/record.json". Writes are atomic, and durable once the
call returns. `create` never replaces an object of another process. It therefore decides, among any number of processes
on any machines, which one was first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol


def checked(key: str) -> str:
    """Return the key. Raises ValueError for an invalid key, such as one that leads out of the store."""
    if any(word in ("", ".", "..") for word in key.split("/")):
        raise ValueError(f"{key!r} is no key of a store")
    return key


class Store(Protocol):
    """Objects by key. Safe to call from several threads.

    Every call raises StoreError, one line that names the object, if the store cannot be read or written.
    """

    def get(self, key: str) -> bytes:
        """Return an object's bytes. Raises FileNotFoundError, with the object's name, if there is none."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing any earlier one."""

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless it exists; return whether this call created it.

        A store behind a network may return False for an object that it did create, if its first answer was lost. A
        caller that has to be certain writes unique content and reads it back.
        """

    def below(self, folder: str = "") -> list[str]:
        """Return the keys of all objects in a folder and its subfolders, sorted."""

    def names(self, folder: str = "") -> list[str]:
        """Return the direct entries of a folder, sorted: names of objects, and names of folders with a trailing slash.

        A folder that has just become empty may still be listed.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; missing objects are ignored."""

    def size(self, key: str) -> int:
        """Return an object's size in bytes. Raises FileNotFoundError if there is none."""

    def copy(self, key: str, to: str) -> None:
        """Copy an object of any size to another key. Raises FileNotFoundError if there is none."""

    def put_file(self, key: str, path: Path) -> None:
        """Write an object from a file, which need not fit into memory."""

    def get_to(self, key: str, path: Path) -> None:
        """Write an object to a local file atomically. Raises FileNotFoundError if there is none."""

    def path(self, key: str) -> Path | None:
        """Return the path of an object on this machine, whether it exists or not; None if objects are not files."""

    def url(self, key: str = "") -> str:
        """Return the name of an object, or of the store, for messages."""

    def sign(self, method: Literal["GET", "PUT"], key: str, seconds: float, size: int | None = None) -> str | None:
        """Return a URL with which any client may GET or PUT this object for `seconds`; None if unsupported.

        With `size`, the URL is for an object of this number of bytes only; None if the service cannot be told that.
        """

    def forget_parts(self) -> None:
        """Remove the remains of killed writers. No process may be writing meanwhile."""
