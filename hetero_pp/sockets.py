"""Where Unix sockets lie: in a private folder whose path is short, as the system takes about a hundred bytes."""

from __future__ import annotations

import multiprocessing.util
import os
import tempfile
from pathlib import Path

_LONGEST_PARENT = 64
"""Bytes of the folder for temporary files, so that its sockets' paths fit: 103 bytes on macOS, 107 on Linux."""
_SHORT = "/tmp"


def socket_folder() -> Path:
    """Create a folder for sockets that only this user can enter; the caller removes it."""
    return Path(tempfile.mkdtemp(prefix="hetero-pp-", dir=_parent()))


def place_sockets_of_multiprocessing() -> None:
    """Have multiprocessing keep its sockets where their paths fit; it removes them at the end. May be called again.

    It makes one folder in a process's life, in `tempfile.tempdir`: TMPDIR, which clusters and builds make long.
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
