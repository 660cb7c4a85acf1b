"""Traces of rounds, from made-up reports."""

from __future__ import annotations

import socket
from contextlib import closing

from made_up_run import (
    START,
    begun,
    failure,
    inner_step,
    member_round,
    round_closed,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from test_operate import STEP, membership_event, told

from hetero_pp.messages.messages_pb2 import (
    LATE,
    Report,
)
from hetero_pp.program.operate.observed import Observed
from hetero_pp.program.operate.traces import RoundTraces, traced


def spans_of(*reports: Report) -> list[ReadableSpan]:
    """Return the spans of reports, in the order of their ends."""
    exporter, observed = InMemorySpanExporter(), Observed()
    observed.follow(told())
    traces = RoundTraces(observed, SimpleSpanProcessor(exporter))
    for report in reports:
        traces.on_report(report)
    traces.close()
    return list(exporter.get_finished_spans())


def _round(span: ReadableSpan) -> object:
    return (span.attributes or {})["hetero_pp.round"]


def test_a_trace_is_of_one_round_and_has_its_events() -> None:
    late = membership_event(START + 3, LATE, replica="home")
    fails = failure(START + 14, "dc", "out of memory")
    second = inner_step(START + 12, "dc", "dc", 2, 0)
    first, open_one = spans_of(begun(START, 0), STEP, late, round_closed(START + 10, 1), second, fails)
    assert (first.start_time, first.end_time) == (1e9 * START, 1e9 * (START + 10))
    assert [(one.name, one.attributes) for one in first.events] == [
        ("late", {"slot": "", "replica": "home", "cause": "why"})
    ]
    assert (first.status.status_code, _round(first)) == (StatusCode.UNSET, 1)
    assert (open_one.start_time, open_one.status.description) == (1e9 * (START + 10), "dc: out of memory")
    assert first.context.trace_id != open_one.context.trace_id


def test_a_round_that_is_reported_again_has_one_trace() -> None:
    """An exchange that was restarted reports rounds again. A resumed run has no spans of its earlier rounds."""
    closed = round_closed(START + 10, 4)
    again = [begun(START + 11, 4), round_closed(START + 11, 3), closed]
    found = spans_of(begun(START, 3), inner_step(START + 1, "dc", "dc", 4, 0), closed, *again, member_round("dc", 4))
    assert [_round(one) for one in found if one.name == "round"] == [4]
    assert [one.name for one in found[1:]] == ["inner loop", "outer step", "evaluation", "member round"]
    assert spans_of(begun(START, 3), member_round("dc", 2)) == []


def test_a_collector_that_is_away_is_one_line() -> None:
    lines: list[str] = []
    observed = Observed()
    observed.follow(told())
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with traced(url, observed, lines.append) as on_report:
        for report in (begun(START, 0), STEP, round_closed(START + 5, 1), member_round("dc", 1)):
            on_report(report)
    assert [line.partition(": Failed")[0] for line in lines] == [
        f"{url}: some traces were not sent, but the run continues"
    ]
