"""Faults inside one process of a run, injected on orders of the launcher."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from fault_injection.full_disk import FullDisk
from fault_injection.schedule import Point
from fault_injection.settings import Kind, point_of
from fault_injection.wire import Wire
from hetero_pp.store.faults import Faults
from hetero_pp.store.store import Store


@dataclass(frozen=True)
class Orders:
    """Faults of one process, given to it at its start."""

    launcher: Connection
    """Connection to the launcher: orders arrive on it, and the process sends the phases that it reaches."""
    points: frozenset[Point]
    """Points at which the process waits until the launcher has injected its faults."""
    missed: frozenset[int]
    has_wires: bool
    """Whether its links can be cut or slowed down."""
    has_disk: bool
    """Whether its disk can be full."""


class InjectedFaults(Faults):
    """Implements Faults by the launcher's messages.

    A message is a JSON object with the kind of fault, the link, the duration in seconds, and the delay in seconds.
    """

    def __init__(self, orders: Orders) -> None:
        self.missed = orders.missed
        self._orders = orders
        self._go = threading.Condition()
        self._gone_on: set[Point] = set()
        self._wires: dict[str, Wire] = {}
        self._corrupts = threading.Event()
        self._full_until = 0.0
        threading.Thread(target=self._listen, name="faults", daemon=True).start()

    # ---- called by the process ----

    def computes(self, round_: int, step: int, micro_batch: int, is_forward: bool) -> None:
        point = point_of(step, micro_batch)
        if is_forward and (round_, point) in self._orders.points:
            self.reached(point, round_)

    def reached(self, phase: str, round_: int) -> None:
        """Report the phase to the launcher; if faults are due here, wait until the launcher has injected them."""
        point = (round_, phase)
        waits = point in self._orders.points and point not in self._gone_on
        try:
            self._orders.launcher.send_bytes(json.dumps({"round": round_, "phase": phase, "waits": waits}).encode())
        except OSError:
            return  # the launcher is gone, so the lifeline ends this process
        if waits:
            with self._go:
                self._go.wait_for(lambda: point in self._gone_on)

    def touch(self, theta: Mapping[str, Tensor]) -> None:
        if self._corrupts.is_set():
            self._corrupts.clear()
            flip_bit(next(iter(theta.values())))

    def write(self) -> None:
        if time.monotonic() < self._full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def disk(self, store: Store) -> Store:
        return FullDisk(store, self.write) if self._orders.has_disk else store

    def route(self, link: str, address: str) -> str:
        """Return the address of a wire to `address`. Each link has at most one wire at a time."""
        if not self._orders.has_wires:
            return address
        wire = self._wires.get(link)
        if wire is None:
            wire = self._wires[link] = Wire(address)
        wire.target = address
        return wire.address

    # ---- messages of the launcher ----

    def _listen(self) -> None:
        while True:
            try:
                message = json.loads(self._orders.launcher.recv_bytes())
            except (EOFError, OSError):
                return
            self._do(message)

    def _do(self, message: Mapping[str, object]) -> None:
        seconds, by = float(str(message.get("seconds", 0))), float(str(message.get("by", 0)))
        wire = self._wires.get(str(message.get("link", "")))
        match message["do"]:
            case "go":
                with self._go:
                    self._gone_on.add((int(str(message["round"])), str(message["phase"])))
                    self._go.notify_all()
            case Kind.CUT if wire is not None:
                wire.cut()
                _later(seconds, wire.mend)
            case Kind.DELAY if wire is not None:
                wire.slow_down(by)
                _later(seconds, lambda: wire.slow_down(0.0))
            case Kind.CORRUPT:
                self._corrupts.set()
            case Kind.FILL:
                self._full_until = time.monotonic() + seconds


def _later(seconds: float, do: Callable[[], object]) -> None:
    timer = threading.Timer(seconds, do)
    timer.daemon = True
    timer.start()


def flip_bit(tensor: Tensor) -> None:
    """Flip the lowest bit of a tensor's first value (fp32): the smallest possible change."""
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
