"""Audits of one run: signs are compared before a round closes, and judgements of validators follow later.

The medians of the judgements update the scores, and failing replicas are excluded. No call about a round waits for a
judgement. With nobody excluded, a record is the same as without audits.
"""

from __future__ import annotations

import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero_pp.config.audit import AuditSettings
from hetero_pp.config.lines import VALIDATOR
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import DamagedFile, Refused, StoreError
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import Judgement, Losses, MembershipEventKind
from hetero_pp.messages.refusals import Kind
from hetero_pp.messages.report_bounds import MOST_LOSS
from hetero_pp.rpc.exchange_service import Caller, HeldBy
from replica_groups.audit.gauntlet import SignCheck, median_of, why
from replica_groups.audit.replica_scores import ReplicaScores, RoundFacts
from replica_groups.audit.showing import Showing, Shows, settings_sha256
from replica_groups.exchange.audits import Exclusion, keep_scores, newest_scores
from replica_groups.exchange.memberships import Memberships
from replica_groups.exchange.reports import Reports
from replica_groups.exchange.runner import AuditHook, CoordinatorRunner
from replica_groups.rounds import events as e
from replica_groups.rounds.coordinator import BARRED_ROUNDS
from replica_groups.rounds.draws import draw_key

MOST_VALIDATORS = 16  # number of validators, by name, that have judged a recent round
JUDGED_ROUNDS = 64  # number of recent rounds about which judgements are taken
AWAITED_ROUNDS = 4  # rounds after which a validator that stays behind is not awaited
UNAUDITED_ROUNDS = 16  # rounds without any judgement after which the run counts as unaudited
MOST_CHARACTERS = 400  # characters of a text in a judgement
REMEMBERED_ROUNDS = 64  # number of recent rounds whose members are known


@dataclass
class _JudgedRound:
    """Judgements of one validator about the contributions to one round."""

    losses: dict[str, pb.Losses] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)  # copy -> the original


class Judgements(AuditHook):
    """Judgements about one run, and what its members show to be judged. Thread-safe."""

    def __init__(
        self,
        runner: CoordinatorRunner,
        reports: Reports,
        held_by: Callable[[str], HeldBy | None],
        settings: AuditSettings,
        weighs: bool,
        overlapping: Callable[[pb.RoundRecord], Collection[tuple[str, str]]],
        signs: SignCheck | None = None,
        shows: Shows | None = None,
    ) -> None:
        """`weighs`: scores are the weights of contributions. `overlapping` compares all contributions to a round.

        `signs` compares their signs before the round closes. `shows`: settings of draws, if rounds are computed again.
        """
        super().__init__(runner.refused)
        self._signs, self._overlapping = signs, overlapping
        self._runner, self._log, self._reports, self._settings = runner, runner.log, reports, settings
        self.exclusions = Exclusions(runner, held_by, settings)
        self._book = None if settings.scores is None else ReplicaScores(settings.scores, runner.roster.replicas)
        self._weighs = weighs
        self._taking = threading.Condition()
        """Held while judgements are taken, also during writes to the store. No call about a round waits for it."""
        self._lock = threading.Lock()  # guards the book for moments
        self._judged = 0  # the last round that the book has
        self._told: dict[int, dict[str, _JudgedRound]] = defaultdict(dict)
        """Round -> validator -> what it told, of rounds that the book does not have."""
        self._seen: dict[int, set[tuple[str, str, str]]] = defaultdict(set)
        """Round -> (validator, replica, kind) of the judgements taken."""
        self._validators: dict[str, int] = {}  # validator -> newest round that it judged by losses
        self._checkers: dict[str, int] = {}  # validator -> newest round that it computed again
        self._sound: set[str] = set()  # validators whose recomputation of some replica had its bits, or was near enough
        self._unsound: dict[str, list[pb.Judgement]] = defaultdict(list)
        """Validator that is not sound yet -> what it found by recomputation."""
        self._against: dict[int, dict[str, float]] = {}
        """Round -> agreement of the contributions that go against the others."""
        self._differing: dict[int, set[str]] = defaultdict(set)  # round -> replicas that began it with other parameters
        self._heard = 0  # last closed round when a judgement came
        self.is_audited = True
        self.showing = None if shows is None else Showing(runner, runner.log, shows, self.unshown, self._preferred)

    # ---- what the exchange tells ----

    def admit(self, guests: Memberships | None, authority: bytes | None) -> None:
        self.exclusions.guests = guests
        if self.showing is not None:
            self.showing.guests, self.showing.authority = guests, authority

    def why(self, round_: int, replica: str) -> str:
        return self.exclusions.why(round_, replica)

    def prepare(self, last_round: int, spec: RunSpec | None) -> None:
        if self.showing is not None:
            self.showing.begin(last_round, "" if spec is None else settings_sha256(spec))

    def begin(self, last_round: int) -> None:
        """Restore the scores and exclusions after a round, from which the run begins or resumes."""
        self._judged = self._heard = last_round
        try:
            kept = self._runner.retry(lambda: newest_scores(self._log.store, last_round))
            if kept is None:
                return
            with self._lock:
                if kept.book is not None and self._settings.scores is not None:
                    self._book = ReplicaScores.from_json(self._settings.scores, kept.book)
        except DamagedFile as error:
            self._membership_event(pb.UNAUDITED, f"{error}; all scores begin anew")
            return
        self.exclusions.restore(kept.excluded, last_round)

    def end(self) -> None:
        if self.showing is not None:
            self.showing.end()

    def decide(self, record: pb.RoundRecord) -> None:
        owing = dict[str, str]()
        if self.showing is not None:
            self.showing.commitments.add_to(record)
            owing = self.showing.owing(record)
        self._against.pop(record.round - JUDGED_ROUNDS, None)
        names = [one.replica for one in record.contributions]
        self._compare_signs(record, {*self.exclusions.of(record.round, names), *owing})
        with self._lock:
            out = self.exclusions.of(record.round, names) | owing
            if self._book is not None and self._settings.scores is not None and self._settings.scores.include:
                best = self._book.chosen([name for name in names if name not in out])
                cause = f"its score is not among the best {self._settings.scores.include}"
                out |= {name: cause for name in names if name not in out and name not in best}
            if len(out) == len(names):
                out = {}
            left = [name for name in names if name not in out]
            weights = self._book.weights(left) if self._book is not None and self._weighs and left else {}
        for one in [one for one in record.contributions if one.replica in out]:
            record.contributions.remove(one)
        record.left_out.extend(out)
        for one in record.contributions:
            one.weight = weights.get(one.replica, one.weight)
        self.exclusions.note(record.round, out)

    def _compare_signs(self, record: pb.RoundRecord, out: Collection[str]) -> None:
        """Exclude, from this round on, replicas whose contributions go against the others; `out` are excluded already.

        A record that could not be written is decided again, about the same contributions or others.
        """
        if self._signs is None:
            return
        compared = pb.RoundRecord(round=record.round)
        compared.contributions.extend(one for one in record.contributions if one.replica not in out)
        found = self._signs.against(compared, self._log.blobs_of(compared))
        known = self._against.setdefault(record.round, {})
        for name in sorted(found.keys() - known.keys()):
            self.exclusions.exclude(name, record.round, why(record.round, found[name]))
            self._reports.tell_own(judged=pb.Judgement(round=record.round, replica=name, agreement=found[name]))
        known |= found

    def closed(self, record: pb.RoundRecord) -> None:
        round_ = record.round
        self.exclusions.closed(round_)
        if self.showing is not None:
            self.showing.commitments.closed(record)
        awaits = self._book is not None and self._settings.by == "validators"
        if awaits and self.is_audited and round_ - self._heard > UNAUDITED_ROUNDS:
            since = f"no validator has judged a round since round {self._heard}"
            self.unaudited(f"{since}; `hetero-pp audit validate` starts one")

    def differed(self, replica: str, round_: int) -> None:
        self._differing[round_ + 1].add(replica)

    def unaudited(self, cause: str) -> None:
        """Report that nobody audits the run any more."""
        self.is_audited = False
        self._membership_event(pb.UNAUDITED, cause)

    def _membership_event(self, what: MembershipEventKind, cause: str) -> None:
        membership_event = pb.MembershipEvent(what=what, round=self._runner.coordinator.last_round, cause=cause)
        self._reports.tell_own(membership_event=membership_event)

    # ---- what members commit to and show ----

    def attach(self, member: str, round_: int, generation: int, commitment: pb.Commitment, holder: int) -> str | None:
        own = round_, generation, commitment, holder
        return None if self.showing is None else self.showing.commitments.take(member, *own)

    def asks(self, member: str, holder: int, incarnation: int) -> pb.Asked | None:
        return None if self.showing is None else self.showing.asks(member, holder, incarnation)

    def expected(self, member: str) -> bytes:
        return b"" if self.showing is None else self.showing.commitments.expected(member)

    def expect_file(self, header: pb.ShownFile, caller: Caller) -> None:
        if self.showing is None:
            super().expect_file(header, caller)
            return
        self._runner.require_begun(caller.name)
        self.showing.expect(header, caller)

    def lacks_room(self, header: pb.ShownFile, caller: Caller) -> None:
        if self.showing is not None:
            self.showing.lacks_room(header, caller)

    def take_file(self, header: pb.ShownFile, path: Path, caller: Caller) -> None:
        self.expect_file(header, caller)
        if self.showing is not None:
            self.showing.take(header, path, caller)

    def _preferred(self) -> tuple[Sequence[str], Sequence[str]]:
        """Return the replicas that are tried first: suspected ones, and new ones."""
        with self._lock:
            return ((), ()) if self._book is None else self._book.preferred()

    def unshown(self, found: pb.Judgement) -> None:
        """Take what was found about a member that did not show the checkpoint of a drawn round."""
        self._reports.tell_own(judged=found)
        self.exclusions.punish(found, found.recomputed.cause)

    # ---- what validators tell ----

    def judge(self, request: pb.JudgeRequest, caller: Caller) -> pb.Nothing:
        self.take(request.judgements, caller.name.removeprefix(VALIDATOR))
        return pb.Nothing()

    def take(self, judgements: Sequence[pb.Judgement], validator: str) -> None:
        """Take judgements of a validator, and settle the rounds about which nothing more is awaited.

        Raises Refused for all of them if one is wrong.
        """
        with self._taking:
            self._runner.require_begun(validator)
            self._forget_old(self._runner.coordinator.last_round - JUDGED_ROUNDS)
            new = set[tuple[int, str, str]]()
            for one in judgements:
                why = self._complaint(one, validator, new)
                if why is not None:
                    raise self._runner.refused(f"validator {validator[:40]}", why, Kind.MALFORMED)
            self._heard = self._runner.coordinator.last_round
            if not self.is_audited:
                self.is_audited = True
                self._membership_event(pb.AUDITED, f"{validator} judges the run's rounds again")
            for one in judgements:
                self._note(one, validator)
            while (due := self._due()) is not None:
                for round_ in range(max(self._judged, due - JUDGED_ROUNDS) + 1, due + 1):
                    self._settle(round_)
            self._taking.notify_all()

    def wait_until_judged(self, seconds: float) -> None:
        """Wait until the book has the last round, if any validator keeps up; for at most `seconds`."""

        def is_judged() -> bool:
            last, newest = self._runner.coordinator.last_round, max(self._validators.values(), default=0)
            return self._judged >= last or newest < last - AWAITED_ROUNDS

        with self._taking:
            self._taking.wait_for(is_judged, seconds)

    def _complaint(self, one: pb.Judgement, validator: str, new: set[tuple[int, str, str]]) -> str | None:
        """Return why a judgement is refused; None if it is not. `new`: those of the same request."""
        names = {*self._validators, *self._checkers}
        if validator not in names and len(names) >= MOST_VALIDATORS:
            return f"found more than {MOST_VALIDATORS} validators"
        kind, last = one.WhichOneof("finding") or "nothing", self._runner.coordinator.last_round
        if not max(0, last - JUDGED_ROUNDS) < one.round <= last:
            return f"found a judgement about round {one.round}, expected one of the last {JUDGED_ROUNDS} closed rounds"
        if (why := complaint(one, self._runner.roster.members)) is not None:
            return why
        record = self._runner.wait_for_record(one.round)
        sent = {entry.replica for entry in record.contributions}
        if missing := {one.replica, *([one.copies] if kind == "copies" else [])} - sent:
            return f"round {one.round} includes no contribution of {', '.join(sorted(missing))}"
        if kind == "recomputed" and not one.recomputed.is_equal and not self._is_drawn(record, one.replica):
            return f"{one.replica} was not drawn in round {one.round}"
        key = (one.round, one.replica, kind)
        if (validator, *key[1:]) in self._seen[one.round] or key in new:
            return f"found a second judgement about {one.replica} in round {one.round}"
        new.add(key)
        return None

    def _is_drawn(self, record: pb.RoundRecord, replica: str) -> bool:
        try:
            draw = json.loads(self._runner.retry(lambda: self._log.store.get(draw_key(record.round))))
        except FileNotFoundError:
            return False
        return bool(draw["record"] == record.sha256.hex() and replica in draw["drawn"])

    def _note(self, one: pb.Judgement, validator: str) -> None:
        kind = one.WhichOneof("finding") or ""
        self._seen[one.round].add((validator, one.replica, kind))
        if kind == "recomputed":
            self._checkers[validator] = max(one.round, self._checkers.get(validator, 0))
            self._recomputed(one, validator)
            return
        self._validators[validator] = max(one.round, self._validators.get(validator, 0))
        if one.round > self._judged:  # later ones change nothing
            told = self._told[one.round].setdefault(validator, _JudgedRound())
            if kind == "losses":
                told.losses[one.replica] = one.losses
            else:
                told.copies[one.replica] = one.copies

    def _forget_old(self, newest: int) -> None:
        """Forget what is of rounds up to `newest`, and validators that have judged no later one."""
        kept: tuple[dict[int, Any], ...] = (self._differing, self._seen, self._told)
        for by_round in kept:
            for old in [one for one in list(by_round) if one <= newest]:
                by_round.pop(old, None)
        for judged in (self._validators, self._checkers):
            for name in [name for name, last in judged.items() if last <= newest]:
                del judged[name]

    # ---- losses and copies ----

    def _due(self) -> int | None:
        """Return the next round to settle: all validators have judged it, or one of them is much further."""
        waiting = sorted(round_ for round_ in self._told if round_ > self._judged)
        if self._book is None or not waiting:
            return None
        first, newest = waiting[0], waiting[-1]
        awaited = {name for name, last in self._validators.items() if last > first - AWAITED_ROUNDS}
        return first if awaited <= self._told[first].keys() or newest >= first + AWAITED_ROUNDS else None

    def _settle(self, round_: int) -> None:
        """Update the book by a round, exclude replicas below the bound, keep and report the scores."""
        assert self._book is not None
        told = list(self._told.pop(round_, {}).values())
        names = sorted({name for one in told for name in one.losses})
        measured = {name: [one.losses[name] for one in told if name in one.losses] for name in names}
        losses = {name: median_of(own) for name, own in measured.items() if 2 * len(own) > len(told)}
        facts = self._facts(round_, told)
        with self._lock:
            for replica in self.exclusions.changed_hands(round_):
                self._book.forget(replica)
            before = self._book.to_exclude().items()
            self._book.update(facts, losses)
            found = self._book.to_exclude()
            scores, text = self._book.scores(), self._book.to_json()
        self._judged = round_
        for replica, cause in sorted(found.items() - before):
            if replica not in facts.against:  # it is excluded since the round itself
                self.exclusions.exclude(replica, round_, cause)
        table = pb.Scores(round=round_)
        for name in sorted(scores):
            table.scores.append(scores[name])
            table.scores[-1].excluded = self.exclusions.of(round_ + 1, [name]).get(name, "")
        with suppress(StoreError):  # the next round's holds the same, and more
            keep_scores(self._log.store, table, text, self.exclusions.in_force)
        for name, one in losses.items():
            self._reports.tell_own(judged=pb.Judgement(round=round_, replica=name, losses=one))
        for name, original in facts.copies.items():
            self._reports.tell_own(judged=pb.Judgement(round=round_, replica=name, copies=original))
        self._reports.tell_own(scores=table)

    def _facts(self, round_: int, told: Sequence[_JudgedRound]) -> RoundFacts:
        record = self._runner.wait_for_record(round_)
        included = frozenset(one.replica for one in record.contributions)
        pairs = [pair for one in told for pair in one.copies.items()]
        agreed = sorted({pair for pair in pairs if 2 * pairs.count(pair) > len(told)})
        # Validators say whose text it is. That the two are alike needs no vote.
        alike = {frozenset(pair) for pair in self._overlapping(record)} if agreed else set()
        copies = {copy: original for copy, original in agreed if {copy, original} in alike}
        synchronisation = {name: float(name not in self._differing[round_]) for name in included}
        missed, left_out = frozenset(record.late), frozenset(record.left_out)
        texts = {one.replica: one.tokens for one in record.contributions}
        shown = {} if self.showing is None else self.showing.shown(round_)
        own = round_, included, missed, synchronisation, copies, left_out, texts, self._against.get(round_, {})
        return RoundFacts(*own, shown, self._runner.coordinator.rules.fragments.count)

    # ---- recomputation ----

    def _recomputed(self, one: pb.Judgement, validator: str) -> None:
        """Report a recomputation. One that differs excludes, once more than half of the validators have found it.

        Nothing follows from the recomputations of a validator that never came to the same as anybody: its machine may
        have other bits.
        """
        self._reports.tell_own(judged=one)
        if one.recomputed.is_equal:
            self._sound.add(validator)
            for held in self._unsound.pop(validator, []):
                self._accuse(held, validator)
        elif one.recomputed.evidence and validator not in self._sound:
            self._unsound[validator] = [*self._unsound[validator], one][-JUDGED_ROUNDS:]
        else:
            self._accuse(one, validator)

    def _accuse(self, one: pb.Judgement, validator: str) -> None:
        known = [*self._validators.items(), *self._checkers.items()]
        active = {name for name, last in known if last > one.round - JUDGED_ROUNDS}
        if self.exclusions.accuse(one, validator) * 2 > len(active):
            self.exclusions.punish(one, f"its round {one.round} was computed again: {one.recomputed.cause}")


def complaint(one: Judgement, members: Mapping[str, str]) -> str | None:
    """Return a message on the first field that is out of range; None if there is none. `members`: member -> replica."""
    replicas = {*members.values()}
    found = one.recomputed
    if one.replica not in replicas:
        return f"`replica`: got `{one.replica[:40]}`, expected one of {', '.join(sorted(replicas))}"
    match one.WhichOneof("finding"):
        case "losses":
            # Only losses after a contribution may be infinite: it may make the model diverge.
            for number in Losses.DESCRIPTOR.fields:
                value, is_before = getattr(one.losses, number.name), number.name.endswith("_before")
                is_far = math.isinf(value) and value > 0 and not is_before
                if not (is_far or 0 <= value <= MOST_LOSS) or (is_before and value == 0):
                    return f"`losses.{number.name}`: got {value:g}, expected a loss up to {MOST_LOSS:g}"
            return None
        case "copies" if one.copies not in replicas - {one.replica}:
            return f"`copies`: got `{one.copies[:40]}`, expected another replica"
        case "copies":
            return None
        case "agreement":
            return "`agreement`: the exchange compares signs itself, and takes no judgement about them"
        case "recomputed" if found.member and members.get(found.member) != one.replica:
            return f"`recomputed.member`: got `{found.member[:40]}`, expected a member of {one.replica}"
        case "recomputed" if not found.difference >= 0:
            return f"`recomputed.difference`: got {found.difference:g}, expected 0 or more"
        case "recomputed" if max(len(found.cause), len(found.evidence)) > MOST_CHARACTERS:
            return f"`recomputed`: got a text of more than {MOST_CHARACTERS} characters"
        case "recomputed":
            return None
    return "found a judgement without a finding"


# ---- exclusions: replicas that rounds leave out for a while, and tickets that are revoked ----


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
