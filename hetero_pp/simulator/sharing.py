"""Times when the users of a shared link are done: exact, as the link is never idle while anyone has bytes to send."""

from __future__ import annotations

import numpy as np

from hetero_pp.simulator.pipeline import Array


def all_sent(starts: Array, n_bytes: Array, bandwidth: float) -> float:
    """Return the seconds when the last one is done, in whatever order they send.

    Args: starts [n]: when each begins to send; n_bytes [n]; bandwidth in bits per second.

    It is the largest of (start + all bytes that start then or later), as the link works without a pause from some start
    on.
    """
    order = np.argsort(-starts)
    return float((starts[order] + np.cumsum(n_bytes[order]) * 8 / bandwidth).max())


def fair_ends(n_bytes: Array, bandwidth: float) -> Array:
    """Return the seconds [n] until each has its bytes, if all begin together and share the link evenly.

    While the smallest is in transit, all get as much as it does: end_i = sum_j min(bytes_i, bytes_j) over the
    bandwidth.
    """
    order = np.argsort(n_bytes)
    ascending = n_bytes[order]
    later = np.arange(len(ascending) - 1, -1, -1)
    ends = np.empty(len(ascending))
    ends[order] = (np.cumsum(ascending) + later * ascending) * 8 / bandwidth
    return ends
