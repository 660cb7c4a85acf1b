"""Program that writes files to a store without end. Arguments: URL, a number, and the files."""

from __future__ import annotations

import sys
from itertools import cycle
from pathlib import Path

from hetero_pp.store.opening import open_store

if __name__ == "__main__":
    store, number, *paths = open_store(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:])
    for count, path in enumerate(cycle(paths)):
        store.put_file(f"files/new-{number}-{count}", path)
        store.put_file("files/old", path)
        store.put(f"begun/{number}", b"")
