"""Reads the documents of one file: plain text, JSON lines, Parquet, Python sources, and the prose in their docstrings.

A reader yields each document as text, and None for a row whose text is null.
"""

from __future__ import annotations

import ast
import codecs
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_names
from hetero_pp.data.settings import DOCSTRINGS, PROSE, STANDARD_LIBRARY

if TYPE_CHECKING:
    import pyarrow as pa

_KEY, _FIELD_KEY = ("data", "corpus"), ("data", "text_field")
_LEAST_WORDS = 8  # fewest words of a sentence of prose
_NOT_PROSE = re.compile(r"\s|>>>|\.\.|:|[-=~^*+|#]{3}")
"""Start of a line that is not prose: indentation, a Python session, a directive, a field, an underline, or a table."""
_LINES_BETWEEN = 1000  # lines of a file between two reports of progress
_ROWS_AT_ONCE = 1024
_FIELDS_SHOWN = 20
_BEGINNINGS = {
    codecs.BOM_UTF16_LE: "UTF-16: `iconv -f UTF-16 -t UTF-8` converts it",
    codecs.BOM_UTF16_BE: "UTF-16: `iconv -f UTF-16 -t UTF-8` converts it",
    b"\x1f\x8b": "gzip: `gunzip` unpacks it",
    b"\x28\xb5\x2f\xfd": "zstd: `unzstd` unpacks it",
}
"""First bytes of a file -> its likely format, and the command that converts it."""

OnShare = Callable[[float], None]  # progress callback; the argument is the share read so far, from 0 to 1
Reader = Callable[[Path, str, OnShare], Iterator[str | None]]
"""Function (file, text field, progress callback) -> documents; None for each row without text."""


def readers_of(corpus: str) -> dict[str, Reader]:
    """Return the readers of a corpus by the suffix of the file."""
    installed: dict[str, Reader] = {STANDARD_LIBRARY: _source, DOCSTRINGS: _docstrings, PROSE: _prose}
    if corpus in installed:
        return {".py": installed[corpus]}
    return {".txt": _text, ".jsonl": _json_lines, ".parquet": _parquet}


def _source(path: Path, _field: str, _on_share: OnShare) -> Iterator[str]:
    """Yield the text of a source file; nothing if it is not UTF-8, like some tests of the standard library."""
    try:
        yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return


def _docstrings(path: Path, field: str, on_share: OnShare) -> Iterator[str]:
    """Yield the docstrings of a source file as one document each; nothing if this Python cannot parse the file."""
    for source in _source(path, field, on_share):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in the library's own tests
                tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return
        # Statements alone: `ast.walk` would also visit expressions, which takes most of its time.
        pending: list[ast.AST] = [tree]
        while pending:
            node = pending.pop()
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""
            for part in ("body", "orelse", "handlers", "finalbody", "cases"):
                if isinstance(children := getattr(node, part, None), list):
                    pending.extend(children)


def _prose(path: Path, field: str, on_share: OnShare) -> Iterator[str]:
    """Yield the paragraphs of all docstrings of a source file that are whole sentences, as one document.

    A paragraph becomes one line. Code, lists, headings and fragments are left out.
    """
    found = []
    for docstring in _docstrings(path, field, on_share):
        for paragraph in re.split(r"\n\s*\n", docstring):
            lines = paragraph.strip("\n").split("\n")
            if any(_NOT_PROSE.match(line) for line in lines):
                continue
            text = " ".join(line.strip() for line in lines)
            is_whole = text[:1].isupper() and text.endswith((".", "!", "?", ":"))
            if is_whole and len(text.split()) >= _LEAST_WORDS:
                found.append(text)
    yield "\n\n".join(found)


def _text(path: Path, _field: str, _on_share: OnShare) -> Iterator[str]:
    """Yield the whole file, without a byte order mark and with newlines as \\n."""
    try:
        yield path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        with path.open("rb") as lines:
            raise bad_utf8(str(path), lines) from None


def _json_lines(path: Path, field: str, on_share: OnShare) -> Iterator[str | None]:
    """Yield the text field of every line that is not blank."""
    size = path.stat().st_size
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            yield text_of_line(line, f"{path}:{number}", field)
            if number % _LINES_BETWEEN == 0:
                on_share(lines.tell() / size)


def text_of_line(line: str | bytes, where: str, field: str) -> str | None:
    """Return the text field of a line of JSON, or None if it is null. `where` is the FILE:LINE of the errors.

    Raises ConfigError if the line is not a JSON object with text or null in that field.
    """
    try:
        # Like `json.loads` with bytes: half of a surrogate pair passes here and is replaced below.
        decoded = line.decode("utf-8", "surrogatepass") if isinstance(line, bytes) else line
        record = json.loads(decoded.removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise ConfigError(_KEY, f"{where}: {_not_utf8(error.object, error.start)}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(_KEY, f"{where}: found no valid JSON ({error})") from None
    if not isinstance(record, dict):
        found = type(record).__name__
        raise ConfigError(_KEY, f"{where}: found JSON of type {found}, expected an object with text in `{field}`")
    if field not in record:
        raise ConfigError(_FIELD_KEY, f"found `{field}`, expected a field of {where}: {names_of_fields(record)}")
    text = record[field]
    if not isinstance(text, str | None):
        raise ConfigError(_FIELD_KEY, f"found `{field}` of type {type(text).__name__} in {where}, expected text")
    return None if text is None else text.encode("utf-8", "replace").decode()  # JSON can spell half a surrogate pair


def _parquet(path: Path, field: str, on_share: OnShare) -> Iterator[str | None]:
    """Yield the text column, some rows at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            schema, done = file.schema_arrow, 0
            if field not in schema.names:
                columns = names_of_fields(schema.names)
                raise ConfigError(_FIELD_KEY, f"found `{field}`, expected a column of {path}: {columns}")
            if not holds_text(kind := schema.field(field).type):
                raise ConfigError(_FIELD_KEY, f"found `{field}` of type {kind} in {path}, expected text")
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[field]):
                yield from texts_of_column(batch.column(0), str(path), done)
                done += batch.num_rows
                on_share(done / file.metadata.num_rows)
    except pa.ArrowException as error:
        raise ConfigError(_KEY, f"{path}: found no valid parquet ({' '.join(str(error).split())})") from None


def holds_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type can be read as text: strings or bytes of any layout, or nulls only."""
    import pyarrow.types as types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    bytes_ = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    return any(is_one(kind) for is_one in (*texts, *bytes_, types.is_null))


def texts_of_column(column: Any, file: str, rows_before: int) -> Iterator[str | None]:
    """Yield the values of a column for which `holds_text` is true; bytes are decoded as UTF-8.

    `rows_before`: rows of the file before this part of its column. Raises ConfigError that names the row, counted
    from 1, if bytes are not UTF-8.
    """
    import pyarrow as pa

    try:
        values = column.to_pylist()
    except UnicodeDecodeError:  # strings that were written without validation: find the row
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        values = column.cast(kind).cast(pa.large_binary()).to_pylist()
    for row, value in enumerate(values, start=rows_before + 1):
        try:
            yield value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError as error:
            raise ConfigError(_KEY, f"{file}: row {row}: {_not_utf8(value, error.start)}") from None


def bad_utf8(file: str, lines: Iterable[bytes]) -> ConfigError:
    """Return the error that names the first of the file's lines that is not UTF-8."""
    for number, line in enumerate(lines, start=1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            return ConfigError(_KEY, f"{file}:{number}: {_not_utf8(line, error.start)}")
    return ConfigError(_KEY, f"{file}: changed during reading, expected a file that does not change")


def _not_utf8(data: bytes, position: int) -> str:
    hint = next((f"; this is {what}" for start, what in _BEGINNINGS.items() if data.startswith(start)), "")
    return f"found the byte 0x{data[position]:02x}, which is not UTF-8, expected UTF-8 text{hint}"


def names_of_fields(names: Collection[str]) -> str:
    """List the first fields of a file, as an error message shows them."""
    return format_names(names, _FIELDS_SHOWN) or "it has none"
