"""Bugs that the invariants have to find, as replacements of text in functions."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from simulation.member import Member
from simulation.stores import Store

from replica_groups.rounds.coordinator import Coordinator
from replica_groups.rounds.rules import Rules
from replica_groups.rounds.state import OpenRound, Slot


class Edit(NamedTuple):
    """A replacement in the source of a method."""

    owner: type
    method: str
    found: str
    replaced: str


SUSPENDED = "yield e.Suspend("
NOT_SUSPENDED = "yield from () if True else ("

MUTATIONS: dict[str, tuple[Edit, ...]] = {
    "counts twice": (Edit(OpenRound, "record", "sorted(self.whole)", "2 * sorted(self.whole)"),),
    "sends again what was counted": (Edit(Member, "_drop", "self.blocks_in(round_)", "()"),),
    "forgets to give back": (
        Edit(
            Member, "_settle", "if counted is None:\n        self._give_back(sent)", "if counted is None:\n        pass"
        ),
    ),
    "forgets error feedback when it returns": (Edit(Member, "_undo", "list(self._start)", "self.error"),),
    "contributes again without what it has sent": (
        Edit(Member, "_leave", "self.error, self.contributed = list(self._start), None", "self.contributed = None"),
    ),
    "closes below a quorum": (Edit(OpenRound, "count", "len(self.whole) >= needed", "self.whole"),),
    "counts parts": (
        Edit(OpenRound, "deposit", "known.blobs.keys() >= rules.blocks_of(name, self.number)", "known.blobs"),
    ),
    "waits for blocks of other fragments": (
        Edit(Rules, "blocks_of", "self.fragments.among(self._blocks_of[replica], round_)", "self._blocks_of[replica]"),
    ),
    "closes without waiting": (Edit(OpenRound, "closes_at", "if not waits:", "if True:"),),
    "never closes after grace": (Edit(OpenRound, "closes_at", "return min(", "return None and min("),),
    "accepts an old incarnation": (
        Edit(Coordinator, "_admits", "elif not self.holds(slot.name, incarnation):", "elif False:"),
        Edit(
            Coordinator,
            "_admits",
            "return self.holds(slot.name, incarnation)",
            "return incarnation <= slot.incarnation",
        ),
    ),
    "accepts an old generation's blob": (
        Edit(
            Coordinator,
            "_deposited",
            "(event.round, event.generation), (replica.round",
            "(event.round, 0), (replica.round",
        ),
        Edit(Coordinator, "_deposited", ", replica.generation)\n", ", 0)\n"),
    ),
    "does not suspend survivors": (
        Edit(Coordinator, "_suspend", SUSPENDED, NOT_SUSPENDED),
        Edit(Coordinator, "_heard", "if self._trains_ahead_of(round_) or not (is_decided or is_open):", "if False:"),
    ),
    "tells who has returned to return": (
        Edit(Coordinator, "_heard", "replica.round is None and slot.asked is None", "True"),
    ),
    "assigns a round twice": (Edit(Coordinator, "_may_join", "if replica in self.open.whole:", "if False:"),),
    "lets in out of phase": (
        Edit(Coordinator, "_may_join", "at_once = self.rules.joins_at_once or", "at_once = True or"),
    ),
    "overwrites a record": (Edit(Store, "create", "if record.round not in self.records:", "if True:"),),
    "assumes_present nobody after a restart": (Edit(Coordinator, "__init__", "if goes_on:", "if False:"),),
    "heals nobody": (Edit(Coordinator, "_found_wrong", "slot.differs = True", "pass"),),
    "does not write a record again": (
        Edit(Coordinator, "_transition", "self.open.writing, self.open.retry_at = False", "_ = False"),
    ),
    "does not say again what to train": (
        Edit(
            Coordinator,
            "_asked",
            "yield self._assign(slot, event.trained",
            "_ = (event.trained",
        ),
    ),
    "does not learn of later incarnations": (
        Edit(Coordinator, "_noted", "if event.incarnation > slot.incarnation:", "if False:"),
    ),
    "does not notice silence": (Edit(Slot, "ends_at", "silent = self", "silent = 1e9 + self"),),
    "does not notice who hangs": (Edit(Slot, "ends_at", "if self.computes", "if False"),),
    "waits for ever for who does not leave": (
        Edit(Coordinator, "_open_next", "now + self.rules.grace.most", "now + 1e9"),
    ),
    "never waits again for who missed rounds": (
        Edit(Coordinator, "_note_missed", "= now + UNAWAITED_FACTOR * waited", "= 1e9"),
    ),
    "resumes where the last stage is": (
        Edit(
            Coordinator, "_resumption", "kept.values()), pb.KeptSteps())", "reversed(kept.values())), pb.KeptSteps())"
        ),
    ),
    "begins anew though members keep steps": (
        Edit(Coordinator, "_resumption", "if self._is_possible(resumption, replica) else None", "if False else None"),
    ),
    "weighs a restarted slot like the others": (
        Edit(OpenRound, "record", "blob.steps = max(1, own.steps -", "_ = max(1, own.steps -"),
    ),
    "does not wait for a group that reforms": (
        Edit(Coordinator, "_closes_at", "if not waits and closes is not None", "if False"),
    ),
    "heals who holds the right bits": (Edit(Coordinator, "_compare", "!= right.get(parameter)", "is not None"),),
    "waits for a whole replica to leave": (
        Edit(Coordinator, "_form", "slot.held and slot.asked is not None", "replica.waits"),
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant this bug inside the block. Raise LookupError if the text to replace is missing."""
    with ExitStack() as undone:
        for edit in MUTATIONS[name]:
            undone.callback(setattr, edit.owner, edit.method, getattr(edit.owner, edit.method))
            setattr(edit.owner, edit.method, _edited(edit))
        yield


def _edited(edit: Edit) -> object:
    function = getattr(edit.owner, edit.method)
    source = getattr(function, "__mutated__", None) or textwrap.dedent(inspect.getsource(function))
    if source.count(edit.found) != 1:
        raise LookupError(f"`{edit.found}` is {source.count(edit.found)} times in {edit.owner.__name__}.{edit.method}")
    source = source.replace(edit.found, edit.replaced)
    made: dict[str, object] = {}
    exec(
        compile(f"from __future__ import annotations\n{source}", function.__code__.co_filename, "exec"),
        function.__globals__,
        made,
    )
    mutated = made[edit.method]
    mutated.__mutated__ = source  # type: ignore[attr-defined]
    return mutated
