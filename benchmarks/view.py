"""Measure the page of a large run: seconds until a viewer has a report, share of a core, bytes of the first load.

    python benchmarks/view.py [--json FILE] [--smoke]

A process makes the reports of 100 members in groups of four, with steps of two seconds, at the rates of real members.
It applies them to a run's state as a launcher does: once without a page, and once with the page and 10 viewers. The
page's share of a core is the difference of the CPU seconds of that process. A viewer is a connection that reads live
events. The latency of an event is the time from its report until a viewer has read it, by one clock. The first load is
all files of the page, compressed as they are sent.
"""

from __future__ import annotations

import gzip
import http.client
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from command_line import origin, parse, parser_of, save

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch.fork_server import safe_path
from hetero_pp.program.report.state import RunState
from hetero_pp.program.view.server import PAGE, on_a_page

STAGES, STEPS, SECONDS_BETWEEN_MARKS = 4, 5, 0.7
_DOINGS = (pb.FORWARD, pb.WAITING_FOR_NEXT, pb.BACKWARD, pb.WAITING_FOR_PREVIOUS)


@dataclass(frozen=True)
class Size:
    members: int
    viewers: int
    seconds: float


def spec_of_size(size: Size) -> RunSpec:
    """Return a run of groups of four stages."""
    replicas = [
        {"name": f"home-{number}", "kind": "participants", "stages": STAGES, "link": "home"}
        for number in range(size.members // STAGES)
    ]
    settings = {
        "name": "large",
        "inner": {"steps": STEPS},
        "outer": {"rounds": 10_000},
        "links": {"home": {"bandwidth": "20 Mbit/s"}},
        "replicas": replicas,
    }
    return RunSpec(RunConfig.model_validate(settings), 256)


class Fabricated:
    """Reports of all members, as if every member trained."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._counts = spec.roster.counts

    def joining(self) -> Iterator[Report]:
        for name in self._spec.members:
            yield Report(member=name, joined=pb.Joined(incarnation=1))
            yield Report(member=name, computes=pb.Computes(device="cuda:0 made up"))
        yield Report(member=EXCHANGE, begun=pb.Begun())

    def of_tick(self, number: int) -> Iterator[Report]:
        """Yield the reports of half a second. Each member ends a step every fourth time."""
        for index, (name, member) in enumerate(self._spec.members.items()):
            yield Report(member=name, activity=pb.Activity(doing=_DOINGS[(number + index) % len(_DOINGS)]))
            if (number + index) % 4 == 0 and member.stage is not None:
                step = number // 4
                told = pb.InnerStep(replica=member.replica.name, round=1 + step // STEPS, step=step % STEPS)
                if member.stage.is_last:
                    told.loss = 5.0 / (1 + step)
                if member.stage.is_first:
                    told.tokens = 4096
                yield Report(member=name, inner_step=told)
                yield from self._uses(name, told.round, step)
        if (number + 1) % (4 * STEPS) == 0:
            yield from self._closed((number + 1) // (4 * STEPS))

    def _uses(self, member: str, round_: int, step: int) -> Iterator[Report]:
        for (link, way), counted_by in self._counts.items():
            if counted_by == member:
                size = 1_000_000 * (1 + step % STEPS)
                use = pb.LinkUse(link=link, direction=way, round=round_, payload_bytes=size, wire_bytes=size)
                yield Report(member=member, link_use=use)

    def _closed(self, round_: int) -> Iterator[Report]:
        names = [replica.name for replica in self._spec.config.replicas]
        entries = [pb.ContributionEntry(replica=name, weight=1, steps=STEPS, tokens=20_480) for name in names]
        yield Report(member=EXCHANGE, round_closed=pb.RoundRecord(round=round_, contributions=entries))
        for name, member in self._spec.members.items():
            waited: dict[str, Any] = {"wait_seconds": 2, "wait_previous_seconds": 1.5, "wait_next_seconds": 0.5}
            yield Report(member=name, member_round=pb.MemberRound(round=round_, compute_seconds=8, **waited))
            if member.stage is not None and member.stage.is_last:
                told = pb.Evaluation(replica=member.replica.name, round=round_, loss=4.0, tokens=4096)
                yield Report(member=name, evaluation=told)


def launcher(size: Size, shows: bool, told: Connection) -> None:
    """Apply reports to a state, with or without a page. Tell the page's address, then the CPU seconds."""
    state = RunState(spec_of_size(size))
    page = on_a_page(state, lambda line: told.send(line.split()[-1])) if shows else nullcontext(lambda report: None)
    fabricated = Fabricated(state.spec)
    with page as show:

        def take(report: Report) -> None:
            report.time = time.time()
            if state.apply(report):
                show(report)

        for report in fabricated.joining():
            take(report)
        told.recv()  # the viewers are there
        began, spent, marked, reports = time.monotonic(), time.process_time(), 0.0, 0
        for number in range(int(2 * size.seconds)):
            for report in fabricated.of_tick(number):
                take(report)
                reports += 1
            while (left := began + (number + 1) / 2 - time.monotonic()) > 0:
                time.sleep(min(left, 0.05))
                if time.monotonic() > marked + SECONDS_BETWEEN_MARKS:
                    marked = time.monotonic()
                    take(
                        Report(
                            member=EXCHANGE,
                            membership_event=pb.MembershipEvent(what=pb.INJECTED, cause=f"at {time.time()!r}."),
                        )
                    )
        told.send((time.process_time() - spent, time.monotonic() - began, reports))


@dataclass
class Viewer:
    """A connection that reads live events."""

    url: str
    latencies: list[float] = field(default_factory=list)
    n_bytes: int = 0

    def read(self) -> None:
        host, path = self.url.removeprefix("http://").split("/", 1)
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request("GET", f"/{path}api/runs/large/live")
        with connection.getresponse() as answer:
            for line in answer:
                self.n_bytes += len(line)
                now = time.time()
                for cause in line.split(b"injected fault: at ")[1:]:
                    self.latencies.append(now - float(cause.split(b'"')[0].rstrip(b".")))
                if line.startswith(b"event: end"):
                    return


def measure(size: Size, shows: bool) -> dict[str, Any]:
    """Run a launcher, with or without a page and viewers, and return what it took."""
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=launcher, args=(size, shows, other))
    with safe_path():
        process.start()
    url = own.recv() if shows else ""
    viewers = [Viewer(url) for _ in range(size.viewers if shows else 0)]
    threads = [threading.Thread(target=viewer.read) for viewer in viewers]
    for thread in threads:
        thread.start()
    own.send("go")
    cpu, wall, reports = own.recv()
    for thread in threads:
        thread.join(60)
    process.join(60)
    latencies = sorted(one for viewer in viewers for one in viewer.latencies)
    found = {"cpu_share": cpu / wall, "reports_per_second": reports / wall}
    if latencies:
        found["latency_ms"] = {
            "median": 1000 * median(latencies),
            "p95": 1000 * latencies[int(0.95 * len(latencies))],
            "max": 1000 * latencies[-1],
        }
        found["bytes_per_viewer_and_second"] = sum(one.n_bytes for one in viewers) / len(viewers) / wall
    return found


def first_load() -> dict[str, int]:
    """Return the compressed bytes of the page's files, as they are sent."""
    files = [path for path in PAGE.iterdir() if path.suffix in (".html", ".js", ".css", ".svg")]
    return {"compressed_bytes": sum(len(gzip.compress(path.read_bytes(), 6)) for path in files), "files": len(files)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--members", type=int, default=100)
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=40.0)
    arguments = parse(parser, {"members": 8, "viewers": 2, "seconds": 3.0})
    size = Size(arguments.members, arguments.viewers, arguments.seconds)
    without, shown = measure(size, shows=False), measure(size, shows=True)
    share = shown["cpu_share"] - without["cpu_share"]
    load, latency = first_load(), {name: f"{one:.0f} ms" for name, one in shown["latency_ms"].items()}
    print(f"{size.members} members, {size.viewers} viewers, {shown['reports_per_second']:.0f} reports/s")
    print(f"latency: median {latency['median']}, 95 % within {latency['p95']}, all {latency['max']}")
    print(f"the page takes {100 * share:.1f} % of a core; the state alone {100 * without['cpu_share']:.1f} %")
    print(f"first load: {load['compressed_bytes'] / 1000:.0f} kB compressed")
    found = {"size": vars(size), "without_page": without, "with_page": shown, "share_of_a_core": share}
    save(origin() | found | {"first_load": load}, arguments.json)


if __name__ == "__main__":
    main()
