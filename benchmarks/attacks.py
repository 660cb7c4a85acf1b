"""All attacks on a live run by name, and the process that runs an attack with a member's credentials."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

import attacks_of_liars
import attacks_of_members
import attacks_of_strangers
import attacks_on_links
from attack_calls import NICENESS, REGISTERED, TIMEOUT, Call, Stretch, Target, asked

from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.callers import shown
from hetero_pp.rpc.services import EXCHANGE_SERVICE as SERVICE
from hetero_pp.rpc.services import call_path
from hetero_pp.rpc.stage_link import SERVICE as LINK_SERVICE

MODULES = (attacks_of_strangers, attacks_of_members, attacks_on_links, attacks_of_liars)
ATTACKS = {one.__name__: one for module in MODULES for one in REGISTERED if one.__module__ == module.__name__}
"""Attacks by name, in the order in which they run."""
COUNTED = (
    "claimed_steps",
    "claimed_weights",
    "growing_contributions",
    "takes_rounds",
    "malformed_to_neighbour",
    "former_holder",
    "tunnel",
)
"""Attacks by members whose contributions are included or waited for. They change the parameters of the run."""
THROUGH_RELAY = ("misused_relay", "hostile_relay")
"""Attacks on a run whose stages reach each other through the exchange."""
CLOSED = ("rapid_resets", "former_holder")
"""Attacks some of whose calls end with UNAVAILABLE.

The exchange closes the connection of the first. The second dials stages that have ended, or gave the generation up.
"""
CUT = "hostile_relay"
"""Attack during which the connection of the stage before the link is cut now and then, so that it dials again.

A process that carries the link could cut it in the same way.
"""


def last_refused(target: Target, door: str) -> Sequence[Call]:
    """Return one call for each kind of refusal.

    Its refusal makes the exchange report earlier refusals that it has not reported yet.
    """
    if door == "link":
        path, hello = call_path(LINK_SERVICE, "Open"), pb.LinkHello().SerializeToString()
        return [Call(path, [b"", b""], (), target.guest), Call(path, [hello, b""], (), target.neighbour)]
    own = shown(target.guest, target.run)
    return [
        asked("Heartbeat", pb.HeartbeatRequest(), (), target.nobody),
        asked("Heartbeat", pb.HeartbeatRequest(), own, target.guest),
        Call(call_path(SERVICE, "Heartbeat"), [b"\xff"], shown(target.guest, target.run, 1), target.guest),
        asked("Heartbeat", pb.HeartbeatRequest(), shown(target.guest, "another run", 1), target.guest),
    ]


# ---- in a process of their own ----


def attack_main(parent: Connection, name: str, target: Target, is_over: Event) -> None:
    """Attack each time the parent asks for it, until `is_over` is set. Then send the seconds and the status counts.

    The first message to the parent says that this process has started. The parent kills it.
    """
    os.nice(NICENESS)
    parent.send(True)
    while parent.recv():
        stretch = Stretch()
        attack = threading.Thread(target=ATTACKS[name], args=(target, stretch), daemon=True)
        attack.start()
        while not stretch.is_under_way.wait(0.1) and attack.is_alive():
            pass
        parent.send(attack.is_alive())
        begun = time.monotonic()
        is_over.wait()
        seconds = time.monotonic() - begun
        stretch.is_over.set()
        attack.join(2 * TIMEOUT)
        parent.send((seconds, stretch.codes))
