"""A run as the page shows it: its history with curves and marks, and frames of any moment, as JSON.

Apply each report to the state, then give it to `take`. The page gets the whole once, and then what has changed since.
"""

from __future__ import annotations

import time
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from hetero_pp.config.lines import WAYS, Direction, members_at
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica, ReplicaSettings
from hetero_pp.core.units import bytes_per_second
from hetero_pp.messages.messages_pb2 import CONTRIBUTING, Credit, Doing, Report
from hetero_pp.program.compare import leaves
from hetero_pp.program.report.lines import kind_of, status_lines, words_of
from hetero_pp.program.report.recorder import to_json
from hetero_pp.program.report.state import (
    MemberPresence,
    News,
    Outcome,
    RunState,
    Traffic,
    awaiting,
)

MOST_POINTS = 1000  # points of a curve, after thinning
MOST_MARKS = 5000  # marks that are kept: the newest ones
MOST_FRAMES = 800  # above this number every second frame is dropped, and later ones are taken half as often
MOST_CELLS = 20_000
"""Cells of the grid of rounds, one per round and replica. Longer runs show every second, fourth, ... earlier round."""
_ALWAYS = 50  # newest rounds, which are always shown
_CHARACTERS_MAX = 1000  # of the text of a mark
_MOST_RATE = 1e18  # bytes per second: a damaged record may tell any bytes within any time
_MOST_PROBLEMS = 20
_SECONDS_BETWEEN_FRAMES, _SECONDS_PER_MEMBER = 0.5, 0.02
"""Interval of key frames at first: its minimum, and the share for each member. Frames of large runs cost more."""
_SECONDS_OUT_OF_ORDER = 5.0
"""A report that is older than the last frame by more belongs to an earlier start of the run, which is told again."""
SIDES: Mapping[str, Direction] = {"there": "forward", "back": "backward"}
"""Direction of a link as the page names it -> as the run names it."""
_LASTING = ("given_up", "vacant", "suspended", "finished")
"""States whose start is known. Activities are samples: between two of them a member may do something else."""
_HOPS = {Doing.WAITING_FOR_PREVIOUS: -1, Doing.WAITING_FOR_NEXT: 1}
_DOINGS: Mapping[Doing, str] = {
    Doing.COMPUTING: "computing",
    Doing.FORWARD: "forward",
    Doing.BACKWARD: "backward",
    Doing.WAITING_FOR_PREVIOUS: "waiting",
    Doing.WAITING_FOR_NEXT: "waiting",
    Doing.OUTER_ROUND: "outer",
    Doing.EVALUATING: "evaluating",
    Doing.CATCHING_UP: "reading",
    Doing.WAITING_FOR_ROUND: "waiting",
}
"""Reported activity of a member -> its state on the page."""


class Curve:
    """Loss over the steps of one replica: at most twice MOST_POINTS points [time, step, loss]."""

    def __init__(self) -> None:
        self.points: list[tuple[list[float], int]] = []  # each with the version of the page that it came with
        self._every = 1

    def add(self, time: float, step: int, loss: float, version: int) -> None:
        """Add a point. A step that is trained again replaces its point and those after it."""
        while self.points and self.points[-1][0][1] >= step:
            self.points.pop()
        if step % self._every == 0:
            self.points.append(([time, step, loss], version))
        if len(self.points) >= 2 * MOST_POINTS:
            self._every *= 2
            self.points = [point for point in self.points if point[0][1] % self._every == 0]

    def since(self, version: int) -> list[list[float]]:
        """Return the points that came after a version."""
        first = bisect_right(self.points, version, key=lambda point: point[1])
        return [point for point, _ in self.points[first:]]


class KeyFrames:
    """Frames by time, as compressed JSON. Their number is bounded, and so is the memory: some MB for 100 members."""

    def __init__(self, interval: float) -> None:
        """`interval`: seconds between two frames at first."""
        self._interval = interval
        self._times: list[float] = []
        self._frames: list[bytes] = []

    def is_due(self, time: float) -> bool:
        """Return whether a frame at this time is wanted."""
        if not self._times:
            return True
        return time >= self._times[-1] + self._interval or time < self._times[-1] - _SECONDS_OUT_OF_ORDER

    def add(self, time: float, frame: str) -> None:
        """Add a frame. It replaces those at later times."""
        kept = bisect_right(self._times, time)
        del self._times[kept:], self._frames[kept:]
        self._times.append(time)
        self._frames.append(zlib.compress(frame.encode(), level=1))
        if len(self._times) > MOST_FRAMES:
            self._interval *= 2
            self._times, self._frames = self._times[::2], self._frames[::2]

    def at(self, time: float) -> str | None:
        """Return the last frame up to a time, or the first one; None if there is none."""
        if not self._times:
            return None
        return zlib.decompress(self._frames[max(0, bisect_right(self._times, time) - 1)]).decode()

    def some(self, most: int) -> Iterator[str]:
        """Yield at most this many frames, evenly spaced over all of them, with the last one."""
        count = len(self._frames)
        chosen = {round(index * (count - 1) / max(1, most - 1)) for index in range(most)}
        for index in sorted(chosen) if count > most else range(count):
            yield zlib.decompress(self._frames[index]).decode()


class RunView:
    """A run with what its page needs beyond its state. All methods may be called from any thread."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.own: tuple[str, ...] = ()  # members on this host, if it has joined a run of another host
        self.text = ""  # first digits of the digest of the run's text; empty if unknown
        self.is_live = True
        self.outcome: str | None = None  # how it ended: `over` or `failed`; None while it is not known to have ended
        self.cause = ""  # why it failed
        self.version = 0  # changes with everything that the page shows
        self.curves: dict[str, Curve] = {}
        self.stale = ""  # why the page may be behind the run; empty if it is not known to be
        self.problems: list[str] = []
        self.key_frames = KeyFrames(max(_SECONDS_BETWEEN_FRAMES, _SECONDS_PER_MEMBER * len(state.members)))
        self._marks: deque[tuple[int, News]] = deque(maxlen=MOST_MARKS)  # each with its version, by which it is known
        self._changed: dict[int, int] = {}  # version by round, of the last report that changed it
        self._heard_at = time.monotonic()

    # ---- writing ----

    def take(self, report: Report) -> None:
        """Take in a report that the state has accepted."""
        with self.state.lock:
            self.version += 1
            self._heard_at = time.monotonic()
            if self.state.news is not None:
                self._marks.append((self.version, self.state.news))
            event, since = report.WhichOneof("event"), _since_start(self.state, report.time)
            if event in ("evaluation", "member_round", "round_closed"):
                self._changed[getattr(report, event).round] = self.version
            if event == "inner_step" and report.inner_step.HasField("loss"):
                step = report.inner_step
                replica = self.state.replicas.get(step.replica)
                if replica is not None and step.round not in replica.settled:
                    curve = self.curves.setdefault(step.replica, Curve())
                    curve.add(since, replica.index(step.round, step.step), step.loss, self.version)
            if self.state.news is not None or self.key_frames.is_due(since):
                self.key_frames.add(since, to_json(_frame(self.state, report.time, self.outcome, self.stale)))

    def end(self, outcome: str | None, is_live: bool, cause: str = "") -> None:
        """Note how the run ended, or that it runs."""
        if (outcome, is_live, cause) != (self.outcome, self.is_live, self.cause):
            self.outcome, self.is_live, self.cause = outcome, is_live, cause
            self.version += 1

    def note_stale(self, why: str) -> None:
        """Note why the page may be behind the run."""
        if why != self.stale:
            self.stale = why
            self.version += 1

    def complain(self, problem: str) -> None:
        """Note something that is missing or damaged. Only the first ones are kept."""
        if len(self.problems) < _MOST_PROBLEMS and problem not in self.problems:
            self.problems.append(problem)
            self.version += 1

    # ---- reading ----

    @property
    def clock(self) -> tuple[float | None, int]:
        """All times of the page depend on it: the time of the first report, and the number of breaks."""
        return self.state.started, self.state.sittings

    def now(self) -> float:
        """Return the present time by the clock of the reports: it stands still once the run has ended."""
        latest = self.state.latest or 0.0
        return latest + (time.monotonic() - self._heard_at) if self.is_live and self.state.latest else latest

    def frame(self, when: float | None = None) -> str:
        """Return the frame of this moment, or at a time in seconds since the first report, as JSON."""
        with self.state.lock:
            earlier = None if when is None else self.key_frames.at(when)
            return earlier or to_json(_frame(self.state, self.now(), self.outcome, self.stale))

    def history(self, identifier: str, since: int = 0) -> dict[str, Any]:
        """Return everything but the frames; with `since`, what it has gained since that version."""
        with self.state.lock:
            state, rounds, every = self.state, sorted(self.state.closed), 1
            while len(rounds) * max(1, len(state.replicas)) > every * MOST_CELLS:
                every *= 2
            if since:
                rounds = [round_ for round_ in rounds if self._changed.get(round_, 0) > since]
            else:
                rounds = [round_ for round_ in rounds if round_ % every == 0 or round_ > state.rounds - _ALWAYS]
            # In order of time: a run that goes on reports its earlier start later.
            marks = sorted((mark for mark in self._marks if mark[0] > since), key=lambda mark: mark[1].report.time)
            found = {
                "id": identifier,
                "span": _since_start(state, state.latest or 0.0),
                "outcome": self.outcome,
                "cause": self.cause,
                "is_live": self.is_live,
                "problems": [*self.problems],
                "rounds": [_round(state, round_) for round_ in rounds],
                "marks": [_mark(state, number, news) for number, news in marks],
                "steps": {
                    name: [[time, step / state.replicas[name].share, loss] for time, step, loss in points]
                    for name, curve in self.curves.items()
                    if (points := curve.since(since))
                },
            }
            if rounds or not since:
                goodput, share = state.goodput()
                found["cost"] = {
                    "training_seconds": state.training_seconds(),
                    "tokens": sum(replica.tokens for replica in state.replicas.values()),
                    "tokens_per_second": state.tokens_per_second(),
                    "goodput": goodput,
                    "goodput_share": share,
                    "contribution_bytes": state.contribution_bytes,
                    "wire_bytes": sum(link.wire_bytes for link in state.links.values()),
                }
            if since:
                return found
            config = state.changed.config
            settings = dict(leaves(state.changed.latest.model_dump(mode="json", exclude={"name"})))
            return found | {
                "name": config.name,
                "rehearsal": config.rehearsal is not None,
                "rounds_planned": state.rounds_planned,
                "inner_steps": state.inner_steps,
                "topology": _topology(state.changed),
                "settings": settings | {"data: sha256": self.text or None},
                "own": list(self.own),
            }

    def told(self, identifier: str, since: int = 0) -> str:
        """Return the history, or what it has gained since a version, and the frame of this moment, as JSON."""
        with self.state.lock:
            return f'{{"history": {to_json(self.history(identifier, since))}, "frame": {self.frame()}}}'


# ---- parts of the JSON; the caller holds the state's lock ----


def _since_start(state: RunState, when: float) -> float:
    """Return a time as seconds since the run's first report, without breaks between two sittings."""
    return round(state.elapsed(when), 3)


def _round(state: RunState, round_: int) -> dict[str, Any]:
    """Return a closed round, with a cell for each replica."""
    closed, excluded, cells = state.closed[round_], state.not_counted(round_), {}
    for name in dict.fromkeys([*state.awaited(round_), *state.of_round(round_)]):
        replica = state.replicas.get(name)
        cells[name] = {
            "state": Outcome.INCLUDED if name in closed.sizes else state.exclusion(name, round_).outcome,
            "why": excluded[name].cause if name in excluded else None,
            "bytes": closed.sizes.get(name),
            "training_loss": None if replica is None else replica.round_loss(round_),
            "validation_loss": None if replica is None else replica.validation_loss.get(round_),
            **{f"{part}_seconds": seconds for part, seconds in state.times(round_, name).items()},
        }
    return {
        "round": round_,
        "fragment": state.spec.fragments.describe(round_),
        "closed": _since_start(state, closed.time),
        # It is not known how long a round took if it is not known when the one before closed.
        "seconds": state.round_seconds(round_) if round_ == 1 or round_ - 1 in state.closed else None,
        "bytes": closed.bytes,
        "tokens": closed.tokens_until,
        "validation_loss": state.mean_validation_loss(round_),
        "cells": cells,
    }


def _mark(state: RunState, number: int, news: News) -> dict[str, Any]:
    """Return a membership event as the page shows it. Only members of the run have their own marks."""
    report = news.report
    is_of_exchange, told = report.HasField("membership_event"), report.membership_event
    slot = told.slot if is_of_exchange else report.member
    member = state.members.get(slot)
    return {
        "id": number,
        "time": _since_start(state, report.time),
        "kind": kind_of(news),
        "member": None if member is None else slot,
        "replica": told.replica or (None if member is None else member.replica),
        "round": (told.round if is_of_exchange else report.begun.last_round) or None,
        "text": words_of(news, state.spec)[:_CHARACTERS_MAX],
    }


def _topology(spec: RunSpec) -> dict[str, Any]:
    """Return replicas, members, links and lines. Rates are in bytes per second; None is unlimited."""
    sites, names = spec.config.sites.items(), list(spec.members)
    site_of = {member: name for name, site in sites for member in members_at(site.members, names)}
    members, replicas = [], []
    for replica in spec.replicas_ever:
        boundary = None  # what crosses between the stages of a group, such as `8 of 64, 4 bits`
        if isinstance(replica, ParticipantsReplica) and replica.stage_count > 1:
            width, kept = spec.shape.width, replica.boundary.dimensions(spec.shape.width)
            bits = replica.boundary.bits
            coefficient = replica.boundary.dtype if bits is None else f"{bits} bits"
            boundary = f"{width if kept is None else kept} of {width}, {coefficient}"
        replicas.append(
            {
                "id": replica.name,
                "kind": replica.kind,
                "optional": replica.optional,
                "members": list(replica.members),
                "boundary": boundary,
                "batch_size": replica.batch_size,
            }
        )
    for member in spec.members.values():
        layers = None
        if member.stage is not None and len(member.stage.layers) > 1:
            layers = f"layers {member.stage.layers.start}-{member.stage.layers.stop - 1}"
        elif member.stage is not None:
            layers = f"layer {member.stage.layers.start}" if member.stage.layers else "no layer"
        members.append(
            {
                "id": member.name,
                "replica": member.replica.name,
                "stage": None if member.stage is None else member.stage.index,
                "layers": layers,
                "engine": member.replica.engine if isinstance(member.replica, DatacenterReplica) else "stages",
                "site": site_of.get(member.name),
            }
        )
    return {
        "replicas": replicas,
        "members": members,
        "links": [
            {
                "id": link.name,
                "source": link.source,
                "target": link.target,
                "bandwidth": {side: bytes_per_second(link.bottleneck(way)) for side, way in SIDES.items()},
                "latency": {side: link.shape(way).latency for side, way in SIDES.items()},
            }
            for link in spec.links.values()
        ],
        "lines": [
            {"id": line.name, "members": list(line.members)}
            | {way: bytes_per_second(line.bandwidth_of(way)) for way in WAYS}
            for line in spec.lines.values()
        ],
    }


def _frame(state: RunState, now: float, outcome: str | None, stale: str) -> dict[str, Any]:
    """Return the frame at a time in seconds since the epoch. `stale`: why the page may be behind the run."""
    left, waiting = state.seconds_left(now), state.waiting
    done, total = state.progress_of_open_round(state.latest or 0.0)  # as far as the last report shows
    if state.failed is not None or outcome == "failed":
        phase = "failed"
    elif state.is_over or outcome == "over":
        phase = "over"
    elif not state.has_begun:
        phase = "joining"
    elif state.pause is not None:
        phase = "paused"
    elif waiting is not None and (waiting.awaited != CONTRIBUTING or done >= total):
        phase = "waiting"
    else:
        phase = "training"

    def flow(traffic: Traffic, limit: float | None) -> dict[str, float | None]:
        """Return what passes now. Rates are in bytes per second, but `limit` is in bits per second."""
        rate = traffic.recent_bytes_per_second(now)
        busy = None if limit is None else round(8 * rate / limit, 4)
        return {"rate": round(min(rate, _MOST_RATE)), "busy": busy, "bytes": traffic.wire_bytes}

    links: dict[str, Any] = {}
    for name, link in state.links.items():
        links[name] = {}
        for side, way in SIDES.items():
            receiver, part = awaiting(link.spec, way)
            share = state.members[receiver].share(part) if receiver in state.members else None
            awaited = None if share is None else round(share, 4)
            links[name][side] = flow(link.ways[way], link.spec.bottleneck(way)) | {"awaited": awaited}
    done, total = state.progress_of_open_round(now)
    return {
        "time": _since_start(state, now),
        "phase": phase,
        "message": state.failed or stale or next((line for line, _ in status_lines(state, now)), ""),
        "rounds_closed": state.rounds,
        "step_done": done,
        "step_total": total,
        "elapsed": round(state.elapsed(now), 3),
        "seconds_left": None if left is None else round(left, 1),
        "members": {name: _member_now(state, name) for name in state.members},
        "replicas": {replica.name: _replica_now(state, replica, now) for replica in state.spec.replicas_ever},
        "links": links,
        "lines": {
            name: {way: flow(traffic, traffic.bandwidth) for way, traffic in line.ways.items()}
            for name, line in state.lines.items()
        },
        "exchange": {
            "missing": [] if waiting is None else [missing.member for missing in waiting.missing],
            "store_error": "" if waiting is None else waiting.store_error,
            "refusals": state.refusals.total(),
        },
    }


def _member_now(state: RunState, name: str) -> dict[str, Any]:
    """Return what a member does, and the details in words."""
    presence, told, member = state.presence(name), state.members[name], state.spec.members[name]
    what, detail = "absent", ""
    if presence is MemberPresence.PRESENT:
        what = _DOINGS.get(told.doing, "computing" if state.has_begun else "reading")
        if told.is_suspended:
            what, detail = "suspended", "waits until its group is complete"
        elif told.doing == Doing.WAITING_FOR_ROUND:
            detail = "waits for the next round"
        elif member.stage is not None and told.doing in _HOPS:
            stages = member.replica.members
            detail = f"waits for {stages[(member.stage.index + _HOPS[told.doing]) % len(stages)]}"
        if told.began_at is not None and told.began_at[0] == told.round:
            detail = "; ".join(filter(None, [detail, f"began at step {told.began_at[1] + 1} of this round"]))
    elif presence is not MemberPresence.MISSING:
        what, detail = presence, state.given_up.get(name) or told.vacant or ""
    return {
        "state": what,
        "detail": detail,
        "since": _since_start(state, told.since) if told.since is not None and what in _LASTING else None,
        "device": told.device or None,
        "incarnation": told.incarnation,
        "round": told.round,
        "heard": None if told.heard is None else _since_start(state, told.heard),
    }


def _replica_now(state: RunState, settings: ReplicaSettings, now: float) -> dict[str, Any]:
    name, members = settings.name, [state.members[name] for name in settings.members if name in state.members]
    vacant = [member.vacant is not None for member in members]
    if all(member.has_finished for member in members):
        what = "finished"
    elif not state.joined.issuperset(settings.members):
        what = "absent"
    elif name in state.barred:
        what = "barred"
    elif any(vacant):
        what = "left" if all(vacant) else "suspended"
    else:
        what = "suspended" if any(member.is_suspended for member in members) else "training"
    replica, credit = state.replicas.get(name), state.tally.credits.get(name, Credit())
    numbers: dict[str, Any] = {
        "loss": replica and replica.loss,
        "validation_loss": replica and replica.last_validation_loss,
        "tokens_per_second": replica and state.tokens_per_second(replica, now),
        "tokens": replica and replica.tokens,
        "steps_done": replica and replica.steps_done,
        "included": replica and credit.included,
        "missed": replica and credit.missed,
    }
    if (score := state.scores.get(name)) is not None:
        numbers |= {"score": score.final, "excluded": score.excluded}
    return {"state": what} | numbers
