"""Bytes to and from a store by a URL that its owner has signed: who has the URL needs no credentials."""

from __future__ import annotations

import errno
import http.client
import io
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from hetero_pp.errors import StoreError
from hetero_pp.proxies import needs_no_proxy

HEADERS = {"Content-Type": "application/octet-stream", "x-ms-blob-type": "BlockBlob"}
"""The second is Azure's, and of no meaning to others."""


def upload(url: str, data: bytes, timeout: float) -> None:
    """PUT an object; `timeout` in seconds is for whatever of it stands still. It may be done again after an error.

    Raises StoreError, one line without the signature, unless the store has confirmed that it keeps the object.
    """
    # The timeout would be for all bytes together if they were given at once; of a file it is for each part.
    headers = HEADERS | {"Content-Length": str(len(data))}
    _ask(urllib.request.Request(url, io.BytesIO(data), headers, method="PUT"), "uploaded", timeout)


def download(url: str, size: int, timeout: float) -> bytes:
    """GET an object of so many bytes. Raises StoreError as `upload` does, and if it has more or fewer;
    FileNotFoundError if there is none.
    """
    data = _ask(urllib.request.Request(url), "downloaded", timeout, size + 1)
    if len(data) != size:
        raise StoreError(f"{without_signature(url)}: found another size than {size} bytes")
    return data


def _ask(request: urllib.request.Request, done: str, timeout: float, most: int = -1) -> bytes:
    bare = without_signature(request.full_url)
    proxies = [urllib.request.ProxyHandler({})] if needs_no_proxy(request.full_url) else []
    try:
        with urllib.request.build_opener(*proxies).open(request, timeout=timeout) as answer:
            body: bytes = answer.read(most)
            return body
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.NOT_FOUND and done == "downloaded":
            raise FileNotFoundError(errno.ENOENT, "No such object", bare) from None
        raise StoreError(f"{bare}: cannot be {done} (HTTP {error.code} {error.reason})") from None
    except urllib.error.URLError as error:
        reason = error.reason.strerror if isinstance(error.reason, OSError) else None
        raise StoreError(f"{bare}: cannot be {done} ({reason or error.reason})") from None
    except (OSError, http.client.HTTPException) as error:
        raise StoreError(f"{bare}: cannot be {done} ({error or type(error).__name__})") from None


def without_signature(url: str) -> str:
    """What messages call an object that a URL is for."""
    return urlsplit(url)._replace(query="", fragment="").geturl()
