"""Devices of the members of a run that start on one host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hetero_pp.core.device import CPU, resolved
from hetero_pp.core.errors import ConfigError
from hetero_pp.model.precision import compute_dtype
from hetero_pp.run.alike import range_of
from hetero_pp.run.spec import RunSpec


def devices_of(spec: RunSpec, names: Sequence[str]) -> dict[str, torch.device]:
    """Return the device of each member that starts on this host, in the order of `names`.

    Members that do not name a device share the accelerators in turn. Raises ConfigError for a device that is not there
    or lacks the member's precision. A rehearsal needs none.
    """
    members = [spec.members[name] for name in names if name in spec.members]
    if spec.config.rehearsal is not None:
        return {member.name: CPU for member in members}
    found = {}
    for turn, member in enumerate(members):
        try:
            found[member.name] = resolved(member.device, turn)
        except ConfigError as error:
            raise ConfigError(member.device_key, error.message) from None
        if member.replica.precision == "auto":
            continue
        try:
            compute_dtype(member.replica.precision, found[member.name])
        except ConfigError as error:
            raise ConfigError(("replicas", member.replica_index, *error.key), error.message) from None
    return found


def in_words(devices: Mapping[str, str]) -> str:
    """Return the members and their devices in words, such as `dc on cuda:0; home.0 .. home.3 on cpu`."""
    members: dict[str, dict[str, list[str]]] = {}
    for member, device in devices.items():
        members.setdefault(device, {}).setdefault(member.partition(".")[0], []).append(member)
    return "; ".join(
        f"{range_of([range_of(stages) for stages in same.values()])} on {device}" for device, same in members.items()
    )
