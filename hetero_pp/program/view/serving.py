"""Serves the page at an address: on loopback as it is, elsewhere by TLS to members of the run only."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from hetero_pp.config.links import LOOPBACK_NAMES, is_loopback
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_whole
from hetero_pp.core.sockets import host_and_port
from hetero_pp.program.view.admitted import MemberAuthenticator
from hetero_pp.program.view.broadcast import SECONDS_BETWEEN_FRAMES, Broadcast
from hetero_pp.program.view.run_view import Source
from hetero_pp.program.view.server import page_app
from hetero_pp.rpc.identities import Identity

LOOPBACK = "127.0.0.1:0"
_SECONDS_TO_END = 2.0
_MOST_CONNECTIONS = 200
_SECONDS_BETWEEN_LOOKS = 10.0
"""Interval at which it is checked whether a caller is still a member."""


class Served:
    """The page at an open port."""

    def __init__(
        self, sources: Mapping[str, Source], address: str = LOOPBACK, authenticators: Sequence[MemberAuthenticator] = ()
    ) -> None:
        """Open the port (0: any free one).

        `authenticators`: the runs. Beyond loopback every caller has to show a certificate of a member of one of them.
        Callers are shown this host's identity in the first one.

        Raises ConfigError for an address that cannot be opened, or without runs beyond loopback.
        """
        (host, port), is_local = host_and_port(address), is_loopback(address)
        if not is_local and not authenticators:
            found = "an address that others reach, and no certificate of a run by which to know its members"
            wanted = "127.0.0.1:PORT, or a run that this host serves or joined"
            raise ConfigError((), f"--listen {address}: found {found}, expected {wanted}")
        self._socket = _listen(host, port, address)
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
            http="auto" if is_local else partial(_OfMembers, authenticators),  # type: ignore[arg-type]
            timeout_keep_alive=20,
            timeout_graceful_shutdown=1,
            log_level="critical",  # it would log viewers that it cuts off as errors, between the lines of the run
            limit_concurrency=_MOST_CONNECTIONS,
        )
        config.load()
        if not is_local:
            config.ssl = _only_members([authenticator.identity for authenticator in authenticators])
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
    """Connection of a member. It is cut once the run no longer admits its caller."""

    def __init__(self, authenticators: Sequence[MemberAuthenticator], *arguments: Any, **values: Any) -> None:
        super().__init__(*arguments, **values)
        self._authenticators = authenticators
        self._watch: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.pause_reading()  # until the caller is known
        self._watch = self.loop.create_task(self._cut_strangers(transport))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._watch is not None:
            self._watch.cancel()

    async def _cut_strangers(self, transport: Any) -> None:
        shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        if await self._is_admitted(shown):
            transport.resume_reading()
            while await self._is_admitted(shown):
                await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
        transport.abort()

    async def _is_admitted(self, certificate: bytes) -> bool:
        return await asyncio.to_thread(
            lambda: any(authenticator.admits(certificate) for authenticator in self._authenticators)
        )


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
