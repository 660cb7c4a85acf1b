"""Texts of every kind of corpus, and the error of a corpus that cannot be read."""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hetero_pp.core.errors import ConfigError
from hetero_pp.data.corpora import PACKAGES, documents, fingerprint
from hetero_pp.data.settings import DataSettings


def read(corpus: Path | str, **values: object) -> list[str]:
    return list(documents(DataSettings(corpus=str(corpus), **values)))


def write_parquet(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_a_folder_is_read_recursively_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "b.txt").write_text("second\nline")
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n\n{"text": "line"}\n')
    write_parquet(tmp_path / "z.parquet", text=["x", "y", None, "z"], other=[1, 2, 3, 4])
    (tmp_path / "ignored.md").write_text("no")
    (tmp_path / "blank.txt").write_text(" \n")
    assert read(tmp_path) == ["first", "line", "second\nline", "x", "y", "z"]


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}')
    assert read(path) == ["a?b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "data.corpus: FILE:3: found no valid JSON ("),
        ("3", "data.corpus: FILE:3: found JSON of type int, expected an object with text in `text`"),
        ("[" * 100_000, "data.corpus: FILE:3: found no valid JSON ("),
        ('{"txt": "a", "url": ""}', "data.text_field: found `text`, expected a field of FILE:3: txt, url"),
        ("{}", "data.text_field: found `text`, expected a field of FILE:3: it has none"),
        ('{"text": 1}', "data.text_field: found `text` of type int in FILE:3, expected text"),
        ("\xff", "data.corpus: FILE:3: found the byte 0xff, which is not UTF-8, expected UTF-8 text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value).startswith(message.replace("FILE", str(path)))
    assert "\n" not in caught.value.message


def test_marks_of_byte_order_and_ends_of_lines(tmp_path: Path) -> None:
    """A byte order mark may also stand within a file that was joined from several."""
    line = b'\xef\xbb\xbf{"text": "a"}\r\n'
    (tmp_path / "a.jsonl").write_bytes(2 * line)
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert read(tmp_path) == ["a", "a", "one\ntwo"]


def test_a_corpus_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.corpus: found `nowhere`, expected `standard-library`, `docstrings`"):
        read("nowhere")
    with pytest.raises(ConfigError, match=r"found no usable file at .*expected \.txt, \.jsonl, \.parquet"):
        read(tmp_path)
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(ConfigError, match=r"found no usable file at .*a\.md"):
        read(tmp_path / "a.md")
    (tmp_path / "a.txt").write_text("\n")
    with pytest.raises(ConfigError, match=r"found no text in .*expected at least one document"):
        read(tmp_path)


def test_a_text_file_that_is_not_text(tmp_path: Path) -> None:
    bad = {
        b"abc\n\ncaf\xe9": r"a\.txt:3: found the byte 0xe9, which is not UTF-8, expected UTF-8 text$",
        "a".encode("utf-16"): r"a\.txt:1: .*; this is UTF-16: `iconv -f UTF-16 -t UTF-8` converts it$",
        gzip.compress(b"a"): r"a\.txt:1: .*; this is gzip: `gunzip` unpacks it$",
    }
    for content, message in bad.items():
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read(tmp_path)


@pytest.mark.parametrize("kind", ["binary", "string", "dictionary"])
def test_bytes_of_parquet_that_are_not_text_are_named(tmp_path: Path, kind: str) -> None:
    """Rows are counted from the start of the file, not of the chunk that is read at once."""
    column: pa.Array = pa.array([b"a"] * 3000 + [b"\xff"])
    if kind != "binary":  # some writers do not check strings
        column = pa.Array.from_buffers(pa.string(), len(column), column.buffers())
    column = column.dictionary_encode() if kind == "dictionary" else column
    path = write_parquet(tmp_path / "a.parquet", text=column)
    with pytest.raises(ConfigError, match=r"a\.parquet: row 3001: found the byte 0xff, which is not UTF-8"):
        read(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "b.parquet"])
def test_a_file_of_nulls_only(tmp_path: Path, name: str) -> None:
    """This holds whether its column has a type or not, and although another file has text."""
    if name == "a.jsonl":
        (tmp_path / name).write_text('{"text": null}\n' * 2)
    else:
        write_parquet(tmp_path / name, text=pa.array([None, None], pa.string() if name == "a.parquet" else pa.null()))
    (tmp_path / "c.txt").write_text("text")
    with pytest.raises(ConfigError, match=rf"{name}: found only null in `text` \(2 rows\), expected text"):
        read(tmp_path)


def test_a_parquet_file_without_the_column(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=["x"], n=[1])
    for field, message in (
        ("body", "found `body`, expected a column of .*: text, n"),
        ("n", "of type int64"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            read(path, text_field=field)
        assert caught.value.key == ("data", "text_field")
    path.write_bytes(b"not parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet: found no valid parquet"):
        read(path)


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    os.utime(path, ns=(1, 1))
    settings = DataSettings(corpus=str(tmp_path))
    first = fingerprint(settings)
    assert fingerprint(settings) == first
    os.utime(path, ns=(1, 2))
    touched, changed = fingerprint(settings), path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == changed:  # the clock of files ticks every few milliseconds
        path.write_text("two")  # in place, of the same size, and set back to the same time
        os.utime(path, ns=(1, 2))
    rewritten = fingerprint(settings)
    (tmp_path / "b.txt").write_text("two")
    assert len({first, touched, rewritten, fingerprint(settings)}) == 4


def test_the_standard_library_is_large_and_holds_no_installed_package() -> None:
    texts = read("standard-library")
    assert sum(map(len, texts)) > 10e6
    assert not any("class DataSettings(Settings)" in text for text in texts)


SOURCE = '''"""Module."""
if True:
    class A:
        """Class."""
        async def f(self):
            "Method."
try:
    pass
except OSError:
    def g():
        """
        Bad \\d escape.

        More.
        """
'''


def test_docstrings_come_from_every_kind_of_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "b.py").write_text("def broken(:")
    (tmp_path / "c.py").write_bytes(b'"""\xff"""')
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "d.py").write_text('"""Not standard."""')
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert sorted(read("docstrings")) == ["Bad \\d escape.\n\nMore.", "Class.", "Method.", "Module."]
    assert len(read("standard-library")) == 2


MANUAL = """Adds one. It goes on over
two lines, and has words enough.

    An indented paragraph is an example, whatever it says of itself.

Parameters
----------
x : int
    The number that is added to, with words enough.

This one does not end

Too short.

>>> print(1) is a session, not a sentence, in its way.

All of this is said in one more sentence:
"""


def test_prose_is_the_sentences_of_docstrings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file gives one document, and no module is imported."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("1 / 0\n")
    (tmp_path / "torch" / "a.py").write_text(f'def f():\n    """{MANUAL}"""\n' + '"""Too short."""')
    (tmp_path / "numpy" / "b.py").write_text("def broken(:")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr("sys.modules", {name: one for name, one in sys.modules.items() if name not in PACKAGES})
    [text] = read("prose")
    first = "Adds one. It goes on over two lines, and has words enough."
    assert text == f"{first}\n\nAll of this is said in one more sentence:"
    shutil.rmtree(tmp_path / "sympy")
    with pytest.raises(ConfigError, match="found no package sympy, whose docstrings `prose` reads"):
        read("prose")
