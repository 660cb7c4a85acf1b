"""Files that are whole and durable once they have their name: written beside, flushed to the disk, renamed."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MODE, _SECRET_MODE = 0o666, 0o600
"""Before the umask takes its bits away."""
PART = ".part"
"""What the name of a file ends in until it is whole."""


def write_whole(path: Path, data: bytes, is_secret: bool = False) -> None:
    """Write a file of which no reader ever sees a part, and which a crash of the machine does not take back."""
    with whole(path, is_secret) as part:
        part.write_bytes(data)


@contextmanager
def whole(path: Path, is_secret: bool = False) -> Iterator[Path]:
    """A path to write a file at, which becomes `path` if the block ends well. Of several writers the last one wins.

    The umask decides who may read and write the file, whatever the library that writes it does (safetensors lets the
    owner alone). Only the owner may read and write a secret.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        part.touch(_SECRET_MODE if is_secret else _MODE, exist_ok=False)
        mode = stat.S_IMODE(part.stat().st_mode)
        yield part
        part.chmod(mode)
        flush(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    flush(path.parent)


def remove_parts(folder: Path, name: str = "*") -> None:
    """Remove what writers of such a name that were killed left in a folder and below; nobody else may write there."""
    for part in folder.rglob(f"{name}{PART}"):
        part.unlink(missing_ok=True)


def rename_whole(part: Path, path: Path) -> None:
    """Give a file or folder that is written its name, once all of it is on the disk."""
    for found in part.rglob("*"):
        flush(found)
    flush(part)
    part.rename(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk before anything else is done."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
