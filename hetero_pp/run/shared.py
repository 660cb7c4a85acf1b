"""What a host that joins is told of a run: its configuration, which it makes its own, and the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_pp.data.settings import INSTALLED, is_on_the_hub
from hetero_pp.data.tokenizers import CONFIG, FILE, tokenizer_path
from hetero_pp.errors import ConfigError
from hetero_pp.files import write_whole
from hetero_pp.run.config import RunConfig

MOST_TOKENIZER_BYTES = 6 << 20
"""A message is no larger than 8 MiB; who joins has to bring a larger tokenizer."""


def told_of(config: RunConfig) -> tuple[str, Mapping[str, bytes]]:
    """What of a run its exchange tells who is let in, without a path of its host: the configuration, as JSON, and the
    tokenizer's files by name, if they are small enough.
    """
    found: dict[str, Any] = config.model_dump(mode="json")
    found["model"]["weights"] = None  # the first snapshot has them
    _forget_store(found)
    if not _means_the_same_everywhere(config):
        found["data"]["corpus"] = Path(config.data.corpus).name
    files: dict[str, bytes] = {}
    if config.data.tokenizer != "bytes":
        path = tokenizer_path(config.data)
        found["data"]["tokenizer"] = path.name
        files = {name: path.with_name(name).read_bytes() for name in (FILE, CONFIG) if path.with_name(name).is_file()}
    is_small = sum(map(len, files.values())) <= MOST_TOKENIZER_BYTES
    return json.dumps(found), files if is_small else {}


def _means_the_same_everywhere(config: RunConfig) -> bool:
    """Whether every host can read the corpus by its name."""
    streamed = config.data.streamed
    return config.data.corpus in INSTALLED or (streamed is not None and is_on_the_hub(streamed))


def keep_tokenizer(files: Mapping[str, bytes], folder: Path) -> None:
    """Write what an exchange has told of the tokenizer."""
    for name in (FILE, CONFIG):
        if name in files:
            write_whole(folder / name, files[name])


def kept_tokenizer(folder: Path) -> Path | None:
    """Where that is; None if it told nothing."""
    path = folder / FILE
    return path if path.is_file() else None


def own_configuration(
    told: str, member: str, data: str | None, tokenizer: Path | None, listen: str | None
) -> RunConfig:
    """The run's configuration as this host has it: with where it reads, and where a stage listens if that is told.

    Nothing is kept where the exchange says, only where this host does. Raises ConfigError for one of another version.
    """
    found: dict[str, Any] = json.loads(told)
    _forget_store(found)
    if listen is not None:
        _forget_listen(found, member)
    if data is not None:
        found["data"]["corpus"] = data
    if tokenizer is not None:
        found["data"]["tokenizer"] = str(tokenizer.absolute())
    try:
        return RunConfig.model_validate(found).with_absolute_paths()
    except ValueError as error:
        raise ConfigError(
            (),
            f"the run's configuration does not fit this version of hetero-pp ({error}); install the version "
            "that the run has",
        ) from None


def _forget_store(found: dict[str, Any]) -> None:
    """Where the exchange's host keeps the run: members reach it through the exchange."""
    found["store"], found["states"]["to"] = {}, "folder"


def _forget_listen(found: dict[str, Any], member: str) -> None:
    """Where the configuration has a stage listen that does so elsewhere."""
    replica, _, number = member.rpartition(".")
    for one in found["replicas"]:
        if one["name"] == replica and isinstance(one["stages"], list):
            one["stages"][int(number)]["listen"] = None


def require_data(config: RunConfig, member: str, data: str | None) -> None:
    """Raise ConfigError if a member reads text, and this host was not told where."""
    reads = any(member in (replica.name, replica.members[0]) for replica in config.replicas)
    if reads and data is None and not _means_the_same_everywhere(config):
        raise ConfigError((), f"{member} reads the run's text; give its path on this host with --data PATH")
