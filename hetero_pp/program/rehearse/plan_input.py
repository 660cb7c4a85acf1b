"""Takes from a rehearsal what `plan --measured` uses: the lines that hosts measured, and the costs of compute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hetero_pp.config.lines import LineSettings
from hetero_pp.config.predictions import SimulateSettings
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica, ReplicaSettings, StageSettings
from hetero_pp.core.bounded import read_json_object
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_bits_per_second, format_count

_RATES = TypeAdapter(dict[str, dict[str, float]])


class MeasuredInput:
    """The file that `rehearse` or `serve --rehearse` wrote."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for any other file."""
        self._path = path
        try:
            found = read_json_object(path)
            self._lines = _RATES.validate_python(found["lines"])
            self._members = list(_RATES.validate_python(found["members"]))
            costs: Any = found["costs"]
            self._costs = SimulateSettings.model_validate({key: costs[key] for key in ("hardware", "measured")})
            for rates in self._lines.values():
                LineSettings.model_validate(_shown(rates))
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            reason = f"`{error.args[0]}` is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]
            expected = "expected the rehearsal.json of `hetero-pp rehearse` or `serve --rehearse`"
            raise ConfigError((), f"--measured {path}: found no rehearsal ({reason}), {expected}") from None

    def told(self) -> str:
        """Return a line on what is taken."""
        lines = ", ".join(f"{name} {_both(rates)}" for name, rates in self._lines.items())
        costs = format_count(len(self._costs.measured), "member")
        taken = f"lines of {lines}" if lines else "no lines, because no host joined and measured one"
        return f"Measured by a rehearsal: {taken}; measured costs of {costs}."

    def applied(self, config: RunConfig, layers: int) -> RunConfig:
        """Return the configuration with measured lines and costs.

        Latencies remain as in the YAML. Raises ConfigError for a member of another run, and for one at a site, because
        the line belongs to the site.
        """
        own = {member: replica for replica in config.replicas for member in replica.members}
        if strange := [name for name in self._members if name not in own]:
            raise ConfigError((), f"--measured {self._path}: found {strange[0]}, which is not a member of this run")
        sites = {member: name for name, site in config.sites.items() for member in site.members}
        for name in self._lines:
            if (site := sites.get(name) or sites.get(own[name].name)) is not None:
                raise ConfigError((), f"--measured {self._path}: found a line of {name}, expected one of site {site}")
        kinds = dict(config.lines)
        for name, rates in self._lines.items():
            before = _line_of(own[name], name)
            was = LineSettings() if before is None else config.lines[before]
            kinds[_kind(name)] = was.model_copy(update={"bandwidth": None, **rates})
        replicas = [self._with_lines(replica, layers) for replica in config.replicas]
        simulate = config.simulate
        costs = {
            "hardware": {**simulate.hardware, **self._costs.hardware},
            "measured": {**simulate.measured, **self._costs.measured},
        }
        changed = {"lines": kinds, "replicas": replicas, "simulate": simulate.model_copy(update=costs)}
        return config.model_copy(update=changed)

    def _with_lines(self, replica: ReplicaSettings, layers: int) -> ReplicaSettings:
        measured = [name for name in replica.members if name in self._lines]
        if not measured:
            return replica
        if isinstance(replica, DatacenterReplica):
            return replica.model_copy(update={"line": _kind(replica.name)})
        stages = replica.stages
        if not isinstance(stages, list):
            ranges = replica.layer_ranges(layers)
            stages = [StageSettings(layers=len(ranges[one]), line=replica.line_of(one)) for one in range(len(ranges))]
        named = zip(replica.members, stages, strict=True)
        own = [one.model_copy(update={"line": _kind(name)}) if name in measured else one for name, one in named]
        return replica.model_copy(update={"stages": own})


def _kind(member: str) -> str:
    return f"measured-{member}"


def _line_of(replica: ReplicaSettings, member: str) -> str | None:
    if isinstance(replica, ParticipantsReplica):
        return replica.line_of(replica.members.index(member))
    return replica.line


def _shown(rates: Mapping[str, float]) -> dict[str, str]:
    return {way: f"{rates[way]} bit/s" for way in ("up", "down")}


def _both(rates: Mapping[str, float]) -> str:
    return " and ".join(f"{format_bits_per_second(rates[way])} {way}" for way in ("up", "down"))
