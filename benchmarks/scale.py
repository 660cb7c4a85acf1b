"""Measure what each step of a round costs the exchange with 10, 100 and 1,000 members, and fit how it grows.

    python benchmarks/scale.py [--json FILE] [--chart FILE] [--members N ...] [--rounds N] [--model PRESET]

The exchange is the process that `launch` starts, with its log on disk and its auditor. The members are threads of a few
processes. Each is a datacenter replica: it makes the calls of a real member over a connection of its own, sends
contributions in the real format, and computes nothing. Threads wait for each other between two steps, so that each
step has its own seconds and CPU seconds of the exchange. Fetches carry members squared contributions, and records
members squared entries, so these two are fitted per byte.

`plain` is the time of the same bytes without the exchange, in the same run and over as many connections. The members
send their contributions to a plain gRPC server, and fetch those of all others.

A contribution has some kilobytes, so that steps show the cost of a member. With `--model 178m` it has a real size, and
the steps show the cost of its bytes. Each process of members then holds the model twice.
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np
import psutil
from command_line import origin, parse, parser_of, save
from emulated_members import run_members

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE, LAUNCHER
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.link.protocol import FRAME_BYTES
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.model.transformer import PRESETS, shapes_by_block
from hetero_pp.program.launch.fork_server import safe_path
from hetero_pp.program.launch.job import require_open_files
from hetero_pp.program.launch.supervisor import Supervisor, Watcher
from hetero_pp.rpc.channels import is_reached, make_channel, make_server
from hetero_pp.rpc.connections import reports_of
from hetero_pp.rpc.identities import Secret, SecretKeys, new_secret

MEMBERS, ROUNDS = (10, 100, 1_000), 3
SMOKE = {"members": [4, 8], "rounds": 1}
MEMBERS_OF_A_PROCESS = 125
"""With many more, the polls of gRPC's connections in one process would take longer than the calls."""
STEPS = ("join", "assign", "report", "deposit", "record", "fetch", "confirm")
PER_BYTE = ("record", "fetch")
MOST_SECONDS = 1800.0
SMALL = "{preset: micro, width: 64, heads: 2, feed_forward: 128}"
YAML = """\
name: scale
seed: 1
model: MODEL
data: {corpus: docstrings, sequence_length: 64}
inner: {steps: 4, learning_rate: 6e-3}
outer: {compression: {density: 1/128}, rounds: ROUNDS}
checkpoints: {every: 100}
exchange: {grace: {least: 600 s}, lease: {least: 120 s}}
replicas:
"""


# ---- plain copies of the same bytes ----


def serve_plain(pipe: Connection, size: int, members: int) -> None:
    """Serve bytes over gRPC without looking at them: Up takes a stream of frames, Down sends `size` bytes."""
    frames = [bytes(min(FRAME_BYTES, size - start)) for start in range(0, size, FRAME_BYTES)]

    def up(received: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        return b"%d" % sum(map(len, received))

    def down(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from frames

    handlers: dict[str, Any] = {
        "Up": grpc.stream_unary_rpc_method_handler(up),
        "Down": grpc.unary_stream_rpc_method_handler(down),
    }
    handler = grpc.method_handlers_generic_handler("plain", handlers)
    server, port = make_server("127.0.0.1:0", [handler], 2 * members)
    pipe.send(port)
    pipe.recv()
    server.stop(None).wait()


def run_plain(pipe: Connection, port: int, members: int, size: int) -> None:
    """Send `size` bytes for each member, and fetch what the others sent, over one connection each, when told so."""
    channels = [make_channel(f"127.0.0.1:{port}") for _ in range(members)]

    def up(channel: Any) -> int:
        frames = (bytes(min(FRAME_BYTES, size - start)) for start in range(0, size, FRAME_BYTES))
        return int(channel.stream_unary("/plain/Up")(frames))

    def down(channel: Any) -> int:
        return sum(map(len, channel.unary_stream("/plain/Down")(b"")))

    with ThreadPoolExecutor(members) as pool:
        for channel in channels:
            assert is_reached(channel, 60)
        pipe.send(0)
        for step in iter(pipe.recv, None):
            pipe.send(sum(pool.map({"deposit": up, "fetch": down}[step], channels)))
    for channel in channels:
        channel.close()
    pipe.send(0)


# ---- measuring ----


@dataclass
class Step:
    """Cost of one step of one round."""

    seconds: float
    cpu_seconds: float
    """CPU seconds of the exchange's process."""
    n_bytes: int
    """Fetched by the members in it."""


def processes_of(members: int) -> int:
    """Return the number of processes that share the members."""
    return max(2, math.ceil(members / MEMBERS_OF_A_PROCESS))


class Parts:
    """The processes of one size, which carry out a step together."""

    def __init__(self, pipes: Sequence[Connection], exchange: psutil.Process) -> None:
        self.pipes, self.exchange, self.n_bytes = pipes, exchange, 0

    def do(self, step: str, round_: int = 0) -> Step:
        """Carry out a step by all members."""
        before, began = self._cpu(), time.monotonic()
        answers = self.tell(step, round_)
        seconds, fetched = time.monotonic() - began, sum(answers) - self.n_bytes
        self.n_bytes += fetched
        return Step(seconds, self._cpu() - before, fetched)

    def tell(self, step: str, round_: int = 0) -> list[int]:
        """Carry out a step without measuring it: after the last one, the exchange is gone."""
        for pipe in self.pipes:
            pipe.send((step, round_))
        return [_answer(pipe) for pipe in self.pipes]

    def _cpu(self) -> float:
        used = self.exchange.cpu_times()
        return float(used.user + used.system)


def _answer(pipe: Connection) -> int:
    if not pipe.poll(MOST_SECONDS):
        raise SystemExit("a process of members does not answer")
    return int(pipe.recv())


def measure(members: int, rounds: int, folder: Path, model: str = SMALL) -> dict[str, Any]:
    """Run one exchange with so many members, and return what its steps took."""
    text = YAML.replace("ROUNDS", str(rounds)).replace("MODEL", model)
    text += "".join(f"  - {{name: r{number}, kind: datacenter, batch_size: 8}}\n" for number in range(members))
    (folder / "scale.yaml").write_text(text)
    began = time.process_time()
    spec = spec_of(ConfigFile(folder / "scale.yaml"))
    assert spec.run and spec.roster.members
    built = time.process_time() - began
    run = RunFolder(folder / "run")
    run.path.mkdir()
    run.config.write_text(text)
    keys, reported = SecretKeys(Secret(new_secret()), encrypted=False), [0]
    require_open_files(members)

    def on_report(report: Report) -> None:
        reported[0] += 1

    with Supervisor(spec, run, on_report, LAUNCHER, keys) as supervisor:
        supervisor.start([EXCHANGE])
        address = supervisor.open_exchange()
        watcher = Watcher(lambda: reports_of(address, supervisor.credentials), on_report)
        exchange = psutil.Process(supervisor._processes[EXCHANGE].pid)
        processes = processes_of(members)
        pipes = _start(
            run_members,
            [(run.path, list(spec.members)[n::processes], address, keys.secret.text) for n in range(processes)],
        )
        parts = Parts(pipes, exchange)
        sum(map(_answer, pipes))  # they have started
        steps: dict[str, list[Step]] = {step: [] for step in STEPS}
        steps["join"].append(parts.do("join"))
        parts.do("begin")
        for round_ in range(1, rounds + 1):
            parts.do("encode", round_)
            for step in STEPS[1:]:
                if step == "confirm":
                    parts.do("apply", round_)
                steps[step].append(parts.do(step, round_))
        memory = exchange.memory_info().rss
        threads = exchange.num_threads()
        parts.tell("finish")
        parts.tell("close")
        for pipe in pipes:
            pipe.send(None)
        watcher.wait()
    size = _bytes_of_one(steps["fetch"][-1], members)
    return {
        "members": members,
        "spec_cpu_seconds": built,
        "memory_bytes": memory,
        "threads": threads,
        "reports": reported[0],
        "steps": {step: [asdict(one) for one in found] for step, found in steps.items()},
        **_round_figures(members, steps, len(shapes_by_block(spec.parameter_shapes))),
        **plain_seconds(members, size),
        "contribution_bytes": size,
    }


def _start(target: Callable[..., None], arguments: Sequence[Sequence[Any]]) -> list[Connection]:
    """Start a process for each tuple of arguments; return a pipe to each."""
    context, pipes = multiprocessing.get_context("spawn"), list[Connection]()
    for own in arguments:
        ours, theirs = context.Pipe()
        with safe_path():
            context.Process(target=target, args=(theirs, *own), daemon=True).start()
        pipes.append(ours)
    return pipes


def plain_seconds(members: int, size: int) -> dict[str, Any]:
    """Return the seconds of the bytes of a round without the exchange."""
    (server,) = _start(serve_plain, [((members - 1) * size, members)])
    port = _answer(server)
    processes = processes_of(members)
    clients = _start(run_plain, [(port, len(range(n, members, processes)), size) for n in range(processes)])
    sum(map(_answer, clients))  # they have connected
    seconds: dict[str, list[float]] = {"deposit": [], "fetch": []}
    for _ in range(3):
        for step, found in seconds.items():
            began = time.monotonic()
            for pipe in clients:
                pipe.send(step)
            assert sum(map(_answer, clients)) == members * size * (members - 1 if step == "fetch" else 1)
            found.append(time.monotonic() - began)
    for pipe in clients:
        pipe.send(None)
    sum(map(_answer, clients))  # they have closed their connections
    server.send(None)
    plain = {step: median(found[1:]) for step, found in seconds.items()}
    return {"plain_step_seconds": plain, "plain_seconds": sum(plain.values())}


def _bytes_of_one(fetch: Step, members: int) -> int:
    """Return the size of one contribution: the first member of each process also fetches its own."""
    return round(fetch.n_bytes / (members * (members - 1) + processes_of(members)))


def _round_figures(members: int, steps: Mapping[str, Sequence[Step]], blobs: int) -> dict[str, float]:
    """Return what a round takes, the median over rounds; a contribution has so many blobs."""
    rounds = list(zip(*(steps[step] for step in STEPS[1:]), strict=True))
    return {
        "round_seconds": median(sum(one.seconds for one in own) for own in rounds),
        "round_cpu_seconds": median(sum(one.cpu_seconds for one in own) for own in rounds),
        "deposits_a_second": members * blobs / median(one.seconds for one in steps["deposit"]),
        "fetches_a_second": members * (members - 1) * blobs / median(one.seconds for one in steps["fetch"]),
        "fetched_bytes_a_second": median(one.n_bytes / one.seconds for one in steps["fetch"]),
    }


def fit(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the exponent p of the line through points (size, cost) on logarithmic scales: cost ~ size ** p."""
    known = [(math.log(size), math.log(cost)) for size, cost in points if cost > 0]
    if len(known) < 2:
        return None
    sizes, costs = np.array(known).T
    return float(np.polyfit(sizes, costs, 1)[0])


def growth(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return the exponents with which CPU seconds and seconds of each step grow between the last two sizes."""
    found = {}
    for step in STEPS:
        points = [(one["members"], one["steps"][step]) for one in results]
        squared = 1 if step in PER_BYTE else 0
        found[step] = {
            what: fit([(n, median(own[what] for own in steps) / n**squared) for n, steps in points])
            for what in ("cpu_seconds", "seconds")
        }
    return found


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot CPU seconds, memory and seconds against the number of members, all on logarithmic scales."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (cpu, memory, seconds) = plt.subplots(1, 3, figsize=(13, 4))
    members = [one["members"] for one in results]
    for axis, what in ((cpu, "cpu_seconds"), (seconds, "seconds")):
        for step in STEPS:
            found = [median(own[what] for own in one["steps"][step]) for one in results]
            axis.loglog(members, [max(value, 1e-3) for value in found], "o-", label=step)
        limit = [1e-3 * n * math.log2(n) / members[0] for n in members]
        axis.loglog(members, limit, "k:", label="n log n")
    seconds.loglog(members, [one["plain_seconds"] for one in results], "k--", label="plain gRPC")
    seconds.loglog(members, [one["round_seconds"] for one in results], "k-", label="round")
    memory.semilogx(members, [one["memory_bytes"] / 1e6 for one in results], "o-", label="exchange")
    memory.set_ylim(bottom=0)
    for axis, title in ((cpu, "CPU seconds of the exchange"), (memory, "memory, MB"), (seconds, "seconds")):
        axis.set(title=title, xlabel="members", xticks=members, xticklabels=[f"{n:,}" for n in members])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def lines_of(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is printed of one size."""
    yield f"{result['members']:,} members, contributions of {result['contribution_bytes']:,} bytes"
    yield f"  {'step':<8} {'seconds':>9} {'CPU s':>9}"
    for step in STEPS:
        own = result["steps"][step]
        yield f"  {step:<8}" + "".join(
            f" {median(one[what] for one in own):>9.3f}" for what in ("seconds", "cpu_seconds")
        )
    seconds, plain = result["round_seconds"], result["plain_seconds"]
    yield f"  round {seconds:.2f} s; the same bytes take {plain:.2f} s by plain gRPC ({seconds / plain:.2f} times)"
    yield "  " + ", ".join(
        f"{step} {median(one['seconds'] for one in result['steps'][step]) / plain:.2f} times plain gRPC"
        for step, plain in result["plain_step_seconds"].items()
    )
    yield (
        f"  {result['deposits_a_second']:,.0f} deposits/s, {result['fetches_a_second']:,.0f} fetches/s,"
        f" {result['memory_bytes'] / 1e6:.0f} MB, {result['threads']} threads"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--chart", type=Path)
    parser.add_argument("--members", type=int, nargs="+", default=MEMBERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--model", choices=PRESETS, help="size of contributions, by default some kilobytes")
    arguments = parse(parser, SMOKE)
    model = SMALL if arguments.model is None else f"{{preset: {arguments.model}}}"
    results = list[dict[str, Any]]()
    for members in arguments.members:
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(members, arguments.rounds, Path(folder), model))
        print("\n".join(lines_of(results[-1])), flush=True)
        found = {"model": arguments.model, "sizes": results, "growth": growth(results), "load": psutil.getloadavg()}
        save(origin() | found, arguments.json)
    for step, exponents in growth(results).items():
        of = " per member's bytes" if step in PER_BYTE else ""
        told = ", ".join(f"{what} ~ n^{p:.2f}" for what, p in exponents.items() if p is not None)
        print(f"{step}{of}: {told}")
    if arguments.chart is not None:
        draw(results, arguments.chart)


if __name__ == "__main__":
    main()
