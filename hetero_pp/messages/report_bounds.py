"""Range of every number that a member may put into a report.

The exchange refuses a report outside these ranges. Readers of recorded reports skip it: a
file may be of another exchange.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.message import Message

from hetero_pp.messages.messages_pb2 import Doing, Report

MOST_LOSS = 1e6
"""Nats per token. A model that guesses has the logarithm of its vocabulary, about 12; one that diverges has more."""
MOST_NORM = 1e30  # norm of a gradient: below the largest fp32 number, 3e38
_MOST_DIVERGED = 1e60  # above every norm and loss that is computed from fp32 numbers and is finite
MOST_RATE = 1e6  # learning rate, also in the settings
MOST_SECONDS = 1e8  # three years, also in the settings
MOST_BYTES = 1 << 50  # bytes on one direction of one link in one round: 1 PiB
LEAST_BITS_PER_SECOND, MOST_BITS_PER_SECOND = 1.0, 1e15
"""Rates of a line that a host measured. A plan takes no line without bandwidth."""
MOST_MESSAGES = 1 << 40
MOST_TOKENS = 1 << 40  # tokens of one inner step or one evaluation, if the batch is not known
MOST_REFUSED = 1_000_000  # Messages that one report of refusals may stand for. They are reported once per second.
MOST_STEPS = 1 << 30
"""Inner steps of a round, also in the settings, and if neither their number nor the duration of a round is known."""

_SECONDS = (0.0, MOST_SECONDS)
_RANGES: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "inner_step": {"loss": (0.0, MOST_LOSS), "gradient_norm": (0.0, MOST_NORM), "learning_rate": (0.0, MOST_RATE)},
    "evaluation": {"loss": (0.0, MOST_LOSS), "tokens": (0, MOST_TOKENS)},
    "link_use": {
        "payload_bytes": (0, MOST_BYTES),
        "wire_bytes": (0, MOST_BYTES),
        "messages": (0, MOST_MESSAGES),
        "busy_seconds": _SECONDS,
    },
    "member_round": dict.fromkeys(
        (
            "compute_seconds",
            "wait_seconds",
            "outer_seconds",
            "evaluation_seconds",
            "blocked_seconds",
            "wait_previous_seconds",
            "wait_next_seconds",
        ),
        _SECONDS,
    )
    | {"device_bytes": (0, MOST_BYTES)},
    "refusal": {"count": (0, MOST_REFUSED)},
    "activity": {"doing": (1, max(Doing.values()))},
    "state_saving": {},
    "computes": {},
    "measured_line": dict.fromkeys(("up", "down"), (LEAST_BITS_PER_SECOND, MOST_BITS_PER_SECOND)),
    "failure": {},
    "finished": {},
}
"""Event that a member may report -> field -> smallest and largest number, both allowed."""

_DIVERGING = {"loss": MOST_LOSS, "gradient_norm": MOST_NORM}
"""Fields that are out of range or not finite in an honest report of a run that diverges."""

_FIRST_ROUND: Mapping[str, int] = {
    "inner_step": 1,
    "evaluation": 0,
    "link_use": 0,
    "member_round": 1,
    "state_saving": 0,
}
"""Events that name a round, and the first round that they may name."""


@dataclass(frozen=True)
class ReportBounds:
    """Bounds of one run."""

    steps: int = MOST_STEPS  # inner steps of one round
    tokens: Mapping[str, int] = field(default_factory=dict)  # replica -> tokens of one inner step, if it is known


def complaint(report: Report, last_round: int, bounds: ReportBounds) -> str | None:
    """Return a message on the first field of a member's report that is out of range; None if there is none.

    `last_round` is the newest round of the run.
    """
    event = report.WhichOneof("event")
    if event not in _RANGES:
        return None
    told, ranges = getattr(report, event), dict(_RANGES[event])
    if event in _FIRST_ROUND:
        ranges["round"] = (_FIRST_ROUND[event], last_round)
    if event == "inner_step":
        ranges["step"] = (0, bounds.steps - 1)
        ranges["tokens"] = (0, bounds.tokens.get(told.replica, MOST_TOKENS))
    for name, (least, most) in ranges.items():
        if _is_told(told, name) and not (least <= getattr(told, name) <= most or _has_diverged(told, name)):
            return f"`{event}.{name}`: got {getattr(told, name):g}, expected {least:g} to {most:g}"
    return None


def limit_diverged(report: Report) -> None:
    """Set losses and norms that diverged to the end of their range, because no reader has to expect NaN or more."""
    event = report.WhichOneof("event") or ""
    for name in _RANGES.get(event, {}).keys() & _DIVERGING.keys():
        told = getattr(report, event)
        if _is_told(told, name) and _has_diverged(told, name):
            setattr(told, name, _DIVERGING[name])


def _has_diverged(told: Message, name: str) -> bool:
    """Return whether a loss or a norm has a value that occurs only when training diverges."""
    if name not in _DIVERGING:
        return False
    value = getattr(told, name)
    return math.isnan(value) or value == math.inf or _DIVERGING[name] < value <= _MOST_DIVERGED


def _is_told(told: Message, name: str) -> bool:
    is_optional = told.DESCRIPTOR.fields_by_name[name].has_presence
    return not is_optional or told.HasField(name)
