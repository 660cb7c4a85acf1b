"""Program that writes files to a store until it is killed. Arguments: URL, a number, and the files.

It ends by itself after many files, so that it does not fill the disk if the test that started it has ended.
"""

from __future__ import annotations

import sys
from itertools import cycle
from pathlib import Path

from hetero_pp.store.opening import open_store

MOST = 100
"""Number of new files that are written at most."""

if __name__ == "__main__":
    store, number, *paths = open_store(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:])
    for count, path in zip(range(MOST), cycle(paths), strict=False):
        store.put_file(f"files/new-{number}-{count}", path)
        store.put_file("files/old", path)
        store.put(f"begun/{number}", b"")
