"""Output that is not UTF-8: every command prints ASCII, lays out its tables and keeps its exit code."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hetero_pp.program.cli import app
from hetero_pp.program.report.encoding import make_printable

ROOT = Path(__file__).parents[2]

YAML = """\
name: tiny
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 2}
data: {corpus: CORPUS, sequence_length: 32, validation_share: 0.2, validation_sequences: 8}
inner: {steps: 1, learning_rate: 1e-2, warmup_steps: 1}
outer: {rounds: 1, compression: {density: 1/32}}
lines: {größe: {up: 20 Mbit/s, down: 100 Mbit/s, latency: 1 ms}}
replicas:
  - {name: dc, kind: datacenter, batch_size: 4}
  - {name: home, kind: participants, stages: {count: 2, line: größe}, batch_size: 4, micro_batches: 2,
     boundary: {rank: 1/2, bits: 4}}
"""


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def encoding() -> str:
    return "ascii"


@pytest.fixture
def run(encoding: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command in this process with streams that are not UTF-8.

    It returns the exit code and the text of stdout and stderr.
    """

    def run_command(*arguments: str) -> tuple[int, str, str]:
        written = [io.BytesIO(), io.BytesIO()]
        streams = [io.TextIOWrapper(one, encoding, write_through=True) for one in written]
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", streams[0])
            patched.setattr(sys, "stderr", streams[1])
            patched.setattr(sys, "argv", ["hetero-pp", *arguments])
            make_printable()
            with pytest.raises(SystemExit) as ended:
                app(arguments)
            for stream in streams:
                stream.flush()
        out, errors = (one.getvalue() for one in written)
        assert out.isascii(), out
        assert errors.isascii(), errors
        code = ended.value.code
        assert isinstance(code, int)
        return code, out.decode(), errors.decode()

    return run_command


@pytest.fixture
def yaml(tmp_path: Path, corpus: Path) -> Path:
    path = tmp_path / "größe.yaml"
    path.write_text(YAML.replace("CORPUS", str(corpus)), encoding="utf-8")
    return path


def test_what_is_asked_before_a_run(run: Run, yaml: Path, tmp_path: Path) -> None:
    code, checked, errors = run("check", str(yaml), "--runs", str(tmp_path / "runs"))
    assert (code, errors) == (0, "")
    assert "home.0 (gr\\xf6\\xdfe) |up   " in checked
    _require_straight(checked)
    for command in (
        ("simulate", str(yaml)),
        ("plan", str(ROOT / "configs/plan/unequal.yaml"), "--write", str(tmp_path / "plan.yaml")),
        ("launch", str(yaml), "--print-commands", "--set", "exchange.listen=0.0.0.0:47600"),
    ):
        code, out, errors = run(*command)
        assert (code, errors) == (0, ""), command
        assert out
        _require_straight(out)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])  # ö is in one of them
def test_errors_that_name_what_was_typed(run: Run, yaml: Path, tmp_path: Path) -> None:
    runs = ("--runs", str(tmp_path / "runs"))
    expected = {
        ("check", str(tmp_path / "größer.yaml")): "gr\\xf6\\xdfer.yaml: cannot be read",
        ("check", str(yaml), "--set", "inner.steps=große"): "`gro\\xdfe`",
        ("invite", "größe", *runs): "gr\\xf6\\xdfe",
        ("revoke", "größe", "dc", *runs): "gr\\xf6\\xdfe",
        ("status", "größe", *runs): "gr\\xf6\\xdfe",
        ("leave", "größe", *runs): "gr\\xf6\\xdfe",
        ("join", "größe", *runs): "ticket",
        ("log", "replay", "größe"): "gr\\xf6\\xdfe",
        ("serve", str(yaml), "--token-file", "größe", *runs): "gr\\xf6\\xdfe",
        ("calibrate", "größe"): "gr\\xf6\\xdfe",
        ("große",): "gro\\xdfe",
    }
    for command, words in expected.items():
        code, _, errors = run(*command)
        assert code == 2, (command, errors)
        assert words in errors, command


def _require_straight(printed: str) -> None:
    """Raise AssertionError unless the lines of each table are equally wide and fit 80 columns."""
    edges, width = 0, 0
    for line in printed.splitlines():
        is_edge = line.startswith("+")
        if is_edge and edges % 2 == 0:
            width = len(line)
        assert len(line) == width <= 80 or not line.startswith(("|", "+")), printed
        edges += is_edge


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_text_can_be_printed(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes a file name that is no valid text, which UTF-8 refuses."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, write_through=True))
    make_printable()
    print("a → \udcff")
    assert written.getvalue().decode() == ("a → \\xff\n" if encoding == "utf-8" else "a -> \\xff\n")


@pytest.mark.starts_processes
def test_a_launch_where_everything_is_awkward(yaml: Path, tmp_path: Path) -> None:
    """The locale is ASCII, the proxy is down, and the temporary folder's path is too long for sockets."""
    temporary = tmp_path / ("long" * 30)
    temporary.mkdir()
    names = [f"{scheme}_proxy" for scheme in ("grpc", "http", "https", "all")]
    proxies = {name: "http://127.0.0.1:9" for lower in names for name in (lower, lower.upper())}
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    environment = {**os.environ, **proxies, **ascii_only, "TMPDIR": str(temporary)}
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy", "PYTHONIOENCODING"):
        environment.pop(name, None)
    told = _launched([str(yaml), "--print-commands", "--set", "exchange.listen=0.0.0.0:47600"], environment)
    assert (told.returncode, told.stderr) == (0, b"")
    assert b"gr\\xc3\\xb6\\xc3\\x9fe.yaml" in told.stdout
    done = _launched([str(yaml), "--runs", str(tmp_path / "runs")], environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"All replicas hold the same weights: sha256 " in done.stdout
    logs = [path.read_bytes() for path in (tmp_path / "runs" / "tiny" / "logs").iterdir()]
    assert len(logs) == 4
    assert all(text.isascii() for text in (done.stdout, *logs))
    _require_straight(done.stdout.decode())
    assert "größe" in (tmp_path / "runs" / "tiny" / "config.yaml").read_text(encoding="utf-8")


def _launched(arguments: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "hetero_pp", "launch", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, timeout=240)
