"""Devices that members compute on: what a setting means on this machine, and how people call a device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero_pp.core.errors import ConfigError, OutOfMemory

CPU = torch.device("cpu")


def accelerators() -> list[torch.device]:
    """Return the accelerators of this machine in their order; empty if torch finds none. All are of one kind."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def resolved(setting: str, turn: int = 0) -> torch.device:
    """Return the device that a setting means for the member with the number `turn` among those of this host.

    `auto`, and a kind without a number, take the host's devices in turn. `auto` is the CPU if there are none. Raises
    ConfigError if this machine does not have the device.
    """
    if setting == "cpu":
        return CPU
    there = accelerators()
    kind, _, number = setting.partition(":")
    own = [device for device in there if kind in ("auto", device.type)]
    if number and torch.device(setting) in own:
        return torch.device(setting)
    if own and not number:
        return own[turn % len(own)]
    if setting == "auto":
        return CPU
    if own:
        shared = "`auto` shares them among the members of this host"
        known = f"one of {', '.join(f'`{one}`' for one in own)}, or `auto`: {shared}"
        raise ConfigError(("device",), f"found `{setting}`, expected {known}")
    if setting.startswith("cuda") and not torch.backends.cuda.is_built():
        why = "was built without CUDA"
    else:
        why = f"finds {', '.join(map(str, there))}" if there else "finds no GPU here"
    raise ConfigError(("device",), f"found `{setting}`, expected `auto` or `cpu`: torch {torch.__version__} {why}")


def use(device: torch.device) -> None:
    """Make it the current device of this thread, so that nothing of the member lies on another accelerator."""
    if device.type in ("cuda", "xpu") and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def name_of(device: torch.device) -> str:
    """Return the device and the name of its model, such as `cuda:0 NVIDIA H100 80GB HBM3`, or `cpu`."""
    named = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return str(device) if named is None else f"{device} {named(device)}"


def peak_bytes(device: torch.device) -> int | None:
    """Return the most memory that this process had in use on an accelerator; None if torch does not know it."""
    if device.type == "cpu":
        return None
    try:
        return int(torch.get_device_module(device).max_memory_allocated(device))
    except (AttributeError, AssertionError, RuntimeError):
        return None


@contextmanager
def computing(phase: str, device: torch.device) -> Iterator[None]:
    """Raise OutOfMemory, with the phase and the keys that help, if the device's memory does not suffice for a block."""
    try:
        yield
    except RuntimeError as error:
        told = str(error)
        if not (isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY.search(told)):
            raise
        asked = _ASKED.search(told)
        wanted = f", which needs {asked[1]} more" if asked else ""
        keys = "more `micro_batches`, `recompute: layers`, or `precision: bf16` if it is fp32"
        raise OutOfMemory(f"{device} is out of memory in the {phase}{wanted}; this would need less: {keys}") from None


_NO_MEMORY = re.compile(r"out of memory|can't allocate memory")
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
