"""A store in a folder. Each object is a file that is written under a temporary name, flushed to disk, and renamed.

`create` uses a hard link, so exactly one of several writers gets a name. A name is durable only once its folder has
been flushed to disk too.

`reading` and `writing` give an object of any store as a local file. For a store without files, a temporary copy is
downloaded or uploaded.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar

from hetero_pp.core.errors import StoreError
from hetero_pp.core.files import flush, free_space, is_part, part_of, remove_parts, whole, write_whole
from hetero_pp.store.store import Store, checked

MOST_TRIES = 10

T = TypeVar("T")


class FolderStore:
    """Implements Store on a file system with hard links."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> bytes:
        with storing("read", self.path(key)):
            return self.path(key).read_bytes()

    def put(self, key: str, data: bytes) -> None:
        path = self.path(key)

        def put() -> None:
            make_folder(path.parent)
            write_whole(path, data)

        with storing("written", path):
            _retried(put)

    def create(self, key: str, data: bytes) -> bool:
        path = self.path(key)

        def create() -> bool:
            make_folder(path.parent)
            part = part_of(path)
            try:
                part.write_bytes(data)
                flush(part)
                os.link(part, path)
                return True
            except FileExistsError:
                return False
            finally:
                with suppress(OSError):  # it was never created, or cannot be removed now
                    part.unlink()
                # Also after losing: the caller continues from the winner's object, whose name may not be on disk yet.
                flush(path.parent)

        with storing("written", path):
            return _retried(create)

    def below(self, folder: str = "") -> list[str]:
        top = self.path(folder) if folder else self.folder
        with storing("listed", top):
            found = (Path(here) / name for here, _, names in os.walk(top, onerror=_raise) for name in names)
            return sorted(path.relative_to(self.folder).as_posix() for path in found if not is_part(path.name))

    def names(self, folder: str = "") -> list[str]:
        top = self.path(folder) if folder else self.folder
        with storing("listed", top):
            try:
                with os.scandir(top) as found:
                    return sorted(
                        f"{one.name}/" if one.is_dir() else one.name for one in found if not is_part(one.name)
                    )
            except FileNotFoundError:
                return []

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, and then the folders that are empty."""
        for path in map(self.path, keys):
            with storing("removed", path):
                path.unlink(missing_ok=True)
            folder = path.parent
            with suppress(OSError):  # the first that is not empty
                while folder != self.folder and self.folder in folder.parents:
                    folder.rmdir()
                    folder = folder.parent

    def size(self, key: str) -> int:
        with storing("read", self.path(key)):
            return self.path(key).stat().st_size

    def copy(self, key: str, to: str) -> None:
        with storing("read", self.path(key)):
            self.put_file(to, self.path(key))

    def put_file(self, key: str, path: Path) -> None:
        to = self.path(key)

        def put() -> None:
            make_folder(to.parent)
            with whole(to) as part:
                shutil.copyfile(path, part)

        with storing("written", to):
            _retried(put)

    def get_to(self, key: str, path: Path) -> None:
        with storing("read", self.path(key)), whole(path) as part:
            shutil.copyfile(self.path(key), part)

    def path(self, key: str) -> Path:
        return self.folder / checked(key)

    def url(self, key: str = "") -> str:
        return str(self.folder / key)

    def sign(self, method: Literal["GET", "PUT"], key: str, seconds: float, size: int | None = None) -> str | None:
        """Return None: a folder has no URLs."""
        return None

    def forget_parts(self) -> None:
        remove_parts(self.folder)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and flush the name of each to disk."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for one in reversed(missing):
        try:
            one.mkdir()
        except FileExistsError:
            if not one.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(one)) from None
        flush(one.parent)


def _retried(write: Callable[[], T]) -> T:
    """Call `write` again while another process removes the empty folder into which it writes."""
    for _ in range(MOST_TRIES - 1):
        with suppress(FileNotFoundError):
            return write()
    return write()


def _raise(error: OSError) -> None:
    """Raise an error of os.walk, except that an entry was removed meanwhile."""
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def storing(done: str, path: Path) -> Iterator[None]:
    """Convert OSError to StoreError, with one line of text.

    The line names the file, the operation (`written`, `read`, ...), the reason and the free space. FileNotFoundError
    stays FileNotFoundError.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    except OSError as error:
        reason = "; ".join(filter(None, (error.strerror, free_space(error, path))))
        raise StoreError(f"{path}: cannot be {done} ({reason})") from error


# ---- objects of any store as local files ----


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
