"""Objects as files for as long as a block runs: where a store has none, a copy is made, or written and then sent."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetero_pp.files import whole
from hetero_pp.store.folder import make_folder, storing
from hetero_pp.store.store import Store


@contextmanager
def reading(store: Store, key: str) -> Iterator[Path]:
    """An object as a file that is only read; FileNotFoundError if there is none."""
    path = store.path(key)
    if path is not None:
        yield path
        return
    with _scratch(key) as copy:
        store.get_to(key, copy)
        yield copy


@contextmanager
def writing(store: Store, key: str) -> Iterator[Path]:
    """A path to write a file at, which becomes the object if the block ends well."""
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
    """Where Python's `tempfile` makes files: TMPDIR says where."""
    with storing("written", Path(tempfile.gettempdir())):
        folder = tempfile.TemporaryDirectory(prefix="hetero-pp-", ignore_cleanup_errors=True)
    with folder as name:
        yield Path(name) / key.rpartition("/")[2]
