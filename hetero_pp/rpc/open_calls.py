"""Bounds the open calls of each caller, so that no caller occupies the threads of others."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hetero_pp.core.errors import TooMuch


class OpenCalls:
    """Open calls on one server."""

    def __init__(self, most: int, what: str = "calls") -> None:
        """`most`: open calls of each caller; `what`: their plural in error messages."""
        self._most, self._what = most, what
        self._open: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def one_more(self, caller: str) -> Iterator[None]:
        """Count one more call while the block runs. Raises TooMuch."""
        with self._lock:
            if self._open[caller] >= self._most:
                raise TooMuch(f"{caller} has {self._most} {self._what} open, expected no more")
            self._open[caller] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[caller] -= 1
