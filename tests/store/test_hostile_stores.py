"""S3 services that are hostile or hang: their cost is bounded, and reported."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

from hetero_pp.core.errors import ConfigError, StoreError
from hetero_pp.store import objects
from hetero_pp.store.lease import acting_for
from hetero_pp.store.opening import open_store

_PAGE = (
    '<?xml version="1.0"?><ListBucketResult><IsTruncated>true</IsTruncated>'
    "<NextContinuationToken>{token}</NextContinuationToken>{entries}</ListBucketResult>"
)
_ENTRY = (
    "<Contents><Key>a{number}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    '<ETag>"x"</ETag><Size>1</Size></Contents>'
)


class _Hostile(BaseHTTPRequestHandler):
    """Lists objects without end, and answers a request for an object only once `may_answer` is set."""

    may_answer = threading.Event()
    pages = 0

    def do_GET(self) -> None:
        if "list-type" not in self.path:
            self.may_answer.wait()
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        type(self).pages += 1
        first = self.pages * 100
        entries = "".join(_ENTRY.format(number=first + one) for one in range(100))
        self._answer(200, _PAGE.format(token=self.pages, entries=entries).encode())

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def _served(service: type[BaseHTTPRequestHandler] = _Hostile) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), service)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"s3://runs/mine?endpoint=http://127.0.0.1:{server.server_port}"
    finally:
        _Hostile.may_answer.set()
        server.shutdown()
        serving.join()
        server.server_close()


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")


def test_a_listing_without_an_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "KEYS_MAX", 500)
    monkeypatch.setattr(objects, "LISTING_BYTES_MAX", -1)
    monkeypatch.setattr(objects, "LISTING_CHECK_SECONDS", 0.01)
    with _served() as url:
        store = open_store(url)
        with pytest.raises(
            StoreError, match=(r"s3://runs/mine: found more than 500 objects in the list; stopped reading it")
        ):
            store.below()
        with pytest.raises(
            StoreError, match=(r"s3://runs/mine: its list of objects is longer than .*; stopped reading it")
        ):
            store.names()


def test_a_silent_store_is_named_with_how_long_it_has_been_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "SILENT_SECONDS", 0.01)
    _Hostile.may_answer.clear()
    said: list[str] = []

    def told(line: str, **_: object) -> None:
        said.append(line)
        _Hostile.may_answer.set()

    monkeypatch.setattr(objects, "print", told, raising=False)
    with _served() as url, pytest.raises(FileNotFoundError):
        open_store(url).get("key")
    assert said[0] == "s3://runs/mine/key: the store did not answer for 0 s"


class _Overwriting(BaseHTTPRequestHandler):
    """Keeps objects, and ignores `If-None-Match: *`, as some services do."""

    objects: ClassVar[dict[str, bytes]] = {}

    def do_PUT(self) -> None:
        self.objects[urlsplit(self.path).path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200)

    def do_GET(self) -> None:
        self._answer(200, self.objects[urlsplit(self.path).path])

    def do_DELETE(self) -> None:
        self.objects.pop(urlsplit(self.path).path, None)
        self._answer(204)

    def do_POST(self) -> None:  # several objects are deleted together
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        keys = re.findall("<Key>(.*?)</Key>", body)
        for key in keys:
            self.objects.pop(f"/runs/{key}", None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f'<?xml version="1.0"?><DeleteResult>{deleted}</DeleteResult>'.encode())

    def _answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def test_a_service_that_overwrites_what_should_be_created_holds_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with _served(_Overwriting) as url:
        told = r"found a service that creates an object twice, expected conditional writes \(`If-None-Match: \*`\)"
        with pytest.raises(ConfigError, match=told), acting_for(open_store(url), print, print):
            pass
    assert _Overwriting.objects == {}
