"""Empty stores of every kind: a folder, memory, and a local service that speaks S3 over HTTP."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hetero_pp.store.opening import open_store
from hetero_pp.store.store import Store

KEY, SECRET = "hetero-pp", "of-these-tests-only"

S3 = [pytest.param("s3", marks=pytest.mark.starts_processes)] if sys.platform == "linux" else []
"""The S3 parameter, if SeaweedFS has a package: it has one for Linux."""


def _free_ports(count: int) -> list[int]:
    """Return free ports below those that the system assigns.

    The port ten thousand above is free too, for the service's gRPC.
    """
    found: list[int] = []
    with ExitStack() as held:
        for port in range(20_000 + secrets.randbelow(2_000), 32_000):
            try:
                for one in (port, port + 10_000):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", one))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                break
    assert len(found) == count
    return found


@pytest.fixture
def free_port() -> int:
    """Return a port on which no server listens."""
    return _free_ports(1)[0]


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start SeaweedFS once for all tests. Yield the address of its S3 interface."""
    folder = tmp_path_factory.mktemp("seaweedfs")
    allowed = {"name": "tests", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [allowed]}))
    ports = dict(zip(("master", "volume", "filer", "s3"), _free_ports(4), strict=True))
    program = shutil.which("weed") or str(Path(sys.executable).with_name("weed"))
    arguments = [f"-{name}.port={port}" for name, port in ports.items()]
    off = [f"-s3.port.{name}=0" for name in ("iceberg", "lance")]
    own = ["-dir", str(folder), "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1", "-s3.config", str(folder / "s3.json")]
    command = [program, "server", "-s3", *own, *arguments, *off, "-master.volumeSizeLimitMB=64", "-volume.max=1000"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as service:
        try:
            address = f"http://127.0.0.1:{ports['s3']}"
            _wait_for(address, service, folder / "log")
            yield address
        finally:
            service.kill()


def _wait_for(address: str, service: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert service.poll() is None, log.read_text()
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=10)
        except urllib.error.HTTPError:
            return  # it refuses callers without credentials
        except OSError:
            time.sleep(0.1)
    pytest.fail(log.read_text())


def _bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a new bucket, and set its credentials in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    url = f"s3://tests-{secrets.token_hex(8)}/runs?endpoint={request.getfixturevalue('endpoint')}"
    open_store(url).put("first", b"")  # the service makes a bucket with its first object
    open_store(url).delete(["first"])
    return url


@pytest.fixture(params=["folder", "memory", *S3])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return an empty store of each kind."""
    if request.param == "s3":
        return open_store(_bucket(request, monkeypatch))
    return open_store("memory://" if request.param == "memory" else str(tmp_path / "store"))


@pytest.fixture(params=[pytest.param("folder", marks=pytest.mark.starts_processes), *S3])
def lasting(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty store that other processes can see too."""
    return _bucket(request, monkeypatch) if request.param == "s3" else str(tmp_path / "store")


@pytest.fixture(params=S3)
def signing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return an empty store that signs URLs."""
    return open_store(_bucket(request, monkeypatch))
