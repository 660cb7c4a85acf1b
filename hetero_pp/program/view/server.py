"""The page's server: Starlette on uvicorn, on loopback as it is, elsewhere by TLS to present members of a run only."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import LOOPBACK_NAMES, is_loopback
from hetero_pp.core.errors import ConfigError, HeteroPPError
from hetero_pp.core.files import write_whole
from hetero_pp.core.sockets import host_and_port
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.join.membership import RunOfHost
from hetero_pp.program.report.recorder import INTERRUPTED, to_json
from hetero_pp.program.report.state import RunState
from hetero_pp.program.view.run_view import RunView
from hetero_pp.program.view.sources import Source
from hetero_pp.rpc.admission_client import ask
from hetero_pp.rpc.identities import Identity, read_certificate, ticket_of
from replica_groups.exchange.memberships import Memberships

PAGE = Path(__file__).parent / "page"
POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = [
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-store"),
]
LOOPBACK = "127.0.0.1:0"
SECONDS_BETWEEN_FRAMES, _SECONDS_OF_MANY, MANY = 0.5, 0.8, 50
"""Interval of frames, and that of runs with so many members, whose frames cost more."""
_SECONDS_BETWEEN_LOOKS = 0.1
_TICKS_WHEN_NOTHING_IS_NEW = 8
"""Intervals without a frame while no report arrives: rates sink, and a viewer sees that the server is there."""
_SECONDS_TO_SEND = 20.0
_SECONDS_TO_END = 2.0
_MOST_CONNECTIONS = 200
_SECONDS_KNOWN = 10.0
"""Seconds for which an answer about the holders of slots counts, and after which it is checked again whether a caller
is still a member."""
_SECONDS_TO_ANSWER = 5.0


# ---- what it answers ----


def page_app(live: Mapping[str, LiveEvents], hosts: Sequence[str]) -> Starlette:
    """Return the application. `hosts`: names under which it may be asked for.

    Another name means that a foreign page has bound its own name to this machine's address.
    """

    def live_of(request: Request) -> LiveEvents:
        if request.path_params["name"] not in live:
            raise HTTPException(404, "found no run of this name")
        return live[request.path_params["name"]]

    def view_of(request: Request) -> RunView:
        view = live_of(request).source.view
        if view is None:
            raise HTTPException(404, "found a prediction, which has no reports")
        return view

    def as_json(text: str) -> Response:
        return Response(text, media_type="application/json")

    async def runs(request: Request) -> Response:
        return as_json(to_json({"runs": [run_of(name, events.source) for name, events in live.items()]}))

    async def whole(request: Request) -> Response:
        return as_json(view_of(request).told(request.path_params["name"]))

    async def frame(request: Request) -> Response:
        try:
            when = float(request.query_params.get("time", math.nan))
        except ValueError:
            when = math.nan
        if not math.isfinite(when):
            raise HTTPException(400, "`time`: expected seconds since the run's first report")
        return as_json(view_of(request).frame(when))

    async def events(request: Request) -> Response:
        return EventStream(live_of(request).events(view_of(request)))

    async def prediction(request: Request) -> Response:
        found = await asyncio.to_thread(live_of(request).source.prediction)
        if found is None:
            raise HTTPException(404, "found no prediction of this run")
        return as_json(to_json(found))

    return Starlette(
        routes=[
            Route("/", lambda request: FileResponse(PAGE / "index.html")),
            Mount("/page", StaticFiles(directory=PAGE, check_dir=False)),
            Route("/api/runs", runs),
            Route("/api/runs/{name}", whole),
            Route("/api/runs/{name}/frame", frame),
            Route("/api/runs/{name}/live", events),
            Route("/api/runs/{name}/prediction", prediction),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
            Middleware(GZipMiddleware, minimum_size=1000, compresslevel=6),
        ],
    )


def run_of(name: str, source: Source) -> dict[str, object]:
    view = source.view
    return {
        "id": name,
        "name": name if view is None else view.state.spec.config.name,
        "kind": "prediction" if view is None else "run",
        "is_live": view is not None and view.is_live,
        "predicts": source.predicts,
    }


class EventStream(StreamingResponse):
    """A stream of server-sent events. A viewer that takes no bytes for a while is cut off."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        async def within(message: Message) -> None:
            async with asyncio.timeout(_SECONDS_TO_SEND):
                await send(message)

        await super().stream_response(within)


class LiveEvents:
    """The news of one run, for all of its viewers: one encoding for all, and no viewer waits for another.

    Time is cut into ticks. A viewer is told at most once in a tick, all that is new since it was told before; so one
    that reads slowly is told less often. One encoding serves all viewers that were told the same before.
    """

    def __init__(self, name: str, source: Source, is_closing: Callable[[], bool] = lambda: False) -> None:
        """`is_closing`: returns whether the server ends."""
        self.source = source
        self.viewers = 0
        self._name, self._is_closing = name, is_closing
        self._made_for: object = None  # view, its clock, the tick and whether the run is live, of what is encoded
        self._version = 0  # of the view then
        self._made: dict[int, asyncio.Future[str]] = {}  # encodings by the version that is known already

    async def events(self, view: RunView) -> AsyncIterator[bytes]:
        """Yield server-sent events until the run has ended: the `whole` first, then `change`s.

        A change that is in the whole already does no harm.
        """
        loop, clock, known, told_in = asyncio.get_running_loop(), view.clock, 0, -math.inf
        is_new = True
        self.viewers += 1
        try:
            while not self._is_closing():
                seconds = SECONDS_BETWEEN_FRAMES if len(view.state.members) < MANY else _SECONDS_OF_MANY
                tick = loop.time() // seconds
                is_due = tick > told_in if view.version != known else tick > told_in + _TICKS_WHEN_NOTHING_IS_NEW
                if is_new or is_due:
                    is_live, told_in = view.is_live, tick
                    if self._made_for != (made_for := (view, clock, tick, is_live)):
                        self._made_for, self._version, self._made = made_for, view.version, {}
                    since, known = 0 if is_new else known, self._version
                    if since not in self._made:
                        made = asyncio.ensure_future(asyncio.to_thread(view.told, self._name, since))
                        # Its error is of no interest if all who waited for it have gone.
                        made.add_done_callback(lambda done: done.cancelled() or done.exception())
                        self._made[since] = made
                    text = await asyncio.shield(self._made[since])  # others may wait for it, too
                    yield f"event: {'whole' if is_new else 'change'}\ndata: {text}\n\n".encode()
                    if not is_live:
                        yield b"event: end\ndata: {}\n\n"
                        return
                # To the next tick, or until it is due to look whether the page closes, or the run began anew.
                left = (tick + 1) * seconds - loop.time()
                await asyncio.sleep(min(_SECONDS_BETWEEN_LOOKS, max(left, 0.001)))
                now = self.source.view or view
                # It began anew, or a break or an earlier start became known: all times that were told are others.
                is_new = now is not view or (clock[0] is not None and clock != now.clock)
                view, clock = now, now.clock
        except Exception as error:  # noqa: BLE001 (viewers see what went wrong, and the run goes on)
            view.complain(f"the page cannot show what is new: {type(error).__name__}: {error}")
        finally:
            self.viewers -= 1


# ---- whom it answers ----


class Authenticator:
    """One run: its authority, and the holders of its slots. May be used by many threads."""

    def __init__(self, identity: Identity, holders: Callable[[], Mapping[str, int] | None]) -> None:
        """`identity`: this host's in the run.

        `holders`: returns slot -> number of the present holder with a ticket, 0 if there is none; None: not known.
        """
        self.identity = identity
        self._authority = x509.load_pem_x509_certificate(identity.authority.encode())
        self._ask, self._asked = holders, -_SECONDS_KNOWN
        self._holders: Mapping[str, int] | None = None
        self._lock = threading.Lock()

    def admits(self, certificate: bytes) -> bool:
        """Return whether a certificate (DER) is valid, and its owner a member of the run now.

        A process that was started with the run's secret is a member. If the holders of the slots are not known, the
        certificate alone counts: it is valid for a day at most.
        """
        found = x509.load_der_x509_certificate(certificate)
        try:
            found.verify_directly_issued_by(self._authority)
        except (InvalidSignature, TypeError, ValueError):
            return False
        shown = read_certificate(found.public_bytes(Encoding.PEM))
        if ticket_of(shown.name) is not None or shown.until < time.time():
            return False
        if not shown.holder:
            return True
        with self._lock:
            if time.monotonic() >= self._asked + _SECONDS_KNOWN:
                told = self._ask()
                self._holders = self._holders if told is None else told
                self._asked = time.monotonic()
            return self._holders is None or self._holders.get(shown.name) == shown.holder


def authenticator_of(known: RunOfHost) -> Authenticator:
    """Return the door of a run. Its serving host has the holders of the slots on its disk; others ask the exchange."""

    def on_disk(folder: RunFolder) -> Mapping[str, int] | None:
        if not folder.memberships.is_file():
            return {}
        with suppress(HeteroPPError), closing(Memberships(folder.memberships)) as memberships:
            slots = {holder.slot for holder in memberships.holders()}
            return {slot: found.number for slot in slots if (found := memberships.held_by(slot)) is not None}
        return None

    def told() -> Mapping[str, int] | None:
        with suppress(HeteroPPError):
            reply = ask(known.address, known.identity, "Status", seconds=_SECONDS_TO_ANSWER)
            return {slot.name: slot.holder for slot in reply.slots}
        return None

    return Authenticator(known.identity, partial(on_disk, known.folder) if known.serves else told)


class _OfMembers(H11Protocol):
    """Connection of a member. It is cut once the run no longer admits its caller."""

    def __init__(self, authenticators: Sequence[Authenticator], *arguments: Any, **values: Any) -> None:
        super().__init__(*arguments, **values)
        self._authenticators = authenticators
        self._watch: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.pause_reading()  # until the caller is known
        self._watch = self.loop.create_task(self._cut_strangers(transport))

    async def _cut_strangers(self, transport: Any) -> None:
        shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        if await self._is_admitted(shown):
            transport.resume_reading()
            while not transport.is_closing() and await self._is_admitted(shown):
                await asyncio.sleep(_SECONDS_KNOWN)
        transport.abort()

    async def _is_admitted(self, certificate: bytes) -> bool:
        return await asyncio.to_thread(
            lambda: any(authenticator.admits(certificate) for authenticator in self._authenticators)
        )


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


# ---- the server ----


class Served:
    """The page at an open port."""

    def __init__(
        self, sources: Mapping[str, Source], address: str = LOOPBACK, authenticators: Sequence[Authenticator] = ()
    ) -> None:
        """Open the port (0: any free one).

        `authenticators`: the runs. Beyond loopback every caller has to show a certificate of a member of one of them.
        Callers are shown this host's identity in the first one.

        Raises ConfigError for an address that cannot be opened, or without doors beyond loopback.
        """
        (host, port), is_local = host_and_port(address), is_loopback(address)
        if not is_local and not authenticators:
            found = "an address that others reach, and no certificate of a run by which to know its members"
            wanted = "127.0.0.1:PORT, or a run that this host serves or joined"
            raise ConfigError((), f"--listen {address}: found {found}, expected {wanted}")
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen()  # a browser that comes before the server runs waits
        except OSError as error:
            why = "a port in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
            expected = "expected a free port of this machine (port 0: any)"
            raise ConfigError((), f"{address}: found {why}, {expected}") from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'http' if is_local else 'https'}://{shown}:{self._socket.getsockname()[1]}/"
        self._live = {name: LiveEvents(name, one, lambda: self._server.should_exit) for name, one in sources.items()}
        config = uvicorn.Config(
            page_app(self._live, [*LOOPBACK_NAMES, host] if is_local else ["*"]),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            headers=_HEADERS,  # of every answer
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
        self._server = uvicorn.Server(config)

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
            self._server.should_exit = True
            thread.join(_SECONDS_TO_END)

    def tell_the_end(self) -> None:
        """Give viewers, if there are any, time to hear that the run has ended."""
        if any(live.viewers for live in self._live.values()):
            time.sleep(2 * SECONDS_BETWEEN_FRAMES)


@contextmanager
def on_a_page(state: RunState, say: Callable[[str], None]) -> Iterator[Callable[[Report], None]]:
    """Serve the page of a run on loopback while the block runs, and print its address. Implements Page."""
    view, failed, is_broken = RunView(state), None, False
    served = Served({state.spec.config.name: Source(view)})
    say(f"the run is shown at {served.url}")

    def take(report: Report) -> None:
        """Take in a report that the state has accepted. An error of the page never reaches the run."""
        nonlocal is_broken
        if not is_broken:
            try:
                view.take(report)
            except Exception as error:  # noqa: BLE001 (an error in the page must not fail the run)
                is_broken = True
                view.complain(f"the page stopped following the run: {type(error).__name__}: {error}")

    with served.in_background():
        try:
            yield take
        except BaseException as error:
            failed = str(error) or INTERRUPTED
            raise
        finally:
            cause = failed or state.failed
            view.end("over" if cause is None else "failed", False, cause or "")
            served.tell_the_end()
