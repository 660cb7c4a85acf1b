"""Gradient norms in the headers of messages between stages."""

from __future__ import annotations

import torch

from hetero_pp.core.errors import MalformedMessage
from hetero_pp.messages.messages_pb2 import LinkHeader

LARGEST_NORM = torch.finfo(torch.float32).max


def squared_norm_of(header: LinkHeader, is_due: bool) -> float | None:
    """Return the squared norm in the header of a gradient; None if it is not the last gradient of its step.

    Raises MalformedMessage for a missing, unexpected or non-finite norm, because a NaN would reach every weight.
    """
    if header.HasField("squared_norm") != is_due:
        found, expected = ("no", "one") if is_due else ("a", "none before the last")
        raise MalformedMessage(f"found {found} squared norm on a gradient of a step, expected {expected}")
    if not is_due:
        return None
    if not 0 <= header.squared_norm <= LARGEST_NORM**2:
        raise MalformedMessage(f"found a squared gradient norm of {header.squared_norm}, expected a finite one")
    return header.squared_norm
