"""Devices of the members of a run that start on one host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero_pp.core.device import resolved
from hetero_pp.core.errors import ConfigError
from hetero_pp.run.spec import RunSpec


def devices_of(spec: RunSpec, names: Sequence[str]) -> dict[str, torch.device]:
    """Return the device of each member that starts on this host, in the order of `names`.

    Members that do not name a device share the accelerators in turn. Raises ConfigError for a device that is not there.
    """
    members = [spec.members[name] for name in names if name in spec.members]
    found = {}
    for turn, member in enumerate(members):
        try:
            found[member.name] = resolved(member.device, turn)
        except ConfigError as error:
            raise ConfigError(member.device_key, error.message) from None
    return found
