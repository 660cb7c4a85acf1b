"""`hetero-pp calibrate`: measure what each member of a YAML costs on this machine, and the machine's speed."""

from __future__ import annotations

from pathlib import Path

import torch
from ruamel.yaml import YAML

from hetero_pp.config.overrides import Override
from hetero_pp.config.predictions import MeasuredCost
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import whole
from hetero_pp.core.units import format_count, format_seconds
from hetero_pp.core.yaml_reader import read_yaml, yaml_complaint
from hetero_pp.program.launch.host_memory import host_memory
from hetero_pp.program.report.output import say, standard_output
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.simulator.costs import forward_flops, part_of
from replica_groups.member.measure import measure_all, median_seconds


def calibrate(path: Path, overrides: list[str], write: Path | None) -> None:
    """Measure every member, print the costs, and write a YAML that `simulate --calibration` reads."""
    spec = spec_of(ConfigFile(path, overrides))
    torch.set_num_threads(spec.config.threads)
    measured = dict(measure_all(spec))
    console = standard_output()
    names = list(MeasuredCost.model_fields)
    table = PlainTable(["member"], names)
    operations = seconds = 0.0  # of forward and backward, over all members
    for member, cost in measured.items():
        table.add_row(member, *(format_seconds(getattr(cost, name)) for name in names))
        replica, part = spec.members[member].replica, part_of(spec, spec.members[member])
        rows, length = replica.batch_size // replica.micro_batches, spec.config.data.sequence_length
        operations += 3 * forward_flops(spec.shape, part, rows, length)
        seconds += cost.forward + cost.backward
    console.print(table)
    speed = operations / seconds
    threads = format_count(spec.config.threads, "thread")
    say(console, f"{speed / 1e9:.3g} GFLOP/s reached in forward and backward, with {threads}.")
    if write is not None:
        costs = {member: cost.model_dump(mode="json") for member, cost in measured.items()}
        copied = torch.empty(1 << 25)
        other = torch.empty_like(copied)
        bandwidth = 2 * copied.numel() * copied.element_size() / median_seconds(lambda: other.copy_(copied))
        machine = {
            "flops": f"{speed / 1e9:.4g} GFLOP/s",
            "mfu": 1.0,
            "memory": f"{host_memory().total / 1e9:.4g} GB",
            "memory_bandwidth": f"{bandwidth / 1e9:.4g} GB/s",
            "source": "measured by hetero-pp calibrate",
        }
        with whole(write) as new, new.open("w", encoding="utf-8") as file:
            YAML().dump({"hardware": {"this-machine": machine}, "measured": costs}, file)
        say(console, f"written to {write}", style="dim")


def load_calibration(path: Path) -> dict[str, object]:
    """Return the content of a file that `calibrate` wrote, for the `simulate` section.

    Raises ConfigError if the file is anything else.
    """
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        raise ConfigError((), yaml_complaint(path, error)) from None
    if not isinstance(content, dict) or set(content) != {"hardware", "measured"}:
        expected = "expected the output of `hetero-pp calibrate --write`, with `hardware` and `measured`"
        raise ConfigError((), f"{path}: {expected}")
    return content


def calibrated(path: Path | None) -> list[Override]:
    """Return what the file of `--calibration` sets in the section `simulate`; nothing without a file."""
    measured = {} if path is None else load_calibration(path)
    return [Override(("simulate", key), value, f"--calibration {path}") for key, value in measured.items()]
