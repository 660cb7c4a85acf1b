"""Invitations to a run and the slots that ticket holders have: a small database beside the run's secret.

The exchange queries it at every call, while the processes of `invite` and `revoke` write to it. A slot without an
invitation is free for members that were started with the run's secret.
"""

from __future__ import annotations

import secrets
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hetero_pp.core.errors import Forbidden, Refused, StoreError, TooMuch
from hetero_pp.core.steady_clock import steady_clock
from hetero_pp.rpc.caller_limits import Pace

_SCHEMA = """
CREATE TABLE IF NOT EXISTS tickets (
    id TEXT PRIMARY KEY, place TEXT, until REAL NOT NULL, key BLOB, revoked INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS holders (
    place TEXT NOT NULL, holder INTEGER NOT NULL, ticket TEXT NOT NULL, key BLOB NOT NULL, until REAL NOT NULL,
    ended TEXT, PRIMARY KEY (place, holder)
);
CREATE TABLE IF NOT EXISTS blamed (ticket TEXT PRIMARY KEY, count INTEGER NOT NULL);
"""
_BUSY_SECONDS = 10.0

LEFT = "it has left"
"""Cause of the end of a member that freed its slot."""

MOST_BLAMED = 3
"""Malformed messages on the links of a ticket's holder after which the ticket is revoked."""

SEATS_A_MINUTE, SEATS_AT_ONCE = 10.0, 20
"""Slots that one ticket may take per minute and at once. Each is a row that is flushed while all calls wait."""

HOLDERS_KEPT = 100
"""Number of newest holders of a slot that the database keeps. Only the newest one can act."""

RENEWED_SHARE = 1e-3
"""Share of a certificate's time within which a second renewal writes nothing. Honest members renew at its half."""

_ID_BYTES = 8
_USED = (
    "the ticket was used already, and admits one process: "
    "join in the folder in which it was used, or ask for another ticket"
)


@dataclass(frozen=True)
class Holder:
    """Holder of a slot by an invitation."""

    place: str
    number: int
    """Number of the holder at its slot, from 1."""
    until: float
    """Seconds since 1970 until which it is admitted."""
    ended: str | None
    """Why it is not admitted any more; None if it is."""


@dataclass(frozen=True)
class IssuedTicket:
    """A ticket, as the exchange's host knows it."""

    id: str
    place: str | None
    """Slot that it names; None: any."""
    until: float
    """Seconds since 1970 until which it is valid."""
    is_used: bool


class Memberships:
    """Invitations of one run. May be used by many threads and processes; all changes are durable."""

    def __init__(self, path: Path, clock: Callable[[], float] | None = None) -> None:
        """Open the database in a file, which is created if it is missing. Raises StoreError if that fails."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self._clock, self._lock = path, clock or steady_clock(), threading.RLock()
        self._seats = Pace(SEATS_A_MINUTE / 60, SEATS_AT_ONCE, self._clock)
        try:
            self._database = sqlite3.connect(path, _BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            path.chmod(0o600)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            self._database.executescript(_SCHEMA)
        except sqlite3.OperationalError as error:
            raise StoreError(f"{path}: cannot be opened ({error})") from error

    def close(self) -> None:
        """Close the database, once no other thread queries it: SQLite would crash."""
        with self._lock:
            self._database.close()

    def invite(self, place: str | None, seconds: float) -> str:
        """Create a ticket; return its id. One process may take this slot, or a free one, with it within `seconds`.

        Raises Refused for a slot that is held.
        """
        ticket = secrets.token_hex(_ID_BYTES)
        with self._changing():
            if place is not None and self._is_in(self._newest(place)):
                raise Refused(f"{place} is taken: `hetero-pp revoke` frees it")
            row = (ticket, place, self._clock() + seconds)
            self._database.execute("INSERT INTO tickets (id, place, until) VALUES (?, ?, ?)", row)
        return ticket

    def valid_tickets(self) -> int:
        """Return how many tickets a member uses, or may still use."""
        query = "SELECT COUNT(*) FROM tickets WHERE NOT revoked AND (key IS NOT NULL OR until > ?)"
        with self._reading():
            count: int = self._database.execute(query, (self._clock(),)).fetchone()[0]
        return count

    def enrol(self, ticket: str, key: bytes, vacant: Collection[str], seconds: float) -> Holder:
        """Give a ticket with a key a slot for `seconds`; return its holder.

        May be repeated with the same key, after a lost reply or a departure. `vacant`: the free slots. Raises Refused
        for an unknown ticket and if no slot is free, Forbidden for a ticket that is used, expired or revoked, TooMuch
        for one that takes slots too often.
        """
        with self._changing():
            place = self._good_for(ticket, key)
            if not self._is_in(self._of_ticket(ticket)):
                if (wait_seconds := self._seats.refused_for(ticket)) > 0:
                    raise TooMuch(f"this ticket takes a slot too often; it may again in {max(1.0, wait_seconds):.0f} s")
                self._let_in(ticket, key, self._place_for(place, vacant), seconds)
            found = self._of_ticket(ticket)
            assert found is not None
            return found

    def lacks_place(self, ticket: str, key: bytes) -> bool:
        """Return whether a ticket with a key needs a slot to be chosen. Raises as `enrol`."""
        with self._reading():
            return self._good_for(ticket, key) is None and not self._is_in(self._of_ticket(ticket))

    def slot_of(self, ticket: str) -> str | None:
        """Return the slot that a ticket names; None if it admits to any. Raises Refused if it admits to none."""
        with self._reading():
            place, _, used, _ = self._ticket(ticket)
            if used is not None:
                raise Refused(_USED)
            return None if place is None else self._place_for(place, ())

    def _good_for(self, ticket: str, key: bytes) -> str | None:
        """Return the slot that a ticket names. Raises as `enrol`."""
        place, until, used, revoked = self._ticket(ticket)
        if revoked:
            raise Forbidden("the ticket was revoked")
        if used not in (None, key):
            raise Forbidden(_USED)
        if used is None and self._clock() > until:
            raise Forbidden("the ticket has expired: ask for another")
        return place

    def _ticket(self, ticket: str) -> tuple[str | None, float, bytes | None, int]:
        found = self._database.execute("SELECT place, until, key, revoked FROM tickets WHERE id = ?", (ticket,))
        row: tuple[str | None, float, bytes | None, int] | None = found.fetchone()
        if row is None:
            raise Refused("the ticket does not belong to this run")
        return row

    def _place_for(self, wanted: str | None, vacant: Collection[str]) -> str:
        if wanted is not None:
            if self._is_in(self._newest(wanted)):
                ask = "ask the operator of the run to free it (`hetero-pp revoke`), or for a ticket to another slot"
                raise Refused(f"{wanted} is taken by another host: {ask}")
            return wanted
        held = {holder.place for holder in self.holders() if self._is_in(holder)}
        free = [place for place in vacant if place not in held]
        if not free:
            raise Refused("no slot of the run is free")
        return free[0]

    def _let_in(self, ticket: str, key: bytes, place: str, seconds: float) -> None:
        newest = self._newest(place)
        row = (place, newest.number + 1 if newest else 1, ticket, key, self._clock() + seconds)
        self._database.execute("UPDATE tickets SET key = ? WHERE id = ?", (key, ticket))
        self._database.execute("INSERT INTO holders (place, holder, ticket, key, until) VALUES (?, ?, ?, ?, ?)", row)
        self._database.execute("DELETE FROM holders WHERE place = ? AND holder <= ?", (place, row[1] - HOLDERS_KEPT))

    def renew(self, place: str, number: int, key: bytes, seconds: float) -> Holder:
        """Extend a holder's admission by `seconds`. Raises Refused for a former holder, or another key."""
        with self._changing():
            self._require_in(place, number)
            query, holder = "SELECT key FROM holders WHERE place = ? AND holder = ?", (place, number)
            if self._database.execute(query, holder).fetchone() != (key,):
                raise Forbidden("a certificate can only be renewed for its original key")
            found, until = self._newest(place), self._clock() + seconds
            assert found is not None
            if found.until > until - RENEWED_SHARE * seconds:
                return found
            self._database.execute("UPDATE holders SET until = ? WHERE place = ? AND holder = ?", (until, *holder))
            return replace(found, until=until)

    def end(self, place: str, number: int, why: str) -> None:
        """End a holder's admission, and free its slot. Does nothing if it has ended already."""
        with self._changing():
            self._database.execute(
                "UPDATE holders SET ended = ? WHERE place = ? AND holder = ? AND ended IS NULL", (why, place, number)
            )

    def blame(self, place: str, number: int) -> bool:
        """Count a malformed message on a stage link of a holder, by its ticket; return whether the ticket is revoked.

        With the last of MOST_BLAMED both the ticket and the slot are revoked. A holder that leaves and comes back with
        its ticket gets another number, so numbers are not counted.
        """
        with self._changing():
            if (ticket := self._ticket_of(place, number)) is None:
                return False
            self._database.execute(
                "INSERT INTO blamed VALUES (?, 1) ON CONFLICT (ticket) DO UPDATE SET count = count + 1", (ticket,)
            )
            query = "SELECT count FROM blamed WHERE ticket = ?"
            count: int = self._database.execute(query, (ticket,)).fetchone()[0]
            if count < MOST_BLAMED:
                return False
            self._revoke(ticket, f"its links had {count} malformed messages")
            return True

    def condemn(self, place: str, number: int, why: str) -> None:
        """Revoke the ticket and the slots of a holder, present or former, because of what an audit found."""
        with self._changing():
            if (ticket := self._ticket_of(place, number)) is not None:
                self._revoke(ticket, why)

    def ticket_of(self, place: str, number: int) -> str | None:
        """Return the ticket of a holder, present or former; None if it is not known any more."""
        with self._reading():
            return self._ticket_of(place, number)

    def _ticket_of(self, place: str, number: int) -> str | None:
        query = "SELECT ticket FROM holders WHERE place = ? AND holder = ?"
        row: tuple[str] | None = self._database.execute(query, (place, number)).fetchone()
        return None if row is None else row[0]

    def _revoke(self, ticket: str, why: str) -> None:
        self._database.execute("UPDATE tickets SET revoked = 1 WHERE id = ?", (ticket,))
        self._database.execute("UPDATE holders SET ended = ? WHERE ticket = ? AND ended IS NULL", (why, ticket))

    def tickets(self) -> list[IssuedTicket]:
        """Return all tickets that were not revoked, in the order in which they expire."""
        query = "SELECT id, place, until, key IS NOT NULL FROM tickets WHERE NOT revoked ORDER BY until, id"
        with self._reading():
            found = self._database.execute(query).fetchall()
        return [IssuedTicket(id, place, until, bool(is_used)) for id, place, until, is_used in found]

    def revoke(self, what: str) -> list[str]:
        """Revoke a slot with its unused tickets, or a ticket with its slot; return what was revoked, in words.

        Raises Refused if there is nothing to revoke.
        """
        with self._changing():
            tickets = self._database.execute(
                "SELECT id FROM tickets WHERE (id = ? OR place = ?) AND key IS NULL AND NOT revoked", (what, what)
            ).fetchall()
            rows = self._database.execute(
                "SELECT place, holder, ticket FROM holders WHERE (ticket = ? OR place = ?) AND ended IS NULL",
                (what, what),
            ).fetchall()
            holders, used = [row[:2] for row in rows], [row[2:] for row in rows]
            if not tickets and not holders:
                raise Refused(f"found no host that was invited to {what}, and no ticket with this id")
            self._database.executemany("UPDATE tickets SET revoked = 1 WHERE id = ?", [*tickets, *used])
            self._database.executemany(
                "UPDATE holders SET ended = 'it was taken back' WHERE place = ? AND holder = ?", holders
            )
        return [f"the ticket {ticket}" for (ticket,) in tickets] + [
            f"{place} (holder number {number})" for place, number in holders
        ]

    def require_in(self, place: str, number: int) -> None:
        """Raise Refused if this holder does not hold the slot, or not any more."""
        with self._reading():
            self._require_in(place, number)

    def require_open(self, ticket: str) -> None:
        """Raise Refused for a ticket that admits nobody with any key."""
        with self._reading():
            if self._ticket(ticket)[3]:
                raise Refused("the ticket was revoked")

    def held_by(self, place: str) -> Holder | None:
        """Return the holder of a slot; None if no ticket holder has it."""
        with self._reading():
            newest = self._newest(place)
            return newest if self._is_in(newest) else None

    def holders(self) -> list[Holder]:
        """Return all holders, by slot and number."""
        with self._reading():
            return list(self._holders("ORDER BY place, holder"))

    def _require_in(self, place: str, number: int) -> None:
        newest = self._newest(place)
        if newest is None or number > newest.number:
            raise Refused(f"{place} has had no holder of this number")
        if number < newest.number:
            raise Refused(f"{place} has been given to another holder since")
        if newest.ended is not None:
            raise Refused(f"{place}: {newest.ended}")
        if not self._is_in(newest):
            raise Refused(f"{place}: the certificate was not renewed in time")

    def _is_in(self, holder: Holder | None) -> bool:
        return holder is not None and holder.ended is None and self._clock() <= holder.until

    def _newest(self, place: str) -> Holder | None:
        return next(self._holders("WHERE place = ? ORDER BY holder DESC LIMIT 1", place), None)

    def _of_ticket(self, ticket: str) -> Holder | None:
        """Return the last holder that a ticket admitted."""
        return next(self._holders("WHERE ticket = ? ORDER BY rowid DESC LIMIT 1", ticket), None)

    def _holders(self, clauses: str, *values: str) -> Iterator[Holder]:
        """Return the holders that a query finds, in its order."""
        found = self._database.execute(f"SELECT place, holder, until, ended FROM holders {clauses}", values)
        return (Holder(*row) for row in found.fetchall())

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Keep other processes from changes during the block. Raises StoreError."""
        with self._lock:
            try:
                yield
            except sqlite3.ProgrammingError:  # it is closed
                raise
            except sqlite3.DatabaseError as error:  # a disk that fails, or a damaged file
                raise StoreError(f"{self._path}: cannot be read ({error})") from error

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Apply all changes of a block or none, without changes by others meanwhile. Raises StoreError."""
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                yield
                self._database.execute("COMMIT")
            except sqlite3.OperationalError as error:  # a disk that is full, above all
                raise StoreError(f"{self._path}: cannot be written ({error})") from error
            finally:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
