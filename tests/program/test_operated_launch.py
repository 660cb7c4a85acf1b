"""One launched run as its operator sees it: metrics and health while it trains, traces, and lines of its log."""

from __future__ import annotations

import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import grpc
import pytest
from mixed_run import MIXED
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families
from test_operate import Found, get, samples

from hetero_pp.config.changes import Values
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.spec import RunSpec
from hetero_pp.messages.messages_pb2 import (
    Report,
)
from hetero_pp.program.launch.command import Invocation, OnReport, run_topology
from hetero_pp.program.launch.supervisor import launch
from hetero_pp.program.operate.operations import operated
from hetero_pp.program.report.output import printed_as_json


@dataclass
class Launched:
    """The folder of a run, and everything that its operator saw."""

    folder: Path
    scraped: list[Found] = field(default_factory=list)
    """Metrics after each closed round, and at the end."""
    healths: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def summary(self) -> dict[str, Any]:
        return cast(dict[str, Any], json.loads((self.folder / "summary.json").read_text()))


class Receiver(TraceServiceServicer):
    """Keeps the spans that arrive."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self._spans += scope.spans
        return ExportTraceServiceResponse()


@pytest.fixture(scope="module")
def launched(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    runs = tmp_path_factory.mktemp("runs")
    found, printed = Launched(runs / "mixed"), io.StringIO()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Receiver(found.spans), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    # The options override this environment.
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_SAMPLER": "always_off"}

    def look() -> None:
        url = printed.getvalue().split("metrics: ")[1].split("/metrics")[0]
        found.scraped.append(samples(text_string_to_metric_families(get(f"{url}/metrics")[1])))
        found.healths.append(json.loads(get(f"{url}/healthz")[1]))

    def start(spec: RunSpec, folder: RunFolder, on_report: OnReport, resume: Values | None) -> None:
        def looked_at(report: Report) -> None:
            on_report(report)
            if report.HasField("round_closed"):
                look()

        launch(spec, folder, looked_at, resume)

    with (
        patch.dict(os.environ, environment),
        redirect_stdout(printed),
        redirect_stderr(printed),
        printed_as_json(),
        operated("0", f"http://127.0.0.1:{port}") as operations,
    ):
        run_topology(
            MIXED, [f"data.corpus={corpus}"], runs, False, start=start, invocation=Invocation(operations=operations)
        )
        look()
    server.stop(None).wait()
    found.lines = [json.loads(line) for line in printed.getvalue().splitlines()]
    return found


@pytest.mark.starts_processes
def test_the_metrics_of_a_launched_run_are_those_of_its_summary(launched: Launched) -> None:
    found, summary = launched.scraped[-1], launched.summary
    assert (found["rounds_closed_total",], found["run_condition", "over"]) == (3, 1)
    assert found["members", "finished"] == 4
    assert found["tokens_per_second",] == pytest.approx(summary["tokens_per_second"])
    assert found["contribution_bytes_total",] == summary["contributions"]["bytes"]
    for replica in summary["replicas"]:
        name = replica["name"]
        assert found["tokens_total", name] == replica["tokens"]
        assert found["validation_loss", name] == pytest.approx(replica["validation_loss"][-1])
        assert found["contributions_total", "included", name] == 3
    for link in summary["links"]:
        for way, count in link["wire_bytes"].items():
            assert found["link_wire_bytes_total", way, link["name"]] == count > 0
    assert all(found["member_round_seconds_total", one, "compute"] > 0 for one in ("dc", "home.0", "home.2"))
    ways = [("forward", "home.0-1"), ("backward", "home.1-2")]  # all for which home.1 waits as a stage
    waited = sum(found["link_waited_seconds_total", *way] for way in ways)
    assert waited == pytest.approx(found["member_round_seconds_total", "home.1", "wait"])
    assert all(found["link_waited_seconds_total", *way] > 0 for way in ways)


@pytest.mark.starts_processes
def test_a_launched_run_can_be_watched(launched: Launched) -> None:
    assert [one["rounds_closed_total",] for one in launched.scraped] == [1, 2, 3, 3]
    assert [one["condition"] for one in launched.healths] == ["running", "running", "over", "over"]
    assert [one["round"] for one in launched.healths] == [1, 2, 3, 3]
    for before, after in zip(launched.scraped, launched.scraped[1:], strict=False):
        assert all(after[key] >= value for key, value in before.items() if key[0].endswith("_total"))


@pytest.mark.starts_processes
def test_the_traces_of_a_launched_run(launched: Launched) -> None:
    rounds = {span.trace_id: span for span in launched.spans if span.name == "round"}
    assert len(rounds) == 3
    members = [span for span in launched.spans if span.name == "member round"]
    assert len(members) == 3 * 4
    assert all(one.parent_span_id == rounds[one.trace_id].span_id for one in members)
    known = {one.span_id: one for one in members}
    for name in ("inner loop", "outer step", "evaluation"):
        parts = [span for span in launched.spans if span.name == name]
        assert len(parts) == len(members)
        for part in parts:
            whole = known[part.parent_span_id]
            assert whole.start_time_unix_nano <= part.start_time_unix_nano <= part.end_time_unix_nano
            assert part.end_time_unix_nano <= whole.end_time_unix_nano + 1000
    included = [one for span in rounds.values() for one in span.attributes if one.key == "hetero_pp.included"]
    assert [[value.string_value for value in one.value.array_value.values] for one in included] == [["dc", "home"]] * 3


@pytest.mark.starts_processes
def test_the_log_of_a_launched_run_is_one_object_a_line(launched: Launched) -> None:
    assert all(one.keys() == {"time", "level", "event", "run", "member", "text"} for one in launched.lines)
    assert {one["run"] for one in launched.lines[1:]} == {"mixed"}
    assert {one["level"] for one in launched.lines} == {"info"}
    events = [one["event"] for one in launched.lines]
    assert (events.count("round_closed"), events.count("start"), events.count("joined")) == (3, 1, 1)
    text = next(one["text"] for one in launched.lines if one["event"] == "round_closed")
    assert text.startswith("round 1/3: validation loss ")
