"""Check of the environment's proxies: which one gRPC would use, and whether it reaches the exchange."""

from __future__ import annotations

from urllib.request import getproxies_environment

from hetero_pp.core.proxies import grpc_proxy, route_to
from hetero_pp.program.doctor.finding import Finding, ok, warn
from hetero_pp.program.doctor.subject import Subject

_PUBLIC = "192.0.2.1"
"""A host outside of all private networks (RFC 5737); it is not dialled."""


def check_proxy(subject: Subject) -> Finding:
    """Say which proxy connections use. A proxy that does not work is a warning, because connections go without it."""
    if not getproxies_environment():
        return ok("the environment names no proxy")
    if subject.peer is None:
        proxy = grpc_proxy(_PUBLIC)
        return ok("no proxy for gRPC" if proxy is None else f"{proxy} outside of private networks")
    route = route_to(subject.peer.address)
    if route.proxy is not None:
        return ok(f"the exchange is reached through {route.proxy}")
    if route.note:
        return warn(f"the exchange is{route.note}: correct the variable, or name the exchange in no_proxy")
    return ok("the environment names a proxy, which is not used for the exchange")
