"""Object store based on obstore, which only this file imports: S3-compatible services, Google, Azure, and memory.

Writes are atomic. `create` uses conditional writes: `If-None-Match: *` on S3, and the equivalent of other services.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

import obstore
import psutil
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import MemoryStore, from_url

from hetero_pp.core.errors import StoreError
from hetero_pp.core.files import whole
from hetero_pp.core.proxies import PRIVATE_NETWORKS, is_private
from hetero_pp.core.text import without_controls
from hetero_pp.core.units import format_bytes
from hetero_pp.store.presigned import with_length
from hetero_pp.store.store import checked

PART_BYTES, MOST_PARTS = 8 * 2**20, 9_000
"""Size of the parts in which large files are transferred, and their largest number. Each part is retried separately."""

CONNECT_SECONDS, PART_SECONDS = 10, 120
"""Time limits of a connection attempt, and of one request or part on the slowest useful line."""

KEYS_MAX = 1_000_000  # largest number of objects below one folder; a round of 1,000 replicas has fewer
LISTING_BYTES_MAX, LISTING_CHECK_SECONDS = 2**29, 0.2  # memory that one listing may take, and the interval of the check
SILENT_SECONDS = 10.0  # time after which the user is told that a store does not answer

BACKOFF = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2}
RETRIES = 1000
"""Retries after a lost connection or a server error, with growing pauses.

In practice the time limit (`patience`) ends them.
"""


class ObjectStore:
    """Implements Store on an object service."""

    def __init__(self, url: str, options: Mapping[str, str], patience: float = 60.0) -> None:
        """Open a store. `options` are obstore's for the URL; a failed request is retried for up to `patience` seconds.

        Raises StoreError if the URL or an option is invalid.
        """
        self._url, own = url.rstrip("/"), (options.get("access_key_id"), options.get("secret_access_key"))
        environment = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        self._secrets = {key: secret for key, secret in (environment, own) if key and secret}
        """Access key -> its secret, for what obstore does not sign."""
        self._objects = _opened(url, options, patience)

    def get(self, key: str) -> bytes:
        with self._told("read", key), self._watched(key):
            return bytes(obstore.get(self._objects, checked(key)).bytes())

    def put(self, key: str, data: bytes) -> None:
        with self._told("written", key):
            obstore.put(self._objects, checked(key), data, chunk_size=PART_BYTES)

    def create(self, key: str, data: bytes) -> bool:
        with self._told("written", key):
            try:
                obstore.put(self._objects, checked(key), data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

    def below(self, folder: str = "") -> list[str]:
        with self._told("listed", folder):
            found: list[str] = []
            pages = iter(obstore.list(self._objects, checked(folder) if folder else None))
            while True:
                with self._watched(folder):
                    page = next(pages, None)
                if page is None:
                    return sorted(found)
                found += [one["path"] for one in page]
                if len(found) > KEYS_MAX:
                    raise StoreError(
                        f"{self.url(folder)}: found more than {KEYS_MAX:,} objects in the list; stopped reading it"
                    )

    def names(self, folder: str = "") -> list[str]:
        with self._told("listed", folder), self._watched(folder):
            found = self._listed(checked(folder) if folder else None)
        folders = [f"{_name(prefix)}/" for prefix in found["common_prefixes"]]
        own = checked(folder) if folder else ""  # some services also list the folder itself
        return sorted([*folders, *(_name(one["path"]) for one in found["objects"] if one["path"] != own)])

    def delete(self, keys: Sequence[str]) -> None:
        with self._told("removed", keys[0] if keys else ""):
            try:
                obstore.delete(self._objects, [checked(key) for key in keys])
            except FileNotFoundError:  # some services stop at a missing object, so others may be left

                def delete_one(key: str) -> None:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._objects, key)

                with ThreadPoolExecutor(8) as pool:
                    list(pool.map(delete_one, keys))

    def size(self, key: str) -> int:
        with self._told("read", key), self._watched(key):
            return int(obstore.head(self._objects, checked(key))["size"])

    def copy(self, key: str, to: str) -> None:
        """Copy within the service, without a download."""
        with self._told("read", key):
            obstore.copy(self._objects, checked(key), checked(to))

    def put_file(self, key: str, path: Path) -> None:
        part = max(PART_BYTES, path.stat().st_size // MOST_PARTS + 1)
        with self._told("written", key):
            obstore.put(self._objects, checked(key), path, chunk_size=part)

    def get_to(self, key: str, path: Path) -> None:
        """Write an object to a file. A change of the object meanwhile is not detected; callers check a digest."""
        with self._told("read", key):
            size = self.size(key)
            with whole(path) as part, part.open("wb") as file:
                for start in range(0, size, PART_BYTES):
                    end = min(start + PART_BYTES, size)
                    file.write(obstore.get_range(self._objects, key, start=start, end=end))

    def path(self, key: str) -> Path | None:
        """Return None: objects are not files."""
        return None

    def url(self, key: str = "") -> str:
        return f"{self._url}/{key}".rstrip("/")

    def sign(self, method: Literal["GET", "PUT"], key: str, seconds: float, size: int | None = None) -> str | None:
        if isinstance(self._objects, MemoryStore):
            return None
        with self._told("signed", key):
            url = obstore.sign(self._objects, method, checked(key), timedelta(seconds=seconds))
        return url if size is None else with_length(url, method, size, self._secrets)

    def forget_parts(self) -> None:
        """Do nothing: incomplete uploads are removed by the bucket's lifecycle rules."""

    def _listed(self, prefix: str | None) -> Any:
        """List one level of a folder. Raises StoreError if the listing takes more than LISTING_BYTES_MAX.

        obstore gathers all pages itself, so the limit applies to the growth of this process's memory.
        """

        async def listed() -> Any:
            asked = asyncio.ensure_future(obstore.list_with_delimiter_async(self._objects, prefix))
            process = psutil.Process()
            most = process.memory_info().rss + LISTING_BYTES_MAX
            while not (await asyncio.wait([asked], timeout=LISTING_CHECK_SECONDS))[0]:
                if process.memory_info().rss > most:
                    asked.cancel()
                    told = f"is longer than {format_bytes(LISTING_BYTES_MAX)}; stopped reading it"
                    raise StoreError(f"{self.url(prefix or '')}: its list of objects {told}")
            return asked.result()

        with ThreadPoolExecutor(1) as own:  # the thread of a notebook already has a running event loop
            return own.submit(lambda: asyncio.run(listed())).result()

    @contextmanager
    def _watched(self, key: str) -> Iterator[None]:
        """Report on standard error, at growing intervals, how long the store has not answered while the block runs."""
        answered, since = threading.Event(), time.monotonic()

        def watch() -> None:
            pause = SILENT_SECONDS
            while not answered.wait(pause):
                silent = time.monotonic() - since
                print(f"{self.url(key)}: the store did not answer for {silent:.0f} s", file=sys.stderr, flush=True)
                pause = max(silent, SILENT_SECONDS)

        watcher = threading.Thread(target=watch, name="silence", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            answered.set()
            watcher.join()

    @contextmanager
    def _told(self, done: str, key: str) -> Iterator[None]:
        """Convert errors of obstore to StoreError: one line with the object and the reason.

        FileNotFoundError stays FileNotFoundError for a read, unless the whole bucket is missing.
        """
        try:
            yield
        except FileNotFoundError as error:
            if done == "read" and "NoSuchBucket" not in str(error):
                raise FileNotFoundError(2, "No such object", self.url(key)) from error
            raise StoreError(f"{self.url(key)}: cannot be {done} ({_reason(error)})") from error
        except (BaseError, OSError) as error:
            raise StoreError(f"{self.url(key)}: cannot be {done} ({_reason(error)})") from error


def _opened(url: str, options: Mapping[str, str], patience: float) -> Any:
    """Open the obstore store of a URL; the types of `options` differ by store, hence the casts."""
    client = {
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "timeout": timedelta(seconds=PART_SECONDS),
        "allow_http": options.get("endpoint", "").startswith("http://"),
        **_proxy_options(options.get("endpoint", "")),
    }
    retry = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=patience), "backoff": BACKOFF}
    if url.startswith("memory:"):
        return MemoryStore()
    try:
        return from_url(url, client_options=cast(Any, client), retry_config=cast(Any, retry), **cast(Any, options))
    except (BaseError, ValueError) as error:
        raise StoreError(f"{url}: cannot be used ({_reason(error)})") from error


def _proxy_options(endpoint: str) -> dict[str, str]:
    """Return options that apply the environment's proxy to public services only; empty if no proxy is set.

    obstore ignores the environment only if it is given a proxy, so it is given one with exceptions.
    """
    proxies, parts = getproxies_environment(), urlsplit(endpoint)
    url = proxies.get(parts.scheme or "https", proxies.get("all", ""))
    if not proxies.keys() & {"http", "https", "all"} or (url and urlsplit(url).scheme not in ("http", "https")):
        return {}
    if not url or (parts.hostname and is_private(parts.hostname)):
        return {"proxy_url": "http://127.0.0.1:9", "proxy_excludes": "0.0.0.0/0,::/0,*"}
    no_proxy = ",".join([*PRIVATE_NETWORKS, "localhost", "metadata.google.internal", proxies.get("no", "")])
    return {"proxy_url": url, "proxy_excludes": no_proxy}


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _reason(error: Exception) -> str:
    """Shorten an error of many lines to the server's message, the system's message, or its first line."""
    text = str(error)
    if "169.254.169.254" in text:  # metadata service of cloud machines, the last source of credentials that is tried
        return "found no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    said = re.search(r"<Message>(.+?)</Message>", text, re.DOTALL) or re.search(r'\bmessage: "(.+?)"', text)
    first = text.split("\n", 1)[0]
    return without_controls(" ".join((said[1] if said else first.rpartition(" - ")[2]).split()).rstrip("."))
