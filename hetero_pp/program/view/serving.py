"""Serves the page at an address: on loopback as it is, elsewhere by TLS to members of the run only."""

from __future__ import annotations

import errno
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from hetero_pp.config.links import is_loopback
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_whole
from hetero_pp.program.view.broadcast import SECONDS_BETWEEN_FRAMES, Broadcast
from hetero_pp.program.view.server import LOOPBACK_NAMES, page_app
from hetero_pp.program.view.sources import Source
from hetero_pp.rpc.certificates import Identity
from hetero_pp.rpc.tickets import ticket_of

LOOPBACK = "127.0.0.1:0"
_SECONDS_TO_END = 2.0
_MOST_CONNECTIONS = 200


class Served:
    """The page at an open port."""

    def __init__(
        self, sources: Mapping[str, Source], address: str = LOOPBACK, identities: Sequence[Identity] = ()
    ) -> None:
        """Open the port (0: any free one).

        `identities`: this host's in each run, of which the first is shown to callers. They are needed beyond loopback,
        where every caller has to show a certificate of a member of one of the runs.

        Raises ConfigError for an address that cannot be opened, or without identities beyond loopback.
        """
        host, _, port = address.rpartition(":")
        host, is_local = host.strip("[]"), is_loopback(address)
        if not is_local and not identities:
            found = "an address that others reach, and no certificate of a run by which to know its members"
            wanted = "127.0.0.1:PORT, or a run that this host serves or joined"
            raise ConfigError((), f"--listen {address}: found {found}, expected {wanted}")
        self._socket = _listen(host, int(port), address)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'http' if is_local else 'https'}://{shown}:{self._socket.getsockname()[1]}/"
        app = page_app(sources, [*LOOPBACK_NAMES, host] if is_local else ["*"])
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            ws="none",
            http="auto" if is_local else _OfMembers,
            timeout_keep_alive=20,
            timeout_graceful_shutdown=1,
            log_level="critical",  # it would log viewers that it cuts off as errors, between the lines of the run
            limit_concurrency=_MOST_CONNECTIONS,
        )
        config.load()
        if not is_local:
            config.ssl = _only_members(identities)
        self._server = _Server(config, app.state.broadcasts)

    def run(self) -> None:
        """Serve until an interrupt."""
        with suppress(KeyboardInterrupt):
            self._server.run([self._socket])

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Serve while the block runs."""
        thread = threading.Thread(target=self.run, name="page", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._server.end()
            thread.join(_SECONDS_TO_END)

    def tell_the_end(self) -> None:
        """Give viewers, if there are any, time to hear that the run has ended."""
        if any(broadcast.has_viewers for broadcast in self._server.broadcasts):
            time.sleep(2 * SECONDS_BETWEEN_FRAMES)


class _OfMembers(H11Protocol):
    """Connection of a member. It is cut for a ticket: its holder has not joined."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        shown = transport.get_extra_info("peercert") or {}
        names = [value for part in shown.get("subject", ()) for key, value in part if key == "commonName"]
        if any(ticket_of(name) is not None for name in names):
            transport.abort()


class _Server(uvicorn.Server):
    """Ends the streams of its viewers before it ends."""

    def __init__(self, config: uvicorn.Config, broadcasts: Collection[Broadcast]) -> None:
        super().__init__(config)
        self.broadcasts = broadcasts

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.end()
        super().handle_exit(sig, frame)

    def end(self) -> None:
        """Ask the server to end, from any thread."""
        for broadcast in self.broadcasts:
            broadcast.is_closing = True
        self.should_exit = True


def _listen(host: str, port: int, address: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen()  # a browser that comes before the server runs waits
    except OSError as error:
        why = "a port in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
        raise ConfigError((), f"{address}: found {why}, expected a free port of this machine (port 0: any)") from None
    return found


def _only_members(identities: Sequence[Identity]) -> ssl.SSLContext:
    """Return a context that shows the first identity, and accepts only certificates that the runs have signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata="\n".join(one.authority for one in identities))
    with tempfile.TemporaryDirectory() as folder:
        pem = Path(folder) / "identity.pem"  # the ssl module reads keys from files only
        write_whole(pem, f"{identities[0].key}\n{identities[0].certificate}".encode(), is_secret=True)
        context.load_cert_chain(pem)
    return context
