"""How many calls of one caller are open at once: a bounded number, so that nobody takes the threads of others."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hetero_pp.errors import TooMuch


class OpenCalls:
    """Of one server."""

    def __init__(self, most: int, what: str = "calls") -> None:
        """`most`: how many each caller may have open; `what`: their plural in error messages."""
        self._most, self._what = most, what
        self._open: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def one_more(self, caller: str) -> Iterator[None]:
        """While the block runs. Raises TooMuch."""
        with self._lock:
            if self._open[caller] >= self._most:
                raise TooMuch(f"{caller} has {self._most} {self._what} open, expected no more")
            self._open[caller] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[caller] -= 1
