"""Serves the page at an address of this machine."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import uvicorn

from hetero_pp.core.errors import ConfigError
from hetero_pp.program.view.server import page_app
from hetero_pp.program.view.sources import Source

LOOPBACK = "127.0.0.1"
_SECONDS_TO_END = 1.0


class Served:
    """The page at an open port."""

    def __init__(self, sources: Mapping[str, Source], host: str = LOOPBACK, port: int = 0) -> None:
        """Open the port; 0: any free one. Raises ConfigError if it cannot be opened."""
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{host}:{self.port}/"
        config = uvicorn.Config(
            page_app(sources),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=20,
            timeout_graceful_shutdown=1,
            limit_concurrency=200,
            h11_max_incomplete_event_size=16_384,
            ws="none",
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until an interrupt."""
        self._server.run([self._socket])

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Serve while the block runs."""
        thread = threading.Thread(target=self.run, name="page", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._server.should_exit = self._server.force_exit = True
            thread.join(_SECONDS_TO_END)


def _listen(host: str, port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        in_use = error.errno == errno.EADDRINUSE
        why = "the port is in use" if in_use else error.strerror
        raise ConfigError((), f"{host}:{port}: found that {why}, expected a free port (--port 0 takes any)") from None
    return found
