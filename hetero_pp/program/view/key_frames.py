"""Key frames of a run: its state at regular times, compressed, so that the page shows any moment at once."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator

MOST_FRAMES = 800
"""Above this number every second frame is dropped, and later ones are taken half as often."""
_SECONDS_OUT_OF_ORDER = 5.0
"""A report that is older than the last frame by more belongs to an earlier start of the run, which is told again."""


class KeyFrames:
    """Frames by time, as JSON. Their number is bounded, and so is the memory: some MB for 100 members."""

    def __init__(self, interval: float) -> None:
        """`interval`: seconds between two frames at first."""
        self._interval = interval
        self._times: list[float] = []
        self._frames: list[bytes] = []

    def is_due(self, time: float) -> bool:
        """Return whether a frame at this time is wanted."""
        if not self._times:
            return True
        return time >= self._times[-1] + self._interval or time < self._times[-1] - _SECONDS_OUT_OF_ORDER

    def add(self, time: float, frame: str) -> None:
        """Add a frame. It replaces those at later times."""
        kept = bisect_right(self._times, time)
        del self._times[kept:], self._frames[kept:]
        self._times.append(time)
        self._frames.append(zlib.compress(frame.encode(), level=1))
        if len(self._times) > MOST_FRAMES:
            self._interval *= 2
            self._times, self._frames = self._times[::2], self._frames[::2]

    def at(self, time: float) -> str | None:
        """Return the last frame up to a time, or the first one; None if there is none."""
        if not self._times:
            return None
        return zlib.decompress(self._frames[max(0, bisect_right(self._times, time) - 1)]).decode()

    def some(self, most: int) -> Iterator[str]:
        """Yield at most this many frames, evenly spaced over all of them, with the last one."""
        count = len(self._frames)
        chosen = {round(index * (count - 1) / max(1, most - 1)) for index in range(most)}
        for index in sorted(chosen) if count > most else range(count):
            yield zlib.decompress(self._frames[index]).decode()
