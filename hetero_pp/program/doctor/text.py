"""Check of the run's text: it can be read, and is the same as that of the run's other members."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from hetero_pp.config.shared import require_data
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_bytes
from hetero_pp.data.corpora import corpus_bytes, documents
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokens import is_encoded, prepare_tokens
from hetero_pp.program.doctor.finding import Finding, NotChecked, fail, ok, warn
from hetero_pp.program.doctor.subject import CheckedPart, Subject

MOST_ENCODED_BYTES = 64e6
"""Bytes of text that are encoded to compare it: a few seconds."""
_SHOWN = 12


def check_text(subject: Subject) -> Finding:
    """Read a document, and compare the digest of the tokens with the run's if both are known. Writes no file."""
    part = subject.part
    members = part.spec.members
    readers = [name for names in part.choices for name in names if name in members and members[name].reads_data]
    if not readers:
        raise NotChecked("no member that starts here reads the text")
    data = part.spec.config.data
    if subject.kind == "ticket":
        try:
            require_data(part.spec.config, readers[0], subject.data)
        except ConfigError as error:
            return fail(error.message) if len(readers) == len(part.choices) else warn(error.message)
    if data.streamed is not None:
        return _of_stream(data)
    try:
        next(documents(data))
    except ConfigError as error:
        return fail(str(part.located(error)))
    size = corpus_bytes(data)
    told = f"{data.corpus} can be read ({format_bytes(size)})"
    expected = subject.answer_ is not None and subject.answer.reply.tokens
    if not expected:
        return ok(told)
    return _compared(subject, part, told, size, str(expected))


def _compared(subject: Subject, part: CheckedPart, told: str, size: int, expected: str) -> Finding:
    data, cache = part.spec.config.data, subject.folder.cache
    if not part.has_tokenizer:
        return ok(f"{told}; not compared with the run's, whose tokenizer comes with `join`")
    if not is_encoded(data, cache) and size > MOST_ENCODED_BYTES:
        return ok(f"{told}; too large to be compared here; `join` compares it with the run's")
    with TemporaryDirectory() as scratch:
        found = prepare_tokens(data, cache if is_encoded(data, cache) else Path(scratch)).digest
    if found == expected:
        return ok(f"{told}, and is the same as the run's")
    differ = f"the sha256 of its tokens begins with {found[:_SHOWN]}, the run's with {expected[:_SHOWN]}"
    return fail(f"{told}, but is another text than the run's: {differ}; give the run's text with --data PATH")


def _of_stream(data: DataSettings) -> Finding:
    if find_spec("datasets") is None:
        return fail(f"{data.corpus} is streamed, which needs a package: pip install 'hetero-pp[datasets]'")
    return warn(f"{data.corpus} is streamed and was not opened here; `hetero-pp check` opens it")
