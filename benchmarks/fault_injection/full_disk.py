"""A store that fails for a while as if its disk were full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from hetero_pp.core.errors import StoreError
from hetero_pp.store.store import Store


class FullDisk:
    """Implements Store by another store.

    `write` is called before each write, and raises OSError while the disk is full.
    """

    def __init__(self, store: Store, write: Callable[[], None]) -> None:
        self._store, self._write = store, write

    def _require_space(self, key: str) -> None:
        try:
            self._write()
        except OSError as error:
            raise StoreError(f"{self.url(key)}: cannot be written ({error.strerror})") from error

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def put(self, key: str, data: bytes) -> None:
        self._require_space(key)
        self._store.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._require_space(key)
        return self._store.create(key, data)

    def below(self, folder: str = "") -> list[str]:
        return self._store.below(folder)

    def names(self, folder: str = "") -> list[str]:
        return self._store.names(folder)

    def delete(self, keys: Sequence[str]) -> None:
        self._store.delete(keys)

    def size(self, key: str) -> int:
        return self._store.size(key)

    def copy(self, key: str, to: str) -> None:
        self._require_space(to)
        self._store.copy(key, to)

    def put_file(self, key: str, path: Path) -> None:
        self._require_space(key)
        self._store.put_file(key, path)

    def get_to(self, key: str, path: Path) -> None:
        self._store.get_to(key, path)

    def path(self, key: str) -> Path | None:
        """Return None, so that no caller writes to the file behind the key directly."""
        return None

    def url(self, key: str = "") -> str:
        return self._store.url(key)

    def sign(self, method: Literal["GET", "PUT"], key: str, seconds: float, size: int | None = None) -> str | None:
        return self._store.sign(method, key, seconds, size)

    def forget_parts(self) -> None:
        self._store.forget_parts()
