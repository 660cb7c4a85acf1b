"""Program that holds a run's lease in a store until it is killed. Argument: URL."""

from __future__ import annotations

import sys
import threading

from hetero_pp.store.lease import acting_for
from hetero_pp.store.opening import open_store

if __name__ == "__main__":
    store = open_store(sys.argv[1])
    with acting_for(store, print, print, 5.0):
        store.put("acts", b"")
        threading.Event().wait()
