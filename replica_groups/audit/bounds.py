"""Range of every field of a judgement. The exchange refuses a judgement outside of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hetero_pp.messages.messages_pb2 import Judgement, Losses
from hetero_pp.messages.report_bounds import MOST_LOSS

MOST_CHARACTERS = 400
"""Characters of a text in a judgement."""


def complaint(one: Judgement, members: Mapping[str, str]) -> str | None:
    """Return a message on the first field that is out of range; None if there is none. `members`: member -> replica."""
    replicas = {*members.values()}
    found = one.recomputed
    if one.replica not in replicas:
        return f"`replica`: got `{one.replica[:40]}`, expected one of {', '.join(sorted(replicas))}"
    match one.WhichOneof("finding"):
        case "losses":
            return _of_losses(one.losses)
        case "copies" if one.copies not in replicas - {one.replica}:
            return f"`copies`: got `{one.copies[:40]}`, expected another replica"
        case "copies":
            return None
        case "recomputed" if found.member and members.get(found.member) != one.replica:
            return f"`recomputed.member`: got `{found.member[:40]}`, expected a member of {one.replica}"
        case "recomputed" if not found.difference >= 0:
            return f"`recomputed.difference`: got {found.difference:g}, expected 0 or more"
        case "recomputed" if max(len(found.cause), len(found.evidence)) > MOST_CHARACTERS:
            return f"`recomputed`: got a text of more than {MOST_CHARACTERS} characters"
        case "recomputed":
            return None
    return "found a judgement without a finding"


def _of_losses(losses: Losses) -> str | None:
    """Losses of a contribution that makes the model diverge are infinite; those before it are not."""
    for field in Losses.DESCRIPTOR.fields:
        value, is_before = getattr(losses, field.name), field.name.endswith("_before")
        is_far = math.isinf(value) and value > 0 and not is_before
        if not (is_far or 0 <= value <= MOST_LOSS) or (is_before and value == 0):
            return f"`losses.{field.name}`: got {value:g}, expected a loss up to {MOST_LOSS:g}"
    return None
