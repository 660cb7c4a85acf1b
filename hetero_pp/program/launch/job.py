"""What a process of a run is told when it starts: which member it is, and where the run is kept."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_pp.changed_keys import Values
from hetero_pp.run.folder import RunFolder

FAILED = 1
CONSEQUENCE = 3
"""Exit code of a process that only stopped because another one failed."""
CRASHED = 4
"""Exit code of a process that could not go on, and may be able to if it is started again."""

STOP = {"stop": "yes"}
"""What the launcher sends to have a process save its state and end, or close no further round; and the answer."""


@dataclass(frozen=True)
class Job:
    """Given to a process when it starts. The rest, which is secret or not known yet, comes over its connection."""

    member: str
    folder: RunFolder
    resume: Values | None = None
    """If the exchange goes on with the run that is in the folder: what is changed from there on."""
    again: bool = False
    """Whether it takes the place of a process that has died, in a run that is under way."""
