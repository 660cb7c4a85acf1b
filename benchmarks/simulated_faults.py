"""Simulate rounds with faults, check every invariant, and count the replicas that the rounds include.

    python benchmarks/simulated_faults.py --rounds 1000000 [--seed N] [--workers N] [--json FILE] [--trace]

A seed has one history of up to 50 rounds (tests/simulation/). Seeds count up from the first one until there are enough
rounds. A violation is printed with its seed and its round. `--seed S --rounds 50 --trace` prints this history event by
event. Histories in FILE are not played again unless the rules or the simulation have changed.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import earlier, origin, parse, parser_of, save

if TYPE_CHECKING:
    from simulation.world import History

ROOT = Path(__file__).absolute().parents[1]
HISTORY = 50
"""Rounds of one history."""
CHUNK = 20
"""Histories that a worker plays in one task."""
SMOKE = {"rounds": 200}


@dataclass
class Total:
    """Totals of all histories so far."""

    source: str
    seed: int
    histories: int = 0
    rounds: int = 0
    events: int = 0
    simulated_seconds: float = 0.0
    cpu_seconds: float = 0.0
    live: int = 0
    counted: int = 0
    light_live: int = 0
    light_counted: int = 0
    violations: list[str] = field(default_factory=list)

    def add(self, history: History) -> None:
        self.histories += 1
        self.rounds += history.rounds
        self.events += history.events
        self.simulated_seconds += history.seconds
        self.live += history.live
        self.counted += history.counted
        self.light_live += history.live * history.are_light
        self.light_counted += history.counted * history.are_light
        if history.violation is not None:
            self.violations.append(history.violation)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first history")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="print every event")
    arguments = parse(parser, SMOKE)
    _find_simulation()
    total = _earlier(arguments.json, arguments.seed)
    if arguments.trace:
        for seed, rounds in _lengths(arguments.seed, arguments.rounds):
            total.add(_play(seed, rounds, print))
    else:
        _play_all(total, arguments.rounds, arguments.workers, arguments.json)
    print("\n".join([*total.violations, _line(total)]))
    raise SystemExit(1 if total.violations else 0)


def _play_all(total: Total, rounds: int, workers: int, path: Path | None) -> None:
    """Play chunk by chunk, and write the totals after each."""
    left = iter(_lengths(total.seed + total.histories, rounds - total.rounds))
    with ProcessPoolExecutor(workers, initializer=_find_simulation) as pool:
        while chunks := list(filter(None, (list(islice(left, CHUNK)) for _ in range(workers)))):
            for histories, seconds in pool.map(_play_chunk, chunks):
                total.cpu_seconds += seconds
                for history in histories:
                    total.add(history)
            save(origin() | _shares(total) | asdict(total), path)
            if path is not None and total.histories % 400 < CHUNK * workers:
                print(_line(total), flush=True)


def _find_simulation() -> None:
    """Make the simulation importable, which lies among the tests."""
    sys.path.insert(0, str(ROOT / "tests"))


def _play(seed: int, rounds: int, tells: Callable[[str], object] | None = None) -> History:
    from simulation.world import play

    return play(seed, rounds, tells)


def _lengths(seed: int, rounds: int) -> Iterator[tuple[int, int]]:
    """Yield (seed, rounds) of each history."""
    for start in range(0, rounds, HISTORY):
        yield seed + start // HISTORY, min(HISTORY, rounds - start)


def _play_chunk(chunk: Sequence[tuple[int, int]]) -> tuple[list[History], float]:
    """Play the histories of a chunk. Return them, and the CPU seconds."""
    started = time.process_time()
    return [_play(seed, rounds) for seed, rounds in chunk], time.process_time() - started


def _earlier(path: Path | None, seed: int) -> Total:
    """Return the totals of this seed in a file, if neither the rules nor the simulation have changed since."""
    total, found = Total(_source(), seed), earlier(path)
    if (found.get("source"), found.get("seed")) != (total.source, seed):
        return total
    return Total(**{name: found[name] for name in asdict(total)})


def _source() -> str:
    """Return a digest of the rules and of the simulation."""
    files = [*(ROOT / "replica_groups" / "rounds").glob("*.py"), *(ROOT / "tests" / "simulation").glob("*.py")]
    played = [path for path in sorted(files) if not path.stem.startswith(("test_", "mutations"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in played)).hexdigest()[:16]


def _shares(total: Total) -> dict[str, float]:
    """Return the share of included replicas among those that were present for a whole round."""
    return {
        "counted_share": total.counted / max(total.live, 1),
        "counted_share_light": total.light_counted / max(total.light_live, 1),
    }


def _line(total: Total) -> str:
    rate = total.rounds / total.cpu_seconds if total.cpu_seconds else 0.0
    shares = _shares(total)
    return (
        f"{total.rounds:,} rounds of {total.histories:,} histories, {total.events:,} events, {rate:.0f} rounds a CPU"
        f" second: {len(total.violations)} violations; counted {shares['counted_share']:.1%} of the replicas that were"
        f" there, {shares['counted_share_light']:.1%} where few things went wrong"
    )


if __name__ == "__main__":
    main()
