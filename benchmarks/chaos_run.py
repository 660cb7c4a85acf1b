"""Run under faults: it is started as a user starts it, observed through its files, and stopped by Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

SECONDS_BETWEEN_LOOKS = 1.0
WITH_FAULTS = Path(__file__).with_name("launch_with_faults.py")

YAML = """\
name: chaos
seed: 1
model: {preset: micro, width: 64, heads: 2, feed_forward: 128}
data: {corpus: docstrings, sequence_length: 64, validation_sequences: 4, repeat: true}
inner: {steps: 4, learning_rate: 6e-3}
outer: {rounds: 100000}
checkpoints: {every: 1}
exchange:
  quorum: 0.5
  grace: {factor: 3, least: 2 s, most: 10 s}
  limit: 60 s
  lease: {factor: 5, least: 5 s, most: 10 s}
restarts: {count: 100000}
replicas:
  - {name: dc, kind: datacenter, batch_size: 8}
  - {name: near, kind: participants, stages: 2, batch_size: 8, micro_batches: 2, boundary: {rank: 1/4}}
  - {name: far, kind: participants, stages: [{layers: 1}, {layers: 2}, {layers: 1}], batch_size: 8, micro_batches: 2,
     boundary: {rank: 1/4}}
"""
REPLICAS = ("dc", "near", "far")


def role_of(slot: str) -> str:
    """Return the role of a member."""
    if "." not in slot:
        return "exchange" if slot == "exchange" else "datacenter"
    return {"0": "first stage", "2": "last stage"}.get(slot[-1], "stage")


def round_of(path: Path) -> int:
    """Return the round of a record's file."""
    return int(path.parent.name.removeprefix("round-"))


class ChaosRun:
    """One run in the background, in a folder of its own."""

    def __init__(self, folder: Path, settings: Sequence[str], text: str = YAML, inside: Sequence[str] = ()) -> None:
        """Prepare the run. `inside` is a command prefix, such as one that enters a namespace."""
        folder.mkdir(parents=True, exist_ok=True)
        runs = folder.parent / "runs"  # shared by all runs, so that the corpus is encoded once
        self.folder = runs / folder.name
        (folder / "run.yaml").write_text(text)
        sets = [part for setting in (f"name={folder.name}", *settings) for part in ("--set", setting)]
        self._inside, self._arguments = list(inside), [str(folder / "run.yaml"), "--runs", str(runs), *sets]
        self._output, self._faults = folder / "output.txt", folder / "faults.yaml"
        self._process: subprocess.Popen[bytes] | None = None
        self._events, self._read = list[dict[str, Any]](), 0

    def start(self, faults: Sequence[str] = (), resume: bool = False) -> None:
        """Start the run. `faults` are entries of a fault file. A resumed run writes its metrics file anew."""
        self._events, self._read = [], 0
        program, more = ["-P", "-m", "hetero_pp", "launch"], ["--resume" if resume else "--new"]
        if faults:
            self._faults.write_text("faults:\n" + "".join(f"  - {fault}\n" for fault in faults))
            program, more = [str(WITH_FAULTS)], [*more, "--faults", str(self._faults)]
        command = [*self._inside, sys.executable, *program, *self._arguments, *more]
        with self._output.open("ab") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file)

    @property
    def runs(self) -> bool:
        """Whether the run has not ended."""
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> ChaosRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the run as Ctrl-C does."""
        if self._process is not None and self.runs:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
            self._process.kill()
            self._process.wait()

    def said(self) -> str:
        """Return the last three lines of the output."""
        return "\n".join(self._output.read_text().splitlines()[-3:])

    def events(self) -> list[dict[str, Any]]:
        """Return the events so far, without link use. Each line is read once, because there are hundreds per second."""
        path = self.folder / "metrics.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._events += [told for line in whole.splitlines() if (told := _needed(json.loads(line))) is not None]
            self._read += len(whole) + len(newline)
        return self._events

    def closed(self) -> dict[int, float]:
        """Return the time at which each round closed, from its record file. Events may be lost with the exchange."""
        return {round_of(path): path.stat().st_mtime for path in self._records()}

    def _records(self) -> list[Path]:
        return sorted((self.folder / "log").glob("round-*/record.json"))

    def records(self) -> dict[int, dict[str, Any]]:
        """Return the record of each round."""
        return {round_of(path): json.loads(path.read_text()) for path in self._records()}

    def wait(self, seconds: float, until_closed: int | None = None) -> bool:
        """Wait for `seconds`, until the run ends, or until a round closes. Return True if the time ran out first."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.runs:
            if until_closed is not None and max(self.closed(), default=0) >= until_closed:
                return False
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return self.runs

    def replay(self) -> str:
        """Return the exit code and the last line of `hetero-pp log replay` for the run."""
        command = [sys.executable, "-P", "-m", "hetero_pp", "log", "replay", str(self.folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        return f"rc {done.returncode}: " + ([*done.stdout.splitlines(), *done.stderr.splitlines()] or [""])[-1]

    def sizes(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield (member, process id, bytes of memory, descriptors) of all running processes, including the launcher."""
        if self._process is None:
            return
        with suppress(psutil.Error):
            launcher = psutil.Process(self._process.pid)
            yield "launcher", launcher.pid, launcher.memory_info().rss, launcher.num_fds()
            for child in launcher.children(recursive=True):
                with suppress(psutil.Error, OSError):
                    log = (Path("/proc") / str(child.pid) / "fd" / "2").resolve()
                    if log.parent == self.folder / "logs":
                        yield log.stem, child.pid, child.memory_info().rss, child.num_fds()


def _needed(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return the needed fields of an event, or None for link use. There are hundreds of thousands of events."""
    if line["event"] == "inner_step":
        return {key: line[key] for key in ("event", "time", "replica")}
    return None if line["event"] == "link_use" else line


def tokens_a_second(run: ChaosRun, since: float | None = None, until: float | None = None) -> float:
    """Return tokens of included contributions per second, from the first close (or `since`) to the last (`until`)."""
    records, closed = run.records(), run.closed()
    if len(records) < 2:
        return 0.0
    first = min(records)
    begin, end = since or closed[first], until or closed[max(records)]
    tokens = sum(tokens_of(record) for round_, record in records.items() if round_ > first)
    return tokens / (end - begin)


def tokens_of(record: Mapping[str, Any]) -> int:
    """Return the tokens of the contributions that a round included."""
    return sum(int(one.get("tokens", 0)) for one in record["contributions"])
