"""Train models of a real size for a few steps, and compare peak memory and bytes with the prediction.

    python benchmarks/real_size.py --model 178m [--json FILE]

178m is one datacenter replica and one group of four stages, 512m one group of four stages. They need 16 GB and 23 GB of
free disk. Each member is a process that `hetero-pp launch` starts, behind a shaped line. The text is random, the
batches are tiny, and a round has few steps, so the seconds of a round beside its steps can be read. Memory is sampled
from outside: the bytes that only this process holds (USS), by phase. The system counts them page by page, which takes
a share of a core; so they are counted once a second, and the cheap resident set tells the changes between.

- start: until a member has read the run checkpoint and evaluated it;
- step: during inner steps, and while the saved state before them is written;
- round: from the last inner step to the end of the evaluation.

Pages of memory-mapped files count as long as the system keeps them, and are told apart (`mapped`), because it takes
them back when it needs memory. Seconds:

- first run checkpoint: from the start of the exchange's process until the first run checkpoint is on its disk;
- join: from the begin of the run until a member has read its part of the first run checkpoint over its line;
- contribute: from the end of a member's inner loop until its last block is in the log;
- exchange: from the end of the last inner loop until the round is closed;
- apply: from there until a member holds the new parameters;
- round: from the end of the last inner loop until all members hold the new parameters;
- CPU: user and system time of a member in its outer round;
- state: a saved state;
- run checkpoint: from the audit of the round until its run checkpoint is on the disk.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from command_line import origin, parse, parser_of, save
from launched import events_of, letters, start_program
from processes import meanwhile, writers_to

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE, exchange_link_name
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.simulator.exchange_load import exchange_load
from hetero_pp.simulator.memory import memory_of_member
from hetero_pp.simulator.traffic import checkpoint_bytes, exchange_link_loads

SMOKE = {"model": "tiny", "rounds": 2, "steps": 2, "length": 32}
DISK_BYTES = 45
"""Bytes on disk per parameter of all members: run checkpoints, saved states, and copies for undo."""
PHASES = ("start", "step", "round")
SECONDS = ("join", "contribute", "apply", "state", "outer", "blocked", "cpu")
SECONDS_BETWEEN_COUNTS = 1.0

Sample = tuple[float, int, int, float]
"""Time, bytes that only the process holds, bytes of mapped files, and CPU seconds so far."""

GROUP = (
    "{name: home, kind: participants, stages: 4, batch_size: 2, micro_batches: 2, link: line, uplink: line, "
    "boundary: {rank: 1/8, dtype: bf16}}"
)
REPLICAS = {
    "tiny": ["{name: dc, kind: datacenter, batch_size: 2, micro_batches: 2, uplink: line}", GROUP],
    "178m": ["{name: dc, kind: datacenter, batch_size: 2, micro_batches: 2, uplink: line}", GROUP],
    "512m": [GROUP],
}
YAML = """\
name: real-size
seed: 1
threads: 1
model: {{{model}}}
data: {{corpus: {corpus}, sequence_length: {length}, validation_share: 0.1, validation_sequences: 2}}
inner: {{steps: {steps}, learning_rate: 1e-4}}
outer: {{rounds: {rounds}, compression: {{density: 1/32, value_bits: 2}}}}
checkpoints: {{every: {rounds}}}
links: {{line: {{bandwidth: {bandwidth}, latency: 5 ms}}}}
replicas:
{replicas}
"""


def write_run(folder: Path, arguments: argparse.Namespace) -> Path:
    """Write the corpus and the YAML of a run; return the YAML's path."""
    (folder / "corpus.txt").write_text(letters(400 * arguments.length))
    tiny = "preset: micro, width: 128, heads: 4, feed_forward: 384, vocabulary: 2000"
    preset = tiny if arguments.model == "tiny" else f"preset: {arguments.model}, vocabulary: 32000"
    text = YAML.format(
        model=preset,
        corpus=folder / "corpus.txt",
        length=arguments.length,
        steps=arguments.steps,
        rounds=arguments.rounds,
        bandwidth=arguments.bandwidth,
        replicas="\n".join(f"  - {one}" for one in REPLICAS[arguments.model]),
    )
    path = folder / "run.yaml"
    path.write_text(text)
    return path


@dataclass
class Sampler:
    """Samples of the memory of a run's members, which are found by their output files in the folder `logs`."""

    logs: Path
    every: float
    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    began: dict[str, float] = field(default_factory=dict)
    """Member -> start of its process."""
    _others: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Process -> when pages that it shares were counted last, and their bytes."""

    def go_on(self, is_over: threading.Event) -> None:
        """Take samples until the event is set."""
        while not is_over.is_set():
            began = time.monotonic()
            for pid, member in writers_to(self.logs):
                with suppress(psutil.Error):  # it has just ended
                    self._sample(psutil.Process(pid), member)
            is_over.wait(max(0.01, self.every - (time.monotonic() - began)))

    def _sample(self, process: psutil.Process, member: str) -> None:
        self.began.setdefault(member, process.create_time())
        counted, others = self._others.get(process.pid, (0.0, 0))
        if time.monotonic() - counted > SECONDS_BETWEEN_COUNTS:
            full = process.memory_full_info()
            others = full.rss - full.shared - full.uss
            self._others[process.pid] = time.monotonic(), others
        now, used = process.memory_info(), process.cpu_times()
        own = now.rss - now.shared - others
        self.samples[member].append((time.time(), own, now.shared, used.user + used.system))


def launch(path: Path, folder: RunFolder, every: float) -> Sampler:
    """Launch a run as a user would, and return the samples. Raises SystemExit if it fails."""
    said, sampler = path.with_name("output.txt"), Sampler(folder.output(EXCHANGE).parent, every)
    with meanwhile(sampler.go_on):
        code = start_program("launch", str(path), "--runs", str(folder.path.parent), to=said).wait()
    if code != 0:
        raise SystemExit(f"the run ended with {code}: {said.read_text()}")
    return sampler


class Told:
    """Events of a run, and the times of its files."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.events = folder, events_of(folder)

    def of(self, event: str, **values: object) -> list[dict[str, Any]]:
        """Return the events of a kind with these values."""
        found = (one for one in self.events if one["event"] == event)
        return [one for one in found if all(one.get(name) == value for name, value in values.items())]

    def times(self, event: str, **values: object) -> list[float]:
        return [one["time"] for one in self.of(event, **values)]

    def total(self, member: str, round_: int, direction: str) -> int:
        """Return the payload bytes on a member's link to the exchange in a round."""
        found = self.of("link_use", link=exchange_link_name(member), round=round_, direction=direction)
        return int(max((one["payload_bytes"] for one in found), default=0))

    def trains(self, member: str, at: float) -> bool:
        """Return whether a member took inner steps at a time; the first of a round begins when the one before ends."""
        for ended in [0.0, *self.times("member_round", member=member)]:
            own = [one for one in self.of("inner_step", member=member) if one["time"] > ended]
            if own and ended < at <= max(one["time"] for one in own if one["round"] == own[0]["round"]):
                return True
        return False

    def written(self, pattern: str) -> float:
        """Return when the last file of this pattern in the run's folder was written."""
        return max(path.stat().st_mtime for path in self.folder.path.glob(pattern))

    def join_rate(self, member: str) -> tuple[float, float]:
        """Return the seconds and the bytes of reading the first run checkpoint."""
        said = self.folder.output(member).read_text()
        found = re.search(r"read ([\d,]+) bytes of the run checkpoint .* in ([\d.]+) s", said)
        assert found is not None
        return float(found[2]), float(found[1].replace(",", ""))

    def outer(self, member: str, round_: int) -> tuple[float, float, dict[str, Any]]:
        """Return when a member began its outer round, when it held the new parameters, and the event after that."""
        [done] = self.of("member_round", member=member, round=round_)
        applied = done["time"] - done["evaluation_seconds"]
        return applied - done["outer_seconds"], applied, done

    def seconds(self, member: str, replica: str, round_: int, samples: Sequence[Sample]) -> dict[str, float]:
        """Return the seconds of a round beside its steps."""
        began, applied, done = self.outer(member, round_)
        blobs = self.written(f"log/round-{round_:06d}/{replica}/**/*.blob*")
        state = self.folder.state(member) / f"round-{round_:06d}" / "digests.json"
        found = {
            "contribute": blobs - began,
            "apply": applied - self.times("round_closed", round=round_)[0],
            "outer": done["outer_seconds"],
            "blocked": done["blocked_seconds"],
            "cpu": _used(samples, applied) - _used(samples, began),
        }
        if state.exists():
            found["state"] = state.stat().st_mtime - done["time"]
        return found

    def rounds(self, members: Iterable[str], count: int) -> dict[str, float]:
        """Return the seconds of the whole run's parts in its last round."""
        began, applied, _ = zip(*(self.outer(member, count) for member in members), strict=True)
        return {
            "exchange": self.times("round_closed", round=count)[0] - max(began),
            "round": max(applied) - max(began),
            "checkpoint": self.written(f"log/checkpoint-{count:06d}*")
            - self.written(f"log/audited/round-{count:06d}.json"),
        }


def _used(samples: Sequence[Sample], at: float) -> float:
    """Return the CPU seconds of a process until a time."""
    return min(samples, key=lambda one: abs(one[0] - at))[3]


def phases(told: Told, member: str, samples: Sequence[Sample]) -> dict[str, int]:
    """Return the peak of a member by phase."""
    started = told.times("begun")[0]
    if member != EXCHANGE:
        started = min(told.times("link_use", member=member, round=0))
    found = dict.fromkeys(PHASES, 0)
    for at, size, *_ in samples:
        phase = "start" if at <= started else "step" if told.trains(member, at) else "round"
        found[phase] = max(found[phase], size)
    return found


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one run, and return what each member held, took and sent, beside the prediction."""
    path = write_run(folder, arguments)
    spec = spec_of(ConfigFile(path))
    needed, free = DISK_BYTES * sum(_numbers(spec, name) for name in spec.members), shutil.disk_usage(folder).free
    if needed > free:
        raise SystemExit(f"{folder}: found {free / 1e9:.0f} GB of free disk, expected at least {needed / 1e9:.0f} GB")
    run = RunFolder(folder / "runs" / "real-size")
    sampler = launch(path, run, arguments.every)
    (folder / "samples.json").write_text(json.dumps(sampler.samples))
    told = Told(run)
    names = [EXCHANGE, *spec.members]
    return {
        "model": arguments.model,
        "load": psutil.getloadavg()[0],
        "parameters": sum(_numbers(spec, member) for member in spec.members["home.0"].replica.members),
        "first_checkpoint_seconds": told.written("log/checkpoint-000000*") - sampler.began[EXCHANGE],
        "seconds": told.rounds(spec.members, arguments.rounds),
        "members": [_member(spec, told, sampler, name, arguments) for name in names],
    }


def _numbers(spec: RunSpec, name: str) -> int:
    """Return the parameters that a member trains; the exchange has all."""
    shapes, owned = spec.parameter_shapes, spec.members[name].owned if name in spec.members else spec.parameter_shapes
    return sum(math.prod(shapes[one]) for one in owned)


def _member(spec: RunSpec, told: Told, sampler: Sampler, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    samples = sampler.samples[name]
    peak = max(size for _, size, *_ in samples)
    held = exchange_load(spec).memory_bytes
    if name in spec.members:
        held = memory_of_member(spec, spec.members[name], accelerated=False).held()
    predicted = sum(held.values())
    found: dict[str, Any] = {
        "member": name,
        "parameters": _numbers(spec, name),
        "peak_bytes": peak,
        "peaks": phases(told, name, samples),
        "mapped_bytes": max(mapped for _, _, mapped, _ in samples),
        "predicted_bytes": predicted,
        "predicted": held,
        "ratio": predicted / peak,
    }
    if name == EXCHANGE:
        return found
    member, rounds = spec.members[name], arguments.rounds
    loads = exchange_link_loads(spec, member)
    join_seconds, join_bytes = told.join_rate(name)
    bandwidth = spec.links[exchange_link_name(name)].shape("backward").bandwidth or float("inf")
    found["seconds"] = {"join": join_seconds, **told.seconds(name, member.replica.name, rounds, samples)}
    found["join_share_of_line"] = 8 * join_bytes / join_seconds / bandwidth
    found["bytes"] = {
        "first run checkpoint": [join_bytes, checkpoint_bytes(spec, member)],
        "sent": [told.total(name, rounds, "forward"), loads["forward"].outer_round],
        "received": [told.total(name, rounds, "backward"), loads["backward"].outer_round],
    }
    return found


def show(found: Mapping[str, Any]) -> None:
    print(f"{found['model']}: {found['parameters'] / 1e6:.1f} million parameters; GB")
    print(f"{'member':<10}{'start':>7}{'step':>7}{'round':>7}{'peak':>7}{'predicted':>11}{'ratio':>7}{'B/param':>9}")
    for one in found["members"]:
        peaks = "".join(f"{one['peaks'].get(phase, 0) / 1e9:>7.2f}" for phase in PHASES)
        ends = f"{one['peak_bytes'] / 1e9:>7.2f}{one['predicted_bytes'] / 1e9:>11.2f}{one['ratio']:>7.2f}"
        print(f"{one['member']:<10}{peaks}{ends}{one['peak_bytes'] / one['parameters']:>9.1f}")
    print(f"\n{'seconds':<10}" + "".join(f"{part:>12}" for part in SECONDS) + f"{'of line':>9}")
    for one in found["members"][1:]:
        parts = (one["seconds"].get(part) for part in SECONDS)
        cells = "".join(f"{'–':>12}" if seconds is None else f"{seconds:>12.2f}" for seconds in parts)
        print(f"{one['member']:<10}{cells}{one['join_share_of_line']:>9.2f}")
    whole = {"first run checkpoint": found["first_checkpoint_seconds"], **found["seconds"]}
    print(", ".join(f"{part} {seconds:.2f} s" for part, seconds in whole.items()))
    for what in found["members"][1]["bytes"]:
        sent, expected = (sum(one["bytes"][what][side] for one in found["members"][1:]) for side in (0, 1))
        print(f"bytes, {what}: {sent:,.0f}, predicted {expected:,.0f}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=REPLICAS, default="178m")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="inner steps of a round")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--bandwidth", default="1 Gbit/s", help="of every line, in each direction")
    parser.add_argument("--every", type=float, default=0.05, help="seconds between two samples of memory")
    parser.add_argument("--folder", type=Path, help="keep the run in this empty folder")
    arguments = parse(parser, SMOKE)
    with tempfile.TemporaryDirectory(prefix="hetero-pp-real-size-") as name:
        found = measure(arguments.folder or Path(name), arguments)
    show(found)
    settings = {name: getattr(arguments, name) for name in ("rounds", "steps", "length", "bandwidth")}
    save(origin() | settings | found, arguments.json)


if __name__ == "__main__":
    main()
