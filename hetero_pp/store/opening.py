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


def open_store(url: str, endpoint: str | None = None, region: str | None = None) -> Store:
    """A path or file:// is a folder; s3://, gs:// and az:// name a bucket and where in it; memory:// ends with it.

    `endpoint` is where a service that is not Amazon's speaks S3, such as http://127.0.0.1:8333; it and `region` may
    stand in the URL: s3://bucket/folder?endpoint=...&region=... Credentials are what the usual variables say
    (AWS_ACCESS_KEY_ID, ...), or for S3 the file of Amazon's tools.

    Raises ConfigError if there is no such store, or what it needs is not installed.
    """
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        return FolderStore(Path(url2pathname(parts.path) if parts.scheme else url))
    if parts.scheme not in SCHEMES:
        raise ConfigError((), f"{url}: found `{parts.scheme}:`, expected a path, or one of {', '.join(SCHEMES)}")
    try:
        from hetero_pp.store.objects import ObjectStore
    except ModuleNotFoundError:
        raise ConfigError((), f"{url}: such a store needs an extra: pip install 'hetero-pp[objects]'") from None
    asked = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(asked.keys() - set(OPTIONS))
    if unknown:
        raise ConfigError((), f"{url}: found `{unknown[0]}`, expected {' or '.join(OPTIONS)} behind the question mark")
    given = {"endpoint": endpoint, "region": region}
    options = {key: value for key, value in given.items() if value is not None} | asked
    bare = parts._replace(query="").geturl() if parts.scheme != "memory" else "memory://"
    if parts.scheme == "s3":
        options |= credentials_from_file()
    return ObjectStore(bare, options)
