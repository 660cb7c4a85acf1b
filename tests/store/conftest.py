"""Empty stores of every kind: a folder, memory, and a local service that speaks S3 over HTTP."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_pp.store.opening import open_store
from hetero_pp.store.store import Store

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from object_service import KEY, SECRET, free_ports, object_service

S3 = [pytest.param("s3", marks=pytest.mark.starts_processes)] if sys.platform == "linux" else []
"""The S3 parameter, if SeaweedFS has a package: it has one for Linux."""


@pytest.fixture
def free_port() -> int:
    """Return a port on which no server listens."""
    return free_ports(1)[0]


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start SeaweedFS once for all tests. Yield the address of its S3 interface."""
    with object_service(tmp_path_factory.mktemp("seaweedfs")) as address:
        yield address


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
