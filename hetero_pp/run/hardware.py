"""Hardware catalog, and entries of the user: speed and memory of machines."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import Field

from hetero_pp.config.settings import Bandwidth, Ratio, Settings, Size, Speed
from hetero_pp.core.errors import ConfigError

ACCELERATOR_FLOPS = 5e12
"""Peak operations per second from which hardware is taken for an accelerator: more than CPUs reach."""


class Hardware(Settings):
    """One accelerator, or one machine that computes as one."""

    flops: Speed = Field(gt=0, description="peak dense bf16 (fp32 for a CPU) operations a second")
    mfu: Ratio = Field(0.4, gt=0, le=1, description="share of the peak that training reaches")
    memory: Size = Field(gt=0)
    memory_bandwidth: Bandwidth = Field(gt=0, description="such as `3.35 TB/s`")
    source: str = ""

    @property
    def achieved_flops(self) -> float:
        """Operations per second in training."""
        return self.flops * self.mfu

    @property
    def is_accelerator(self) -> bool:
        """Whether it computes beside a host with a memory of its own; a CPU has one memory for everything."""
        return self.flops >= ACCELERATOR_FLOPS

    @property
    def memory_bytes_per_second(self) -> float:
        return self.memory_bandwidth / 8


def _entry(flops: str, memory: str, memory_bandwidth: str, mfu: float, source: str) -> Hardware:
    return Hardware.model_validate(
        {"flops": flops, "memory": memory, "memory_bandwidth": memory_bandwidth, "mfu": mfu, "source": source}
    )


CATALOG: Mapping[str, Hardware] = {
    "h200": _entry("989 TFLOP/s", "141 GB", "4.8 TB/s", 0.4, "NVIDIA H200 SXM data sheet, without sparsity"),
    "h100": _entry("989 TFLOP/s", "80 GB", "3.35 TB/s", 0.4, "NVIDIA H100 SXM data sheet, without sparsity"),
    "a100": _entry("312 TFLOP/s", "80 GB", "2.039 TB/s", 0.5, "NVIDIA A100 80GB SXM data sheet"),
    "l40s": _entry("362 TFLOP/s", "48 GB", "864 GB/s", 0.35, "NVIDIA L40S data sheet, without sparsity"),
    "rtx-4090": _entry("165 TFLOP/s", "24 GB", "1008 GB/s", 0.4, "NVIDIA Ada white paper, fp32 accumulation"),
    "rtx-3090": _entry("71 TFLOP/s", "24 GB", "936 GB/s", 0.4, "NVIDIA GA102 white paper, fp32 accumulation"),
    "cpu-core": _entry(
        "45 GFLOP/s", "4 GB", "10 GB/s", 0.5, "one core of a 2020s server, fp32; `calibrate` measures yours"
    ),
}
"""Peaks are from the vendors. The MFU is an assumption: what tuned training code reaches at these models' sizes."""

_NO_MODEL = re.compile(r"nvidia|geforce|tesla|gpu|sxm\d*|\d+gb|hbm\d+e?")
"""Words in the name of a device that do not tell its peak."""


def hardware_of(device: str) -> Hardware | None:
    """Return the entry of the catalog for a device as `name_of` calls it; None for a model that it does not have.

    Other words name another model with another peak, such as the one for laptops, or `PCIe` of an H100.
    """
    words = re.findall(r"[a-z0-9]+", device.partition(" ")[2].lower())
    model = "-".join(word for word in words if not _NO_MODEL.fullmatch(word))
    return CATALOG.get("a100" if model == "a100-pcie" else model)  # an A100 computes as fast in either form


ASSUMED = "cpu-core"
"""Hardware that is assumed if none is named."""


def hardware_named(name: str, own: Mapping[str, Hardware], key: tuple[str | int, ...]) -> Hardware:
    """Return an entry of the YAML or of the catalog. Raises ConfigError at `key` that lists both."""
    found = own.get(name) or CATALOG.get(name)
    if found is None:
        known = ", ".join([*own, *CATALOG])
        raise ConfigError(key, f"found `{name}`, expected one of {known}, or an entry under simulate.hardware")
    return found
