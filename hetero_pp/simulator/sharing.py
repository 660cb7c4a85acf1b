"""When those who share a link are done with it: exact, as the link is never idle while anybody has bytes to send."""

from __future__ import annotations

import numpy as np

from hetero_pp.simulator.pipeline import Array


def all_sent(starts: Array, n_bytes: Array, bandwidth: float) -> float:
    """When the last of them is done, whoever goes first; seconds.

    Args: starts [n]: when each begins to send; n_bytes [n]; bandwidth in bits per second.

    The largest of (start + all that starts then or later), as the link works without a pause from some start on.
    """
    order = np.argsort(-starts)
    return float((starts[order] + np.cumsum(n_bytes[order]) * 8 / bandwidth).max())


def fair_ends(n_bytes: Array, bandwidth: float) -> Array:
    """Seconds [n] until each has its bytes, if all begin together and those who are left share the link evenly.

    While the smallest is under way, all get as much as it does: end_i = sum_j min(bytes_i, bytes_j) over the bandwidth.
    """
    order = np.argsort(n_bytes)
    ascending = n_bytes[order]
    later = np.arange(len(ascending) - 1, -1, -1)
    ends = np.empty(len(ascending))
    ends[order] = (np.cumsum(ascending) + later * ascending) * 8 / bandwidth
    return ends
