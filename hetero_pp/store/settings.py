"""Settings of the section `store` of the YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlencode, urlsplit

from pydantic import Field, field_validator, model_validator

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.settings import Settings
from hetero_pp.store.opening import folder_of, open_store, parsed
from hetero_pp.store.store import Store

_HOSTS = {
    "s3": ("s3.amazonaws.com", "s3.*.amazonaws.com", "{bucket}.s3.amazonaws.com", "{bucket}.s3.*.amazonaws.com"),
    "gs": ("storage.googleapis.com",),
    "az": ("*.blob.core.windows.net",),
}
"""Host names of each service's objects."""


class StoreSettings(Settings):
    """Location of the run log: run checkpoints, round records, contributions. The YAML never contains credentials."""

    url: str | None = Field(
        None,
        description="a folder, or s3://BUCKET/FOLDER, gs://..., az://...: location of the run log, in a folder with "
        "the run's name; by default the run's own folder on the host of the exchange",
        examples=["s3://runs/mine"],
    )
    endpoint: str | None = Field(
        None, description="address of an S3 service other than Amazon's", examples=["http://127.0.0.1:8333"]
    )
    history: Literal["whole", "recent"] = Field(
        "whole",
        description="`recent`: delete contributions older than the kept run checkpoints. Their rounds can then no "
        "longer be replayed, and a member that was absent for longer starts with an empty error feedback",
    )
    region: str | None = Field(None, description="region of an S3 bucket", examples=["eu-central-1"])

    @field_validator("url")
    @classmethod
    def _names_a_store(cls, url: str | None) -> str | None:
        try:
            if url is not None:
                parsed(url)
        except ConfigError as error:
            raise ValueError(error.message) from None
        return url

    @model_validator(mode="after")
    def _are_compatible(self) -> Self:
        for key in ("endpoint", "region"):
            if getattr(self, key) is not None and not (self.url or "").startswith("s3:"):
                raise ValueError(f"found `{key}` with the url {self.url}, expected it with an s3: url only")
        return self

    def origins(self) -> list[str]:
        """Return where URLs that the exchange signs may lead, as SCHEME://HOST[:PORT]; `*` stands for one word."""
        bare, asked = parsed(self.url or "")
        parts, endpoint = urlsplit(bare), self.endpoint or asked.get("endpoint")
        if parts.scheme == "s3" and endpoint is not None:
            found = urlsplit(endpoint)
            return [f"{found.scheme}://{found.netloc}", f"{found.scheme}://{parts.netloc}.{found.netloc}"]
        hosts = _HOSTS.get(parts.scheme, ())
        return [f"https://{host.format(bucket=parts.netloc)}" for host in hosts]

    def as_one_url(self) -> str:
        """Return the store as one URL with its endpoint, for a ticket; empty if members reach it by no URL."""
        if not self.origins():
            return ""
        bare, asked = parsed(self.url or "")
        endpoint = self.endpoint or asked.get("endpoint")
        return bare if endpoint is None else f"{bare}?{urlencode({'endpoint': endpoint})}"

    def with_absolute_paths(self) -> StoreSettings:
        """Return a copy whose path is absolute."""
        folder = None if self.url is None else folder_of(self.url)
        return self if folder is None else self.model_copy(update={"url": str(folder.absolute())})

    def open(self, name: str, otherwise: Path) -> Store:
        """Open the store of a run, or the folder `otherwise` if no URL is set. Raises ConfigError or StoreError."""
        if self.url is None:
            return open_store(str(otherwise))
        try:
            return open_store(self.url, self.endpoint, self.region, name)
        except ConfigError as error:
            raise ConfigError(("store", "url"), error.message) from None
