"""Checks of this machine: its GPU, memory, disk, files, ports and text, for the part of a run that starts here."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from hetero_pp.config.member_inputs import devices_of, in_words
from hetero_pp.config.shared import require_data
from hetero_pp.core.device import accelerators, name_of
from hetero_pp.core.errors import ConfigError, HeteroPPError
from hetero_pp.core.units import format_bytes, format_count, format_names
from hetero_pp.data.corpora import corpus_bytes, documents
from hetero_pp.data.tokens import is_encoded, prepare_tokens
from hetero_pp.program.check.exchange import (
    check_certificate,
    check_clock,
    check_exchange,
    check_line,
    check_neighbours,
    check_proxy,
    check_relay,
)
from hetero_pp.program.check.findings import Finding, FindingState, NotChecked, check_output, fail, ok, warn
from hetero_pp.program.check.subject import CheckedPart, Subject
from hetero_pp.program.launch.earlier import find_unfinished, held_parts
from hetero_pp.program.launch.hosts import fixed_addresses, meeting_places
from hetero_pp.program.launch.job import require_open_files
from hetero_pp.program.launch.this_machine import limits_of
from hetero_pp.simulator.memory import disk_bytes

SHOWN = 4  # most names in a line
LEAST_BYTES = 1e9  # free bytes below which a disk counts as full if it is not known what the run writes
LEAST_TEMPORARY_BYTES = 50e6
MOST_ENCODED_BYTES = 64e6  # bytes of text that are encoded to compare it: a few seconds
_TOKEN_BYTES = 2  # Bytes on disk for each byte of text: a token of one byte takes two. Other tokenizers need less.
_LEFT = 0.1  # share of the free space that should be left
_NVIDIA = Path("/proc/driver/nvidia/version")
_CUDA_BUILD = "pip install --force-reinstall torch (docs/tutorial_home.md)"


def checks_of(subject: Subject) -> dict[str, Callable[[], Finding]]:
    """Return all checks by name, in the order in which they are printed."""
    of_subject = {
        "settings": check_settings,
        "memory": check_memory,
        "disk": check_disk,
        "open files": check_open_files,
        "text": check_text,
        "ports": check_ports,
        "leftovers": check_leftovers,
        "proxy": check_proxy,
        "exchange": check_exchange,
        "clock": check_clock,
        "neighbours": check_neighbours,
        "relay": check_relay,
        "line": check_line,
        "certificate": check_certificate,
    }
    of_machine = {"gpu": check_gpu, "temporary": check_temporary, "output": check_output}
    return {**of_machine, **{name: partial(_checked, check, subject) for name, check in of_subject.items()}}


def _checked(check: Callable[[Subject], Finding], subject: Subject) -> Finding:
    """Make a check. A YAML may be for larger machines, so what is too small here is a warning."""
    if subject.kind != "yaml" or check not in (check_memory, check_disk, check_open_files):
        return check(subject)
    try:
        found = check(subject)
    except (HeteroPPError, OSError) as error:
        return warn(str(error))
    return warn(found.line) if found.state is FindingState.FAIL else found


# ---- the machine ----


@dataclass(frozen=True)
class Gpu:
    """Facts about the GPU of this machine, and about PyTorch's build."""

    built_for: str  # `CUDA 13.0`, `ROCm 6.4`, or empty for a build that uses neither
    has_driver: bool  # whether a driver of NVIDIA is installed
    names: tuple[str, ...]  # accelerators that PyTorch can use
    trouble: str = ""  # PyTorch's warning when it looked for them


def check_gpu() -> Finding:
    """Compare the driver of the GPU with PyTorch's build."""
    version = torch.version
    built_for = f"CUDA {version.cuda}" if version.cuda else f"ROCm {version.hip}" if version.hip else ""
    has_driver = _NVIDIA.is_file() or shutil.which("nvidia-smi") is not None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        names = tuple(map(name_of, accelerators()))
        if has_driver and built_for and not names:
            torch.cuda.is_available()  # warns of a driver that is too old
    return gpu_verdict(Gpu(built_for, has_driver, names, " ".join(str(told[0].message).split()) if told else ""))


def gpu_verdict(gpu: Gpu) -> Finding:
    build = f"torch {torch.__version__}"
    if gpu.names:
        return ok(f"{', '.join(gpu.names)}; {build}, built for {gpu.built_for or 'this machine'}")
    if not gpu.has_driver:
        return ok("found no GPU, so members compute on the CPU")
    if not gpu.built_for:
        return warn(f"found an NVIDIA driver, but {build} is a build without CUDA, so the CPU computes: {_CUDA_BUILD}")
    why = gpu.trouble or "no GPU is visible to this process (CUDA_VISIBLE_DEVICES, or rights to /dev/nvidia*)"
    return warn(f"{build} for {gpu.built_for} finds no usable GPU, so the CPU computes: {why}; update the driver")


def check_temporary() -> Finding:
    """Check that temporary files can be written, and that there is room for them."""
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
            file.flush()
    except OSError as error:
        return fail(f"{folder}: cannot be written ({error.strerror}): set TMPDIR to a folder with free space")
    free = shutil.disk_usage(folder).free
    told = f"{format_bytes(free)} are free at {folder}"
    return ok(told) if free >= LEAST_TEMPORARY_BYTES else warn(f"{told}: set TMPDIR to a folder with free space")


# ---- what starts here ----


def check_settings(subject: Subject) -> Finding:
    """Check the settings as `launch` does. Raises their errors."""
    if subject.problem:
        return fail(subject.problem)
    if subject.part_ is None:
        raise NotChecked("no YAML, ticket or run was given")
    if subject.kind == "ticket" and subject.answer.reply.refusal:
        return fail(subject.answer.reply.refusal)
    part = subject.part_.result()
    if subject.kind == "ticket":
        return ok(f"{subject.told}: open now: {format_names([slot for (slot,) in part.choices], SHOWN)}")
    return ok(f"{subject.told}, starts {format_names(part.names, SHOWN)} here")


def check_memory(subject: Subject) -> Finding:
    """Check devices and memory as `launch` does, for each slot that a ticket may take."""
    part = subject.part
    if part.spec.config.rehearsal is not None:
        raise NotChecked("a rehearsal computes nothing")
    limits = {tuple(names): limits_of(part.spec, names) for names in part.choices}
    final = {names: found for names, found in limits.items() if any(one.is_final for one in found)}
    if final:
        names, found = next(iter(final.items()))
        why = "; ".join(str(part.located(ConfigError(one.key, one.message))) for one in found)
        if len(final) == len(limits):
            return fail(why)
        rest = [one for (one,) in limits if (one,) not in final]
        return warn(f"this machine can take {format_names(rest, SHOWN)}, but not {', '.join(names)}: {why}")
    if told := list(dict.fromkeys(one.message for found in limits.values() for one in found)):
        return warn("; ".join(told))
    devices = {name: name_of(one) for name, one in devices_of(part.spec, part.names).items()}
    return ok(f"enough memory; {in_words(devices) or 'no member here'}")


def check_disk(subject: Subject) -> Finding:
    """Compare what the run writes to its folder with the free space there."""
    path = subject.runs.absolute()
    folder, mend = next(one for one in (path, *path.parents) if one.exists()), "choose another folder with --runs"
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return fail(f"{folder}: cannot be written ({error.strerror}): {mend}")
    free = shutil.disk_usage(folder).free
    try:
        needed = needed_bytes(subject.part)
    except NotChecked:
        told = f"{format_bytes(free)} are free at {folder}"
        little = f"{told}, which is little for a run: free space, or {mend}"
        return ok(told) if free >= LEAST_BYTES else warn(little)
    shown = ", ".join(f"{purpose} {format_bytes(size)}" for purpose, size in needed.items() if size >= 1)
    total = sum(needed.values())
    told = f"the run writes about {format_bytes(total)} ({shown}) of the {format_bytes(free)} free at {folder}"
    if total > free:
        return fail(f"{told}: free space, or {mend}")
    return ok(told) if total <= (1 - _LEFT) * free else warn(f"{told}, which is nearly all: free space, or {mend}")


def needed_bytes(part: CheckedPart) -> dict[str, float]:
    """Return the bytes that the part writes, by purpose. If there are several slots, the largest counts."""
    needed = max((disk_bytes(part.spec, names) for names in part.choices), key=lambda one: sum(one.values()))
    settings, text = part.spec.config.data, 0
    members = [part.spec.members[name] for name in part.names if name in part.spec.members]
    if settings.streamed is None and any(member.reads_data for member in members):
        try:
            text = corpus_bytes(settings)
        except (ConfigError, OSError):
            text = 0  # the check of the text says so
    return needed | {"encoded text": _TOKEN_BYTES * text}


def check_open_files(subject: Subject) -> Finding:
    """Check that the launcher may open enough files. Raises ConfigError as `launch` does."""
    processes = 1 if subject.part_ is None else len(subject.part.names)
    require_open_files(processes)
    return ok(f"enough for {format_count(processes, 'process', 'processes')}")


def check_text(subject: Subject) -> Finding:
    """Read a document, and compare the digest of the tokens with the run's if both are known. Writes no file."""
    part = subject.part
    config, members = part.spec.config, part.spec.members
    readers = [name for names in part.choices for name in names if name in members and members[name].reads_data]
    if not readers:
        raise NotChecked("no member that starts here reads the text")
    if subject.prepared is not None:
        raise NotChecked("the text was read before the checks")
    data, cache = config.data, subject.folder.cache
    if subject.kind == "ticket":
        try:
            require_data(config, readers[0], subject.data)
        except ConfigError as error:
            return fail(error.message) if len(readers) == len(part.choices) else warn(error.message)
    if data.streamed is not None and find_spec("datasets") is None:
        return fail(f"{data.corpus} is streamed, which needs a package: pip install 'hetero-pp[datasets]'")
    if data.streamed is not None:
        return warn(f"{data.corpus} is streamed and was not opened here")
    try:
        next(documents(data))
    except ConfigError as error:
        return fail(str(part.located(error)))
    size = corpus_bytes(data)
    told = f"{data.corpus} can be read ({format_bytes(size)})"
    expected = str(subject.answer.reply.tokens) if subject.answer_ is not None else ""
    if not expected:
        return ok(told)
    if not part.has_tokenizer:
        return ok(f"{told}; not compared with the run's, whose tokenizer comes with `join`")
    if not is_encoded(data, cache) and size > MOST_ENCODED_BYTES:
        return ok(f"{told}; too large to be compared here; `join` compares it with the run's")
    with tempfile.TemporaryDirectory() as scratch:
        found = prepare_tokens(data, cache if is_encoded(data, cache) else Path(scratch)).digest
    if found == expected:
        return ok(f"{told}, and is the same as the run's")
    differ = f"the sha256 of its tokens begins with {found[:12]}, the run's with {expected[:12]}"
    return fail(f"{told}, but is another text than the run's: {differ}; give the run's text with --data PATH")


def check_ports(subject: Subject) -> Finding:
    """Try to listen at each fixed address, as `launch` does."""
    part = subject.part
    running = held_parts(subject.runs.absolute(), subject.name) if subject.kind == "run" else []
    listening = [one for one in fixed_addresses(part.spec.config) if one.member in part.names and one.is_of_this_host]
    for one in listening:
        if one.member in running:
            continue
        try:
            one.try_to_listen()
        except ConfigError as error:
            return fail(str(part.located(error)))
    places = [one for one in meeting_places(part.spec.config) if one.member in part.names and one.is_of_this_host]
    for one in places:
        try:
            one.try_to_listen()
        except ConfigError as error:
            return warn(f"{part.located(error)}; if this is another node of {one.member}, all is well")
    listening += places
    if not listening:
        return ok("no fixed port on this host; free ones are chosen")
    shown = [f"{one.address} ({'used by this run' if one.member in running else 'free'})" for one in listening]
    return ok(", ".join(shown))


def check_leftovers(subject: Subject) -> Finding:
    """Look for another launch of the run, for processes without a launcher, and for an unfinished run."""
    if not subject.name:
        raise NotChecked("needs a YAML, a ticket or a run")
    runs, folder = subject.runs.absolute(), subject.folder.path
    held = held_parts(runs, subject.name)
    if held:
        told = f"{folder}: a launch on this host runs {format_names(held, SHOWN)}"
        if subject.kind == "yaml":
            return fail(f"{told}; wait until it has ended, or give this run another `name`")
        return ok(told)
    left = processes_in(folder)
    if left:
        shown = ", ".join(f"{number} ({name})" for number, name in left.items())
        mend = f"kill {' '.join(map(str, left))}"
        return warn(f"{folder}: processes without a launcher use its files: {shown}; end them: {mend}")
    found = find_unfinished(subject.part.spec.config, subject.runs) if subject.kind == "yaml" else None
    if found is not None:
        return warn(f"{found}; `launch --resume` continues it, and `launch --new` moves it aside")
    return ok(f"no other launch and no process uses {folder}")


def processes_in(folder: Path) -> Mapping[int, str]:
    """Return the processes of this user that have files below a folder open: id -> name."""
    found = {}
    for process in psutil.process_iter(["name"]):
        try:
            paths = [Path(one.path) for one in process.open_files()]
            only_reads = "view" in process.cmdline()
        except (psutil.Error, OSError):
            continue  # of another user, or it has ended
        if any(path.is_relative_to(folder) for path in paths) and not only_reads:
            found[process.pid] = process.info["name"] or "?"
    return found
