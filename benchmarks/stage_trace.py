"""Where the time of a launched group's steps goes: fill and drain of its pipeline, hop by hop.

Each process of a stage writes the times of its messages; all use the machine's monotonic clock. A hop has three parts:

- queue: from receiving a message to queueing the work for the next one;
- compute: until the device has computed that message, and it is copied and checked;
- transit: until the neighbour has it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from hetero_pp.link.protocol import Message
from hetero_pp.messages.messages_pb2 import ACTIVATION, GRADIENT
from hetero_pp.program.launch.supervisor import Supervisor
from hetero_pp.rpc.link_end import GrpcLinkEnd
from hetero_pp.store.faults import Faults
from stages.worker import StageWorker

PARTS = ("queue", "compute", "transit")


class TracingSupervisor(Supervisor):
    """A supervisor that lets its processes write the times of their messages."""

    def __init__(self, folder: Path, switch_interval: float, *arguments: Any) -> None:
        """`switch_interval`: seconds after which a thread of a member gives Python's lock to another one."""
        super().__init__(*arguments)
        self._folder_of_traces, self._switch_interval = folder, switch_interval

    def faults_of(self, member: str) -> Callable[[], Faults]:
        return partial(_trace, self._folder_of_traces / f"{member}.jsonl", self._switch_interval)


def _trace(path: Path, switch_interval: float) -> Faults:
    """Write the times of this process's stage from now on. Injects no faults."""
    sys.setswitchinterval(switch_interval)
    lines = path.open("w", buffering=1 << 16)

    def note(what: str, purpose: int, step: int, index: int) -> None:
        lines.write(json.dumps([what, purpose, step, index, time.monotonic()]) + "\n")

    run, receive, send = StageWorker._run, StageWorker._receive, GrpcLinkEnd.send
    post_activation, post_gradient = StageWorker._send_activation, StageWorker._send_gradient

    def noted_run(self: StageWorker, events: Any, under_way: Any) -> None:
        note("begin", under_way.purpose, under_way.step, 0)
        run(self, events, under_way)
        note("end", under_way.purpose, under_way.step, 0)
        lines.flush()

    def noted_receive(self: StageWorker, link: Any, purpose: Any, round_: int, step: int, index: int) -> Message:
        message = receive(self, link, purpose, round_, step, index)
        note("received", purpose, step, index)
        return message

    def noted_post(post: Any, purpose: int, self: StageWorker, under_way: Any, index: int) -> None:
        note("queued", purpose if under_way.purpose == ACTIVATION else under_way.purpose, under_way.step, index)
        post(self, under_way, index)

    def noted_send(self: GrpcLinkEnd, message: Message) -> None:
        header = message.header
        note("sent", header.purpose, header.step, header.micro_batch)
        send(self, message)

    changed: dict[str, Any] = {"_run": noted_run, "_receive": noted_receive}
    changed["_send_activation"] = lambda *given: noted_post(post_activation, ACTIVATION, *given)
    changed["_send_gradient"] = lambda *given: noted_post(post_gradient, GRADIENT, *given)
    for name, function in changed.items():
        setattr(StageWorker, name, function)
    GrpcLinkEnd.send = noted_send  # type: ignore[method-assign]
    return Faults()


def milliseconds_a_step(folder: Path, first: int) -> dict[str, float]:
    """Return medians over the steps from number `first` on; {} if no stage has written any."""
    stages = []
    for path in sorted(folder.glob("*.[0-9]*.jsonl")):
        times = {tuple(key): at for *key, at in map(json.loads, path.open())}
        stages.append(times)
    if not stages:
        return {}
    steps = sorted(step for what, purpose, step, _ in stages[0] if what == "begin" and purpose == ACTIVATION)
    found = [_parts(stages, step) for step in steps[first:-1]]
    return {name: 1e3 * median(one[name] for one in found) for name in found[0]}


def _parts(stages: list[dict[Any, float]], step: int) -> dict[str, float]:
    """Return the seconds of the parts of one step; those of hops are means over the hops."""
    last = max(index for what, purpose, _, index in stages[0] if what == "received" and purpose == GRADIENT)
    begin, again = (stages[0]["begin", ACTIVATION, one, 0] for one in (step, step + 1))
    down, up = (ACTIVATION, step, 0), (GRADIENT, step, last)
    full, left, back = stages[-1]["received", *down], stages[-1]["sent", *up], stages[0]["received", *up]
    found = {"step": again - begin, "fill": full - begin, "between": left - full, "drain": back - left}
    found["turn"] = again - back
    hops = {"fill": (down, list(pairwise(stages))), "drain": (up, list(pairwise(stages[::-1])))}
    for phase, (key, pairs) in hops.items():
        inner = [one for one, _ in pairs[1:]]
        found[f"{phase} queue"] = sum(one["queued", *key] - one["received", *key] for one in inner) / len(inner)
        found[f"{phase} compute"] = sum(one["sent", *key] - one["queued", *key] for one, _ in pairs) / len(pairs)
        found[f"{phase} transit"] = sum(to["received", *key] - one["sent", *key] for one, to in pairs) / len(pairs)
    return found


def table(times: dict[str, float]) -> str:
    """Return two lines: the parts of a step, and the parts of a hop."""
    whole = ", ".join(f"{name} {times[name]:.1f}" for name in ("step", "fill", "between", "drain", "turn"))
    hops = "; ".join(
        f"{phase} " + ", ".join(f"{part} {times[f'{phase} {part}']:.1f}" for part in PARTS)
        for phase in ("fill", "drain")
    )
    return f"    milliseconds: {whole}\n    a hop: {hops}"
