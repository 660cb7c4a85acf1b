"""Exclusions that follow from audits: replicas that rounds leave out for a while, and tickets that are revoked."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from hetero_pp.config.audit import AuditSettings
from hetero_pp.core.errors import Refused
from hetero_pp.messages.messages_pb2 import Judgement
from hetero_pp.rpc.exchange_service import HeldBy
from replica_groups.exchange.audits import Exclusion
from replica_groups.exchange.memberships import Memberships
from replica_groups.exchange.runner import CoordinatorRunner
from replica_groups.rounds import events as e
from replica_groups.rounds.coordinator import BARRED_ROUNDS

REMEMBERED_ROUNDS = 64  # number of recent rounds whose members are known


class Exclusions:
    """Exclusions of one run. Thread-safe."""

    def __init__(
        self, runner: CoordinatorRunner, held_by: Callable[[str], HeldBy | None], settings: AuditSettings
    ) -> None:
        self.guests: Memberships | None = None  # members with a ticket, once they are served
        self._runner, self._held_by = runner, held_by
        self._rounds = BARRED_ROUNDS if settings.compares is None else settings.compares.excluded_rounds
        self._lock = threading.Lock()
        self._excluded: dict[str, Exclusion] = {}
        self._why: dict[int, Mapping[str, str]] = {}
        """Round -> replicas that an audit left out of it, each with the reason."""
        self._held: dict[int, Mapping[str, HeldBy]] = {}  # round -> holders of the slots as it closed
        self._accusers: dict[tuple[int, str, str], set[str]] = defaultdict(set)
        """(round, replica, named member) -> validators."""
        self._tickets: dict[str, frozenset[str]] = {}
        """Replica -> tickets of its holders in its last settled round, if it had any."""

    @property
    def in_force(self) -> dict[str, Exclusion]:
        """Exclusions that rounds after the last closed one respect."""
        with self._lock:
            last = self._runner.coordinator.last_round
            return {name: one for name, one in self._excluded.items() if one.until > last + 1}

    def of(self, round_: int, replicas: Iterable[str]) -> dict[str, str]:
        """Return which of the replicas are excluded from a round, each with the reason."""
        with self._lock:
            found = {name: self._excluded[name] for name in replicas if name in self._excluded}
        return {name: one.cause for name, one in found.items() if round_ < one.until}

    def note(self, round_: int, out: Mapping[str, str]) -> None:
        """Note the replicas that an audit left out of a round, to tell why."""
        with self._lock:
            self._why[round_] = dict(out)

    def why(self, round_: int, replica: str) -> str:
        """Return why an audit left a replica out of a round; empty if none did."""
        with self._lock:
            return self._why.get(round_, {}).get(replica, "")

    def closed(self, round_: int) -> None:
        """Note the holders of all slots. The caller holds the lock of the decisions."""
        held = self._held_now()
        with self._lock:
            self._held[round_] = held
            for old in [one for one in self._held if one <= round_ - REMEMBERED_ROUNDS]:
                del self._held[old]
                self._why.pop(old, None)
            for key in [key for key in self._accusers if key[0] <= round_ - REMEMBERED_ROUNDS]:
                del self._accusers[key]

    def restore(self, excluded: Mapping[str, Exclusion], last_round: int) -> None:
        """Take over the exclusions of an earlier exchange of the run."""
        for replica, one in excluded.items():
            if replica in self._runner.roster.replicas and one.until > last_round + 1:
                self._condemn(replica, last_round, one)

    def exclude(self, replica: str, round_: int, why: str) -> None:
        """Exclude a replica for some rounds, because of what was found about its contribution to a round."""
        since = max(round_, self._runner.coordinator.last_round)
        self._condemn(replica, round_, Exclusion(until=since + self._rounds + 1, cause=why))

    def _condemn(self, replica: str, round_: int, one: Exclusion) -> None:
        with self._lock:
            self._excluded[replica] = one
        cause = f"the audit of round {round_} excludes {replica}: {one.cause}"
        self._runner.tell(e.Condemned(replica, round_, one.until, cause))

    def changed_hands(self, round_: int) -> list[str]:
        """Return the replicas that none of the holders before holds in this round, as far as their tickets tell."""
        found = []
        for replica, tickets in self._tickets_in(round_).items():
            before = self._tickets.get(replica)
            if before and not before & tickets:
                found.append(replica)
            self._tickets[replica] = tickets
        return found

    def _tickets_in(self, round_: int) -> dict[str, frozenset[str]]:
        """Return replica -> tickets of its holders in a round, of replicas with tickets."""
        with self._lock:
            held = self._held.get(round_, {})
        return self._tickets_of(held)

    def _held_now(self) -> dict[str, HeldBy]:
        return {name: one for name in self._runner.roster.members if (one := self._held_by(name))}

    def _tickets_of(self, held: Mapping[str, HeldBy]) -> dict[str, frozenset[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for slot, one in held.items():
            if one.holder and self.guests is not None and (ticket := self.guests.ticket_of(slot, one.holder)):
                found[self._runner.roster.members[slot]].add(ticket)
        return {replica: frozenset(tickets) for replica, tickets in found.items()}

    # ---- recomputation ----

    def accuse(self, one: Judgement, validator: str) -> int:
        """Return how many validators have computed another contribution than a replica's, and name the same member."""
        with self._lock:
            accusers = self._accusers[one.round, one.replica, one.recomputed.member]
            accusers.add(validator)
            return len(accusers)

    def punish(self, one: Judgement, why: str) -> None:
        """Revoke the ticket of a member that computed something else; without a ticket, exclude its replica.

        A replica whose members have changed since is not excluded, because its present ones may be honest.
        """
        member = one.recomputed.member
        record = self._runner.wait_for_record(one.round)
        made = [each for entry in record.contributions if entry.replica == one.replica for each in entry.commitments]
        # The holder of the slot when it committed; 0 without a ticket.
        holder = next((each.holder for each in made if each.member == member), 0)
        if holder and self.guests is not None:
            self.guests.condemn(member, holder, why)
            now = self._held_by(member)
            if now is not None and now.holder:
                try:
                    self.guests.require_in(member, now.holder)
                except Refused:
                    cause = f"its ticket was revoked: {why}"
                    self._runner.tell(e.Died(member, now.incarnation, cause))
            return
        before = self._tickets_in(one.round).get(one.replica)
        if not before or before & self._tickets_of(self._held_now()).get(one.replica, frozenset()):
            self.exclude(one.replica, one.round, why)
