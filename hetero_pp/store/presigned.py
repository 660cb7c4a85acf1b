"""Transfers objects through presigned URLs, which require no credentials of the caller."""

from __future__ import annotations

import errno
import hashlib
import hmac
import http.client
import io
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from hetero_pp.core.errors import StoreError
from hetero_pp.core.proxies import needs_no_proxy

HEADERS = {"Content-Type": "application/octet-stream", "x-ms-blob-type": "BlockBlob"}
"""Headers of an upload. The second one is required by Azure and ignored by other services."""

_SIGNATURE = "X-Amz-Signature"

_ANSWER_BYTES_MAX = 64 * 2**10
_PIECE_BYTES = 1 << 20

_PORTS = {"http": 80, "https": 443}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes every redirect an error: a signed URL is for one object of one store."""

    def redirect_request(self, *_: Any) -> None:
        return None


def is_of(url: str, origins: Sequence[str]) -> bool:
    """Return whether a URL is of one of these stores.

    An origin is SCHEME://HOST or SCHEME://HOST:PORT. `*` in a host stands for one word between its dots.
    """
    try:
        asked, known = _origin(url), [_origin(origin) for origin in origins]
    except ValueError:  # the port is not a number
        return False
    for scheme, pattern, port in known:
        words = list(zip(asked[1].split("."), pattern.split("."), strict=False))
        is_host = asked[1].count(".") == pattern.count(".") and all(own and one in (own, "*") for own, one in words)
        if asked[::2] == (scheme, port) and is_host:
            return True
    return False


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").rstrip("."), parts.port or _PORTS.get(parts.scheme)


def upload(url: str, data: bytes, timeout: float) -> None:
    """PUT an object. It is safe to repeat after an error. `timeout` limits, in seconds, each period without progress.

    Raises StoreError, one line without the signature, unless the store confirmed that it keeps the object.
    """
    # For a bytes body the timeout would apply to the whole transfer; for a file it applies to each part.
    headers = HEADERS | {"Content-Length": str(len(data))}
    request = urllib.request.Request(url, io.BytesIO(data), headers, method="PUT")
    _ask(request, "uploaded", timeout, lambda answer: answer.read(_ANSWER_BYTES_MAX))


def with_length(url: str, method: str, size: int, secrets: Mapping[str, str]) -> str | None:
    """Return a signed URL of S3 (signature version 4) that is good for a body of `size` bytes only.

    The length becomes a signed header, so the service refuses other bodies. `secrets`: access key -> its secret. None
    for a URL of another service, or of a key without its secret, as on a machine with a role.
    """
    parts = urlsplit(url)
    query = {key: value for key, value in parse_qsl(parts.query, keep_blank_values=True) if key != _SIGNATURE}
    access_key, *scope = query.get("X-Amz-Credential", "").split("/")
    if access_key not in secrets:
        return None
    query["X-Amz-SignedHeaders"] = names = "content-length;host"
    asked = "&".join(f"{quote(key, safe='')}={quote(value, safe='')}" for key, value in sorted(query.items()))
    headers = f"content-length:{size}\nhost:{parts.netloc}\n"
    request = "\n".join([method, parts.path, asked, headers, names, "UNSIGNED-PAYLOAD"])
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{secrets[access_key]}".encode()
    for part in (*scope, "\n".join(["AWS4-HMAC-SHA256", query["X-Amz-Date"], "/".join(scope), digest])):
        key = hmac.digest(key, part.encode(), "sha256")
    return parts._replace(query=f"{asked}&{_SIGNATURE}={key.hex()}").geturl()


def download(url: str, size: int, timeout: float) -> bytes:
    """GET an object of exactly `size` bytes.

    Raises StoreError as `upload` does, and for another size; FileNotFoundError if there is no such object.
    """
    data: bytes = _ask(urllib.request.Request(url), "downloaded", timeout, lambda answer: answer.read(size + 1))
    if len(data) != size:
        raise StoreError(f"{without_signature(url)}: found another size than {size} bytes")
    return data


def download_range(
    url: str, start: int, room: memoryview, timeout: float, arrived: Callable[[int], object] = lambda n_bytes: None
) -> None:
    """GET a part of an object that fills `room`, from byte `start` on. `arrived` is told the bytes that came.

    Raises as `download` does, and StoreError if the store answers with another part.
    """
    if not len(room):
        return
    headers = {"Range": f"bytes={start}-{start + len(room) - 1}"}

    def read(answer: http.client.HTTPResponse) -> None:
        done = 0
        if answer.status == http.HTTPStatus.PARTIAL_CONTENT and answer.length == len(room):
            while done < len(room) and (count := answer.readinto(room[done : done + _PIECE_BYTES])):
                done += count
                arrived(count)
        if done != len(room):
            raise StoreError(f"{without_signature(url)}: found no {len(room)} bytes from {start} on")

    _ask(urllib.request.Request(url, headers=headers), "downloaded", timeout, read)


def _ask(request: urllib.request.Request, done: str, timeout: float, read: Callable[[Any], Any]) -> Any:
    bare = without_signature(request.full_url)
    proxies = [urllib.request.ProxyHandler({})] if needs_no_proxy(request.full_url) else []
    try:
        with urllib.request.build_opener(_NoRedirect, *proxies).open(request, timeout=timeout) as answer:
            return read(answer)
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
    return urlsplit(url)._replace(query="", fragment="").geturl()
