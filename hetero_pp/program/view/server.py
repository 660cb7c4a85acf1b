"""The server of the page: Starlette on uvicorn, with a strict content security policy."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetero_pp.config.links import LOOPBACK_NAMES
from hetero_pp.program.report.recorder import to_json
from hetero_pp.program.view.broadcast import Broadcast, EventStream
from hetero_pp.program.view.run_view import RunView, Source

PAGE = Path(__file__).parent / "page"
POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def page_app(sources: Mapping[str, Source], hosts: list[str] | None = None) -> Starlette:
    """Return the application. `hosts`: names under which it may be asked for; by default names of this machine.

    Another name means that a foreign page has bound its own name to this machine's address.
    """
    broadcasts = {name: Broadcast(name, source) for name, source in sources.items()}

    async def runs(request: Request) -> Response:
        return _json({"runs": [run_of(name, source) for name, source in sources.items()]})

    async def history(request: Request) -> Response:
        name = request.path_params["name"]
        return _json(_view(sources, name).history(name))

    async def frame(request: Request) -> Response:
        view = _view(sources, request.path_params["name"])
        told = request.query_params.get("time")
        return _as_json(view.frame() if told is None else view.frame_at(_seconds(told)))

    async def live(request: Request) -> Response:
        name = request.path_params["name"]
        _view(sources, name)
        return EventStream(broadcasts[name].events())

    async def prediction(request: Request) -> Response:
        source = _source(sources, request.path_params["name"])
        found = await asyncio.to_thread(lambda: source.prediction)
        if found is None:
            raise HTTPException(404, "found no prediction of this run")
        return _json(found)

    app = Starlette(
        routes=[
            Route("/", lambda request: FileResponse(PAGE / "index.html")),
            Mount("/page", StaticFiles(directory=PAGE, check_dir=False)),
            Route("/api/runs", runs),
            Route("/api/runs/{name}/history", history),
            Route("/api/runs/{name}/frame", frame),
            Route("/api/runs/{name}/live", live),
            Route("/api/runs/{name}/prediction", prediction),
        ],
        middleware=[
            Middleware(_Secured),
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts or list(LOOPBACK_NAMES), www_redirect=False),
            Middleware(GZipMiddleware, minimum_size=1000, compresslevel=6),
        ],
    )
    app.state.broadcasts = broadcasts.values()
    return app


def run_of(name: str, source: Source) -> dict[str, object]:
    view = source.view
    shown = name if view is None else view.state.spec.config.name
    return {
        "id": name,
        "name": shown,
        "kind": "prediction" if view is None else "run",
        "is_live": view is not None and view.is_live,
        "predicts": source.predicts,
    }


def _source(sources: Mapping[str, Source], name: str) -> Source:
    if name not in sources:
        raise HTTPException(404, "found no run of this name")
    return sources[name]


def _view(sources: Mapping[str, Source], name: str) -> RunView:
    view = _source(sources, name).view
    if view is None:
        raise HTTPException(404, "found a prediction, which has no reports")
    return view


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise HTTPException(400, "`time`: expected seconds since the run's first report")
    return found


def _json(value: object) -> Response:
    return _as_json(to_json(value))


def _as_json(text: str) -> Response:
    return Response(text, media_type="application/json")


class _Secured:
    """Adds the security headers to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in _HEADERS.items()),
                ]
            await send(message)

        await self._app(scope, receive, with_headers)
