"""The metrics of a run: docs/reference/metrics.md is generated from METRICS.

Label values are names of the YAML, or of a fixed set. Text that a member or a stranger sends is never a label.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

from prometheus_client.core import GaugeMetricFamily

from hetero_pp.config.lines import WAYS, Way
from hetero_pp.config.links import DIRECTIONS, EXCHANGE
from hetero_pp.core.units import bytes_per_second
from hetero_pp.messages.messages_pb2 import STORING
from hetero_pp.messages.refusals import Kind
from hetero_pp.program.operate.collector import Described, Samples, ScrapedState
from hetero_pp.program.operate.observed import Condition, seconds_without_progress
from hetero_pp.program.report.carried import DirectionState, LineState
from hetero_pp.program.report.membership_state import Outcome
from hetero_pp.program.report.replica_state import ReplicaState
from hetero_pp.program.report.spent import PARTS, awaiting
from hetero_pp.program.report.state import MemberPresence, RunState

MEMBER, REPLICA, LINK, LINE = ("member",), ("replica",), ("link", "direction"), ("line", "way")


# ---- the run ----


def _one(value: Callable[[ScrapedState], float | None], view: ScrapedState) -> Samples:
    return [((), value(view))]


def _of_state(value: Callable[[RunState], float | None], view: ScrapedState) -> Samples:
    return [((), value(view.state))]


def _info(view: ScrapedState) -> Samples:
    config = view.state.spec.config
    return [((config.name, "run" if config.rehearsal is None else "rehearsal"), 1)]


def _condition(view: ScrapedState) -> Samples:
    found = view.observed.health().condition
    return [((one,), float(one is found)) for one in Condition]


def _progress(view: ScrapedState) -> float:
    done, planned = view.state.progress_of_open_round(view.observed.now())
    return done / planned if planned else 0.0


def _last_round_seconds(state: RunState) -> float | None:
    return state.round_seconds(state.rounds) if state.rounds in state.closed else None


def _is_obstructed(state: RunState) -> float:
    return float(state.waiting is not None and state.waiting.awaited == STORING)


# ---- members ----


def _members(view: ScrapedState) -> Samples:
    found = Counter(view.state.presence(name) for name in view.observed.members(view.state))
    return [((one,), found[one]) for one in MemberPresence]


def _is_up(state: RunState, member: str) -> float:
    return float(state.presence(member) in (MemberPresence.PRESENT, MemberPresence.FINISHED))


def _of_members(value: Callable[[RunState, str], float], view: ScrapedState) -> Samples:
    return [((name,), value(view.state, name)) for name in view.observed.members(view.state)]


def _spent(view: ScrapedState) -> Samples:
    names = view.observed.members(view.state)
    return [((name, part), view.state.spent[name].seconds(part)) for name in names for part in PARTS]


def _restarts(view: ScrapedState) -> Samples:
    names = [*view.observed.members(view.state), *([EXCHANGE] if view.observed.sees_all else [])]
    return [((name,), view.state.membership_state.restarts[name]) for name in names]


# ---- replicas ----


def _of_replicas(value: Callable[[ReplicaState], float | None], view: ScrapedState) -> Samples:
    return [((one.name,), value(one)) for one in view.observed.replicas(view.state)]


def _contributions(view: ScrapedState) -> Samples:
    found = view.outcomes.count(view.state.membership_state)
    names = [one.name for one in view.observed.replicas(view.state)]
    return [((name, outcome), found[name, outcome]) for name in names for outcome in Outcome]


def _scores(view: ScrapedState) -> Samples:
    names = [one.name for one in view.observed.replicas(view.state)]
    return [((name,), found.final) for name in names if (found := view.state.scores.get(name)) is not None]


def _refusals(view: ScrapedState) -> Samples:
    return [((kind.name.lower(),), view.state.refusals[kind]) for kind in Kind]


# ---- links and lines ----


def _of_links(value: Callable[[DirectionState], float | None], view: ScrapedState) -> Samples:
    return [((link, way), value(state)) for link, way, state in view.observed.directions(view.state)]


def _waited(view: ScrapedState) -> Samples:
    known = view.observed.members(view.state)
    for link in view.state.links.values():
        for way in DIRECTIONS:
            receiver, part = awaiting(link.spec, way)
            if receiver in known:
                yield (link.name, way), view.state.spent[receiver].seconds(part)


def _of_lines(value: Callable[[LineState, Way], float | None], view: ScrapedState) -> Samples:
    return [((name, way), value(line, way)) for name, line in view.state.lines.items() for way in WAYS]


def build_info() -> GaugeMetricFamily:
    labels = {"version": version("hetero-pp"), "python": platform.python_version(), "torch": version("torch")}
    family = GaugeMetricFamily("hetero_pp_build_info", "Versions of the program; the value is 1.", labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


# fmt: off
METRICS = (
    Described("hetero_pp_run_info", ("run", "kind"), "",
              "Name of the run; `kind` is `run`, or `rehearsal` if it trains nothing. The value is 1.", _info),
    Described("hetero_pp_run_condition", ("condition",), "", "1 for the condition that /healthz reports, else 0.",
              _condition),
    Described("hetero_pp_last_report_timestamp_seconds", (), "seconds since 1970",
              "Time at which this host got the last report of the run.",
              partial(_one, lambda view: view.observed.heard)),
    Described("hetero_pp_no_progress_seconds", (), "seconds",
              "Time for which the exchange has waited without progress; 0 if it waits for nothing.",
              partial(_one, lambda view: seconds_without_progress(view.state, view.observed.now()))),
    Described("hetero_pp_storage_obstructed", (), "",
              "1 while a disk or a store refuses a read or write of the exchange, else 0.",
              partial(_of_state, _is_obstructed)),
    Described("hetero_pp_rounds_closed_total", (), "rounds", "Closed rounds, those of earlier starts included.",
              partial(_of_state, lambda state: state.rounds), needs_all=True),
    Described("hetero_pp_rounds_planned", (), "rounds", "Rounds of the whole run.",
              partial(_of_state, lambda state: state.rounds_planned)),
    Described("hetero_pp_round_progress_ratio", (), "0 to 1",
              "Share of the open round's inner loop that the slowest required replica has done.",
              partial(_one, _progress), needs_all=True),
    Described("hetero_pp_round_duration_seconds", (), "seconds", "Duration of the last closed round, without pauses.",
              partial(_of_state, _last_round_seconds), needs_all=True),
    Described("hetero_pp_pauses_total", (), "pauses", "Pauses because fewer replicas were present than a round needs.",
              partial(_of_state, lambda state: len(state.membership_state.pauses))),
    Described("hetero_pp_tokens_per_second", (), "tokens a second",
              "Trained tokens divided by the time since the first inner step, without pauses.",
              partial(_one, lambda view: view.state.tokens_per_second()), needs_all=True),
    Described("hetero_pp_included_tokens_total", (), "tokens", "Tokens of contributions that rounds include.",
              partial(_of_state, lambda state: state.membership_state.counted_tokens), needs_all=True),
    Described("hetero_pp_contribution_bytes_total", (), "bytes", "Size of the contributions that rounds include.",
              partial(_of_state, lambda state: state.contribution_bytes), needs_all=True),
    Described("hetero_pp_refusals_total", ("kind",), "messages", "Refused messages by kind.", _refusals,
              needs_all=True),

    Described("hetero_pp_members", ("state",), "members", "Members by state.", _members),
    Described("hetero_pp_member_up", MEMBER, "", "1 if the member is present or has finished, else 0.",
              partial(_of_members, _is_up)),
    Described("hetero_pp_member_round", MEMBER, "rounds", "Last round that the member finished.",
              partial(_of_members, lambda state, name: state.spent[name].last_round)),
    Described("hetero_pp_member_round_seconds_total", (*MEMBER, "part"), "seconds",
              "Time of the member's rounds by part. `wait` is for neighbours, and `blocked` for the exchange.", _spent),
    Described("hetero_pp_restarts_total", ("process",), "restarts", "Restarts of a process by this host.", _restarts),

    Described("hetero_pp_training_loss", REPLICA, "nats a token", "Training loss of the replica's last inner step.",
              partial(_of_replicas, lambda replica: replica.loss)),
    Described("hetero_pp_validation_loss", REPLICA, "nats a token", "Last validation loss, in the replica forward.",
              partial(_of_replicas, lambda replica: replica.last_validation_loss)),
    Described("hetero_pp_tokens_total", REPLICA, "tokens", "Trained tokens, without those of discarded attempts.",
              partial(_of_replicas, lambda replica: replica.tokens), needs_all=True),
    Described("hetero_pp_contributions_total", (*REPLICA, "outcome"), "contributions",
              "What became of the replica's contributions to closed rounds.", _contributions, needs_all=True),
    Described("hetero_pp_score", REPLICA, "", "Final score of the replica's contributions; no sample without scores.",
              _scores, needs_all=True),

    Described("hetero_pp_link_wire_bytes_total", LINK, "bytes", "Bytes on the wire, with framing.",
              partial(_of_links, lambda direction: direction.wire_bytes)),
    Described("hetero_pp_link_busy_seconds_total", LINK, "seconds",
              "Time for which the direction was busy since the first inner step.",
              partial(_of_links, lambda direction: direction.busy_seconds)),
    Described("hetero_pp_link_capacity_bytes_per_second", LINK, "bytes a second",
              "Configured rate of the direction; no sample without a limit.",
              partial(_of_links, lambda direction: bytes_per_second(direction.bandwidth))),
    Described("hetero_pp_link_waited_seconds_total", LINK, "seconds",
              "Time in finished rounds for which the receiver waited for messages of the direction. It contains the "
              "time in which the sender computes.", _waited),
    Described("hetero_pp_line_wire_bytes_total", LINE, "bytes", "Bytes on the wire of all links that share the line.",
              partial(_of_lines, LineState.wire_bytes), needs_all=True),
    Described("hetero_pp_line_busy_seconds_total", LINE, "seconds",
              "Time that these bytes take at the line's rate, since the first inner step.",
              partial(_of_lines, LineState.busy_seconds), needs_all=True),
    Described("hetero_pp_line_capacity_bytes_per_second", LINE, "bytes a second",
              "Configured rate of the line; no sample without a limit.",
              partial(_of_lines, lambda line, way: bytes_per_second(line.spec.bandwidth(way))), needs_all=True),
)
# fmt: on
