"""How many bugs the tests catch: those of benchmarks/mutants.yaml, planted one at a time in a copy of the tree.

    python benchmarks/mutants.py [--only ID ...] [--workers N] [--json FILE] [--unchecked] [--smoke]

A bug is caught if one of its tests fails, or hangs, twice, and passes once the bug is gone. First all tests that are
named have to pass without a bug, unless they are `--unchecked`. What FILE has is not run again: a bug that was caught,
until it or its file changes; one that was not, until its tests do, too. `--smoke` only looks whether every bug can be
planted, and plants one.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import hashlib
import json
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
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from pydantic import Field, TypeAdapter
from ruamel.yaml import YAML

from hetero_pp.config.settings import Settings
from hetero_pp.research.experiments.provenance import commit, machine

ROOT = Path(__file__).absolute().parents[1]
LIST = ROOT / "benchmarks" / "mutants.yaml"
SMOKE = "bytes-per-second-as-bits"
TEST_SECONDS = 180
"""After which a test that hangs has failed."""
SECONDS = 900
"""After which all tests of a bug have; without a bug they have none."""
ATTEMPTS = 2
"""To plant a bug, if what failed did not fail because of it."""
PACKAGES = ("hetero_pp", "stages", "replica_groups")

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - (.*))?$", re.MULTILINE)
_PATHS = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+")
"""Of the machine: what lies before the last part of an absolute path."""
_NOTHING_RAN = {3: "pytest failed itself", 4: "pytest was called wrongly", 5: "pytest found no tests"}


class Mutant(Settings):
    """A bug: text that is replaced in one file, and the tests that may notice, the likeliest first."""

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    what: str = Field(description="what is wrong with the bug, in a line")
    file: str
    find: str = Field(min_length=1)
    replace: str
    occurrence: int | None = Field(None, ge=1, description="which, if the text is in the file several times")
    tests: list[str] = Field(min_length=1)

    def plant(self, text: str) -> str:
        """The file's text with the bug. Raises ValueError if it cannot be planted, or changes nothing."""
        parts = text.split(self.find)
        count, wanted = len(parts) - 1, self.occurrence or 1
        if count < wanted or (self.occurrence is None and count > 1):
            raise ValueError(f"found {count} times in {self.file}: {self.find}")
        planted = self.find.join(parts[:wanted]) + self.replace + self.find.join(parts[wanted:])
        try:
            if ast.dump(ast.parse(planted)) == ast.dump(ast.parse(text)):
                raise ValueError(f"changes nothing in {self.file}")
        except SyntaxError as error:
            raise ValueError(f"is no Python any more: {error}") from None
        return planted

    @property
    def key(self) -> str:
        """Equal as long as the bug and its file are."""
        return _sha256([self.file, self.find, self.replace, str(self.occurrence), (ROOT / self.file).read_text()])

    @property
    def tests_key(self) -> str:
        """Equal as long as its tests are."""
        paths = [path for test in self.tests for path in _files_of(ROOT / test)]
        return _sha256([str(path.relative_to(ROOT)) + path.read_text() for path in paths])


@dataclass(frozen=True)
class Outcome:
    """What came of some tests."""

    failed: list[str]
    """Tests; or all that were asked for, if it is not known which."""
    how: str
    seconds: float


class Copy:
    """The tree as it is now, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scratch = folder / "tree", folder / "tmp"
        self._files = {self.folder / name for name in _tracked()}
        for path in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path.relative_to(self.folder), path)
        # A file that is changed and changed back within a second would go by its old bytecode, unless that has a hash.
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
        """With the bug in it."""
        path = self.folder / mutant.file
        text = path.read_text()
        path.write_text(mutant.plant(text))
        try:
            yield
        finally:
            path.write_text(text)

    def test(self, tests: Sequence[str], stops: bool = True, seconds: float | None = SECONDS) -> Outcome:
        """Run tests, up to the first that fails if it `stops`. Raises RuntimeError if none could be run."""
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
        """Exit code (None: it took too long) and output of Python; nothing that it made or started stays."""
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
        """Remove what tests left, as tokens that a bug has encoded would mislead those that follow."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        for path in self.folder.rglob("*"):
            if path.is_file() and path not in self._files and path.parent.name != "__pycache__":
                path.unlink(missing_ok=True)


class Results:
    """What is known, by bug; in a file, if there is one."""

    def __init__(self, path: Path | None, listed: Sequence[Mutant]) -> None:
        """What `path` has of the bugs that are listed."""
        self._path = path
        self._lock = Lock()
        known = json.loads(path.read_text())["mutants"] if path is not None and path.exists() else []
        names = {mutant.id for mutant in listed}
        self._found: dict[str, dict[str, Any]] = {one["id"]: one for one in known if one["id"] in names}

    def known(self, mutant: Mutant) -> Mapping[str, Any] | None:
        """What came of a bug; None if it has to be run."""
        found = self._found.get(mutant.id)
        if found is None or found["key"] != mutant.key:
            return None
        return found if found["caught"] or found["tests_key"] == mutant.tests_key else None

    def add(self, mutant: Mutant, outcome: Outcome) -> None:
        """Keep what came of a bug."""
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
            if self._path is not None:
                self._write(self._path)

    def _write(self, path: Path) -> None:
        caught = sum(result["caught"] for result in self._found.values())
        whole = {"machine": machine(), "commit": commit(), "planted": len(self._found), "caught": caught}
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(whole | {"mutants": list(self._found.values())}, indent=1) + "\n")
        temporary.replace(path)

    def table(self, mutants: Sequence[Mutant]) -> Iterator[str]:
        """A line for each bug, and the sum."""
        rows = [(mutant, self._found[mutant.id]) for mutant in mutants if mutant.id in self._found]
        wide = max((len(mutant.id) for mutant, _ in rows), default=0)
        for mutant, result in rows:
            yield f"{mutant.id:<{wide}}  {mutant.file}  {_said(result)}"
        yield f"{sum(result['caught'] for _, result in rows)} of {len(rows)} caught"


def try_one(copy: Copy, mutant: Mutant) -> Outcome:
    """Plant a bug and run its tests; what fails has to fail twice, and to pass without the bug."""
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
    """Each bug once, in whichever copy is free."""
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
    """All bugs of the list. Ends with every complaint if one of them cannot be planted."""
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
    """Those of these names; all, if none is named."""
    if unknown := set(only) - {mutant.id for mutant in mutants}:
        sys.exit(f"found no {', '.join(sorted(unknown))} in {LIST.name}")
    return [mutant for mutant in mutants if not only or mutant.id in only]


def require_passing(copy: Copy, mutants: Sequence[Mutant]) -> None:
    """End unless all tests of some bugs pass without one, some at the second time: else they would prove nothing."""
    outcome = copy.test(sorted({test for mutant in mutants for test in mutant.tests}), stops=False, seconds=None)
    if outcome.failed:
        print(f"failed without any bug: {outcome.failed} ({outcome.how})", flush=True)
        outcome = copy.test(outcome.failed, stops=False)
    if outcome.failed:
        sys.exit(f"failed again without any bug: {outcome.failed} ({outcome.how})")
    print(f"without a bug all tests pass ({outcome.seconds} s)", flush=True)


def smoke() -> None:
    """Every bug can be planted, and one that is planted is caught."""
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
    """The files of the checkout, those that git does not know yet too."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted({name for name in found if name and (ROOT / name).is_file()})


def _files_of(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _sha256(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def main() -> None:
    """Check the list, plant, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="ID", default=[])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--unchecked", action="store_true", help="the tests were seen to pass without a bug")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
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
