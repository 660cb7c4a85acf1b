"""Invitations to a run and the slots that ticket holders have: a small database beside the run's secret.

The exchange queries it at every call, while the processes of `invite` and `revoke` write to it. A slot without an
invitation is free for members that were started with the run's secret.

If the run's log is in a store of its own, the database is a cache of the changes there, so that another host can serve
the run:

  memberships/<mark>/000000    created by the first host that serves the run
  memberships/<mark>/000007    the seventh change, as statements of `_WRITES` with their values

The mark follows from the run's token. Each change is created once, before it is acknowledged: of two processes that
make the seventh change, the second reads the first one's, and then makes the eighth. Every 256th has all rows, too, so
that older ones can go.
"""

from __future__ import annotations

import hmac
import json
import secrets
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.core.errors import ConfigError, Forbidden, Refused, StoreError, TooMuch
from hetero_pp.core.progress import steady_clock
from hetero_pp.rpc.limits import Pace
from hetero_pp.store.store import Store
from replica_groups.exchange.log import open_log

_SCHEMA = """
CREATE TABLE IF NOT EXISTS tickets (
    id TEXT PRIMARY KEY, slot TEXT, until REAL NOT NULL, key BLOB, revoked INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS holders (
    slot TEXT NOT NULL, holder INTEGER NOT NULL, ticket TEXT NOT NULL, key BLOB NOT NULL, until REAL NOT NULL,
    joins_by REAL, ended TEXT, PRIMARY KEY (slot, holder)
);
CREATE TABLE IF NOT EXISTS malformed (
    ticket TEXT NOT NULL, other TEXT NOT NULL, count INTEGER NOT NULL, until REAL, PRIMARY KEY (ticket, other)
);
CREATE TABLE IF NOT EXISTS blamed (ticket TEXT PRIMARY KEY, count INTEGER NOT NULL);
"""
_BUSY_SECONDS = 10.0

_WRITES = {
    "invite": "INSERT INTO tickets (id, slot, until) VALUES (?, ?, ?)",
    "use": "UPDATE tickets SET key = ? WHERE id = ?",
    "revoke": "UPDATE tickets SET revoked = 1 WHERE id = ?",
    "hold": "INSERT INTO holders (slot, holder, ticket, key, until, joins_by) VALUES (?, ?, ?, ?, ?, ?)",
    "forget": "DELETE FROM holders WHERE slot = ? AND holder <= ?",
    "renew": "UPDATE holders SET until = ?, joins_by = ? WHERE slot = ? AND holder = ?",
    "joined": "UPDATE holders SET joins_by = NULL WHERE slot = ? AND holder = ? AND joins_by IS NOT NULL",
    "end": "UPDATE holders SET ended = ? WHERE slot = ? AND holder = ? AND ended IS NULL",
    "end by ticket": "UPDATE holders SET ended = ? WHERE ticket = ? AND ended IS NULL",
    "malformed": "INSERT INTO malformed VALUES (?, ?, 1, NULL) ON CONFLICT DO UPDATE SET count = count + 1",
    "part": "UPDATE malformed SET count = 0, until = ? WHERE ticket = ? AND other = ?",
    "blame": "INSERT INTO blamed VALUES (?, 1) ON CONFLICT DO UPDATE SET count = count + 1",
}
"""Every statement that changes the database, by name. The store has names and values only, so that it runs no other."""

_TABLES = ("tickets", "holders", "malformed", "blamed")
FOLDER, _HEX = "memberships", "hex"
WITH_ALL_ROWS = 256  # number of changes after which one has all rows

LEFT = "it has left"  # cause of the end of a member that freed its slot
GONE = "went to a host that waited, as its own was gone"  # cause of the end of a member whose host did not return

MOST_BLAMED = 3
"""Malformed messages between two holders after which both are parted, and requests that no honest holder sends."""

PARTED_SECONDS = 3600.0  # seconds for which two parted holders are not placed beside each other

STRANGERS = 3
"""Neighbours with different tickets from which a ticket was parted when it is revoked. One liar rarely has as many
tickets. The operator's own members count as one neighbour.
"""

_OPERATOR = ""  # stands for a ticket at a slot whose holder was started with the run's secret

RESERVED_SECONDS = 600.0
"""Seconds for which a slot is kept for a holder that has not joined. A host that prepares itself renews them."""

ADMISSIONS_A_MINUTE, ADMISSIONS_AT_ONCE = 10.0, 20
"""Slots that one ticket may take per minute and at once. Each is a row that is flushed while all calls wait."""

HOLDERS_KEPT = 100  # Number of newest holders of a slot that the database keeps. Only the newest one can act.

RENEWED_SHARE = 1e-3
"""Share of a certificate's time within which a second renewal writes nothing. Honest members renew at its half."""

_ID_BYTES = 8
_EXPIRED = "the ticket has expired: ask for another"
_USED = (
    "the ticket was used already, and admits one process: "
    "join in the folder in which it was used, or ask for another ticket"
)


@dataclass(frozen=True)
class Holder:
    """Holder of a slot by an invitation."""

    slot: str
    number: int  # number of the holder at its slot, from 1
    until: float  # seconds since 1970 until which it is admitted
    joins_by: float | None  # seconds since 1970 by which it must have joined; None once it has
    ended: str | None  # why it is not admitted any more; None if it is


@dataclass(frozen=True)
class IssuedTicket:
    """A ticket, as the exchange's host knows it."""

    id: str
    slot: str | None  # slot that it names; None: any
    until: float  # seconds since 1970 until which it is valid
    is_used: bool


_Change = TypeVar("_Change", bound=Callable[..., Any])


def _changing(change: _Change) -> _Change:
    """Apply all changes of a method or none, without changes by others meanwhile. The method raises StoreError, too.

    If another process has changed the memberships in the store since, the method runs again.
    """

    @wraps(change)
    def changed(self: Memberships, *arguments: Any, **named: Any) -> Any:
        with self._changes:
            while True:
                try:
                    self._changing_thread, self._writes = threading.get_ident(), []
                    self._writer.execute("BEGIN IMMEDIATE")
                    found = change(self, *arguments, **named)
                    if self._keep():
                        self._writer.execute("COMMIT")
                        return found
                except sqlite3.OperationalError as error:  # a disk that is full, above all
                    raise StoreError(f"{self._path}: cannot be written ({error})") from error
                finally:
                    self._changing_thread = 0
                    if self._writer.in_transaction:
                        self._writer.execute("ROLLBACK")
                self._catch_up()

    return cast(_Change, changed)


class Memberships:
    """Invitations of one run. May be used by many threads and processes; all changes are durable."""

    def __init__(
        self, path: Path, clock: Callable[[], float] | None = None, store: Store | None = None, token: str = ""
    ) -> None:
        """Open the database in a file, which is created if it is missing. Raises StoreError if that fails.

        `store`: where all changes are kept, for the hosts with the run's `token`.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self._clock = path, clock or steady_clock()
        self._lock, self._changes = threading.RLock(), threading.Lock()
        self._changing_thread, self._writes = 0, list[list[Any]]()
        self._admissions = Pace(ADMISSIONS_A_MINUTE / 60, ADMISSIONS_AT_ONCE, self._clock)
        self._store, self._folder = store, f"{FOLDER}/{mark_of(token)}"
        try:
            # Calls are admitted by the second one while a change waits for the store.
            self._writer, self._reader = (
                sqlite3.connect(path, _BUSY_SECONDS, isolation_level=None, check_same_thread=False) for _ in range(2)
            )
            path.chmod(0o600)
            self._writer.execute("PRAGMA journal_mode=WAL")
            self._writer.execute("PRAGMA synchronous=FULL")
            self._writer.executescript(_SCHEMA)
        except sqlite3.OperationalError as error:
            raise StoreError(f"{path}: cannot be opened ({error})") from error
        if store is not None:
            store.create(f"{self._folder}/000000", b"{}")
            self._catch_up()

    @property
    def _database(self) -> sqlite3.Connection:
        """Connection of this thread: with its own changes while it makes one."""
        return self._writer if self._changing_thread == threading.get_ident() else self._reader

    def close(self) -> None:
        """Close the database, once no other thread queries it: SQLite would crash."""
        with self._changes, self._lock:
            self._writer.close()
            self._reader.close()

    @_changing
    def invite(self, slot: str | None, seconds: float) -> str:
        """Create a ticket; return its id. One process may take this slot, or a free one, with it within `seconds`.

        Raises Refused for a slot that is held.
        """
        ticket = secrets.token_hex(_ID_BYTES)
        if slot is not None and self._is_in(self._newest(slot)):
            raise Refused(f"{slot} is taken: `hetero-pp revoke` frees it")
        self._write("invite", ticket, slot, self._clock() + seconds)
        return ticket

    def valid_tickets(self) -> int:
        """Return how many tickets a member uses, or may still use."""
        query = "SELECT COUNT(*) FROM tickets WHERE NOT revoked AND (key IS NOT NULL OR until > ?)"
        with self._reading():
            count: int = self._database.execute(query, (self._clock(),)).fetchone()[0]
        return count

    @_changing
    def enrol(self, ticket: str, key: bytes, vacant: Collection[str], seconds: float) -> Holder:
        """Give a ticket with a key a slot for `seconds`; return its holder.

        May be repeated with the same key, after a lost reply or a departure. `vacant`: the free slots; a ticket that
        names a slot takes one of them only if it has lost its own. Raises Refused for an unknown ticket and if no slot
        is free, Forbidden for a ticket that is used, expired or revoked, TooMuch for one that takes slots too often.
        """
        slot = self._good_for(ticket, key)
        if not self._is_in(self._of_ticket(ticket)):
            if (wait_seconds := self._admissions.refused_for(ticket)) > 0:
                raise TooMuch(f"this ticket takes a slot too often; it may again in {max(1.0, wait_seconds):.0f} s")
            wanted = None if self._has_lost(ticket) else slot
            slot, now = self._slot_for(wanted, vacant), self._clock()
            newest = self._newest(slot)
            number = newest.number + 1 if newest else 1
            self._write("use", key, ticket)
            self._write("hold", slot, number, ticket, key, now + seconds, now + RESERVED_SECONDS)
            self._write("forget", slot, number - HOLDERS_KEPT)
        found = self._of_ticket(ticket)
        assert found is not None
        return found

    def wants(self, ticket: str, key: bytes, vacant: Collection[str]) -> list[str] | None:
        """Return the slot that a ticket names if it has lost that and it is free again, or nothing if it names none.

        None: no slot has to be chosen, as it has one, or takes the one that it names. Raises as `enrol`.
        """
        with self._reading():
            own = self._good_for(ticket, key)
            if (own is not None and not self._has_lost(ticket)) or self._is_in(self._of_ticket(ticket)):
                return None
            return [own] if own is not None and own in vacant and not self._is_in(self._newest(own)) else []

    def slot_of(self, ticket: str) -> str | None:
        """Return the slot of an unused ticket; None if it admits to any. Raises Refused if it admits to none."""
        with self._reading():
            slot, _, used, _ = self._ticket(ticket)
            if used is not None:
                raise Refused(_USED)
            return None if slot is None else self._slot_for(slot, ())

    def _good_for(self, ticket: str, key: bytes) -> str | None:
        """Return the slot that a ticket names. Raises as `enrol`."""
        slot, until, used, revoked = self._ticket(ticket)
        if revoked:
            raise Forbidden("the ticket was revoked")
        if used not in (None, key):
            raise Forbidden(_USED)
        if used is None and self._clock() > until:
            raise Forbidden(_EXPIRED)
        return slot

    def _ticket(self, ticket: str) -> tuple[str | None, float, bytes | None, int]:
        found = self._database.execute("SELECT slot, until, key, revoked FROM tickets WHERE id = ?", (ticket,))
        row: tuple[str | None, float, bytes | None, int] | None = found.fetchone()
        if row is None:
            raise Refused("the ticket does not belong to this run")
        return row

    def _slot_for(self, wanted: str | None, vacant: Collection[str]) -> str:
        if wanted is not None:
            if self._is_in(self._newest(wanted)):
                ask = "ask the operator of the run to free it (`hetero-pp revoke`), or for a ticket to another slot"
                raise Refused(f"{wanted} is taken by another host: {ask}")
            return wanted
        held = {holder.slot for holder in self.holders() if self._is_in(holder)}
        free = [slot for slot in vacant if slot not in held]
        if not free:
            raise Refused("no slot of the run is free")
        return free[0]

    @_changing
    def renew(self, slot: str, number: int, key: bytes, seconds: float) -> Holder:
        """Extend a holder's admission by `seconds`. Raises Refused for a former holder, or another key."""
        self.require_in(slot, number)
        query, holder = "SELECT key FROM holders WHERE slot = ? AND holder = ?", (slot, number)
        if self._database.execute(query, holder).fetchone() != (key,):
            raise Forbidden("a certificate can only be renewed for its original key")
        found, until = self._newest(slot), self._clock() + seconds
        assert found is not None
        if found.until > until - RENEWED_SHARE * seconds:
            return found
        joins_by = None if found.joins_by is None else self._clock() + RESERVED_SECONDS
        self._write("renew", until, joins_by, *holder)
        return replace(found, until=until, joins_by=joins_by)

    @_changing
    def joined(self, slot: str, number: int) -> None:
        """Note that a holder has joined, so that its slot is kept for as long as its certificate is valid."""
        found = self._newest(slot)
        if found is not None and found.joins_by is not None:
            self._write("joined", slot, number)

    @_changing
    def end(self, slot: str, number: int, why: str) -> None:
        """End a holder's admission, and free its slot. Does nothing if it has ended already."""
        self._write("end", why, slot, number)

    @_changing
    def part(self, ends: Mapping[str, int]) -> dict[str, str]:
        """Count a malformed message between two holders, slot -> number; number 0 has no ticket.

        With the last of MOST_BLAMED both lose their slots, because nobody can know which of them lies. Their tickets
        stay valid for slots that are not beside each other. Return slot -> why, for the slots that a ticket lost.

        Counts are of the two tickets. A holder that leaves and comes back with its ticket gets another number.
        """
        tickets = [self.ticket_of(*end) if end[1] else _OPERATOR for end in ends.items()]
        if None in tickets or len(set(tickets)) < 2:
            return {}
        pairs = [tuple(tickets), tuple(tickets[::-1])]
        for pair in pairs:
            self._write("malformed", *pair)
        query, found = "SELECT count FROM malformed WHERE ticket = ? AND other = ?", dict[str, str]()
        if self._database.execute(query, pairs[0]).fetchone()[0] < MOST_BLAMED:
            return {}
        until = self._clock() + PARTED_SECONDS
        for pair in pairs:
            self._write("part", until, *pair)
        for slot, neighbour, ticket in zip(ends, [*ends][::-1], tickets, strict=True):
            if not ticket:
                continue
            why = f"was parted from its neighbour {neighbour} after {MOST_BLAMED} malformed messages"
            query = "SELECT COUNT(*) FROM malformed WHERE ticket = ? AND until IS NOT NULL"
            strangers: int = self._database.execute(query, (ticket,)).fetchone()[0]
            if strangers >= STRANGERS:
                why = f"{strangers} neighbours with different tickets had malformed messages on their links to it"
                self._revoke(ticket, why)
            self._write("end by ticket", why, ticket)
            found[slot] = why
        return found

    def lost(self, ticket: str) -> str:
        """Return why a ticket lost its slot, if it may take another one now; else an empty text."""
        with self._reading():
            last = self._of_ticket(ticket)
            if last is None or self._is_in(last) or not self._has_lost(ticket):
                return ""
            return last.ended or "is free, as its holder did not join in time"

    def may_be_neighbour(self, ticket: str, neighbours: Mapping[str, bool]) -> bool:
        """Return whether a ticket was not parted lately from the holder of a neighbouring slot.

        `neighbours`: slot -> whether it is the operator's unless a ticket holder has it.
        """
        with self._reading():
            if not (parted := self._parted_from(ticket)):
                return True
            for slot, is_operators in neighbours.items():
                holder, other = self.held_by(slot), _OPERATOR if is_operators else None
                if (other if holder is None else self.ticket_of(slot, holder.number)) in parted:
                    return False
            return True

    @_changing
    def blame(self, ticket: str) -> bool:
        """Count a request that no honest caller sends; return whether the ticket is revoked, after MOST_BLAMED."""
        self._write("blame", ticket)
        query = "SELECT count FROM blamed WHERE ticket = ?"
        count: int = self._database.execute(query, (ticket,)).fetchone()[0]
        if count >= MOST_BLAMED:
            self._revoke(ticket, f"it sent {count} requests that no honest member sends")
        return count >= MOST_BLAMED

    def _parted_from(self, ticket: str) -> set[str | None]:
        """Return the tickets beside which this one is not placed now."""
        query = "SELECT other FROM malformed WHERE ticket = ? AND until > ?"
        return {row[0] for row in self._database.execute(query, (ticket, self._clock()))}

    def _has_lost(self, ticket: str) -> bool:
        """Return whether a ticket was parted from its neighbour lately, or its slot went to a host that waited."""
        last = self._of_ticket(ticket)
        return bool(self._parted_from(ticket)) or (last is not None and last.ended == GONE)

    @_changing
    def condemn(self, slot: str, number: int, why: str) -> None:
        """Revoke the ticket and the slots of a holder, present or former, because of what an audit found."""
        if (ticket := self.ticket_of(slot, number)) is not None:
            self._revoke(ticket, why)

    def ticket_of(self, slot: str, number: int) -> str | None:
        """Return the ticket of a holder, present or former; None if it is not known any more."""
        with self._reading():
            query = "SELECT ticket FROM holders WHERE slot = ? AND holder = ?"
            row: tuple[str] | None = self._database.execute(query, (slot, number)).fetchone()
            return None if row is None else row[0]

    def _revoke(self, ticket: str, why: str) -> None:
        self._write("revoke", ticket)
        self._write("end by ticket", why, ticket)

    def tickets(self) -> list[IssuedTicket]:
        """Return all tickets that were not revoked, in the order in which they expire."""
        query = "SELECT id, slot, until, key IS NOT NULL FROM tickets WHERE NOT revoked ORDER BY until, id"
        with self._reading():
            found = self._database.execute(query).fetchall()
        return [IssuedTicket(id, slot, until, bool(is_used)) for id, slot, until, is_used in found]

    @_changing
    def revoke(self, what: str) -> list[str]:
        """Revoke a slot with its unused tickets, or a ticket with its slot; return what was revoked, in words.

        Raises Refused if there is nothing to revoke.
        """
        tickets = self._database.execute(
            "SELECT id FROM tickets WHERE (id = ? OR slot = ?) AND key IS NULL AND NOT revoked", (what, what)
        ).fetchall()
        rows = self._database.execute(
            "SELECT slot, holder, ticket FROM holders WHERE (ticket = ? OR slot = ?) AND ended IS NULL",
            (what, what),
        ).fetchall()
        holders = [row[:2] for row in rows]
        if not tickets and not holders:
            raise Refused(f"found no host that was invited to {what}, and no ticket with this id")
        for ticket in [*(row[0] for row in tickets), *(row[2] for row in rows)]:
            self._write("revoke", ticket)
        for holder in holders:
            self._write("end", "it was taken back", *holder)
        return [f"the ticket {ticket}" for (ticket,) in tickets] + [
            f"{slot} (holder number {number})" for slot, number in holders
        ]

    def require_in(self, slot: str, number: int) -> None:
        """Raise Refused if this holder does not hold the slot, or not any more."""
        with self._reading():
            newest = self._newest(slot)
            if newest is None or number > newest.number:
                raise Refused(f"{slot} has had no holder of this number")
            if number < newest.number:
                raise Refused(f"{slot} has been given to another holder since")
            if newest.ended is not None:
                raise Refused(f"{slot}: {newest.ended}")
            if not self._is_in(newest):
                late = self._clock() <= newest.until
                why = "its holder did not join in time" if late else "the certificate was not renewed in time"
                raise Refused(f"{slot}: {why}")

    def require_open(self, ticket: str) -> None:
        """Raise Refused for a ticket that admits nobody with any key."""
        with self._reading():
            _, until, used, revoked = self._ticket(ticket)
            if revoked:
                raise Refused("the ticket was revoked")
            if used is None and self._clock() > until:
                raise Refused(_EXPIRED)

    def held_by(self, slot: str) -> Holder | None:
        """Return the holder of a slot; None if no ticket holder has it."""
        with self._reading():
            newest = self._newest(slot)
            return newest if self._is_in(newest) else None

    def holders(self) -> list[Holder]:
        """Return all holders, by slot and number."""
        with self._reading():
            return list(self._holders("ORDER BY slot, holder"))

    def _is_in(self, holder: Holder | None) -> bool:
        if holder is None or holder.ended is not None:
            return False
        return self._clock() <= min(holder.until, holder.until if holder.joins_by is None else holder.joins_by)

    def _newest(self, slot: str) -> Holder | None:
        return next(self._holders("WHERE slot = ? ORDER BY holder DESC LIMIT 1", slot), None)

    def _of_ticket(self, ticket: str) -> Holder | None:
        """Return the last holder that a ticket admitted."""
        return next(self._holders("WHERE ticket = ? ORDER BY rowid DESC LIMIT 1", ticket), None)

    def _holders(self, clauses: str, *values: str) -> Iterator[Holder]:
        """Return the holders that a query finds, in its order."""
        found = self._database.execute(f"SELECT slot, holder, until, joins_by, ended FROM holders {clauses}", values)
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

    def _write(self, name: str, *values: Any) -> None:
        """Change the database by a statement of `_WRITES`."""
        self._writer.execute(_WRITES[name], values)
        self._writes.append([name, *values])

    def _keep(self) -> bool:
        """Create the change in the store; return False if another process has made one of its number before."""
        if self._store is None or not self._writes:
            return True
        number = 1 + self._applied()
        change: dict[str, Any] = {"writes": self._writes, "nonce": secrets.token_hex(16)}
        if number % WITH_ALL_ROWS == 0:
            change["rows"] = {one: self._writer.execute(f"SELECT * FROM {one}").fetchall() for one in _TABLES}
        data = json.dumps(change, default=lambda key: {_HEX: key.hex()}).encode()
        # An earlier try may have created it, although no answer arrived.
        if not (self._store.create(self._key(number), data) or self._store.get(self._key(number)) == data):
            return False
        if self._last() > number:  # this process was away for so long that the change of this number is gone
            return False
        self._writer.execute(f"PRAGMA user_version = {number}")
        if "rows" in change and number > WITH_ALL_ROWS:
            older = range(max(1, number - 2 * WITH_ALL_ROWS), number - WITH_ALL_ROWS)
            self._store.delete([self._key(one) for one in older])
        return True

    def _applied(self) -> int:
        """Return the number of the last change that the database has."""
        applied: int = self._writer.execute("PRAGMA user_version").fetchone()[0]
        return applied

    def _last(self) -> int:
        """Return the number of the last change in the store."""
        assert self._store is not None
        return max((int(name) for name in self._store.names(self._folder) if name.isdigit()), default=0)

    def _key(self, number: int) -> str:
        return f"{self._folder}/{number:06d}"

    def _catch_up(self) -> None:
        """Apply the changes of other processes. Raises StoreError for one that cannot be read."""
        assert self._store is not None
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            begin, last = 1 + self._applied(), self._last()
            newest = last - last % WITH_ALL_ROWS  # the newest with all rows
            for number in range(max(begin, newest), last + 1):
                change = json.loads(self._store.get(self._key(number)), object_hook=_with_bytes)
                if number == newest and begin < newest:
                    for table in _TABLES:
                        self._writer.execute(f"DELETE FROM {table}")
                        for row in change["rows"][table]:
                            self._writer.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
                else:
                    for name, *values in change.get("writes", ()):
                        self._writer.execute(_WRITES[name], values)
                self._writer.execute(f"PRAGMA user_version = {number}")
            self._writer.execute("COMMIT")
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, sqlite3.Error) as error:
            raise StoreError(f"{self._store.url(self._folder)}: cannot be read ({error})") from error
        finally:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")


def _with_bytes(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value[_HEX]) if value.keys() == {_HEX} else value


def mark_of(token: str) -> str:
    """Return a name that follows from a run's token, and does not tell it."""
    return hmac.digest(token.encode(), b"hetero-pp: memberships of a run", "sha256").hex()[:16]


def require_token(store: Store, token: str) -> None:
    """Raise ConfigError unless the run of a store was begun with this token, or with none that is known."""
    marks = store.names(FOLDER)
    if marks and f"{mark_of(token)}/" not in marks:
        expected = "expected that of the run: copy it from a host that has served it, and give it with --token-file"
        raise ConfigError((), f"{store.url()}: found another token, {expected}")


def open_memberships(config: RunConfig, folder: RunFolder, token: str, store: Store | None = None) -> Memberships:
    """Open the memberships of a run on a host that serves it. `store`: by default that of the run's log."""
    if config.store.url is None:
        return Memberships(folder.memberships)
    return Memberships(folder.memberships, store=store or open_log(config, folder).store, token=token)
