"""Draws what is tried and what is computed again, and takes what members show for it, as objects of the store.

    draws/<end>.json                         the end of a chain of secrets, and settings, before the first round
    draws/round-000007.json                  the secret of round 7, and the replicas that it drew
    evidence/000007-home/<member>/...        what the members of a replica that is computed again showed
    evidence/000007-home/arrived.json        written once all have: members that did not, and why
    texts/000007-home                        text of a streamed corpus that a replica that is tried showed; empty: none

A member is asked with each assignment until its files are here. An exchange that starts again begins another chain, and
forgets the requests of the last one.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from hetero_pp.config.audit import GauntletSettings
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.errors import DamagedFile
from hetero_pp.messages.messages_pb2 import Asked, Commitment, Judgement, Recomputed, RoundRecord, ShownFile
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.audit.commitments import (
    AMONG,
    BEFORE,
    MESSAGES,
    MOST_RESTARTED,
    TEXT,
    Commitments,
    messages_sha256,
    sha256_in,
    shown_text,
    tensors_sha256,
)
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.memberships import Memberships
from replica_groups.exchange.runner import CoordinatorRunner
from replica_groups.rounds.draws import (
    DRAWS,
    ROUNDS_TO_SHOW_TEXT,
    TEXTS,
    Chain,
    draw_key,
    drawn,
    drawn_for_trials,
    text_key,
)
from stages.anchors import anchors_seed, first_expansion

EVIDENCE, ARRIVED, AUTHORITY = "evidence", "arrived.json", "authority.pem"

ROUNDS_TO_SHOW = 32
"""Rounds within which a checkpoint has to arrive; a line that needs longer is too slow for such audits."""

TEXTS_KEPT = 64  # rounds for which a shown text stays in the store
MOST_LEFT, WITHIN = 3, 256  # times that a ticket may leave before it has shown a drawn round, within so many rounds
ROUNDS_TO_JUDGE = 3 * ROUNDS_TO_SHOW  # rounds after which no validator judges what was shown, and it is removed
MANIFEST = "evidence.json"  # file in a folder of evidence that was judged, and stays

MOST_TRIES = 2
_ROOM_OF_HEADERS = 1 << 20
MOST_OF_MESSAGES = 64 << 20  # bytes of the digests of a round's messages; a digest has 32
MOST_SEQUENCES = 1 << 20  # sequences of a round of which a few can be shown: their digests have 32 MiB


@dataclass(frozen=True)
class Shows:
    """Settings of draws, and bounds of what members may show."""

    share: float  # share of the replicas' rounds that are computed again
    readers: frozenset[str]  # members that read the corpus
    most_bytes: Mapping[str, int]  # member -> largest size of its checkpoint
    fresh: Mapping[str, bytes]  # member -> digest of the tensors of its state before its first step
    states: bool = True  # whether members commit to their states
    scores: GauntletSettings | None = None  # None: no contributions are tried
    is_streamed: bool = False  # whether members show the text on which their contributions are tried
    sequence_length: int = 1
    vocabulary: int = 0


@dataclass
class _ShowRequest:
    """One member of a drawn replica."""

    commitment: Commitment
    told: int = 0
    incarnation: int = 0  # the last one that was told
    refuses: bool = False  # whether one incarnation was told twice: it has gone on without showing anything
    tries: int = 0
    missing: set[str] = field(default_factory=set)  # files that are not here yet
    failure: str = ""
    is_hindered: bool = False  # whether the exchange had no room for a file, so that the member is not to blame


@dataclass
class _PendingDraw:
    round: int
    replica: str
    generation: int
    members: dict[str, _ShowRequest]
    sequences: tuple[int, ...] = ()  # numbers of the sequences to show; empty: the checkpoint
    count: int = 0  # sequences of the round

    @property
    def folder(self) -> str:
        return evidence_key(self.round, self.replica)

    @property
    def is_over(self) -> bool:
        return all(one.failure or not one.missing for one in self.members.values())


class Showing:
    """Draws of one exchange, and what members showed. Thread-safe."""

    def __init__(
        self,
        runner: CoordinatorRunner,
        log: ContributionLog,
        shows: Shows,
        accuse: Callable[[Judgement], object],
        preferred: Callable[[], tuple[Sequence[str], Sequence[str]]] = lambda: ((), ()),
    ) -> None:
        """`accuse` gets what is found about a member that did not show the checkpoint that it was asked for.

        `preferred` returns the replicas that are tried first: suspected ones, and new ones.
        """
        self._runner, self._log, self._shows, self._accuse = runner, log, shows, accuse
        self._preferred, self._commits = preferred, bool(shows.states or shows.readers)
        self.commitments = Commitments(runner.roster.members, shows.readers, shows.fresh, shows.states)
        self.authority: bytes | None = None
        """Certificate (PEM) of the authority that signed those of the members; None if the run is not encrypted."""
        self.guests: Memberships | None = None  # members with a ticket, once they are served
        self._lock, self._drawing = threading.RLock(), threading.Lock()
        self._chain: Chain | None = None
        self._settings = ""
        self._next = 1
        self._open: list[_PendingDraw] = []  # draws whose files are not all here, oldest first
        self._departures: dict[str, dict[tuple[str, int], int]] = {}
        """Ticket, or slot without one -> (replica, generation) in which it left -> round that it did not show."""
        self._shown: dict[int, dict[str, bool]] = {}
        """Drawn round -> whether a replica showed its text in time."""

    def begin(self, last_round: int, settings: str = "") -> None:
        """Publish the end of a new chain, before the round after `last_round`; remove what is of later rounds.

        `settings`: digest of those by which rounds are computed again (settings_sha256).
        """
        retry, read = self._runner.retry, self._log.read_record
        self.commitments.begin(last_round, lambda round_: retry(partial(read, round_)))
        self._next, self._settings = last_round + 1, settings
        self._chain = self._published_chain()
        store = self._log.store
        for number, replica in evidence_in(store.names(EVIDENCE)):
            if number > last_round:
                store.delete(store.below(evidence_key(number, replica)))
        self._forget_texts(lambda round_: round_ > last_round)

    def _published_chain(self) -> Chain:
        chain = Chain(secrets.token_bytes(32), self._next)
        known = {"first": chain.first, "end": chain.end.hex(), "share": self._shows.share, "settings": self._settings}
        self._put(f"{DRAWS}/{chain.end.hex()[:16]}.json", known)
        return chain

    # ---- draws ----

    def asks(self, member: str, holder: int, incarnation: int) -> Asked | None:
        """Return the drawn round for which a member has to show its checkpoint or text, if there is one."""
        self._draw()
        with self._lock:
            mine = [one for one in self._open if member in one.members and self._is_owed(one.members[member], holder)]
            if not mine:
                return None
            chosen = min(mine, key=lambda one: one.members[member].told)  # each once before it is too late to keep it
            asked = chosen.members[member]
            asked.refuses |= asked.told > 0 and asked.incarnation == incarnation
            asked.told, asked.incarnation = asked.told + 1, incarnation
            return Asked(round=chosen.round, sequences=chosen.sequences)

    def shown(self, round_: int) -> Mapping[str, bool]:
        """Return whether the replicas that were drawn to show text of a round did so in time."""
        with self._lock:
            return dict(self._shown.get(round_, {}))

    def owing(self, record: RoundRecord) -> dict[str, str]:
        """Return the replicas of a record that it may not count, each with why.

        Their members were asked for a file that is not here, which honest ones send before they contribute again. Or
        groups have lost stages so often that too few of their contributions could be computed again.
        """
        found: dict[str, str] = {}
        for entry in record.contributions if self._shows.share else ():
            if self.commitments.has_many_restarts(entry):
                found[entry.replica] = f"{MOST_RESTARTED} of its last {AMONG} contributions had restarts, as this one"
        with self._lock:
            owed = [(name, one, asked) for one in self._open for name, asked in one.members.items()]
            for entry in record.contributions:
                for made in entry.commitments:
                    for name, one, asked in owed:
                        is_told = name == made.member and asked.told and not asked.is_hindered
                        if is_told and self._is_owed(asked, made.holder):
                            what = "text of" if one.sequences else "checkpoint from before"
                            found[entry.replica] = f"{name} owes its {what} round {one.round}"
        return found

    def _is_owed(self, asked: _ShowRequest, holder: int) -> bool:
        """Return whether a holder of the slot still has to show files: it committed, and may have come back since."""
        if not asked.missing or asked.failure:
            return False
        then, member = asked.commitment.holder, asked.commitment.member
        if then == holder or self.guests is None:
            return then == holder
        ticket = self.guests.ticket_of(member, then) if then else None
        return ticket is not None and ticket == self.guests.ticket_of(member, holder)

    def _draw(self) -> None:
        """Draw from all rounds that have closed since the last call, and publish their secrets."""
        with self._drawing:
            while self._next <= self._runner.coordinator.last_round:
                assert self._chain is not None, "the run has begun"
                self._draw_round(self._next, self._chain)
                self._next += 1
                if self._next == self._chain.after:
                    self._chain = self._published_chain()

    def _draw_round(self, round_: int, chain: Chain) -> None:
        record, secret = self._runner.wait_for_record(round_), chain.secret(round_)
        entries = {entry.replica: entry for entry in record.contributions if entry.commitments}
        # A replica that lost a member within the round cannot be computed again from the states before it.
        whole = [name for name, entry in entries.items() if not entry.restarts]
        found = drawn(secret, record.sha256, whole, self._shows.share)
        tried = self._tried(record, secret)
        known = {"chain": chain.end.hex(), "secret": secret.hex(), "record": record.sha256.hex(), "drawn": found}
        self._put(draw_key(round_), {**known, "tried": tried})
        with self._lock:
            for entry in [entries[name] for name, sequences in tried.items() if sequences]:
                readers = {one.member: _ShowRequest(one, missing={TEXT}) for one in entry.commitments if one.text}
                own = tuple(tried[entry.replica]), entry.tokens // self._shows.sequence_length
                self._open.append(_PendingDraw(round_, entry.replica, entry.generation, readers, *own))
            for replica in found:
                entry = entries[replica]
                members = {
                    one.member: _ShowRequest(one, missing={BEFORE, MESSAGES} if one.messages else {BEFORE})
                    for one in entry.commitments
                }
                self._open.append(_PendingDraw(round_, replica, entry.generation, members))
            self._give_up(round_)
            self._shown.pop(round_ - TEXTS_KEPT, None)
        self._settle()
        if found:
            self._forget_unjudged(round_ - ROUNDS_TO_JUDGE)
        if round_ % TEXTS_KEPT == 0:
            self._forget_texts(lambda number: number <= round_ - TEXTS_KEPT)

    def _tried(self, record: RoundRecord, secret: bytes) -> dict[str, list[int]]:
        """Return the replicas whose contributions are tried, each with the numbers of the sequences that it shows."""
        if self._shows.scores is None:
            return {}
        entries = [one for one in record.contributions if one.commitments or not self._commits]
        read = {one.replica: one.tokens // self._shows.sequence_length for one in entries}
        evaluated, rows = self._shows.scores.sizes(len(read), sum(read.values()))
        names = drawn_for_trials(secret, record.sha256, read, evaluated, *self._preferred())
        if not self._shows.is_streamed:
            return {name: [] for name in names}
        chances = {name: random.Random(secret + name.encode()) for name in names}
        return {name: sorted(one.sample(range(read[name]), min(rows, read[name]))) for name, one in chances.items()}

    def _forget_texts(self, is_old: Callable[[int], bool]) -> None:
        store = self._log.store
        names = [name for name in store.names(TEXTS) if (match := re.match(r"\d+", name)) and is_old(int(match[0]))]
        store.delete([f"{TEXTS}/{name}" for name in names])

    def _forget_unjudged(self, round_: int) -> None:
        """Remove what was shown up to a round without a finding: no validator was there, or it fell behind."""
        store = self._log.store
        for number, replica in evidence_in(store.names(EVIDENCE)):
            keys = store.below(evidence_key(number, replica)) if number <= round_ else []
            if f"{evidence_key(number, replica)}/{MANIFEST}" not in keys:
                store.delete(keys)

    def _give_up(self, round_: int, is_last: bool = False) -> None:
        """End the wait for files that have had their rounds by now. `is_last`: the run is over."""
        for one in self._open:
            within = ROUNDS_TO_SHOW_TEXT if one.sequences else ROUNDS_TO_SHOW
            when = "before it left the run" if is_last else f"within {within} rounds"
            for name, asked in one.members.items() if is_last or one.round <= round_ - within else ():
                if not asked.missing or asked.failure:
                    continue
                asked.failure = LEFT
                if asked.is_hindered:
                    continue
                if one.sequences:  # who leaves has shown nothing, either: leaving must not be better than bad work
                    asked.failure = LEFT if is_last and not asked.told else f"did not show its text {when}"
                elif asked.refuses or (is_last and asked.told):
                    asked.failure = f"did not show its checkpoint {when}"
                elif not is_last and self._left(one, name, asked.commitment) > MOST_LEFT:
                    asked.failure = f"left before it showed a drawn round, {MOST_LEFT + 1} times in {WITHIN} rounds"

    def _left(self, drawn: _PendingDraw, member: str, made: Commitment) -> int:
        """Note that a member left before it had shown a round; return how often its ticket did, or else its slot."""
        ticket = self.guests.ticket_of(member, made.holder) if self.guests is not None and made.holder else None
        times = self._departures.setdefault(ticket or member, {})
        times[drawn.replica, drawn.generation] = drawn.round
        return sum(round_ > drawn.round - WITHIN for round_ in times.values())

    def _settle(self) -> None:
        """Write what arrived of the draws that are over."""
        with self._lock:
            over = [one for one in self._open if one.is_over]
            self._open = [one for one in self._open if not one.is_over]
            for one in over:
                failed = {asked.failure for asked in one.members.values() if asked.failure}
                if one.sequences and failed != {LEFT}:
                    self._shown.setdefault(one.round, {})[one.replica] = not failed
        for one in over:
            failures = {name: asked.failure for name, asked in one.members.items() if asked.failure}
            if one.sequences:
                if failures:
                    self._runner.retry(partial(self._log.store.put, text_key(one.round, one.replica), b""))
                continue
            if (authority := self.authority) is not None:
                self._runner.retry(partial(self._log.store.put, f"{one.folder}/{AUTHORITY}", authority))
            self._put(f"{one.folder}/{ARRIVED}", {"round": one.round, "replica": one.replica, "missing": failures})
            for name, why in failures.items():
                if why != LEFT:
                    found = Recomputed(member=name, cause=f"{name} {why}")
                    self._accuse(Judgement(round=one.round, replica=one.replica, recomputed=found))

    def end(self) -> None:
        """End all waits, because the members have left after the last round."""
        self._draw()
        with self._lock:
            self._give_up(self._next, is_last=True)
        self._settle()

    # ---- files ----

    def expect(self, header: ShownFile, caller: Caller) -> None:
        """Raise Refused for a file that a member was not asked for, or that is too large."""
        of, asked = self._asked(header, caller)
        most = self._shows.most_bytes[caller.name] if header.name == BEFORE else MOST_OF_MESSAGES
        if header.name not in asked.missing:
            self._refuse(caller.name, f"shows {header.name[:80]!r}, expected one of {sorted(asked.missing)}")
        right = 32 * of.count + 4 * (self._shows.sequence_length + 1) * len(of.sequences)
        if of.sequences and (header.size != right or of.count > MOST_SEQUENCES):
            expected = f"expected {right}, of at most {MOST_SEQUENCES} sequences"
            self._refuse(caller.name, f"shows {header.size} bytes of {of.count} sequences, {expected}")
        if not of.sequences and not 0 < header.size <= most:
            self._refuse(caller.name, f"shows {header.size} bytes of {header.name}, expected at most {most}")

    def lacks_room(self, header: ShownFile, caller: Caller) -> None:
        """Note that the exchange has no room for a file, which is not the member's fault."""
        self._asked(header, caller)[1].is_hindered = True

    def take(self, header: ShownFile, path: Path, caller: Caller) -> None:
        """Take a file that has arrived. Raises Refused if it does not match what the member committed to."""
        self.expect(header, caller)
        (of, asked), replica = self._asked(header, caller), self._runner.roster.members[caller.name]
        try:
            if of.sequences:
                own = of.count, self._shows.vocabulary, asked.commitment.text
                is_right = len(shown_text(path.read_bytes(), of.sequences, *own)) > 0
            elif header.name == BEFORE:
                is_right = sha256_in(path) == asked.commitment.before
            else:
                is_right = messages_sha256(path.read_bytes()) == asked.commitment.messages
        except DamagedFile:
            is_right = False
        key = text_key(of.round, replica) if of.sequences else f"{of.folder}/{caller.name}/{header.name}"
        if is_right:
            self._runner.retry(lambda: self._log.store.put_file(key, path))
        with self._lock:
            if is_right:
                asked.missing.discard(header.name)
            else:
                asked.tries += 1
                if asked.tries >= MOST_TRIES:
                    asked.failure = f"showed {header.name} that does not match its commitment, {MOST_TRIES} times"
        self._settle()
        if not is_right:
            self._refuse(caller.name, f"its {header.name} from round {header.round} does not match its commitment")

    def _asked(self, header: ShownFile, caller: Caller) -> tuple[_PendingDraw, _ShowRequest]:
        self._runner.expect_member(caller.name)
        replica = self._runner.roster.members[caller.name]
        with self._lock:
            for one in self._open:
                is_asked = (one.round, one.replica, bool(one.sequences)) == (header.round, replica, header.name == TEXT)
                if is_asked and caller.name in one.members:
                    return one, one.members[caller.name]
        raise self._runner.refused(caller.name, f"shows a file of round {header.round}, and was not asked for it")

    def _refuse(self, member: str, reason: str) -> None:
        raise self._runner.refused(member, reason, Kind.MALFORMED)

    def _put(self, key: str, content: Mapping[str, object]) -> None:
        data = json.dumps(content, indent=1).encode()
        self._runner.retry(lambda: self._log.store.put(key, data))


LEFT = "left"  # failure of a member that was gone: nobody is blamed for it, unless it happens too often


def shows_of(spec: RunSpec) -> Shows | None:
    """Return the settings of draws and of what is shown, if the run has scores or is audited by recomputation.

    A checkpoint has at most two moments and the error feedback of each parameter, and those of the boundary's anchors.
    """
    recompute, scores, data = spec.config.audit.recompute, spec.config.audit.scores, spec.config.data
    if recompute is None and scores is None:
        return None
    tries = scores, scores is not None and data.streamed is not None, data.sequence_length, spec.shape.vocabulary
    readers = frozenset(name for name, member in spec.members.items() if member.reads_data)
    if recompute is None:
        return Shows(0.0, readers if spec.config.commits_to_text else frozenset(), {}, {}, False, *tries)
    shapes, anchors = spec.parameter_shapes, 3 * spec.shape.vocabulary * spec.shape.width
    values = {name: 4 * sum(math.prod(shapes[one]) for one in own.owned) for name, own in spec.members.items()}
    most = {name: 4 * (count + anchors * (spec.members[name].stage is not None)) for name, count in values.items()}
    fresh = {name: _fresh_sha256(spec, member) for name, member in spec.members.items()}
    sizes = {name: size + _ROOM_OF_HEADERS for name, size in most.items()}
    return Shows(recompute.share, readers, sizes, fresh, True, *tries)


def _fresh_sha256(spec: RunSpec, member: MemberSpec) -> bytes:
    """Return the digest of the tensors of a member's state before its first step: W of its anchors."""
    own, first = member.replica, dict[str, Tensor]()
    if isinstance(own, ParticipantsReplica) and member.stage is not None and not member.stage.is_first:
        rank = None if own.boundary.anchors is None else own.boundary.anchors.dimensions(spec.shape.width)
        if rank is not None:
            seed = anchors_seed(spec.config.seed, own.name, member.stage.index - 1)
            first["moments:anchors.values.expansion"] = first_expansion(rank, spec.shape.width, seed)
    return tensors_sha256(first, first.__getitem__)


def settings_sha256(spec: RunSpec) -> str:
    """Return the digest of the settings by which rounds are computed again: the run's, its changes, and tolerance."""
    recompute = spec.config.audit.recompute
    known = [spec.agreed, spec.changes.to_json(), None if recompute is None else recompute.tolerance]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def evidence_key(round_: int, replica: str) -> str:
    return f"{EVIDENCE}/{round_:06d}-{replica}"


def evidence_in(names: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (round, replica) of the folders of evidence among the names in `evidence/`."""
    for name in names:
        if (match := re.fullmatch(r"(\d{6,12})-(.+)/", name)) is not None:
            yield int(match[1]), match[2]
