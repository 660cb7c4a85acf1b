"""Contributions that members write to and read from the store themselves, so that they do not pass the exchange.

A member asks for a URL that the exchange signs, uploads its blob there, and reports the upload. The exchange trusts
none of this: it copies the blob inside the store to a key that the member has no URL for, and decodes that copy.
"""

from __future__ import annotations

from hetero_pp.core.errors import DamagedFile, MalformedContribution
from replica_groups.exchange.log import ContributionLog

UPLOADED = ".uploaded"
URL_SECONDS = 900.0
"""Seconds within which an upload or a download with a URL has to begin; large, because clocks differ."""


def upload_url(log: ContributionLog, key: str, size: int, is_guest: bool) -> str | None:
    """Return a URL at which the blob of this key, of `size` bytes, may be put; None if the store has no such URLs.

    Where the length cannot be signed, only a guest gets none: it might fill the store.
    """
    url = log.store.sign("PUT", key + UPLOADED, URL_SECONDS, size)
    return log.store.sign("PUT", key + UPLOADED, URL_SECONDS) if url is None and not is_guest else url


def download_url(log: ContributionLog, key: str) -> str | None:
    """Return a URL at which the blob of this key may be read; None if the store has no such URLs."""
    return log.store.sign("GET", key, URL_SECONDS)


def take_upload(log: ContributionLog, key: str, sha256: bytes, most: int) -> bytes:
    """Take over a blob that a member has uploaded, with this digest and of at most `most` bytes; return it.

    May be repeated. Raises MalformedContribution if something else is there, FileNotFoundError if nothing is.
    """
    try:
        data = log.read_blob(key, sha256)
    except (DamagedFile, FileNotFoundError):
        data = _copied(log, key, sha256, most)
    log.store.delete([key + UPLOADED])
    return data


def _copied(log: ContributionLog, key: str, sha256: bytes, most: int) -> bytes:
    log.store.copy(key + UPLOADED, key)
    if (size := log.store.size(key)) > most:
        complaint = f"uploaded {size} bytes, expected at most {most}"
    else:
        try:
            return log.read_blob(key, sha256)
        except DamagedFile:
            complaint = "uploaded other data than announced"
    log.store.delete([key])
    raise MalformedContribution(complaint)
