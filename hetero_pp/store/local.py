"""Objects as local files while a block runs. For a store without files, a temporary copy is downloaded or uploaded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetero_pp.core.files import whole
from hetero_pp.store.folder import make_folder, storing
from hetero_pp.store.store import Store


@contextmanager
def reading(store: Store, key: str) -> Iterator[Path]:
    """Yield an object as a read-only file. Raises FileNotFoundError if there is none."""
    path = store.path(key)
    if path is not None:
        yield path
        return
    with _scratch(key) as copy:
        store.get_to(key, copy)
        yield copy


@contextmanager
def writing(store: Store, key: str) -> Iterator[Path]:
    """Yield a path to write to. The file becomes the object if the block ends without an exception."""
    path = store.path(key)
    if path is not None:
        with storing("written", path):
            make_folder(path.parent)
            with whole(path) as part:
                yield part
        return
    with _scratch(key) as copy:
        with storing("written", copy):
            yield copy
        store.put_file(key, copy)


@contextmanager
def _scratch(key: str) -> Iterator[Path]:
    """Yield a path in a temporary folder of Python's `tempfile` (set by TMPDIR)."""
    with storing("written", Path(tempfile.gettempdir())):
        folder = tempfile.TemporaryDirectory(prefix="hetero-pp-", ignore_cleanup_errors=True)
    with folder as name:
        yield Path(name) / key.rpartition("/")[2]
