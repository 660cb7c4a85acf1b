"""All members as threads of one process, with in-process links: the reference for the networked run, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from hetero_pp.errors import ConfigError, LinkClosed, RunFailed
from hetero_pp.link.in_process import in_process_pair
from hetero_pp.link.protocol import LinkEnd
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch.exchange_host import begin_run, make_exchange
from hetero_pp.program.launch.resume import states_of
from hetero_pp.run.spec import MemberSpec, RunSpec
from hetero_pp.topology import DatacenterReplica, ParticipantsReplica, stage_link_name
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.restart import join_run
from replica_groups.saved_states import SavedStates
from replica_groups.take_part import train_member

Ends = dict[str, tuple[LinkEnd | None, LinkEnd | None]]


def run_in_process(
    spec: RunSpec, folder: Path, cache: Path, on_report: Callable[[Report], None], resume: bool = False
) -> None:
    """Train the whole topology, or go on with the run in the folder; raises the first member's error, if any fails.

    Raises ConfigError for replicas that need processes of their own.
    """
    require_threads(spec)
    torch.set_num_threads(spec.config.threads)
    exchange = make_exchange(spec, folder)
    failures: list[Exception] = []
    watcher = threading.Thread(target=_watch, args=(exchange, on_report, failures), name="watcher", daemon=True)
    watcher.start()
    ends = _connect(spec)
    errors: list[Exception] = []
    threads = [
        threading.Thread(
            target=_run_member,
            args=(spec, member, exchange, ends, cache, states_of(spec, folder, name), errors),
            name=name,
            daemon=True,
        )
        for name, member in spec.members.items()
    ]
    try:
        for thread in threads:
            thread.start()
        auditor = begin_run(exchange, spec, resume)
        for thread in threads:
            thread.join()
        auditor.join()
    except KeyboardInterrupt:
        exchange.fail("interrupted")
        _abort(ends, "interrupted")
        raise
    finally:
        exchange.end_watching()
        watcher.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, LinkClosed | RunFailed)), errors[0])
    if failures:
        kind = type(failures[0]).__name__
        raise RunFailed(f"the run's reports could not be followed to its end: {kind}: {failures[0]}")


def require_threads(spec: RunSpec) -> None:
    """Raise ConfigError for a replica whose engine starts processes of its own."""
    for index, replica in enumerate(spec.config.replicas):
        if isinstance(replica, DatacenterReplica) and replica.engine != "torch":
            raise ConfigError(
                ("replicas", index, "engine"),
                f"found `{replica.engine}`, expected `torch` in one process: leave out --in-process",
            )


def _watch(exchange: Exchange, on_report: Callable[[Report], None], failures: list[Exception]) -> None:
    try:
        for report in exchange.watch():
            on_report(report)
    except Exception as error:  # noqa: BLE001 (a bug: members train on, and the end of the run tells)
        failures.append(error)


def _connect(spec: RunSpec) -> Ends:
    """(upstream, downstream) of every member."""
    ends: Ends = dict.fromkeys(spec.members, (None, None))
    for replica in spec.config.replicas:
        if not isinstance(replica, ParticipantsReplica):
            continue
        for hop in range(replica.stage_count - 1):
            first, second = in_process_pair(spec.links[stage_link_name(replica.name, hop)], spec.config.seed)
            above, below = replica.members[hop], replica.members[hop + 1]
            ends[above] = (ends[above][0], first)
            ends[below] = (second, ends[below][1])
    return ends


def _run_member(
    spec: RunSpec,
    member: MemberSpec,
    exchange: Exchange,
    ends: Ends,
    cache: Path,
    states: SavedStates,
    errors: list[Exception],
) -> None:
    torch.set_num_threads(spec.config.threads)
    upstream, downstream = ends[member.name]
    try:
        last_round = join_run(exchange, member.name, "", states)
        train_member(spec, member, exchange, upstream, downstream, cache, states, last_round)
        for link in (upstream, downstream):
            if link is not None:
                link.close()
    except Exception as error:  # noqa: BLE001 (a bug in one thread must not leave the others waiting)
        errors.append(error)
        exchange.fail(f"{member.name}: {error}")
        _abort(ends, str(error))


def _abort(ends: Ends, cause: str) -> None:
    for pair in ends.values():
        for link in pair:
            if link is not None:
                link.abort(cause)
