"""Blobs that members put into a store by a URL that somebody else has signed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from hetero_pp.errors import MalformedContribution, StoreError
from hetero_pp.model import Shapes
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import select
from hetero_pp.store.opening import open_store
from hetero_pp.store.presigned import download, upload
from hetero_pp.store.store import Store
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.uploads import upload_url, uploaded_entry

SHAPES: Shapes = {"norm.weight": (16,)}
SETTINGS = CompressionSettings(density=1 / 8)
ADDRESS = BlobAddress("run", 3, "home", "norm")


def _blob(seed: int) -> bytes:
    values = torch.randn(16, generator=torch.Generator().manual_seed(seed))
    selection = select(torch.zeros(16), values, SETTINGS)
    return encode_blob(ADDRESS, [("norm.weight", (16,), selection)], SETTINGS)


def test_a_blob_that_was_uploaded_is_counted_for_what_it_is(signing: Store) -> None:
    log, blob = ContributionLog(signing), _blob(1)
    url = upload_url(log, ADDRESS, 2)
    assert url is not None
    upload(url, blob, 60)
    upload(url, blob, 60)  # whoever does not know whether it arrived does it again
    assert log.read_blob(3, "home", 2, "norm") == blob
    entry = uploaded_entry(log, ADDRESS, 2, hashlib.sha256(blob).digest(), SHAPES, SETTINGS)
    assert (entry.block, entry.sha256, entry.size) == ("norm", hashlib.sha256(blob).digest(), len(blob))
    assert entry.kept_values > 0
    get = signing.sign("GET", "round-000003/home/2/norm.blob", 60)
    assert get is not None and download(get, 60) == blob


def test_what_is_not_what_was_said_does_not_count(signing: Store) -> None:
    log, blob = ContributionLog(signing), _blob(1)
    digest = hashlib.sha256(blob).digest()
    with pytest.raises(FileNotFoundError):
        uploaded_entry(log, ADDRESS, 2, digest, SHAPES, SETTINGS)
    url = upload_url(log, ADDRESS, 2)
    assert url is not None
    upload(url, _blob(2), 60)
    with pytest.raises(MalformedContribution, match="`norm` of home in the store is not what was said"):
        uploaded_entry(log, ADDRESS, 2, digest, SHAPES, SETTINGS)
    upload(url, b"anything", 60)
    with pytest.raises(MalformedContribution):
        uploaded_entry(log, ADDRESS, 2, hashlib.sha256(b"anything").digest(), SHAPES, SETTINGS)


def test_a_url_is_for_one_object_and_a_refusal_is_one_line(signing: Store) -> None:
    log = ContributionLog(signing)
    url = upload_url(log, ADDRESS, 2)
    assert url is not None
    with pytest.raises(StoreError, match=r"^http://127\.0\.0\.1:\S+/3/norm\.blob: cannot be uploaded \(HTTP 403 "):
        upload(url.replace("/home/2/", "/home/3/"), b"another epoch's", 60)
    with pytest.raises(StoreError, match=r"cannot be downloaded \(HTTP 403 "):
        download(url, 60)
    assert signing.below() == []


def test_who_cannot_be_reached_is_one_line(free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}/runs/key?X-Amz-Signature=secret"
    with pytest.raises(StoreError) as raised:
        upload(url, b"data", 60)
    assert str(raised.value) == f"http://127.0.0.1:{free_port}/runs/key: cannot be uploaded (Connection refused)"


@pytest.mark.parametrize("url", ["folder", "memory://"])
def test_some_stores_have_no_urls(url: str, tmp_path: Path) -> None:
    store = open_store(str(tmp_path) if url == "folder" else url)
    assert upload_url(ContributionLog(store), ADDRESS, 1) is None
