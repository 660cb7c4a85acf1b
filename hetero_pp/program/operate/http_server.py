"""Serves /metrics and /healthz over plain HTTP, for Prometheus, probes and browsers."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from hetero_pp.config.lines import LOOPBACK_NAMES, is_loopback
from hetero_pp.config.topology import parse_address
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.sockets import host_and_port
from hetero_pp.program.operate.metrics import RunCollector
from hetero_pp.program.operate.observed import Observed
from hetero_pp.program.report.recorder import to_json

LOOPBACK = "127.0.0.1"
MOST_REQUESTS = 16  # requests that are served at once; further ones are refused
SECONDS_OF_A_CONNECTION = 10.0
REASON_CHARACTERS = 1000  # most characters of a reason: members send some of the text
_SECONDS_TO_END = 2.0

OPTION = "--metrics"


def parse_listen(text: str) -> tuple[str, int]:
    """Return host and port of [ADDRESS:]PORT. Without an address the host is the loopback interface.

    Raises ConfigError for another text.
    """
    try:
        return host_and_port(parse_address(f"{LOOPBACK}:{text}" if text.isdigit() else text))
    except ValueError:
        found = f"{OPTION}: found `{text}`, expected PORT or ADDRESS:PORT, such as `9464` or `0.0.0.0:9464`"
        raise ConfigError((), found) from None


class _Brief(H11Protocol):
    """Connection that is cut after a while, however slowly its client sends or reads."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(SECONDS_OF_A_CONNECTION, transport.abort)


@contextmanager
def served(listen: str, observed: Observed) -> Iterator[str]:
    """Serve a run's metrics and health while the block runs; yield the URL. Raises ConfigError if it cannot listen.

    On loopback it answers to this machine's own names only: another name means that a foreign page has bound its own
    name to this machine's address.
    """
    host, port = parse_listen(listen)
    is_local = is_loopback(f"{host}:0") or host == "::1"
    registry = CollectorRegistry()
    registry.register(RunCollector(observed))

    def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    def healthz(request: Request) -> Response:
        health, state = observed.health(), observed.state
        found: dict[str, Any] = {"condition": health.condition}
        if health.reason:
            found["reason"] = health.reason[:REASON_CHARACTERS]
        if state is not None:
            found |= {"run": state.spec.config.name, "round": observed.round(state), "rounds": state.rounds_planned}
            found |= {"rehearsal": state.spec.config.rehearsal is not None}
        headers = {"x-content-type-options": "nosniff"}
        status = 200 if health.is_well else 503
        return Response(to_json(found) + "\n", status, headers, media_type="application/json")

    def other(request: Request, error: Exception) -> Response:
        return PlainTextResponse("expected /metrics or /healthz\n", 404)

    app = Starlette(
        routes=[Route("/metrics", metrics), Route("/healthz", healthz)],
        middleware=[
            Middleware(
                TrustedHostMiddleware, allowed_hosts=[*LOOPBACK_NAMES, host] if is_local else ["*"], www_redirect=False
            )
        ],
        exception_handlers={404: other},
    )
    config = uvicorn.Config(
        app,
        http=_Brief,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level="critical",  # a client that went away is no error
        server_header=False,
        limit_concurrency=MOST_REQUESTS,
        timeout_graceful_shutdown=1,
    )
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise ConfigError((), f"{OPTION} {listen}: cannot listen ({why}); choose another port or address") from None
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="metrics", daemon=True)
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(_SECONDS_TO_END)
        listener.close()
