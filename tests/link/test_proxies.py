"""Proxies of the environment: never used for this machine and private networks, elsewhere only if they work."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from connect_proxy import ConnectProxy

from hetero_pp.core import proxies
from hetero_pp.core.errors import LinkTimeout
from hetero_pp.core.proxies import DIRECT, is_private, route_to
from hetero_pp.rpc.channels import is_reached, make_channel, make_server
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.identities import Credentials
from hetero_pp.store.objects import ObjectStore
from hetero_pp.store.presigned import download, upload

SECONDS = 20.0
VARIABLES = [f"{name}_proxy" for name in ("grpc", "https", "http", "all", "no", "no_grpc")]
PUBLIC = "127.0.0.2"
"""An address of this machine that the tests count as public."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove all proxies from the environment."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


def _set_all(environment: pytest.MonkeyPatch, url: str) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        environment.setenv(name, url)


@pytest.fixture
def dead(environment: pytest.MonkeyPatch) -> str:
    """Make a port on which no server listens the proxy of everything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    _set_all(environment, f"http://{address}")
    return address


@pytest.fixture
def public(environment: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield HOST:PORT of a gRPC server that counts as public."""
    environment.setattr(proxies, "is_private", lambda host: host != PUBLIC)
    server, port = make_server(f"{PUBLIC}:0", [], 1)
    yield f"{PUBLIC}:{port}"
    server.stop(None).wait()


def _connects(address: str) -> None:
    with closing(make_channel(address)) as channel:
        assert is_reached(channel, SECONDS)


PRIVATE = "127.0.0.1 127.8.8.8 10.1.2.3 172.31.0.1 192.168.7.7 169.254.169.254 100.64.0.1 ::1 fe80::1%eth0 fd00::1"
ELSEWHERE = "192.0.2.1 8.8.8.8 172.32.0.1 100.128.0.1 2001:db8::1 name.that.is.not.known.invalid"


def test_private_addresses_are_told_from_others(environment: pytest.MonkeyPatch) -> None:
    assert [host for host in PRIVATE.split() if not is_private(host)] == []
    assert is_private("::ffff:10.0.0.1")
    assert is_private("localhost")
    known = {"store.corp": "10.0.0.9", "name.example": "8.8.8.8"}

    def resolve(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (known[host], 0))]

    environment.setattr(socket, "getaddrinfo", resolve)
    assert [host for host in ELSEWHERE.split() if is_private(host)] == []
    assert (is_private("store.corp"), is_private("name.example")) == (True, False)


@pytest.mark.usefixtures("dead")
def test_grpc_takes_no_proxy_to_this_machine(tmp_path: Path) -> None:
    for listen in ("127.0.0.1:0", f"unix:{tmp_path}/socket"):
        server, port = make_server(listen, [], 1)
        try:
            _connects(listen if listen.startswith("unix") else f"localhost:{port}")
        finally:
            server.stop(None).wait()


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_a_proxy_that_works_is_used(environment: pytest.MonkeyPatch, public: str, variable: str) -> None:
    with closing(ConnectProxy()) as proxy:
        environment.setenv(variable, f"http://us%40r:secret@{proxy.address}")
        route = route_to(public)
        assert route.note == f" (through the proxy http://us%40r@{proxy.address} ({variable}))"
        del proxy.asked[:]
        with closing(make_channel(public, route=route)) as channel:
            assert is_reached(channel, SECONDS)
        assert proxy.asked == [(public, "Basic dXNAcjpzZWNyZXQ=")]  # us@r:secret


@pytest.mark.parametrize("status", [403, 407, 503])
def test_where_a_proxy_refuses_the_connection_is_direct(
    environment: pytest.MonkeyPatch, public: str, status: int
) -> None:
    with closing(ConnectProxy(status)) as proxy:
        environment.setenv("http_proxy", proxy.address)
        route = route_to(public)
        assert route.proxy is None
        assert f"dialled without the proxy http://{proxy.address} (http_proxy), which failed: " in route.note
        assert str(status) in route.note
        _connects(public)


def test_a_proxy_that_finds_nobody_yet_is_used(environment: pytest.MonkeyPatch, public: str) -> None:
    """If the address answers without the proxy, no proxy is used. An exchange may start after its members."""
    nobody = f"{PUBLIC}:1"
    with closing(ConnectProxy(503)) as proxy:
        environment.setenv("https_proxy", f"http://{proxy.address}")
        assert route_to(nobody).proxy is not None
        assert route_to(public).proxy is None


def test_no_proxy_is_respected(environment: pytest.MonkeyPatch, public: str) -> None:
    with closing(ConnectProxy()) as proxy:
        environment.setenv("https_proxy", f"http://{proxy.address}")
        assert route_to(public).proxy is not None
        for excluded in (PUBLIC, "example.com, 127.0.0.0/30", "*"):
            environment.setenv("no_proxy", excluded)
            assert route_to(public) == DIRECT
        for other in ("7.0.0.2", "127.0.0.0/31", "", " , "):
            environment.setenv("no_proxy", other)
            assert route_to(public).proxy is not None
        environment.setenv("nogrpc_proxy", "example.com")  # gRPC's own variable wins
        assert route_to(public).proxy is not None
        environment.setenv("grpc_proxy", "")
        assert route_to(public) == DIRECT


def test_no_proxy_names_domains(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(proxies, "is_private", lambda host: False)
    environment.setenv("https_proxy", "http://proxy.example")
    environment.setenv("no_proxy", "corp.example,.lab.example,*.home.example")
    hosts = ("corp.example", "a.corp.example", "a.lab.example", "a.b.HOME.example", "mycorp.example", "example")
    assert [proxies.grpc_proxy(host) is None for host in hosts] == [True, True, True, True, False, False]


def test_an_exchange_that_is_not_reached_names_the_proxy(environment: pytest.MonkeyPatch, dead: str) -> None:
    environment.setattr(proxies, "is_private", lambda host: False)
    environment.setenv("grpc_proxy", f"http://anna:secret@{dead}")
    client = ExchangeClient(f"{PUBLIC}:1", Credentials("dc", "a token"), timeout=0.1)
    with closing(client), pytest.raises(LinkTimeout) as error:
        client.agree("dc", "a configuration")
    assert f"(dialled without the proxy http://anna@{dead} (grpc_proxy), which failed: " in str(error.value)
    assert "secret" not in str(error.value)


class _Objects(http.server.BaseHTTPRequestHandler):
    """An object store that keeps one object."""

    kept = b""

    def do_PUT(self) -> None:
        type(self).kept = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("ETag", "one")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200 if self.kept else 404)
        self.send_header("Content-Length", str(len(self.kept)))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("ETag", "one")
        self.end_headers()
        self.wfile.write(self.kept)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def objects() -> Iterator[int]:
    """Yield the port of this store."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Objects) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.usefixtures("dead")
def test_objects_on_this_machine_need_no_proxy(objects: int, environment: pytest.MonkeyPatch) -> None:
    upload(f"http://localhost:{objects}/bucket/key", b"some bytes", SECONDS)
    assert download(f"http://127.0.0.1:{objects}/bucket/key", 10, SECONDS) == b"some bytes"
    environment.setenv("AWS_ACCESS_KEY_ID", "key")
    environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for host in ("127.0.0.1", "localhost"):
        store = ObjectStore("s3://bucket", {"endpoint": f"http://{host}:{objects}", "region": "here"}, patience=0.1)
        assert store.get("key") == b"some bytes"


def test_objects_of_a_public_service_keep_the_proxy(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("AWS_ACCESS_KEY_ID", "key")
    environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with closing(ConnectProxy(403)) as proxy:
        environment.setenv("https_proxy", f"http://{proxy.address}")
        environment.setenv("no_proxy", "example.org")
        store = ObjectStore("s3://bucket", {"region": "here"}, patience=0.1)
        with pytest.raises(Exception, match="cannot be read"):
            store.get("key")
        assert proxy.asked[0][0].endswith("amazonaws.com:443")
