"""OpenTelemetry traces of a run: one trace for each round, made from the reports, so that members need nothing.

The root span is the round, from the close of the one before to its own. Below it, each member has a span with three
parts: inner loop, outer step, evaluation. Membership events are events of the root span.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context
from opentelemetry.util.types import Attributes

from hetero_pp.core.errors import ConfigError
from hetero_pp.messages.messages_pb2 import MemberRound, MembershipEventKind, Report
from hetero_pp.program.operate.observed import Observed
from hetero_pp.program.report.state import STILL_TOLD

MOST_QUEUED, MOST_AT_ONCE, SECONDS_BETWEEN, SECONDS_TO_SEND = 4096, 512, 5.0, 5.0
"""Spans that wait for the collector, and that one message carries; seconds between messages, and to send one."""
_DISABLED = "OTEL_SDK_DISABLED"


@contextmanager
def traced(url: str, observed: Observed, say: Callable[[str], None]) -> Iterator[Callable[[Report], None]]:
    """Yield a function that takes each report and sends spans to an OTLP collector. `say` is told once of a failure.

    OTEL_EXPORTER_OTLP_HEADERS may hold a key for the collector. A collector that does not answer costs the run nothing.
    Raises ConfigError if the URL cannot be used.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ConfigError((), f"--otlp: found `{url}`, expected a URL such as `http://localhost:4317`")
    if os.environ.get(_DISABLED, "").lower() == "true":
        raise ConfigError((), f"--otlp: found {_DISABLED}=true in the environment, which drops all spans; unset it")
    is_plain = url.startswith("http://")
    processor = BatchSpanProcessor(
        OTLPSpanExporter(endpoint=url, insecure=is_plain, timeout=SECONDS_TO_SEND),
        max_queue_size=MOST_QUEUED,
        schedule_delay_millis=1000 * SECONDS_BETWEEN,
        max_export_batch_size=MOST_AT_ONCE,
        export_timeout_millis=1000 * SECONDS_TO_SEND,
    )
    with _one_line(f"{url}: some traces were not sent, but the run continues", say):
        traces = RoundTraces(observed, processor)
        try:
            yield traces.on_report
        finally:
            traces.close()


@contextmanager
def _one_line(complaint: str, say: Callable[[str], None]) -> Iterator[None]:
    """Say one line about the first error of OpenTelemetry in the block, instead of all of them."""
    logger = logging.getLogger("opentelemetry")
    handler, propagates = _First(complaint, say), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


class _First(logging.Handler):
    def __init__(self, complaint: str, say: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)  # it also warns each time that it retries
        self._complaint, self._say, self._has_said = complaint, say, False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._has_said:
            self._has_said = True
            self._say(f"{self._complaint}: {record.getMessage()}")


class RoundTraces:
    """Makes the spans of a run. It takes the reports of one start of the run, in order."""

    def __init__(self, observed: Observed, processor: SpanProcessor) -> None:
        self._observed = observed
        resource = Resource({"service.name": "hetero-pp"})  # without those that the environment sets
        self._provider = TracerProvider(
            ALWAYS_ON, resource, shutdown_on_exit=False, span_limits=SpanLimits(max_span_attributes=64)
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("hetero_pp")
        self._rounds: dict[int, Span] = {}  # root spans of the newest rounds, of which all but the last have ended
        self._last_closed = 0
        self._closed_at: float | None = None

    def on_report(self, report: Report) -> None:
        """Take in one report, after the state of the run has."""
        match report.WhichOneof("event"):
            case "begun":
                self._last_closed, self._closed_at = report.begun.last_round, report.time
            case "inner_step" if report.inner_step.round == self._last_closed + 1:
                self._root(report.inner_step.round, report.time)
            case "member_round":
                self._member(report.time, report.member, report.member_round)
            case "membership_event" if (root := self._rounds.get(self._last_closed + 1)) is not None:
                told = report.membership_event
                attributes = {"slot": told.slot, "replica": told.replica, "cause": told.cause}
                root.add_event(MembershipEventKind.Name(told.what).lower(), attributes, _nanoseconds(report.time))
            # An exchange that was restarted reports closed rounds again.
            case "round_closed" if report.round_closed.round > self._last_closed:
                record = report.round_closed
                span = self._root(record.round, report.time)
                span.set_attribute("hetero_pp.included", [one.replica for one in record.contributions])
                span.set_attribute("hetero_pp.late", list(record.late))
                span.set_attribute("hetero_pp.rejected", list(record.left_out))
                span.end(_nanoseconds(report.time))
                self._last_closed, self._closed_at = record.round, report.time
            case "failure" if not report.failure.consequence:
                for span in self._rounds.values():
                    if span.is_recording():
                        span.set_status(Status(StatusCode.ERROR, f"{report.member}: {report.failure.cause}"))

    def close(self) -> None:
        """End the open round and send everything, within seconds."""
        for span in self._rounds.values():
            if span.is_recording():
                span.end()
        self._provider.shutdown()

    def _root(self, round_: int, time: float) -> Span:
        """Return the root span of a round, which begins when the round before closed."""
        if round_ not in self._rounds:
            state = self._observed.state
            name = "" if state is None else state.spec.config.name
            attributes: Attributes = {"hetero_pp.round": round_, "hetero_pp.run": name}
            start = time if self._closed_at is None else min(time, self._closed_at)
            self._rounds[round_] = self._tracer.start_span(
                "round", Context(), attributes=attributes, start_time=_nanoseconds(start)
            )
            for old in [one for one in self._rounds if one <= round_ - STILL_TOLD]:
                del self._rounds[old]
        return self._rounds[round_]

    def _member(self, end: float, member: str, told: MemberRound) -> None:
        """Make the spans of a member's round, which ended at `end` with its evaluation."""
        root = self._rounds.get(told.round)
        if root is None:
            return
        parts = {
            "inner loop": told.compute_seconds + told.wait_seconds,
            "outer step": told.outer_seconds,
            "evaluation": told.evaluation_seconds,
        }
        start = end - sum(parts.values())
        fields = ("round", "compute_seconds", "wait_seconds", "blocked_seconds")
        own = {"hetero_pp.member": member}
        found = own | {f"hetero_pp.{field}": getattr(told, field) for field in fields}
        above = set_span_in_context(root, Context())
        whole = self._tracer.start_span("member round", above, attributes=found, start_time=_nanoseconds(start))
        below = set_span_in_context(whole, Context())
        for name, seconds in parts.items():
            span = self._tracer.start_span(name, below, attributes=own, start_time=_nanoseconds(start))
            start += seconds
            span.end(_nanoseconds(start))
        whole.end(_nanoseconds(end))


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
