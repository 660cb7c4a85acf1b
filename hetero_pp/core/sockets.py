"""Folder of Unix sockets: private, with a short path, because the system allows about a hundred bytes."""

from __future__ import annotations

import multiprocessing.util
import os
import tempfile
from pathlib import Path

_LONGEST_PARENT = 64
"""Longest path in bytes of the folder for temporary files, so that socket paths fit: 103 on macOS, 107 on Linux."""
_SHORT = "/tmp"


def host_and_port(address: str) -> tuple[str, int]:
    """Return both parts of HOST:PORT; the host of `[::1]:80` without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def socket_folder() -> Path:
    """Create a folder for sockets that only this user can enter; the caller removes it."""
    return Path(tempfile.mkdtemp(prefix="hetero-pp-", dir=_parent()))


def place_sockets_of_multiprocessing() -> None:
    """Make multiprocessing keep its sockets where their paths fit; it removes them at the end. May be called again.

    multiprocessing makes one folder per process, in `tempfile.tempdir`: TMPDIR, which is long on clusters and in
    builds.
    """
    kept = tempfile.tempdir
    tempfile.tempdir = _parent()
    try:
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = kept


def _parent() -> str:
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= _LONGEST_PARENT else _SHORT
