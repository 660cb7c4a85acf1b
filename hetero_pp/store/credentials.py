"""Credentials for S3 from the file of Amazon's own tools, used if no environment variable contains them."""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path

from hetero_pp.core.errors import ConfigError

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
