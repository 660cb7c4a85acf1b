"""Checks of what computes: device and memory for the members that start here, and the driver of a GPU."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from hetero_pp.config.member_inputs import devices_of, in_words
from hetero_pp.core.device import accelerators, name_of
from hetero_pp.core.units import format_names
from hetero_pp.program.doctor.finding import Finding, fail, ok, warn
from hetero_pp.program.doctor.subject import CheckedPart, Subject
from hetero_pp.program.launch.this_machine import limits_of

_SHOWN = 4
_NVIDIA = Path("/proc/driver/nvidia/version")
_CUDA_BUILD = "pip install --force-reinstall torch (docs/tutorial_home.md)"


def check_memory(subject: Subject) -> Finding:
    """Check devices and memory as `check` and `launch` do, for each slot that a ticket may take."""
    part = subject.part
    limits = {tuple(names): limits_of(part.spec, names) for names in part.choices}
    final = {names: found for names, found in limits.items() if any(one.is_final for one in found)}
    if final:
        names, found = next(iter(final.items()))
        why = next(one.message for one in found if one.is_final)
        if len(final) == len(limits):
            return fail(why)
        rest = [one for (one,) in limits if (one,) not in final]
        return warn(f"this machine can take {format_names(rest, _SHOWN)}, but not {', '.join(names)}: {why}")
    told = next((one.message for found in limits.values() for one in found), None)
    return ok(f"enough memory; {_devices(part)}") if told is None else warn(told)


def _devices(part: CheckedPart) -> str:
    return in_words({name: name_of(one) for name, one in devices_of(part.spec, part.names).items()}) or "no member here"


@dataclass(frozen=True)
class Gpu:
    """Facts about the GPU of this machine, and about PyTorch's build."""

    built_for: str
    """`CUDA 13.0`, `ROCm 6.4`, or empty for a build that uses neither."""
    has_driver: bool
    """Whether a driver of NVIDIA is installed."""
    names: tuple[str, ...]
    """Accelerators that PyTorch can use."""
    trouble: str = ""
    """PyTorch's warning when it looked for them."""


def check_gpu() -> Finding:
    """Compare the driver of the GPU with PyTorch's build."""
    return verdict(look_for_gpu())


def look_for_gpu() -> Gpu:
    version = torch.version
    built_for = f"CUDA {version.cuda}" if version.cuda else f"ROCm {version.hip}" if version.hip else ""
    has_driver = _NVIDIA.is_file() or shutil.which("nvidia-smi") is not None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        names = tuple(map(name_of, accelerators()))
        if has_driver and built_for and not names:
            torch.cuda.is_available()  # warns of a driver that is too old
    return Gpu(built_for, has_driver, names, " ".join(str(told[0].message).split()) if told else "")


def verdict(gpu: Gpu) -> Finding:
    build = f"torch {torch.__version__}"
    if gpu.names:
        return ok(f"{', '.join(gpu.names)}; {build}, built for {gpu.built_for or 'this machine'}")
    if not gpu.has_driver:
        return ok("found no GPU, so members compute on the CPU")
    if not gpu.built_for:
        return warn(f"found an NVIDIA driver, but {build} is a build without CUDA, so the CPU computes: {_CUDA_BUILD}")
    why = gpu.trouble or "no GPU is visible to this process (CUDA_VISIBLE_DEVICES, or rights to /dev/nvidia*)"
    return warn(f"{build} for {gpu.built_for} finds no usable GPU, so the CPU computes: {why}; update the driver")
