"""Plant the bugs of benchmarks/mutants.yaml one at a time in a copy of the tree, and count those that tests catch.

    python benchmarks/mutants.py [--only ID ...] [--workers N] [--json FILE] [--unchecked] [--smoke]

A bug is caught if one of its tests fails or hangs twice, and passes without the bug. First, all named tests must pass
without a bug, unless `--unchecked` is given. Results in FILE are kept. A caught bug runs again when the bug or its file
changes; a bug that was not caught also when its tests change. `--smoke` only checks that every bug can be planted, and
runs one of them.
"""

from __future__ import annotations

import ast
import compileall
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from command_line import earlier, origin, parse, parser_of, save
from pydantic import Field, TypeAdapter
from ruamel.yaml import YAML

from hetero_pp.core.settings import Settings

ROOT = Path(__file__).absolute().parents[1]
LIST = ROOT / "benchmarks" / "mutants.yaml"
SMOKE = "bytes-per-second-as-bits"
TEST_SECONDS = 180
"""Seconds after which a test that hangs has failed."""
SECONDS = 900
"""Seconds after which all tests of a bug have failed. The first run without a bug has no limit."""
ATTEMPTS = 2
"""Number of times that a bug is planted, if the failed tests also fail without it."""
PACKAGES = ("hetero_pp", "stages", "replica_groups")

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - (.*))?$", re.MULTILINE)
_PATHS = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+")
"""Absolute path without its last part, which differs between machines."""
_NOTHING_RAN = {3: "pytest failed itself", 4: "pytest was called wrongly", 5: "pytest found no tests"}


class Mutant(Settings):
    """A bug: text that is replaced in one file, and the tests that may notice it, the likeliest first."""

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    what: str = Field(description="what is wrong with the bug, in a line")
    file: str
    find: str = Field(min_length=1)
    replace: str
    occurrence: int | None = Field(None, ge=1, description="which, if the text is in the file several times")
    tests: list[str] = Field(min_length=1)

    def plant(self, text: str) -> str:
        """Return the file's text with the bug. Raises ValueError if the bug cannot be planted or changes nothing."""
        parts = text.split(self.find)
        count, wanted = len(parts) - 1, self.occurrence or 1
        if count < wanted or (self.occurrence is None and count > 1):
            raise ValueError(f"found {count} times in {self.file}: {self.find}")
        planted = self.find.join(parts[:wanted]) + self.replace + self.find.join(parts[wanted:])
        if not self.file.endswith(".py"):
            return planted
        try:
            if ast.dump(ast.parse(planted)) == _dumped(text):
                raise ValueError(f"changes nothing in {self.file}")
        except SyntaxError as error:
            raise ValueError(f"is no Python any more: {error}") from None
        return planted

    @property
    def key(self) -> str:
        """Digest of the bug and of its file."""
        return _sha256([self.file, self.find, self.replace, str(self.occurrence), (ROOT / self.file).read_text()])

    @property
    def tests_key(self) -> str:
        """Digest of the bug's tests."""
        paths = [path for test in self.tests for path in _files_of(ROOT / test)]
        return _sha256([str(path.relative_to(ROOT)) + path.read_text() for path in paths])


@cache
def _dumped(text: str) -> str:
    """Return the syntax tree of a file, in which several bugs may be."""
    return ast.dump(ast.parse(text))


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run of some tests."""

    failed: list[str]
    """Tests that failed, or all requested tests if pytest did not name them."""
    how: str
    seconds: float


class Copy:
    """Copy of the current tree in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scratch = folder / "tree", folder / "tmp"
        self._files = {self.folder / name for name in _tracked()}
        for path in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path.relative_to(self.folder), path)
        # Python would use old bytecode of a file that changes twice within a second, unless it compares a hash.
        compileall.compile_dir(self.folder, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        own = {"PYTHONPATH": str(self.folder), "TMPDIR": str(self.scratch), "COLUMNS": "1000"}
        self._environment = os.environ | own
        self._require_imported()

    def _require_imported(self) -> None:
        """Raise RuntimeError if Python would import packages from elsewhere, such as where they are installed from."""
        for name in PACKAGES:
            _, path = self._run(["-c", f"import {name}; print({name}.__file__)"], SECONDS)
            if not Path(path).is_relative_to(self.folder):
                raise RuntimeError(f"found {path} imported, expected a file in {self.folder}")

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Plant the bug while the block runs."""
        path = self.folder / mutant.file
        text = path.read_text()
        path.write_text(mutant.plant(text))
        try:
            yield
        finally:
            path.write_text(text)

    def test(self, tests: Sequence[str], stops: bool = True, seconds: float | None = SECONDS) -> Outcome:
        """Run tests, up to the first failure if it `stops`. Raises RuntimeError if none could run."""
        started = time.monotonic()
        options = ["-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
        code, said = self._run(["-m", "pytest", *options, *(["-x"] if stops else []), *tests], seconds)
        spent = round(time.monotonic() - started, 1)
        if code in _NOTHING_RAN:
            raise RuntimeError(f"{_NOTHING_RAN[code]}: {said[-2000:]}")
        if code == 0:
            return Outcome([], "passed", spent)
        if code is None:
            return Outcome([*tests], f"took more than {seconds} s", spent)
        if not (found := _FAILED.findall(said)):
            return Outcome([*tests], f"ended with code {code}", spent)
        return Outcome([test for test, _ in found], found[0][1][:200] or "failed", spent)

    def _run(self, arguments: Sequence[str], seconds: float | None) -> tuple[int | None, str]:
        """Run Python. Return its exit code (None if it took too long) and its output.

        Nothing that it has made or started stays.
        """
        self.scratch.mkdir()
        output = self.scratch / "output"
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        code = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            said = output.read_text(errors="replace")
            self._tidy()
        return code, said

    def _tidy(self) -> None:
        """Remove what tests left. Tokens that were encoded with a bug would mislead later tests."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        for path in self.folder.rglob("*"):
            if path.is_file() and path not in self._files and path.parent.name != "__pycache__":
                path.unlink(missing_ok=True)


class Results:
    """Known outcomes by bug, kept in a file if there is one."""

    def __init__(self, path: Path | None, listed: Sequence[Mutant]) -> None:
        """Read the outcomes of the listed bugs from `path`."""
        self._path, self._lock = path, Lock()
        names, known = {mutant.id for mutant in listed}, earlier(path).get("mutants", [])
        self._found: dict[str, dict[str, Any]] = {one["id"]: one for one in known if one["id"] in names}

    def known(self, mutant: Mutant) -> Mapping[str, Any] | None:
        """Return the outcome of a bug; None if the bug has to be run."""
        found = self._found.get(mutant.id)
        if found is None or found["key"] != mutant.key:
            return None
        return found if found["caught"] or found["tests_key"] == mutant.tests_key else None

    def add(self, mutant: Mutant, outcome: Outcome) -> None:
        result = {
            "id": mutant.id,
            "what": mutant.what,
            "file": mutant.file,
            "caught": bool(outcome.failed),
            "by": next(iter(outcome.failed), None),
            "how": _PATHS.sub("…/", outcome.how),
            "seconds": outcome.seconds,
            "key": mutant.key,
            "tests_key": mutant.tests_key,
        }
        with self._lock:
            self._found[mutant.id] = result
            every = list(self._found.values())
            caught = sum(one["caught"] for one in every)
            save(origin() | {"planted": len(every), "caught": caught, "mutants": every}, self._path)

    def table(self, mutants: Sequence[Mutant]) -> Iterator[str]:
        """Yield a line for each bug, and the total."""
        rows = [(mutant, self._found[mutant.id]) for mutant in mutants if mutant.id in self._found]
        wide = max((len(mutant.id) for mutant, _ in rows), default=0)
        for mutant, result in rows:
            yield f"{mutant.id:<{wide}}  {mutant.file}  {_said(result)}"
        yield f"{sum(result['caught'] for _, result in rows)} of {len(rows)} caught"


def try_one(copy: Copy, mutant: Mutant) -> Outcome:
    """Plant a bug and run its tests. Tests that fail must fail twice, and pass without the bug."""
    seconds = 0.0
    for _ in range(ATTEMPTS):
        with copy.planted(mutant):
            outcome = copy.test(mutant.tests)
            again = copy.test(outcome.failed) if outcome.failed else outcome
        seconds = round(seconds + outcome.seconds, 1)
        if not outcome.failed:
            return Outcome([], "passed", seconds)
        if again.failed and not copy.test(outcome.failed).failed:
            return Outcome(outcome.failed, outcome.how, seconds)
    return Outcome([], f"{outcome.failed[0]} fails now and then, with the bug and without: {outcome.how}", seconds)


def try_all(mutants: Sequence[Mutant], copies: Sequence[Copy], results: Results) -> None:
    """Try each bug once, in any copy that is free."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def run(mutant: Mutant) -> None:
        copy = free.get()
        try:
            outcome = try_one(copy, mutant)
        finally:
            free.put(copy)
        results.add(mutant, outcome)
        print(f"{mutant.id}: {'; '.join([*outcome.failed[:1], outcome.how])} ({outcome.seconds} s)", flush=True)

    with ThreadPoolExecutor(len(copies)) as pool:
        for done in [pool.submit(run, mutant) for mutant in mutants]:
            done.result()


def listed() -> list[Mutant]:
    """Return all bugs of the list. Exits with all complaints if a bug cannot be planted."""
    mutants = TypeAdapter(list[Mutant]).validate_python(YAML(typ="safe").load(LIST))
    complaints = [f"{one}: is there twice" for one in {m.id for m in mutants} if [m.id for m in mutants].count(one) > 1]
    for mutant in mutants:
        complaints += [f"{mutant.id}: found no {test}" for test in mutant.tests if not (ROOT / test).exists()]
        try:
            mutant.plant((ROOT / mutant.file).read_text())
        except (OSError, ValueError) as error:
            complaints.append(f"{mutant.id}: {error}")
    if complaints:
        sys.exit("\n".join(complaints))
    return mutants


def chosen(mutants: Sequence[Mutant], only: Sequence[str]) -> list[Mutant]:
    """Return the bugs with these ids; all bugs if there are none."""
    if unknown := set(only) - {mutant.id for mutant in mutants}:
        sys.exit(f"found no {', '.join(sorted(unknown))} in {LIST.name}")
    return [mutant for mutant in mutants if not only or mutant.id in only]


def require_passing(copy: Copy, mutants: Sequence[Mutant]) -> None:
    """Exit unless all tests of these bugs pass without a bug, at the latest at the second attempt.

    Otherwise their failures would prove nothing.
    """
    outcome = copy.test(sorted({test for mutant in mutants for test in mutant.tests}), stops=False, seconds=None)
    if outcome.failed:
        print(f"failed without any bug: {outcome.failed} ({outcome.how})", flush=True)
        outcome = copy.test(outcome.failed, stops=False)
    if outcome.failed:
        sys.exit(f"failed again without any bug: {outcome.failed} ({outcome.how})")
    print(f"without a bug all tests pass ({outcome.seconds} s)", flush=True)


def smoke() -> None:
    """Check that every bug can be planted, and that the tests catch one planted bug."""
    mutants = listed()
    [one] = chosen(mutants, [SMOKE])
    with TemporaryDirectory(prefix="mutants-") as folder:
        outcome = try_one(Copy(Path(folder)), one)
    if not outcome.failed:
        sys.exit(f"{one.id} was not caught: {outcome.how}")
    print(f"{len(mutants)} bugs can be planted; {one.id} is caught by {outcome.failed[0]}")


def _said(result: Mapping[str, Any]) -> str:
    if result["caught"]:
        return str(result["by"])
    return "NOT CAUGHT" + ("" if result["how"] == "passed" else f" ({result['how']})")


def _tracked() -> list[str]:
    """Return the files of the checkout, including files that git does not track yet."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted({name for name in found if name and (ROOT / name).is_file()})


def _files_of(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _sha256(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", metavar="ID", default=[])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--unchecked", action="store_true", help="skip the check that the tests pass without a bug")
    arguments = parse(parser, {})
    if arguments.smoke:
        smoke()
        return
    everything = listed()
    mutants, results = chosen(everything, arguments.only), Results(arguments.json, everything)
    left = [mutant for mutant in mutants if results.known(mutant) is None]
    print(f"{len(left)} of {len(mutants)} bugs to plant", flush=True)
    with TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        copies = [Copy(Path(folder, str(number))) for number in range(arguments.workers if left else 0)]
        if left and not arguments.unchecked:
            require_passing(copies[0], left)
        if left:
            try_all(left, copies, results)
    print("\n".join(results.table(mutants)))


if __name__ == "__main__":
    main()
