"""The metrics of a run, collected from its state at each scrape: docs/reference/metrics.md is generated from METRICS.

Label values are names of the YAML, or of a fixed set. Text that a member or a stranger sends is never a label.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from hetero_pp.config.lines import DIRECTIONS, EXCHANGE, LOOPBACK_NAMES, WAYS, is_loopback
from hetero_pp.config.topology import parse_address
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.sockets import host_and_port
from hetero_pp.core.units import bytes_per_second
from hetero_pp.messages.messages_pb2 import STORING
from hetero_pp.messages.refusals import Kind
from hetero_pp.program.operate.observed import Condition, Observed, seconds_without_progress
from hetero_pp.program.report.recorder import to_json
from hetero_pp.program.report.state import (
    PARTS,
    STILL_TOLD,
    MemberPresence,
    MemberState,
    Outcome,
    ReplicaState,
    RunState,
    Traffic,
    awaiting,
    sender,
)

MEMBER, REPLICA, LINK, LINE = ("member",), ("replica",), ("link", "direction"), ("line", "way")

Samples = Iterable[tuple[Sequence[str], float | None]]
"""Label values and value; a value of None is not known, and is left out."""


class View:
    """The data that a scrape reads, as far as this host gets reports. The collector holds the lock of the state."""

    def __init__(self, observed: Observed, state: RunState, outcomes: Counter[tuple[str, Outcome]]) -> None:
        """`outcomes`: number of contributions by replica and outcome."""
        self.observed, self.state, self.outcomes, only = observed, state, outcomes, observed.only
        came = [name for name in state.spec.members if name in state.spec.needed or name in state.joined]
        self.members = [name for name in came if only is None or name in only]
        replicas = {state.spec.members[member].replica.name for member in self.members}
        self.replicas = [replica for replica in state.replicas.values() if replica.name in replicas]

    def of_members(self, value: Callable[[str, MemberState], float | None]) -> Samples:
        return [((name,), value(name, self.state.members[name])) for name in self.members]

    def of_replicas(self, value: Callable[[ReplicaState], float | None]) -> Samples:
        return [((one.name,), value(one)) for one in self.replicas]

    def of_links(self, value: Callable[[Traffic], float | None]) -> Samples:
        """Return the samples of directions whose sender, which reports the use, this host hears of."""
        both = [(link, way) for link in self.state.links.values() for way in DIRECTIONS]
        only = self.observed.only
        heard = [(link, way) for link, way in both if only is None or sender(link.spec, way) in only]
        return [((link.name, way), value(link.ways[way])) for link, way in heard]

    def of_lines(self, value: Callable[[Traffic], float | None]) -> Samples:
        return [((name, way), value(line.ways[way])) for name, line in self.state.lines.items() for way in WAYS]


@dataclass(frozen=True)
class Described:
    """A metric: its name, labels, unit and meaning, and how its samples follow from a run."""

    name: str
    labels: Sequence[str]
    unit: str
    meaning: str
    samples: Callable[[View], Samples | float | None]
    """Returns the samples, or the value of the only one, which has no labels."""
    needs_all: bool = False  # whether it needs the reports of all members, which `join` does not get

    @property
    def is_counter(self) -> bool:
        """Whether its values never fall while the process lives."""
        return self.name.endswith("_total")


class RunCollector(Collector):
    """Yields the metrics of one run."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._settled: Counter[tuple[str, Outcome]] = Counter()
        self._settled_until = 0
        """Outcomes of contributions up to a round: old rounds are counted once, so that a scrape stays short."""
        self._highest: dict[tuple[str, ...], float] = {}
        """Largest value of each sample of a counter. A process that is restarted counts its round anew, which lowers a
        sum. Prometheus would take that for a counter that began at 0 again."""

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registration reads no state."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield build_info()  # before the run is known, too
        state = self._observed.state
        if state is not None:
            with state.lock:
                old, recent = max(state.closed, default=0) - STILL_TOLD, Counter[tuple[str, Outcome]]()
                for round_ in (one for one in state.closed if one > self._settled_until):
                    (self._settled if round_ <= old else recent).update(state.outcomes(round_).items())
                self._settled_until = max(self._settled_until, old)
                view = View(self._observed, state, self._settled + recent)
                # Counters appear once the run begins or resumes. They would otherwise jump from 0 when a resumed run
                # takes in its earlier reports.
                found = [
                    self._filled(one, view)
                    for one in METRICS
                    if (self._observed.sees_all or not one.needs_all) and (state.has_opened or not one.is_counter)
                ]
            yield from found

    def _filled(self, metric: Described, view: View) -> Metric:
        kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
        family, found = kind(metric.name, metric.meaning, labels=metric.labels), metric.samples(view)
        for labels, value in [((), found)] if found is None or isinstance(found, int | float) else found:
            if value is not None:
                key = (metric.name, *labels)
                if metric.is_counter:
                    self._highest[key] = value = max(value, self._highest.get(key, value))
                family.add_metric(labels, value)
        return family


def build_info() -> GaugeMetricFamily:
    labels = {"version": version("hetero-pp"), "python": platform.python_version(), "torch": version("torch")}
    family = GaugeMetricFamily("hetero_pp_build_info", "Versions of the program; the value is 1.", labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


# ---- samples that take more than a line ----


def _progress(view: View) -> float:
    done, planned = view.state.progress_of_open_round(view.observed.now())
    return done / planned if planned else 0.0


def _waited(view: View) -> Samples:
    for link in view.state.links.values():
        for way in DIRECTIONS:
            receiver, part = awaiting(link.spec, way)
            if receiver in view.members:
                yield (link.name, way), view.state.members[receiver].seconds[part]


# fmt: off
METRICS = (
    Described("hetero_pp_run_info", ("run", "kind"), "",
              "Name of the run; `kind` is `run`, or `rehearsal` if it trains nothing. The value is 1.",
              lambda view: [((config.name, "run" if config.rehearsal is None else "rehearsal"), 1)
                            for config in [view.state.spec.config]]),
    Described("hetero_pp_run_condition", ("condition",), "", "1 for the condition that /healthz reports, else 0.",
              lambda view: [((one,), float(one is found)) for found in [view.observed.health().condition]
                            for one in Condition]),
    Described("hetero_pp_last_report_timestamp_seconds", (), "seconds since 1970",
              "Time at which this host got the last report of the run.", lambda view: view.observed.heard),
    Described("hetero_pp_no_progress_seconds", (), "seconds",
              "Time for which the exchange has waited without progress; 0 if it waits for nothing.",
              lambda view: seconds_without_progress(view.state, view.observed.now())),
    Described("hetero_pp_storage_obstructed", (), "",
              "1 while a disk or a store refuses a read or write of the exchange, else 0.",
              lambda view: float(view.state.waiting is not None and view.state.waiting.awaited == STORING)),
    Described("hetero_pp_rounds_closed_total", (), "rounds", "Closed rounds, those of earlier starts included.",
              lambda view: view.state.rounds, needs_all=True),
    Described("hetero_pp_rounds_planned", (), "rounds", "Rounds of the whole run.",
              lambda view: view.state.rounds_planned),
    Described("hetero_pp_round_progress_ratio", (), "0 to 1",
              "Share of the open round's inner loop that the slowest required replica has done.", _progress,
              needs_all=True),
    Described("hetero_pp_round_duration_seconds", (), "seconds", "Duration of the last closed round, without pauses.",
              lambda view: (view.state.round_seconds(view.state.rounds) if view.state.rounds in view.state.closed
                            else None), needs_all=True),
    Described("hetero_pp_pauses_total", (), "pauses", "Pauses because fewer replicas were present than a round needs.",
              lambda view: len(view.state.pauses)),
    Described("hetero_pp_tokens_per_second", (), "tokens a second",
              "Trained tokens divided by the time since the first inner step, without pauses.",
              lambda view: view.state.tokens_per_second(), needs_all=True),
    Described("hetero_pp_included_tokens_total", (), "tokens", "Tokens of contributions that rounds include.",
              lambda view: sum(closed.tokens for closed in view.state.closed.values()), needs_all=True),
    Described("hetero_pp_contribution_bytes_total", (), "bytes", "Size of the contributions that rounds include.",
              lambda view: view.state.contribution_bytes, needs_all=True),
    Described("hetero_pp_refusals_total", ("kind",), "messages", "Refused messages by kind.",
              lambda view: [((kind.name.lower(),), view.state.refusals[kind]) for kind in Kind], needs_all=True),

    Described("hetero_pp_members", ("state",), "members", "Members by state.",
              lambda view: [((one,), found[one])
                            for found in [Counter(view.state.presence(name) for name in view.members)]
                            for one in MemberPresence]),
    Described("hetero_pp_member_up", MEMBER, "", "1 if the member is present or has finished, else 0.",
              lambda view: view.of_members(
                  lambda name, _: float(view.state.presence(name) in ("present", "finished")))),
    Described("hetero_pp_member_round", MEMBER, "rounds", "Last round that the member finished.",
              lambda view: view.of_members(lambda _, member: member.last_round)),
    Described("hetero_pp_member_round_seconds_total", (*MEMBER, "part"), "seconds",
              "Time of the member's rounds by part. `wait` is for neighbours, and `blocked` for the exchange.",
              lambda view: [((name, part), view.state.members[name].seconds[part])
                            for name in view.members for part in PARTS]),
    Described("hetero_pp_restarts_total", ("process",), "restarts", "Restarts of a process by this host.",
              lambda view: [((name,), view.state.restarts[name])
                            for name in [*view.members, *([EXCHANGE] if view.observed.sees_all else [])]]),

    Described("hetero_pp_training_loss", REPLICA, "nats a token", "Training loss of the replica's last inner step.",
              lambda view: view.of_replicas(lambda replica: replica.loss)),
    Described("hetero_pp_validation_loss", REPLICA, "nats a token", "Last validation loss, in the replica forward.",
              lambda view: view.of_replicas(lambda replica: replica.last_validation_loss)),
    Described("hetero_pp_tokens_total", REPLICA, "tokens", "Trained tokens, without those of discarded attempts.",
              lambda view: view.of_replicas(lambda replica: replica.tokens), needs_all=True),
    Described("hetero_pp_contributions_total", (*REPLICA, "outcome"), "contributions",
              "What became of the replica's contributions to closed rounds.",
              lambda view: [((one.name, outcome), view.outcomes[one.name, outcome])
                            for one in view.replicas for outcome in Outcome], needs_all=True),
    Described("hetero_pp_score", REPLICA, "", "Final score of the replica's contributions; no sample without scores.",
              lambda view: view.of_replicas(
                  lambda replica: score.final if (score := view.state.scores.get(replica.name)) else None),
              needs_all=True),

    Described("hetero_pp_link_wire_bytes_total", LINK, "bytes", "Bytes on the wire, with framing.",
              lambda view: view.of_links(lambda direction: direction.wire_bytes)),
    Described("hetero_pp_link_busy_seconds_total", LINK, "seconds",
              "Time for which the direction was busy since the first inner step.",
              lambda view: view.of_links(lambda direction: direction.busy_seconds)),
    Described("hetero_pp_link_capacity_bytes_per_second", LINK, "bytes a second",
              "Configured rate of the direction; no sample without a limit.",
              lambda view: view.of_links(lambda direction: bytes_per_second(direction.bandwidth))),
    Described("hetero_pp_link_waited_seconds_total", LINK, "seconds",
              "Time in finished rounds for which the receiver waited for messages of the direction. It contains the "
              "time in which the sender computes.", _waited),
    Described("hetero_pp_line_wire_bytes_total", LINE, "bytes", "Bytes on the wire of all links that share the line.",
              lambda view: view.of_lines(lambda line: line.wire_bytes), needs_all=True),
    Described("hetero_pp_line_busy_seconds_total", LINE, "seconds",
              "Time that these bytes take at the line's rate, since the first inner step.",
              lambda view: view.of_lines(lambda line: line.busy_seconds if line.bandwidth else None), needs_all=True),
    Described("hetero_pp_line_capacity_bytes_per_second", LINE, "bytes a second",
              "Configured rate of the line; no sample without a limit.",
              lambda view: view.of_lines(lambda line: bytes_per_second(line.bandwidth)), needs_all=True),
)
# fmt: on


# ---- /metrics and /healthz over plain HTTP ----


LOOPBACK = "127.0.0.1"
MOST_REQUESTS = 16  # requests that are served at once; further ones are refused
SECONDS_OF_A_CONNECTION = 10.0
REASON_CHARACTERS = 1000  # most characters of a reason: members send some of the text
_SECONDS_TO_END = 2.0

OPTION = "--metrics"


class _Brief(H11Protocol):
    """Connection that is cut after a while, however slowly its client sends or reads."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(SECONDS_OF_A_CONNECTION, transport.abort)


@contextmanager
def served(listen: str, observed: Observed) -> Iterator[str]:
    """Serve a run's metrics and health while the block runs; yield the URL. Raises ConfigError if it cannot listen.

    On loopback it answers to this machine's own names only: another name means that a foreign page has bound its own
    name to this machine's address.
    """
    try:
        host, port = host_and_port(parse_address(f"{LOOPBACK}:{listen}" if listen.isdigit() else listen))
    except ValueError:
        found = f"{OPTION}: found `{listen}`, expected PORT or ADDRESS:PORT, such as `9464` or `0.0.0.0:9464`"
        raise ConfigError((), found) from None
    is_local = is_loopback(f"{host}:0") or host == "::1"
    registry = CollectorRegistry()
    registry.register(RunCollector(observed))

    def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    def healthz(request: Request) -> Response:
        health, state = observed.health(), observed.state
        found: dict[str, Any] = {"condition": health.condition}
        if health.reason:
            found["reason"] = health.reason[:REASON_CHARACTERS]
        if state is not None:
            found |= {"run": state.spec.config.name, "round": observed.round(state), "rounds": state.rounds_planned}
            found |= {"rehearsal": state.spec.config.rehearsal is not None}
        headers = {"x-content-type-options": "nosniff"}
        status = 200 if health.is_well else 503
        return Response(to_json(found) + "\n", status, headers, media_type="application/json")

    def other(request: Request, error: Exception) -> Response:
        return PlainTextResponse("expected /metrics or /healthz\n", 404)

    app = Starlette(
        routes=[Route("/metrics", metrics), Route("/healthz", healthz)],
        middleware=[
            Middleware(
                TrustedHostMiddleware, allowed_hosts=[*LOOPBACK_NAMES, host] if is_local else ["*"], www_redirect=False
            )
        ],
        exception_handlers={404: other},
    )
    config = uvicorn.Config(
        app,
        http=_Brief,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level="critical",  # a client that went away is no error
        server_header=False,
        limit_concurrency=MOST_REQUESTS,
        timeout_graceful_shutdown=1,
    )
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise ConfigError((), f"{OPTION} {listen}: cannot listen ({why}); choose another port or address") from None
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="metrics", daemon=True)
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(_SECONDS_TO_END)
        listener.close()
