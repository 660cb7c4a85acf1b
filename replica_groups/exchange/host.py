"""Host of an exchange: creates it, and begins the run with its first run checkpoint or where it ended before."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from hetero_pp.config.changes import REPLICAS, Agreement, Values, read_changes, replicas_of, write_changes
from hetero_pp.config.checkpoint import RunCheckpoint, first_checkpoint
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import DIRECTIONS, stage_link_name
from hetero_pp.config.member_inputs import round_optimizer
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.errors import DamagedFile, HeteroPPError
from hetero_pp.core.progress import NowAndThen
from hetero_pp.messages.messages_pb2 import Reading
from hetero_pp.messages.report_bounds import ReportBounds
from hetero_pp.rpc.exchange_service import AvailableStates
from hetero_pp.rpc.relay import MESSAGE_BYTES, LinkLimit
from hetero_pp.simulator.traffic import stage_link_loads
from hetero_pp.store.faults import NO_FAULTS, Faults
from hetero_pp.store.folder import storing
from hetero_pp.store.lease import Lease
from replica_groups.exchange.auditor import Auditor, Retention
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog, keep_configuration, open_log
from replica_groups.exchange.magnitudes import contribution_limits, inner_steps
from replica_groups.exchange.replay import OptimizerFor, checkpoint_after, newest_sound
from replica_groups.rounds.rules import Rules, Window

_STEPS_A_SECOND, _STEPS_OF_ANY_ROUND = 100, 10_000


@dataclass(frozen=True)
class Restart:
    """Start of a run, or of its continuation."""

    checkpoint: RunCheckpoint
    damaged: tuple[str, ...] = ()  # skipped files, each with its damage
    last_round: int | None = None  # last decided round, if it is later than the run checkpoint's
    note: str = ""  # data without which the run resumes


class UnderWay(HeteroPPError):
    """Members of the run are there, so it cannot resume as requested. They wait for another exchange."""


def make_exchange(
    spec: RunSpec,
    folder: RunFolder,
    resume: Values | None = None,
    goes_on: bool = False,
    lonely: bool = False,
    faults: Faults = NO_FAULTS,
    lease: Lease | None = None,
) -> Exchange:
    """Return an exchange that members can join; `begin_run` lets them train. `resume`: as in `begin_run`.

    `goes_on`: it replaces one that ended while members continued. `lonely`: all members are threads of this process, so
    that none can be gone without it. `lease`: without it the exchange does not use its store.
    """
    agreement, rehearses = Agreement(spec.at(1), spec.changes, resume or {}), spec.config.rehearsal is not None
    store, inner = faults.disk(open_log(spec.config, folder).store), spec.config.inner
    log = ContributionLog(store if lease is None else lease.fenced(store))
    is_shared = spec.config.store.url is not None
    if is_shared and (goes_on or resume is not None):  # another host may have served the run since
        kept = log.store.names()
        for path in (folder.text, folder.so_far):
            if path.name in kept:
                log.store.get_to(path.name, path)
    # A round of a fixed time may have 100 steps a second, and 10,000 more.
    steps = inner.steps or _STEPS_OF_ANY_ROUND + math.ceil(_STEPS_A_SECOND * (inner.seconds or 0.0))
    return Exchange(
        spec.run,
        spec.roster,
        None,
        spec.config.outer,
        log,
        agreement=agreement,
        rules=rules_of(spec, lonely),
        goes_on=goes_on,
        tokens_a_step=tokens_a_step(spec),
        magnitudes=None if rehearses else spec.config.exchange.magnitudes,
        text=folder.text,
        bounds=ReportBounds(steps, tokens_a_step(spec)),
        rehearsed=spec.parameter_shapes if rehearses else None,
        so_far=folder.so_far,
        link_limits=link_limits(spec),
        parameters=spec.parameter_shapes,
        is_shared=is_shared,
    )


def link_limits(spec: RunSpec) -> dict[tuple[str, str], LinkLimit]:
    """Return what the relay may carry in each direction of each stage link."""
    found = dict[tuple[str, str], LinkLimit]()
    for replica in spec.config.replicas:
        if not isinstance(replica, ParticipantsReplica):
            continue
        loads = stage_link_loads(spec, replica)
        batches = -(-spec.config.data.validation_sequences // (replica.batch_size // replica.micro_batches))
        for hop in range(replica.stage_count - 1):
            link = spec.links[stage_link_name(replica.name, hop)]
            for direction in DIRECTIONS:
                step = loads[direction].step + replica.micro_batches * MESSAGE_BYTES
                evaluation = loads[direction].evaluation + batches * MESSAGE_BYTES
                found[link.name, direction] = LinkLimit(step, evaluation, link.bottleneck(direction))
    return found


def rules_of(spec: RunSpec, lonely: bool = False) -> Rules:
    """Return the rules of a run's rounds."""
    own = spec.config.exchange
    ever = Window(1.0, math.inf, math.inf)
    return Rules(
        spec.roster.members,
        spec.roster.blocks,
        quorum=own.quorum,
        grace=Window(own.grace.factor, own.grace.least, own.grace.most),
        limit=own.limit,
        lease=ever if lonely else Window(own.lease.factor, own.lease.least, own.lease.most),
        hang=ever if lonely else Window(own.hang.factor, own.hang.least, own.hang.most),
        joins_at_once=spec.config.inner.seconds is not None,
        tokens_a_step=tokens_a_step(spec) if spec.config.outer.weights == "tokens" else None,
        steps=inner_steps(spec),
        own_steps={one.name: spec.steps_of(one.name) or 0 for one in spec.config.replicas if one.steps is not None},
        overlap=spec.config.outer.overlap > 0,
        resumes=spec.resumes,
        fragments=spec.fragments,
        optional=frozenset(replica.name for replica in spec.config.replicas if replica.optional),
    )


def tokens_a_step(spec: RunSpec) -> dict[str, int]:
    """Return replica -> tokens that it trains on in one inner step."""
    return {replica.name: replica.batch_size * spec.config.data.sequence_length for replica in spec.config.replicas}


def begin_run(
    exchange: Exchange, spec: RunSpec, folder: RunFolder, resume: Values | None, goes_on: bool = False
) -> Auditor:
    """Begin the run once all required members have joined and reported their states; return its auditor.

    `resume`: None for a new run, else the keys to change when it resumes, which are kept in its folder. With `goes_on`
    the exchange replaces one that has ended: it waits for nothing and removes no round. The same holds if the run is
    resumed while a member on another host still runs.

    Raises HeteroPPError if there is no round from which all of them can resume, RunFailed if a member is gone before.
    Raises UnderWay if members are there that do not know what is to be changed.
    """
    changes = read_changes(folder.changes)
    if changes.pending is not None:
        resume = {**(resume or {}), REPLICAS: changes.pending}
    spec = spec.with_changes(changes.settled())
    if resume is not None and not goes_on:
        exchange.runner.wait_until(lambda: exchange.runner.goes_on or exchange.has_met())
        goes_on = exchange.runner.goes_on
        # Members need the other keys from their start. A change of the replicas is allowed: they are told of it.
        others = [key for key in (resume if goes_on else {}) if key != REPLICAS]
        if others:
            keys = ", ".join(f"`{key}`" for key in others)
            raise UnderWay(
                f"{keys}: members of the run still train with the old value; stop them before the change, or "
                "undo the change"
            )
    try:
        if goes_on:
            start, spec = exchange.runner.retry(partial(_take_over, exchange, spec, folder, resume or {}))
        elif resume is None:

            def tell(what: str, share: float) -> None:
                exchange.reports.tell_own(reading=Reading(what=what, share=share))

            progress = NowAndThen(tell, 1.0, lambda _: 1.0, time.monotonic)
            start = Restart(first_checkpoint(spec, progress))
            exchange.wait_until_joined()
        else:
            start, spec = exchange.runner.retry(partial(_go_on, exchange, spec, folder, resume))
    except HeteroPPError as error:
        exchange.fail(str(error))  # members wait to hear where they begin
        raise
    optimizer, now = round_optimizer(spec, start.checkpoint.basis), spec.latest
    retention = Retention(exchange.log, now.checkpoints.keep, now.store.history)
    auditor = Auditor(exchange, start.checkpoint, now.outer, now.checkpoints.every, optimizer, retention, folder.path)
    auditor.start()
    limits = None if spec.config.rehearsal is not None else contribution_limits(spec)
    exchange.begin(start.checkpoint, start.damaged, spec, start.last_round, start.note, limits=limits)
    return auditor


def _take_over(exchange: Exchange, spec: RunSpec, folder: RunFolder, wanted: Values) -> tuple[Restart, RunSpec]:
    """Return the start of an exchange that takes over: after the last decided round, whatever members hold.

    Without a run checkpoint the run has not begun. Other replicas take part from the round after the one that members
    may be training.
    """
    damaged: list[str] = []
    last_round = exchange.log.last_record()
    if REPLICAS in wanted:
        changed = spec.changes.changed(spec.at(1), last_round + 2, {REPLICAS: wanted[REPLICAS]})
        spec = spec.with_changes(changed)
        _keep(spec, folder, exchange.log)
    try:
        checkpoint = newest_sound(exchange.log, last_round, damaged)
    except FileNotFoundError:
        return Restart(first_checkpoint(spec)), spec
    return Restart(checkpoint, tuple(damaged), last_round), spec


def _go_on(exchange: Exchange, spec: RunSpec, folder: RunFolder, wanted: Values) -> tuple[Restart, RunSpec]:
    """Return where a run resumes, and the changed run. Removes later rounds from the log, and keeps the changes."""
    start = _find_start(exchange, spec, spec.with_changes(spec.changes.changed(spec.at(1), 1, wanted)).latest)
    first_round = start.checkpoint.round + 1
    if any(since > first_round for since in spec.changes.replicas_since):
        wanted = {REPLICAS: replicas_of(spec.latest), **wanted}  # those that are there have come, or left, already
    if wanted:
        spec = spec.with_changes(spec.changes.changed(spec.at(1), first_round, wanted))
        _keep(spec, folder, exchange.log)
    exchange.log.forget_after(start.checkpoint.round)
    return start, spec


def _keep(spec: RunSpec, folder: RunFolder, log: ContributionLog) -> None:
    """Write the changed keys to the files that a resumed run reads."""
    with storing("written", folder.changes):
        write_changes(spec.changes, folder.changes)
    keep_configuration(spec.config, folder, log)


def _find_start(exchange: Exchange, spec: RunSpec, latest: RunConfig) -> Restart:
    """Return where a run resumes. `latest`: the configuration of its last round.

    Raises HeteroPPError if there is no such round, or if resuming would undo the end of a run that is over.
    """
    available, log = exchange.wait_until_joined(), exchange.log
    last = log.last_record()
    is_over = latest.outer.is_over(last, log.tokens_after(last)) and _has_checkpoint(log, last)
    if is_over and not all(last in states.rounds for states in available.values()):
        raise HeteroPPError(f"the run is over: its log has the run checkpoint after round {last} of {last}")
    saved = any(states.rounds for states in available.values())
    if not saved and not last and not log.checkpoints():
        return Restart(first_checkpoint(spec))  # it stopped before it had begun
    before = {replica.name for replica in spec.at(max(last, 1)).replicas}
    known = {
        name: available[name]
        for name, member in spec.members.items()
        if member.replica.name in before and name in available
    }
    optimizer_for = partial(round_optimizer, spec)
    start = find_restart(log, spec.run, known or available, optimizer_for, latest.states_every)
    if complaint := log.over_before(latest.outer, start.checkpoint.round):
        raise HeteroPPError(f"outer.{complaint}")
    return start


def _has_checkpoint(log: ContributionLog, round_: int) -> bool:
    """Return whether the log has an undamaged run checkpoint after a round."""
    try:
        with log.open_checkpoint(round_):
            return True
    except (DamagedFile, FileNotFoundError):
        return False


def find_restart(
    log: ContributionLog, run: str, available: Mapping[str, AvailableStates], optimizer_for: OptimizerFor, every: int
) -> Restart:
    """Return the newest round of which every member has an undamaged state, and theta after it, as without a break.

    If some members lost their states, or are more than the `every` rounds between two states behind, it is the newest
    round that the log can rebuild. The others lose nothing, and each member continues with the state that it has.
    Members that stopped one round apart, before the first state that all of them have, start again from round 0. Raises
    HeteroPPError with the states of all members if the log can rebuild none.
    """
    damaged = [f"{member}: {one}" for member, states in sorted(available.items()) for one in states.damaged]
    common = frozenset.intersection(*(states.rounds for states in available.values()))
    held = [max(states.rounds, default=0) for states in available.values()]
    newest = max(held)
    if not common and newest - min(held) <= 1 and newest > 0:
        common |= {0}
    of_members = sorted(common, reverse=True) if newest - max(common, default=0) <= every else []
    last = log.last_record()
    for round_ in (*of_members, *range(last, -1, -1)):
        try:
            checkpoint = checkpoint_after(log, run, round_, optimizer_for, damaged)
        except FileNotFoundError:
            continue
        behind = [name for name, states in sorted(available.items()) if round_ > 0 and round_ not in states.rounds]
        older = [f"{name} {_saved(available[name].rounds, round_)}" for name in behind]
        return Restart(checkpoint, tuple(dict.fromkeys(damaged)), note="; ".join(older))
    holders = "; ".join(f"{member} {_listed(states.rounds)}" for member, states in sorted(available.items()))
    complaint = f"found no round that all members have saved and that the log (up to round {last}) can restore"
    cause = f"{complaint}: {holders} (states are saved every `checkpoints.every` rounds)"
    raise HeteroPPError("; ".join([cause, *dict.fromkeys(damaged)]))


def _saved(rounds: frozenset[int], round_: int) -> str:
    newest = max((one for one in rounds if one < round_), default=None)
    none = "has no saved state and starts with an empty error feedback"
    return none if newest is None else f"restores the state that it saved after round {newest}"


def _listed(rounds: frozenset[int]) -> str:
    return f"holds {', '.join(map(str, sorted(rounds)))}" if rounds else "holds none"
