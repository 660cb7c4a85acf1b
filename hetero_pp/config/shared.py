"""Configuration and tokenizer that the exchange sends to a host that joins, and how the host adopts them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.topology import (
    DatacenterReplica,
    ParticipantsReplica,
    ReplicaSettings,
    StagesSettings,
    untold_deepspeed_key,
)
from hetero_pp.core.bounded import parse_json
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_whole
from hetero_pp.data.settings import INSTALLED, DataSettings, is_on_the_hub
from hetero_pp.data.tokenizers import CONFIG, FILE, tokenizer_path
from hetero_pp.store.settings import StoreSettings

_NOWHERE = "127.0.0.1:0"  # default address of an exchange; a host that joins has no exchange
MOST_TOKENIZER_BYTES = 6 << 20  # Messages are at most 8 MiB. A host that joins has to bring a larger tokenizer itself.


def told_of(config: RunConfig) -> tuple[str, Mapping[str, bytes]]:
    """Return the configuration as JSON, and the tokenizer's files by name, for hosts that are admitted.

    Neither contains a path of this host. The files are left out if they are too large.
    """
    found: dict[str, Any] = config.model_dump(mode="json")
    found["model"]["weights"] = None  # the first run checkpoint has them
    found["store"], found["states"]["to"] = {}, "folder"
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
    """Return whether every host can read the corpus by its name."""
    streamed = config.data.streamed
    return config.data.corpus in INSTALLED or (streamed is not None and is_on_the_hub(streamed))


def keep_tokenizer(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the tokenizer's files that an exchange has sent."""
    for name in (FILE, CONFIG):
        if name in files:
            write_whole(folder / name, files[name])


def kept_tokenizer(folder: Path) -> Path | None:
    """Return the path of the received tokenizer; None if the exchange sent none."""
    path = folder / FILE
    return path if path.is_file() else None


def own_configuration(
    told: str, member: str, data: str | None, tokenizer: Path | None, device: str = "auto"
) -> RunConfig:
    """Return the run's configuration for this host, with its own paths and device.

    An exchange may be hostile. So its configuration sets no path and no address of this host. The store, the initial
    weights and the member's listening address are left out, and DeepSpeed's JSON is checked against a list of keys.
    Only this host's own command decides what is read, written, listened at, or computed on.

    Raises ConfigError for a configuration of another version, and for settings that must not come from an exchange.
    """
    try:
        config = RunConfig.model_validate(parse_json(told))
    except ValueError as error:
        reason = " ".join(str(error).split())
        why = f"does not fit this version of hetero-pp ({reason}); install the version of the run"
        raise ConfigError((), f"the run's configuration {why}") from None
    replicas: list[ReplicaSettings] = []
    for index, replica in enumerate(config.replicas):
        changes: dict[str, Any] = {"device": device} if member in replica.members else {}
        if isinstance(replica, DatacenterReplica) and replica.name == member:
            # what a host accepts only from its own YAML
            own = f"start {member} with `hetero-pp launch --only {member}` and your own YAML"
            if replica.nodes > 1 or replica.rendezvous is not None:
                key = "nodes" if replica.nodes > 1 else "rendezvous"
                found = f"found `{getattr(replica, key)}`, expected one host, because a ticket admits one host"
                raise ConfigError(("replicas", index, key), f"{found}, and the exchange sets no address for it: {own}")
            untold = untold_deepspeed_key(replica.deepspeed)
            if untold is not None:
                expected = "expected only keys without files, addresses or code"
                found = f"found it in the configuration from the exchange, {expected}"
                raise ConfigError(("replicas", index, "deepspeed", *untold), f"{found}: {own}")
        elif changes and isinstance(replica, ParticipantsReplica) and isinstance(replica.stages, StagesSettings):
            changes["stages"] = replica.stages.model_copy(update={"device": None})
        elif changes and isinstance(replica, ParticipantsReplica) and isinstance(replica.stages, list):
            changes["stages"] = [
                stage.model_copy(update={"listen": None, "device": None}) if name == member else stage
                for name, stage in zip(replica.members, replica.stages, strict=True)
            ]
        replicas.append(replica.model_copy(update=changes))
    if tokenizer is None and config.data.tokenizer != "bytes":
        give = "give the path of the run's tokenizer with --tokenizer PATH"
        raise ConfigError((), f"the exchange sent no tokenizer; {give}")
    own_data = config.data.model_dump() | ({} if tokenizer is None else {"tokenizer": str(tokenizer.absolute())})
    if data is not None or not _means_the_same_everywhere(config):
        own_data["corpus"] = Path(config.data.corpus).name if data is None else data
    return config.model_copy(
        update={
            "store": StoreSettings(),
            "states": config.states.model_copy(update={"to": "folder"}),
            "model": config.model.model_copy(update={"weights": None}),
            "exchange": config.exchange.model_copy(
                update={"listen": _NOWHERE, "relay": None, "hosts": [], "insecure": False}
            ),
            "data": DataSettings.model_validate(own_data),
            "replicas": replicas,
        }
    ).with_absolute_paths()


def listen_told(told: str, member: str) -> str | None:
    """Return the address at which the exchange wants a stage to listen, which `own_configuration` leaves out."""
    for replica in RunConfig.model_validate(parse_json(told)).replicas:
        if isinstance(replica, ParticipantsReplica) and member in replica.members:
            return replica.listen_of(replica.members.index(member))
    return None


def require_data(config: RunConfig, member: str, data: str | None) -> None:
    """Raise ConfigError if a member reads text, and this host has no path for it."""
    reads = any(member in (replica.name, replica.members[0]) for replica in config.replicas)
    if reads and data is None and not _means_the_same_everywhere(config):
        raise ConfigError((), f"{member} reads the run's text; give the path of the text on this host with --data PATH")
