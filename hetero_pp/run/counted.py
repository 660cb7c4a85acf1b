"""Expansion of `count: 2..50` of a replica: one entry of the YAML stands for several equal groups."""

from __future__ import annotations

import re
from typing import Any

MOST = 1000


def counted(entries: Any) -> Any:
    """Expand the entries of `replicas` to one for every possible group.

    `{name: home, count: 2..50}` becomes home-1 to home-50; the run requires the first two. The first takes the position
    of the entry, and the others follow all entries, so every entry keeps its index in the YAML. Raises ValueError for
    an invalid count.
    """
    if not isinstance(entries, list):
        return entries
    found, more = [], []
    for entry in entries:
        if isinstance(entry, dict) and entry.get("count") is not None:
            least, most = _bounds(entry["count"])
            first, *others = [_copy(entry, number, number > least) for number in range(1, most + 1)]
            found.append(first)
            more += others
        else:
            found.append(entry)
    return [*found, *more]


def _bounds(count: Any) -> tuple[int, int]:
    text = str(count)
    match = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4}))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not least <= most <= MOST or most == 0:
        raise ValueError(f"found count `{text}`, expected a number, or a range such as `0..50`, up to {MOST}")
    return least, most


def _copy(entry: dict[str, Any], number: int, is_optional: bool) -> dict[str, Any]:
    own = {key: value for key, value in entry.items() if key != "count"}
    return {**own, "name": f"{entry.get('name', '')}-{number}", "optional": is_optional}
