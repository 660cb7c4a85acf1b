"""Corpora: what `data.corpus` names, as a stream of documents and as a quick fingerprint."""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from hetero_pp.data.prose import package_folders, prose_of
from hetero_pp.data.settings import DOCSTRINGS, INSTALLED, PROSE, STANDARD_LIBRARY, DataSettings
from hetero_pp.errors import ConfigError

_KEY = ("data", "corpus")
_LINES_BETWEEN = 1000
"""Lines of a file after which it is told how far its reading is."""
_NOT_STANDARD = {"site-packages", "dist-packages", "__pycache__"}

OnShare = Callable[[float], None]
"""(share that was read, from 0 to 1)"""
Reader = Callable[[Path, str, OnShare], Iterator[str]]
"""(file, text field, what to tell how far it is) -> its documents."""


def documents(settings: DataSettings, on_share: OnShare = lambda _: None) -> Iterator[str]:
    """Every document of the corpus that is not blank, file by file in the order of their names."""
    found = False
    for text in _documents_of(_files(settings), settings, on_share):
        found = True
        yield text
    if not found:
        raise ConfigError(_KEY, f"found no text in `{settings.corpus}`, expected at least one document")


def sample(settings: DataSettings, size: int) -> tuple[list[str], float]:
    """Documents of some files, spread evenly over all, and which share of the corpus they are.

    They are about `size` bytes of files, or all if there are fewer; of one large file they are the first.
    """
    files = _files(settings)
    whole = _bytes_of(files)
    some = files[:: max(1, whole // size)]
    part = _bytes_of(some) / whole
    texts: list[str] = []
    read = [(0, 0.0)]
    """How many texts there were at a share of these files."""
    for text in _documents_of(some, settings, lambda share: read.append((len(texts), share))):
        if read[-1][1] * part * whole >= size:
            break
        texts.append(text)
    count, share = read[-1]
    return texts[:count], share * part


def _documents_of(files: Sequence[Path], settings: DataSettings, on_share: OnShare) -> Iterator[str]:
    """The documents of files that are not blank; `on_share` is told between documents."""
    readers = _readers(settings)
    before, whole = 0, _bytes_of(files)
    for path in files:
        size = path.stat().st_size
        within = partial(_within, on_share, before / whole, size / whole)
        yield from (text for text in readers[path.suffix](path, settings.text_field, within) if text.strip())
        before += size
        on_share(before / whole)


def _bytes_of(files: Sequence[Path]) -> int:
    return max(1, sum(path.stat().st_size for path in files))


def _within(on_share: OnShare, before: float, part: float, share: float) -> None:
    on_share(before + part * share)


def fingerprint(settings: DataSettings) -> str:
    """A digest of names, sizes and modification times: did the corpus change, told without reading it."""
    listing = [(str(path), (status := path.stat()).st_size, status.st_mtime_ns) for path in _files(settings)]
    is_docstrings = settings.corpus == DOCSTRINGS
    return hashlib.sha256(json.dumps([is_docstrings, settings.text_field, listing]).encode()).hexdigest()


def _files(settings: DataSettings) -> list[Path]:
    """The files of the corpus, sorted."""
    corpus, suffixes = settings.corpus, _readers(settings).keys()
    if settings.streamed is not None:
        raise ConfigError(
            _KEY, f"found `{corpus}`, expected a corpus that is not streamed: this one is read as a whole"
        )
    if corpus == PROSE:
        return sorted(path for folder in package_folders() for path in _below(folder, set()) if path.suffix in suffixes)
    is_library = corpus in INSTALLED
    root = Path(sysconfig.get_path("stdlib") if is_library else corpus).expanduser().resolve()
    if not root.exists():
        choices = f"{', '.join(f'`{name}`' for name in INSTALLED)} or a path that exists"
        raise ConfigError(_KEY, f"found `{corpus}`, expected {choices}")
    found = _below(root, _NOT_STANDARD if is_library else set()) if root.is_dir() else [root]
    files = [path for path in found if path.suffix in suffixes]
    if not files:
        raise ConfigError(_KEY, f"found no usable file at `{root}`, expected {', '.join(suffixes)}")
    return sorted(files)


def _below(folder: Path, skip: set[str]) -> Iterator[Path]:
    """The files below a folder; folders named in `skip` are not entered."""
    for path in folder.iterdir():
        if path.is_dir():
            if path.name not in skip:
                yield from _below(path, skip)
        elif path.is_file():
            yield path


def _readers(settings: DataSettings) -> dict[str, Reader]:
    """Suffix of a file -> what reads it."""
    if settings.corpus == STANDARD_LIBRARY:
        return {".py": _source}
    if settings.corpus == DOCSTRINGS:
        return {".py": _docstrings}
    if settings.corpus == PROSE:
        return {".py": _prose}
    return {".txt": _text, ".jsonl": _json_lines, ".parquet": _parquet}


def _source(path: Path, _field: str, _on_share: OnShare) -> Iterator[str]:
    """The text of a source file; nothing if it is not UTF-8, as some of the library's own tests are not."""
    try:
        yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return


def _docstrings(path: Path, field: str, on_share: OnShare) -> Iterator[str]:
    """The docstrings of a source file, one a document; nothing if this Python cannot parse it."""
    for source in _source(path, field, on_share):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in the library's own tests
                tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return
        for node in _statements(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def _prose(path: Path, field: str, on_share: OnShare) -> Iterator[str]:
    """The sentences of all docstrings of a source file as one document."""
    texts = (prose_of(docstring) for docstring in _docstrings(path, field, on_share))
    yield "\n\n".join(text for text in texts if text)


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """The module and every statement in it; `ast.walk` would spend most of its time inside expressions."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            children = getattr(node, field, None)
            if isinstance(children, list):
                pending.extend(children)


def _text(path: Path, _field: str, _on_share: OnShare) -> Iterator[str]:
    try:
        yield path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(_KEY, f"{path}: found a byte at {error.start} that is not UTF-8, expected text") from None


def _json_lines(path: Path, field: str, on_share: OnShare) -> Iterator[str]:
    """The text field of every line; a line that is not an object with that field is an error."""
    size = path.stat().st_size
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            yield text_of_line(line, f"{path}:{number}", field)
            if number % _LINES_BETWEEN == 0:
                on_share(lines.tell() / size)


def text_of_line(line: str | bytes, where: str, field: str) -> str:
    """The text field of a line of JSON; `where` says in errors which line. Raises ConfigError if there is none."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(_KEY, f"{where}: found no valid JSON ({error})") from None
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        found = f"`{field}` of type {type(text).__name__}" if isinstance(record, dict) else "no object"
        raise ConfigError(_KEY, f"{where}: found {found}, expected an object with text in `{field}`")
    return text.encode("utf-8", "replace").decode()  # JSON can spell half of a surrogate pair


def _parquet(path: Path, field: str, on_share: OnShare) -> Iterator[str]:
    """The text column, some rows at a time; nulls are skipped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ConfigError(_KEY, f"{path}: found no valid parquet ({error})") from None
    with file:
        schema = file.schema_arrow
        if field not in schema.names:
            raise ConfigError(
                ("data", "text_field"),
                f"found `{field}`, expected a column of {path}: {', '.join(schema.names)}",
            )
        kind = schema.field(field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ConfigError(("data", "text_field"), f"found `{field}` of type {kind} in {path}, expected text")
        done = 0
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)
            done += batch.num_rows
            on_share(done / file.metadata.num_rows)
