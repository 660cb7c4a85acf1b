"""`count: 2..50` of a replica: one entry of the YAML stands for so many groups that are alike."""

from __future__ import annotations

import re
from typing import Any

MOST = 1000


def counted(entries: Any) -> Any:
    """Entries of `replicas` as a YAML has them, with one each for every group that there may be.

    `{name: home, count: 2..50}` is home-1 to home-50, of which the run needs the first two. The first stands where the
    entry stood, and the others behind all entries: so each entry has the place in the list that it has in the YAML.
    Raises ValueError for a count that is none.
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
