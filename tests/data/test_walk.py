"""Files of a corpus folder that are read: each real file once, no hidden file, and nothing endless."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetero_pp.core.errors import ConfigError
from hetero_pp.data.corpora import documents, list_corpus, list_files, skipped_files
from hetero_pp.data.settings import DataSettings
from hetero_pp.program.cli import app

YAML = """
name: messy
model: {width: 16, heads: 2, feed_forward: 16, layers: 1}
data: {corpus: CORPUS, sequence_length: 16, validation_share: 0.2, validation_sequences: 4}
inner: {steps: 1, warmup_steps: 0}
outer: {rounds: 1}
replicas: [{name: dc, kind: datacenter, batch_size: 2, device: cpu}]
"""


def read(corpus: Path) -> list[str]:
    return list(documents(DataSettings(corpus=str(corpus))))


def said(corpus: Path) -> str:
    settings = DataSettings(corpus=str(corpus))
    return skipped_files(settings, list_corpus(settings))


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    """Return a folder with two files, links to them and two loops, hidden files, and things that are no text files."""
    folder = tmp_path / "messy"
    for name in ("b", ".git", ".ipynb_checkpoints"):
        (folder / name).mkdir(parents=True)
        (folder / name / "b.txt").write_text(f"of {name}")
    (folder / "c.txt").write_text("of c")
    (folder / "._c.txt").write_text("hidden")
    (folder / ".DS_Store").write_text("no text")
    (folder / "b" / "up").symlink_to("..")
    (folder / "b" / "outside").symlink_to(tmp_path)
    (folder / "itself").symlink_to(".")
    (folder / "again").symlink_to("b")
    (folder / "link.txt").symlink_to("c.txt")
    (folder / "hard.txt").hardlink_to(folder / "c.txt")
    (folder / "broken.txt").symlink_to("nowhere")
    (folder / "ring.txt").symlink_to("ring.txt")
    (folder / "empty.txt").touch()
    (folder / "empty.parquet").touch()
    (folder / "notes.md").write_text("no")
    (folder / "data.csv").write_text("no")
    os.mkfifo(folder / "pipe.txt")
    return folder


def test_each_real_file_is_read_once(messy: Path) -> None:
    assert read(messy) == ["of b", "of c"]
    assert said(messy) == (
        f"data.corpus: {messy}: read 2 files; skipped 2 broken links, 2 empty files, 1 hidden file, 2 hidden folders, "
        "2 other files (.csv, .md), 6 repeated links and 1 special file"
    )


def test_links_out_of_the_folder_are_followed_once(tmp_path: Path) -> None:
    """In the cache of the Hugging Face Hub, for example, only the links' names have suffixes."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0a1b").write_text('{"text": "blob"}')
    checkpoint = tmp_path / ".cache" / "checkpoint"
    checkpoint.mkdir(parents=True)
    (checkpoint / "a.jsonl").symlink_to("../../blobs/0a1b")
    (checkpoint / "b.jsonl").symlink_to("../../blobs/0a1b")
    (checkpoint / "folder").symlink_to("../../other")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "c.txt").write_text("other")
    assert read(checkpoint) == ["blob", "other"]
    assert read(checkpoint / "a.jsonl") == ["blob"]
    assert said(checkpoint).endswith("read 2 files; skipped 1 repeated link")


@pytest.mark.parametrize("hidden", [".hidden.txt", ".hidden"])
def test_what_the_user_names_is_read_though_it_is_hidden(tmp_path: Path, hidden: str) -> None:
    path = tmp_path / hidden
    file = path if path.suffix else path / "a.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text("named")
    assert read(path) == ["named"]


def test_the_order_is_that_of_the_names(tmp_path: Path) -> None:
    """The order depends neither on when the files were made nor on which of a file's names is found first."""
    names = ["b.txt", "a/z.txt", "a.txt", "B.txt", "a/b/c.txt", "a-b.txt"]
    listings = []
    for number, made in enumerate((names, names[::-1])):
        for name in made:
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        one, other = ("y.txt", "z.txt") if number == 0 else ("z.txt", "y.txt")
        (tmp_path / str(number) / one).write_text("two names")
        (tmp_path / str(number) / other).hardlink_to(tmp_path / str(number) / one)
        listing = list_files(tmp_path / str(number), {".txt"})
        listings.append([str(path.relative_to(tmp_path / str(number))) for path in listing.files])
    assert listings[0] == listings[1] == ["B.txt", "a/b/c.txt", "a/z.txt", "a-b.txt", "a.txt", "b.txt", "y.txt"]


def test_hard_links_of_installed_packages_are_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some package managers link equal files and some copy them. The text of both kinds of hosts has to be the same."""
    (tmp_path / "a.py").write_text("one = 1")
    (tmp_path / "b.py").hardlink_to(tmp_path / "a.py")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert len(list(documents(DataSettings(corpus="standard-library")))) == 2


@pytest.mark.parametrize("name", ["pipe.txt", "socket.txt"])
def test_a_pipe_or_a_socket_is_refused_and_not_waited_for(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.txt")
        os.mkfifo("pipe.txt")
        with pytest.raises(ConfigError, match=f"found a pipe, socket or device at `{name}`, expected a file"):
            read(Path(name))
        with pytest.raises(ConfigError, match=r"found no usable file at `.*` \(skipped 2 special files\), expected"):
            read(tmp_path)


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file is deleted before it is read, and one folder may not be listed by this user."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    texts = documents(DataSettings(corpus=str(tmp_path)))
    assert next(texts) == "a.txt"
    (tmp_path / "b.txt").unlink()
    with pytest.raises(ConfigError, match=r"b\.txt: cannot be read \(No such file or directory\), expected a file"):
        next(texts)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "scandir", refuse)  # because the superuser may list every folder
    with pytest.raises(
        ConfigError, match=r": cannot be read \(Permission denied\), expected a file that the current user"
    ):
        read(tmp_path)


@pytest.mark.parametrize("command", ["check", "launch"])
def test_what_is_skipped_is_said_once(tmp_path: Path, command: str) -> None:
    """It is also reported if an earlier command has encoded the text, although the rows are not read again."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "Enough to train on, and to validate."}\n{"text": null}\n' * 20)
    (folder / "._a.jsonl").write_text("no JSON")
    (folder / "loop").symlink_to(".")
    (tmp_path / "messy.yaml").write_text(YAML.replace("CORPUS", str(folder)))
    for _ in range(2):
        options = ["--in-process"] if command == "launch" else []
        done = CliRunner().invoke(app, [command, str(tmp_path / "messy.yaml"), "--runs", str(tmp_path), *options])
        assert done.exit_code == 0, done.output
        lines = [line for line in done.stdout.splitlines() if "data.corpus" in line]
        assert lines == [
            f"data.corpus: {folder}: read 1 file; skipped 1 hidden file and 1 repeated link",
            f"data.corpus: {folder}: skipped 20 of 40 rows: `text` is null",
        ]
