"""Measure what attacks on a live run cost: the time of rounds, the memory of the exchange, and changed bits.

    python benchmarks/strangers.py [--json FILE] [--parts attacks fuzz] [--only NAME ...] [--messages 1000000]

A datacenter replica and a group of two stages train as separate processes over gRPC with TLS. The attacker holds the
slots of a third replica and of a second group. So it has members' certificates, and tickets. Links have a latency, as
between homes, so that the run leaves processors to attacks. These run in a process of their own with low priority.

- `attacks`: attacks by strangers, by members that exceed their rights, and by members that lie. Each attack runs in
  periods between periods without it. The results are status codes at the attacker, and kinds of refusal at the
  exchange. They include the exchange's memory before and after, and the median time of a round with and without attack.
- `fuzz`: messages to every call: honest, mutated and out of order. Members, holders of a ticket, and strangers send
  them. Strangers get no further than the TLS handshake. No message may end the exchange, or make it larger or slower
  for good. Each error that a message causes must be a refusal.

Each run continues to its end, and must have the bits of a run without attack. With --json, results are written as they
come, and results that the file contains are not measured again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from attack_calls import CONNECTIONS, Target, begin, channel_to, code_of
from attacks import ATTACKS, CLOSED, COUNTED, CUT, THROUGH_RELAY, attack_main, last_refused
from attacks_of_strangers import ANSWERED
from command_line import earlier, origin, parse, parser_of, save
from fuzz_calls import ESCAPED, Fuzzer, left_of, most_of
from strangers_run import (
    DOWNSTREAM,
    ENDS,
    GUEST,
    HELD_ROUNDS,
    HONEST,
    LATENCY,
    LINK,
    MOST_SECONDS_A_ROUND,
    OWN_LINK,
    LiveRun,
    Reference,
    TooFewRoundsError,
)

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.program.launch.fork_server import safe_path
from hetero_pp.research.experiments.outcomes import commit

QUICK = {
    "only": ["forged_hashes", "absurd_reports"],
    "warm_up": 2,
    "settle": 1,
    "rounds": 1,
    "stretches": 1,
    "messages": 10,
    "campaign": 16,
    "latency": "40 ms",
    "telling": 3,
    "connections": 100,
}
SECONDS_BETWEEN_TELLS = 1.2
SECONDS_TO_SETTLE = 7.0
"""Seconds, more than the exchange keeps freed memory for."""
MOST_GROWTH = 50e6
MOST_SHARE = 0.51
"""Largest share of a round's weights that the attacker's two replicas may have: as many as the honest ones."""

Tell = Callable[[dict[str, Any]], None]


def target_of(run: LiveRun, most_connections: int) -> Target:
    """Return what a member knows of a run."""
    roster = run.spec.roster
    return Target(
        run.address,
        run.spec.run,
        run.credentials(GUEST),
        HONEST,
        sorted(roster.blocks[GUEST]),
        sorted(run.spec.parameter_shapes),
        run.addresses[DOWNSTREAM],
        run.credentials(run.spec.links[LINK].source),
        run.spec.links[LINK],
        run.credentials(DOWNSTREAM),
        [run.credentials(one) for one in ENDS],
        OWN_LINK,
        run.credentials("nobody"),
        run.expired(HONEST),
        run.tickets(),
        run.spec,
        run.liars_folder,
        most_connections,
    )


# ---- attacks ----


class Attacker:
    """One attack in a process of its own. It attacks only while `under_way`."""

    def __init__(self, name: str, target: Target) -> None:
        context = multiprocessing.get_context("forkserver")
        self.codes: Counter[str] = Counter()
        self.seconds = 0.0
        self._is_over = context.Event()
        self._parent, child = context.Pipe()
        self._process = context.Process(target=attack_main, args=(child, name, target, self._is_over), daemon=True)
        with safe_path():
            self._process.start()
        self._parent.recv()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Attack while the block runs. Raises RuntimeError if the attack does not begin or has ended by itself."""
        self._is_over.clear()
        self._parent.send(True)
        if not self._parent.poll(MOST_SECONDS_A_ROUND) or not self._parent.recv():
            raise RuntimeError("the attack has not begun, or has ended before it was under way")
        try:
            yield
        finally:
            self._is_over.set()
            seconds, codes = self._parent.recv()
            self.seconds += seconds
            self.codes += codes

    def close(self) -> None:
        """End the process, also if an attack in it neither begins nor ends."""
        self._process.kill()
        self._process.join()


def rounds_of(arguments: argparse.Namespace) -> int:
    """Return the rounds that an attack takes: its start, periods with and without it, rounds between them, the end."""
    return 1 + 2 * arguments.stretches * (arguments.rounds + 1) + arguments.telling


def attacks(folder: Path, arguments: argparse.Namespace, honest: Reference, found: dict[str, Any], tell: Tell) -> None:
    """Run all missing attacks one after the other in one run, and in another, longer run when too few rounds are left.

    Each attack that changes bits has a run of its own, because a member's bound on joins holds for a whole run.
    """
    ends = found.setdefault("ends", [])
    relayed_or_counted = {*THROUGH_RELAY, *COUNTED}
    for own in ({*arguments.only} - relayed_or_counted, {*THROUGH_RELAY}, *({one} for one in COUNTED)):
        while left := [name for name in arguments.only if name in own and name not in found]:
            runs, relayed = 1 + sum(left[0] in end["of"] for end in ends), left[0] in THROUGH_RELAY
            rounds = arguments.warm_up + runs * len(left) * rounds_of(arguments) + HELD_ROUNDS
            with LiveRun(folder, f"attacked-{len(ends)}", rounds, arguments.latency, relayed) as run:
                run.wait_for_round(arguments.warm_up)
                for name in left:
                    try:
                        found[name] = attacked(run, name, arguments)
                    except TooFewRoundsError:
                        break
                    tell(found)
                    show_attack(name, found[name])
                run.wait_until_over()
            ends.append(outcome(run, None if left[0] in COUNTED else honest.of(rounds)) | {"of": left})
            tell(found)
            if not ends[-1]["to_its_end"]:
                return


def attacked(run: LiveRun, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one attack between periods without it. Raises TooFewRoundsError if the run nears its end before that."""
    target = target_of(run, arguments.connections)
    usual, under, before, refused, printed = [], [], run.size(), Counter(run.refusals), run.said()
    with run.paused():
        attacker = Attacker(name, target)
    sizes, happened = list[float](), Counter(run.happened)
    with closing(attacker):
        run.wait_rounds(1)
        for _ in range(arguments.stretches):
            usual += run.wait_rounds(arguments.rounds)
            with attacker.under_way():
                run.wait_rounds(1)
                for _ in range(arguments.rounds):
                    if name == CUT:
                        run.cut()
                    under += run.wait_rounds(1)
                sizes.append(run.size()[1] / 1e6)
            run.wait_rounds(1)
    run.end_guests()
    if not arguments.smoke and name != CUT:
        tell_all(run, target, "link" if name == "link_frames" else EXCHANGE, refused)
    after = run.size()
    return {
        "codes": dict(attacker.codes),
        "refusals_by_kind": dict(sorted((run.refusals - refused).items())),
        "happened": dict(sorted((run.happened - happened).items())),
        "calls_a_second": attacker.codes.total() / attacker.seconds,
        "megabytes": {"before": before[1] / 1e6, "under": sizes, "after": after[1] / 1e6},
        "threads": {"before": before[2], "after": after[2]},
        "bytes_printed": run.said() - printed,
        "is_the_same_process": after[0] == before[0],
        "round_seconds": {"without": usual, "under": under},
        "ratio": median(under) / median(usual) if under and usual else None,
        "commit": commit(),
    }


def tell_all(run: LiveRun, target: Target, door: str, before: Counter[str]) -> None:
    """Make the exchange report how many calls were refused.

    Reports have a bounded rate, so that some refusals are reported only with the next one of their kind. So one more
    refusal of each kind is caused here, which is not counted.
    """
    address, peer = (target.link_address, DOWNSTREAM) if door == "link" else (target.address, EXCHANGE)
    for call in last_refused(target, door):
        with channel_to(address, call.by, peer) as channel:
            time.sleep(SECONDS_BETWEEN_TELLS)
            code_of(begin(channel, call))
    time.sleep(SECONDS_TO_SETTLE)
    before.update(dict.fromkeys(run.refusals - before, 1))


def outcome(run: LiveRun, honest: LiveRun | None) -> dict[str, Any]:
    """Return whether a run came to its end as if it had not been attacked.

    Without a run to compare with, the honest replicas must have equal bits. The attacker's weight is also returned.
    """
    differs = run.differs_within() if honest is None else run.differs_from(honest)
    return {
        "rounds": len(run.closed),
        "to_its_end": run.failure is None and len(run.closed) == run.rounds,
        "failure": run.failure,
        "same_bits": not differs and len(run.closed) == run.rounds,
        "rounds_with_other_bits": differs[:10],
        "largest_share_of_an_attacker": run.largest_share,
        "harm": run.harm(),
        "bytes_printed": run.said(),
    }


def show_attack(name: str, one: dict[str, Any]) -> None:
    before, after, ratio = one["megabytes"]["before"], one["megabytes"]["after"], one["ratio"]
    told = f"{one['codes']}, {one['refusals_by_kind']}, {one['calls_a_second']:.0f}/s"
    print(f"{name}: {told}, {before:.0f} -> {after:.0f} MB, rounds take {ratio or 0:.3f} of the usual time", flush=True)


# ---- fuzz ----


def fuzz(folder: Path, arguments: argparse.Namespace, honest: Reference, found: dict[str, Any], tell: Tell) -> None:
    """Fuzz runs of `campaign` rounds, one after the other, until every call has had its messages."""
    cells, campaigns = found.setdefault("cells", {}), found.setdefault("campaigns", [])
    while left := left_of(cells, arguments.messages):
        with LiveRun(folder, f"fuzzed-{len(campaigns)}", arguments.campaign, arguments.latency) as run:
            run.wait_for_round(arguments.warm_up)
            growth = campaign(run, arguments, cells, left, lambda: tell(found))
            run.wait_until_over()
        campaigns.append(growth | outcome(run, honest.of(arguments.campaign)))
        tell(found)
        show_campaign(campaigns[-1], cells)
        if not campaigns[-1]["to_its_end"]:
            return


def campaign(
    run: LiveRun, arguments: argparse.Namespace, cells: dict[str, Any], left: Sequence[str], tell: Callable[[], None]
) -> dict[str, Any]:
    """Send remaining messages as far as one run allows, and return their effect on the exchange."""
    before, largest = run.size(), run.size()
    with run.paused():
        started = Fuzzer(target_of(run, CONNECTIONS), run.spec, arguments.seed)
    with started as fuzzer:
        far = [fuzzer.far_size()]
        for name in left:
            most = most_of(name, arguments.messages)
            while cells.get(name, {}).get("sent", 0) < most:
                if run.is_over or len(run.closed) >= run.rounds - HELD_ROUNDS - arguments.settle:
                    break
                own = cells.setdefault(name, {"sent": 0, "seconds": 0.0, "codes": {}, "escaped": []})
                fuzzer.some(name, own, most, max(run.closed))
                own["megabytes"] = run.size()[1] / 1e6
                largest = max(largest, run.size(), key=lambda size: size[1])
                tell()
        far.append(fuzzer.far_size())
    run.end_guests()
    after = run.size()
    return {
        "megabytes": {"before": before[1] / 1e6, "most": largest[1] / 1e6, "after": after[1] / 1e6},
        "threads": {"before": before[2], "after": after[2]},
        "link": {"megabytes": [size / 1e6 for size, _ in far], "threads": [threads for _, threads in far]},
        "is_the_same_process": after[0] == before[0],
    }


def show_campaign(one: dict[str, Any], cells: dict[str, Any]) -> None:
    sent, seconds = (sum(cell[key] for cell in cells.values()) for key in ("sent", "seconds"))
    escaped = {name: cell["escaped"][:2] for name, cell in cells.items() if cell["escaped"]}
    size = f"{one['megabytes']['before']:.0f} -> {one['megabytes']['after']:.0f} MB, {one['threads']} threads"
    size += f", a stage {one['link']}"
    end = f"to its end: {one['to_its_end']}, same bits: {one['same_bits']}, escaped: {escaped}, harm: {one['harm']}"
    print(f"fuzz: {sent:,} messages, {sent / max(seconds, 1e-9):.0f}/s, {size}; {end}", flush=True)


# ---- all of it ----


def holes(found: dict[str, Any]) -> list[str]:
    """Return the effects of attacks that are not allowed. Times are only measured."""
    named, fuzzed = dict(found.get("attacks", {})), found.get("fuzz", {})
    ends = {f"attacks {i}": one for i, one in enumerate(named.pop("ends", []))}
    ends |= {f"fuzz {i}": one for i, one in enumerate(fuzzed.get("campaigns", []))}
    told = [f"{name}: not {key}" for name, one in (named | ends).items() for key in GOOD_ENDS if not one.get(key, True)]
    told += [f"{name}: {one[key]}" for name, one in ends.items() for key in ("failure", "harm") if one[key]]
    told += [
        f"{name}: an attacker weighs {one['largest_share_of_an_attacker']:.2f} of a round"
        for name, one in ends.items()
        if one.get("largest_share_of_an_attacker", 0.0) > MOST_SHARE
    ]
    for name, one in (named | ends).items():
        size = one.get("megabytes", {"before": 0.0, "after": 0.0})
        grown = size["after"] - size["before"]
        far = one.get("link", {"megabytes": [0.0, 0.0]})["megabytes"]
        told += [f"{name}: {grown:.0f} MB more"] if 1e6 * grown > MOST_GROWTH else []
        told += [f"{name}: a stage has {far[1] - far[0]:.0f} MB more"] if 1e6 * (far[1] - far[0]) > MOST_GROWTH else []
    told += [
        f"{name}: {one['codes']}"
        for name, one in named.items()
        if name != CUT and ({*ESCAPED, ANSWERED} - {"UNAVAILABLE" if name in CLOSED else ""}) & one["codes"].keys()
    ]
    return told + [f"{name}: {one['escaped'][0]}" for name, one in fuzzed.get("cells", {}).items() if one["escaped"]]


GOOD_ENDS = ("to_its_end", "same_bits", "is_the_same_process")
PARTS = {"attacks": attacks, "fuzz": fuzz}


def main() -> None:
    """Attack, print, and write. Exits with 1 if an attack had an effect that is not allowed."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--only", nargs="+", choices=ATTACKS, default=list(ATTACKS), metavar="NAME", help=", ".join(ATTACKS)
    )
    parser.add_argument("--warm-up", type=int, default=8, help="rounds before the first attack or message")
    parser.add_argument("--settle", type=int, default=4, help="rounds after the last message")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of a period with or without an attack")
    parser.add_argument("--stretches", type=int, default=3, help="periods of each attack")
    parser.add_argument("--telling", type=int, default=24, help="rounds after each attack, while refusals are reported")
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument(
        "--messages", type=int, default=1_000_000, help="messages to each call by members, and by holders of a ticket"
    )
    parser.add_argument("--campaign", type=int, default=2000, help="rounds of one run that is fuzzed")
    parser.add_argument("--latency", default=LATENCY, help="latency of a home's line")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parse(parser, QUICK)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as the program does
    found = earlier(arguments.json) | origin() | {"seed": arguments.seed}
    with tempfile.TemporaryDirectory(prefix="hetero-pp-strangers-") as folder:
        honest = Reference(Path(folder))
        for part in arguments.parts:
            own = found.setdefault(part, {})
            PARTS[part](Path(folder), arguments, honest, own, lambda _: save(found, arguments.json))
    told = holes(found)
    found["holes"] = told
    save(found, arguments.json)
    print("\n".join(["holes:", *told] if told else ["no hole was found"]))
    if told:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
