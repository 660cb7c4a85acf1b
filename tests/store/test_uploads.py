"""Blobs that members upload to a store by a URL that another process has signed."""

from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from hetero_pp.core.errors import MalformedContribution, StoreError
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import select
from hetero_pp.store.opening import open_store
from hetero_pp.store.presigned import download, is_of, upload
from hetero_pp.store.settings import StoreSettings
from hetero_pp.store.store import Store
from replica_groups.exchange.log import URL_SECONDS, ContributionLog, blob_key

SETTINGS = CompressionSettings(density=1 / 8)
MOST = 1 << 20
"""Largest number of bytes of an upload."""
ADDRESS = BlobAddress("run", 3, "home", "norm")


def _blob(seed: int) -> bytes:
    values = torch.randn(16, generator=torch.Generator().manual_seed(seed))
    selection = select(torch.zeros(16), values, SETTINGS)
    return encode_blob(ADDRESS, [("norm.weight", (16,), selection)], SETTINGS)


def _key(blob: bytes) -> str:
    return blob_key(3, "home", 2, "norm", hashlib.sha256(blob).digest())


def test_what_was_uploaded_is_kept_where_nobody_has_a_url_for(signing: Store) -> None:
    log, blob = ContributionLog(signing), _blob(1)
    key, digest = _key(blob), hashlib.sha256(blob).digest()
    url = log.upload_url(key, len(blob), is_guest=True)
    assert url is not None
    upload(url, blob, 60)
    upload(url, blob, 60)  # a client that does not know whether it arrived repeats it
    assert log.take_upload(key, digest, MOST) == blob
    assert signing.below() == [key]
    upload(url, bytes(len(blob)), 60)
    assert log.take_upload(key, digest, MOST) == blob == log.read_blob(key, digest)
    get = log.store.sign("GET", key, URL_SECONDS)
    assert get is not None and download(get, len(blob), 60) == blob
    for size in (len(blob) - 1, len(blob) + 1):
        with pytest.raises(StoreError, match=rf"/norm\.\w+\.blob: found another size than {size} bytes$"):
            download(get, size, 60)


def test_what_is_not_what_was_said_is_not_kept(signing: Store) -> None:
    log, blob = ContributionLog(signing), _blob(1)
    key, digest = _key(blob), hashlib.sha256(blob).digest()
    with pytest.raises(FileNotFoundError):
        log.take_upload(key, digest, MOST)
    url = log.upload_url(key, len(_blob(2)), is_guest=True)
    assert url is not None
    upload(url, _blob(2), 60)
    with pytest.raises(MalformedContribution, match="uploaded other data than announced"):
        log.take_upload(key, digest, MOST)
    assert signing.below() == [f"{key}.uploaded"]


def test_what_is_too_large_is_not_read(signing: Store) -> None:
    log, blob = ContributionLog(signing), bytes(1001)
    url = log.upload_url(_key(blob), len(blob), is_guest=True)
    assert url is not None
    for size in (0, 1000, 1002, 5_000_000):
        with pytest.raises(StoreError, match=r"cannot be uploaded \("):
            upload(url, bytes(size), 60)
    assert signing.below() == []
    upload(url, blob, 60)
    with pytest.raises(MalformedContribution, match="uploaded 1001 bytes, expected at most 1000"):
        log.take_upload(_key(blob), hashlib.sha256(blob).digest(), 1000)
    assert signing.below() == [f"{_key(blob)}.uploaded"]


def test_a_url_is_for_one_object_and_a_refusal_is_one_line(signing: Store) -> None:
    log, key = ContributionLog(signing), _key(_blob(1))
    url = log.upload_url(key, 17, is_guest=True)
    assert url is not None
    with pytest.raises(StoreError, match=r"^http://127\.0\.0\.1:\S+\.uploaded: cannot be uploaded \(HTTP 403 "):
        upload(url.replace("/home/2/", "/home/3/"), b"another generation's", 60)
    with pytest.raises(StoreError, match=r"cannot be uploaded \(HTTP 403 "):
        upload(url.replace(".uploaded", ""), b"what is included.", 60)
    with pytest.raises(StoreError, match=r"cannot be downloaded \(HTTP 403 "):
        download(url, 60, 60)
    assert signing.below() == []


class _Elsewhere(BaseHTTPRequestHandler):
    """Redirects callers to another path, which answers without end."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        self.send_response(302)
        self.send_header("Location", "/latest/meta-data")
        self.end_headers()

    do_PUT = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def test_redirects_are_not_followed() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Elsewhere)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    url = f"http://127.0.0.1:{server.server_port}/key"
    try:
        with pytest.raises(StoreError, match=r"/key: cannot be downloaded \(HTTP 302 Found\)"):
            download(url, 10, 60)
        with pytest.raises(StoreError, match=r"/key: cannot be uploaded \(HTTP 302 Found\)"):
            upload(url, b"data", 60)
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    assert _Elsewhere.asked == ["/key", "/key"]


@pytest.mark.parametrize(
    ("settings", "inside", "outside"),
    [
        (
            {"url": "s3://runs/mine"},
            ["https://s3.eu-central-1.amazonaws.com/runs/x", "https://runs.s3.amazonaws.com/x"],
            ["http://s3.amazonaws.com/x", "https://s3.amazonaws.com:8443/x", "https://ec2-1.compute.amazonaws.com/x"],
        ),
        (
            {"url": "s3://runs/mine", "endpoint": "http://10.0.0.2:9000"},
            ["http://10.0.0.2:9000/runs/x"],
            ["http://10.0.0.2/x", "http://10.0.0.2:9000@attacker.example/x", "https://s3.amazonaws.com/runs/x"],
        ),
        ({"url": "gs://runs"}, ["https://storage.googleapis.com/runs/x"], ["https://storage.googleapis.com.example/x"]),
        ({"url": "az://runs"}, ["https://me.blob.core.windows.net/x"], ["https://blob.core.windows.net/x"]),
        ({}, [], ["http://127.0.0.1/x", "file:///etc/passwd", "https://[::1/x", "http://h:x/"]),
        ({"url": "/a/folder"}, [], ["file:///a/folder/x"]),
    ],
)
def test_signed_urls_are_of_the_store(settings: dict[str, str], inside: list[str], outside: list[str]) -> None:
    store = StoreSettings.model_validate(settings)
    assert [url for url in inside if not is_of(url, store.origins())] == []
    assert [url for url in outside if is_of(url, store.origins())] == []
    if one := store.as_one_url():
        assert StoreSettings(url=one).origins() == store.origins()


def test_who_cannot_be_reached_is_one_line(free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}/runs/key?X-Amz-Signature=secret"
    with pytest.raises(StoreError) as raised:
        upload(url, b"data", 60)
    assert str(raised.value) == f"http://127.0.0.1:{free_port}/runs/key: cannot be uploaded (Connection refused)"


@pytest.mark.parametrize("url", ["folder", "memory://"])
def test_some_stores_have_no_urls(url: str, tmp_path: Path) -> None:
    store = open_store(str(tmp_path) if url == "folder" else url)
    assert ContributionLog(store).upload_url(_key(b""), 0, is_guest=False) is None


def test_a_length_that_cannot_be_signed_is_signed_for_no_guest(signing: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with credentials of a machine's role, whose secret only obstore has."""
    monkeypatch.setattr(signing, "_secrets", {})
    log = ContributionLog(signing)
    assert log.upload_url("key", 100, is_guest=True) is None
    assert "X-Amz-Signature" in (log.upload_url("key", 100, is_guest=False) or "")
