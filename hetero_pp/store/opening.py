"""The store that a URL names: a folder, or objects of a service."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit
from urllib.request import url2pathname

from hetero_pp.errors import ConfigError
from hetero_pp.store.credentials import credentials_from_file
from hetero_pp.store.folder import FolderStore
from hetero_pp.store.store import Store

SCHEMES = ("s3", "gs", "az", "memory")
OPTIONS = ("endpoint", "region")
"""What may stand behind a URL's question mark; credentials may not."""


def open_store(url: str, endpoint: str | None = None, region: str | None = None, name: str = "") -> Store:
    """A path or file:// is a folder; s3://, gs:// and az:// name a bucket and where in it; memory:// ends with it.

    `endpoint` is where a service that is not Amazon's speaks S3, such as http://127.0.0.1:8333; it and `region` may
    stand in the URL: s3://bucket/folder?endpoint=...&region=... Credentials are what the usual variables say
    (AWS_ACCESS_KEY_ID, ...), or for S3 the file of Amazon's tools. `name`: what lies below the URL, under this name.

    Raises ConfigError if there is no such store, or what it needs is not installed; StoreError if something is missing
    that its kind needs.
    """
    folder = folder_of(url)
    if folder is not None:
        return FolderStore(folder / name)
    bare, asked = parsed(url)
    try:
        from hetero_pp.store.objects import ObjectStore
    except ModuleNotFoundError:
        raise ConfigError((), f"{bare}: such a store needs an extra: pip install 'hetero-pp[objects]'") from None
    options = {key: value for key, value in (("endpoint", endpoint), ("region", region)) if value is not None} | asked
    if bare.startswith("s3:"):
        options |= credentials_from_file()
    return ObjectStore(f"{bare}/{name}" if name else bare, options)


def folder_of(url: str) -> Path | None:
    """The folder that a URL names, if it names one."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    return Path(url) if parts.scheme == "" else None


def parsed(url: str) -> tuple[str, dict[str, str]]:
    """A URL without what stands behind its question mark, and that. Raises ConfigError if it names no store."""
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        return url, {}
    if parts.scheme not in SCHEMES:
        raise ConfigError((), f"{url}: found `{parts.scheme}:`, expected a path, or one of {', '.join(SCHEMES)}")
    if parts.scheme == "memory":
        return "memory:", {}
    bare = parts._replace(query="", fragment="").geturl().rstrip("/")
    if "@" in parts.netloc:
        raise ConfigError((), f"{parts.scheme}://: found credentials in a URL, expected them in variables or a file")
    if not parts.netloc:
        raise ConfigError((), f"{url}: found no bucket, expected {parts.scheme}://BUCKET/FOLDER")
    asked = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(asked.keys() - set(OPTIONS))
    if unknown:
        raise ConfigError((), f"{bare}: found `{unknown[0]}`, expected {' or '.join(OPTIONS)} behind the question mark")
    return bare, asked
