"""Opens the store that a URL names: a folder, or objects of a service, with the credentials for it."""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit
from urllib.request import url2pathname

from hetero_pp.core.errors import ConfigError
from hetero_pp.store.folder import FolderStore
from hetero_pp.store.store import Store

SCHEMES = ("s3", "gs", "az", "memory")
OPTIONS = ("endpoint", "region")  # options allowed in the query of a URL; credentials are not


IN_PLACE_OF_THE_FILE = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Environment variables from which obstore reads credentials itself."""

_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
"""Key in the file -> name of the obstore option."""


def open_store(url: str, endpoint: str | None = None, region: str | None = None, name: str = "") -> Store:
    """Open the store of a URL, below the name `name`.

    A path or file:// names a folder; s3://, gs:// and az:// name a bucket and a folder in it. The content of memory://
    is lost when the process ends.

    `endpoint` is the address of an S3-compatible service that is not Amazon's, such as http://127.0.0.1:8333. It and
    `region` may also be given in the URL: s3://bucket/folder?endpoint=...&region=... Credentials come from the usual
    environment variables (AWS_ACCESS_KEY_ID, ...), or for S3 from the credentials file of Amazon's tools.

    Raises ConfigError if the URL names no store or its extra is not installed, and StoreError if a required option is
    missing.
    """
    folder = folder_of(url)
    if folder is not None:
        return FolderStore(folder / name)
    bare, asked = parsed(url)
    try:
        from hetero_pp.store.objects import ObjectStore
    except ModuleNotFoundError:
        raise ConfigError(
            (), f"{bare}: this kind of store needs an optional package: pip install 'hetero-pp[objects]'"
        ) from None
    options = {key: value for key, value in (("endpoint", endpoint), ("region", region)) if value is not None} | asked
    if bare.startswith("s3:"):
        options |= credentials_from_file()
    return ObjectStore(f"{bare}/{name}" if name else bare, options)


def folder_of(url: str) -> Path | None:
    """Return the folder that a URL names, or None if it names no folder."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    return Path(url) if parts.scheme == "" else None


def parsed(url: str) -> tuple[str, dict[str, str]]:
    """Return a URL without its query, and the query's options. Raises ConfigError if it names no store."""
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        return url, {}
    if parts.scheme not in SCHEMES:
        raise ConfigError((), f"{url}: found `{parts.scheme}:`, expected a path, or one of {', '.join(SCHEMES)}")
    if parts.scheme == "memory":
        return "memory:", {}
    bare = parts._replace(query="", fragment="").geturl().rstrip("/")
    if "@" in parts.netloc:
        raise ConfigError(
            (), f"{parts.scheme}://: found credentials in a URL, expected them in environment variables or a file"
        )
    if not parts.netloc:
        raise ConfigError((), f"{url}: found no bucket, expected {parts.scheme}://BUCKET/FOLDER")
    asked = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(asked.keys() - set(OPTIONS))
    if unknown:
        raise ConfigError((), f"{bare}: found `{unknown[0]}`, expected {' or '.join(OPTIONS)} after the question mark")
    return bare, asked


def credentials_from_file(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return obstore's options from ~/.aws/credentials; empty if environment variables contain credentials.

    AWS_PROFILE names the profile (default: `default`), AWS_SHARED_CREDENTIALS_FILE another file. Raises ConfigError if
    an explicitly named file or profile does not exist.
    """
    if any(environment.get(name) for name in IN_PLACE_OF_THE_FILE):
        return {}
    named, profile = environment.get("AWS_SHARED_CREDENTIALS_FILE"), environment.get("AWS_PROFILE")
    path = Path(named) if named else Path.home() / ".aws" / "credentials"
    found = configparser.RawConfigParser()
    try:
        with path.open(encoding="utf-8") as file:
            found.read_file(file)
    except FileNotFoundError:
        if named:
            raise ConfigError((), f"AWS_SHARED_CREDENTIALS_FILE: found no file {path}") from None
        return {}
    except (OSError, UnicodeDecodeError, configparser.Error):
        raise ConfigError((), f"{path}: cannot be read, expected profiles, each with aws_access_key_id = ...") from None
    if not found.has_section(profile or "default"):
        if profile:
            raise ConfigError((), f"AWS_PROFILE: found `{profile}`, which is no profile of {path}")
        return {}
    section = found[profile or "default"]
    return {ours: section[theirs] for theirs, ours in _KEYS.items() if theirs in section}
