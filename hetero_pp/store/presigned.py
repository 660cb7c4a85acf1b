"""Bytes to and from a store by a URL that its owner has signed: who has the URL needs no credentials."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from hetero_pp.errors import StoreError

HEADERS = {"Content-Type": "application/octet-stream", "x-ms-blob-type": "BlockBlob"}
"""The second is Azure's, and of no meaning to others."""


def upload(url: str, data: bytes, timeout: float) -> None:
    """PUT an object; `timeout` in seconds is for whatever of it stands still. It may be done again after an error.

    Raises StoreError, one line without the signature, unless the store has confirmed that it keeps the object.
    """
    _ask(urllib.request.Request(url, data, HEADERS, method="PUT"), "uploaded", timeout)


def download(url: str, timeout: float) -> bytes:
    """GET an object. Raises StoreError as `upload` does."""
    return _ask(urllib.request.Request(url), "downloaded", timeout)


def _ask(request: urllib.request.Request, done: str, timeout: float) -> bytes:
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        raise StoreError(f"{_bare(request)}: cannot be {done} (HTTP {error.code} {error.reason})") from None
    except urllib.error.URLError as error:
        reason = error.reason.strerror if isinstance(error.reason, OSError) else None
        raise StoreError(f"{_bare(request)}: cannot be {done} ({reason or error.reason})") from None
    except (OSError, http.client.HTTPException) as error:
        raise StoreError(f"{_bare(request)}: cannot be {done} ({error or type(error).__name__})") from None


def _bare(request: urllib.request.Request) -> str:
    return urlsplit(request.full_url)._replace(query="", fragment="").geturl()
