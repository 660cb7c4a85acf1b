"""Checks of the disk: space for what the run writes, and the folder of temporary files."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_bytes
from hetero_pp.data.corpora import corpus_bytes
from hetero_pp.data.settings import DataSettings
from hetero_pp.program.doctor.finding import Finding, NotChecked, fail, ok, warn
from hetero_pp.program.doctor.subject import CheckedPart, Subject
from hetero_pp.simulator.disk import disk_bytes

LEAST_BYTES = 1e9
"""Free bytes below which a disk counts as full if it is not known what the run writes."""
LEAST_TEMPORARY_BYTES = 50e6

_TOKEN_BYTES = 2
"""Bytes on disk for each byte of text: a token of one byte takes two. Other tokenizers need less."""
_LEFT = 0.1
"""Share of the free space that should be left."""
_MEND = "free space, or choose another folder with --runs"


def check_disk(subject: Subject) -> Finding:
    """Compare what the run writes to its folder with the free space there."""
    folder = _existing(subject.runs.absolute())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return fail(f"{folder}: cannot be written ({error.strerror}): choose another folder with --runs")
    free = shutil.disk_usage(folder).free
    try:
        part = subject.part
    except NotChecked:
        told = f"{format_bytes(free)} are free at {folder}"
        return ok(told) if free >= LEAST_BYTES else warn(f"{told}, which is little for a run: {_MEND}")
    needed = needed_bytes(part)
    shown = ", ".join(f"{purpose} {format_bytes(size)}" for purpose, size in needed.items() if size >= 1)
    total = sum(needed.values())
    told = f"the run writes about {format_bytes(total)} ({shown}) of the {format_bytes(free)} free at {folder}"
    if total > free:
        return fail(f"{told}: {_MEND}")
    return ok(told) if total <= (1 - _LEFT) * free else warn(f"{told}, which is nearly all: {_MEND}")


def needed_bytes(part: CheckedPart) -> dict[str, float]:
    """Return the bytes that the part writes, by purpose. If there are several slots, the largest counts."""
    needed = max((disk_bytes(part.spec, names) for names in part.choices), key=lambda one: sum(one.values()))
    members = [part.spec.members[name] for name in part.names if name in part.spec.members]
    text = _text_bytes(part.spec.config.data) if any(member.reads_data for member in members) else 0
    return needed | {"encoded text": _TOKEN_BYTES * text}


def _text_bytes(settings: DataSettings) -> int:
    """Return the bytes of the corpus; 0 for one that is streamed, or cannot be read (its own check says so)."""
    if settings.streamed is not None:
        return 0
    try:
        return corpus_bytes(settings)
    except (ConfigError, OSError):
        return 0


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


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(one for one in (path, *path.parents) if one.exists())
