"""Every benchmark starts, and runs at its smallest size, as a process, and prints its numbers.

The longer ones of these runs have the mark `long`: `make test` leaves them out, and `make benchmarks-smoke` has them.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from started import TIMEOUT, run_script

pytestmark = pytest.mark.starts_processes

FOLDER = Path(__file__).parents[2] / "benchmarks"
BENCHMARKS = sorted(path.stem for path in FOLDER.glob("*.py") if "parse(parser, " in path.read_text())
"""Files with a command line. The others are modules that they share."""
PRINTED = {
    "access_lines": [r"kernel +\d.*of home\.\d: \d.*\n +launch +\d.*\n +simulate +\d|no machines in namespaces"],
    "agreement": [r"no work +\d\.\d\d +-?\d\.\d\d\n"],
    "boundary_ideas": [r"as it is +\d", r"2 back +\d.*[-+]\d\.\d", r"by hop +\d.*[-+]\d", r"token before +\d.*[-+]\d"],
    "chaos": [r"matrix: 1 of 1 survived"],
    "codec": [r"real run: signs\W+\d", r"megabytes_micro: \d"],
    "compressors": [r"numba, k = 32: -?\d", r"one pass, numba\W+\d", r"templar, 8 at once\W+\d"],
    "engines_agree": [r"staged to eager +[-+]\d", r"staged to launched +[-+]\d.* the same bits\n"],
    "engines": [r"torch\W+\d.*parameters", r"torchtitan\W+\d.*parameters", r"deepspeed\W+\d.*parameters"],
    "exchange_load": [r"smallest( +-?[\d.]+){4}\n"],
    "fragments": [r"1b, 4 fragments, overlap 1, \d+ steps: a round takes \d.* \d+\.\d% of free\n"],
    "fuzz_contribution": [r"1,000 inputs: \d+ valid, \d+ refused"],
    "gpu": [r"rank 1/8, bf16( +\d+){5}", r"2 replicas, 1 hash", r"staged +[\d,]+ tokens/s +\d\.\d"],
    "homes": [
        r"2 homes, 2 rounds: the bits of one process; they listen at 0 ports\n",
        r"relayed over the ledgers' bytes: \d\.\d+\nfrom typing join to the first inner step: median \d",
    ],
    "in_process": [r"0 of 2 +\d.*\d\n", r"1 of 2 +\d.*\d\n", r"2 of 2 +\d.*\d\n"],
    "link": [r"1 Gbit/s +\d", r"there and back at latency 20.00 ms: \d", r" 64 KiB +\d"],
    "loss_by_token": [r"position .*\n0 to 0 +\d.*[-+]?\d\.\d\n", r"256 to 1023 +\d.*\d\n", r"repeated +\d.*\d\n"],
    "mutants": [r"\d{3} bugs can be planted; [\w-]+ is caught by tests/units/test_units\.py"],
    "object_store_round": [
        r"2 bits +2 +store( +\d+\.\d{3}){9}\n.*2 +exchange( +\d+\.\d{3}){9}\n",
        r"appendix C: 8B, 20 replicas: .* 12 s\n",
    ],
    "overlap": [r"\n0 .*%.*\n1 .*%.*\n", r"over without: \d"],
    "real_size": [
        r"\ndc( +\d+\.\d\d){6}",
        r"\nexchange( +\d+\.\d\d){6}",
        r"first run checkpoint \d.* exchange \d.* checkpoint \d",
    ],
    "rehearse": [r"smallest +step_seconds +\d.* s +\d.* s .*%\n", r"smallest +the run: \d.*; woken \d.* ms late"],
    "robust_means": [r"  8 x 0\.0312 .*geometric_median .* times the mean", r"  8 x 1 .*trimmed_mean .* bytes a value"],
    "recompute_tolerance": [
        r"2 threads +min 0.0e\+00",
        r"sign flip of one layer +min [1-9]",
        r"3 honest rounds computed again: 0 false alarms",
    ],
    "scale": [r"4 members.*\n.*\n  join +\d", r"8 members", r"times\)\n", r"deposit: cpu_seconds ~ n\^-?\d"],
    "simulated_faults": [r"200 rounds of 4 histories.*: 0 violations; counted \d+\.\d%"],
    "simulator": [r"50 Mbit/s, 0 ms, 2 stages, rank full +\d", r"quickstart +\d", r"bytes.* \d"],
    "simulator_growth": [r"participants .*\n +100 +\d", r"stages .*\n +2 +\d", r"micro-batches .*\n +4 +\d"],
    "slow_uplink": [r'beats: .*"contribution_bytes": 200000.*"heartbeats": [1-9]|not shaped by the kernel'],
    "standby": [r"folder: none of round 2: continued after \d.*\nfolder: 1 kills, an equal hash; \d"],
    "start": [r"joined \d.*, begun \d.*, inner_step \d.*, cpu \d"],
    "strangers": [
        r"forged_hashes: .*'PERMISSION_DENIED': [1-9].*'unexpected': [1-9]",
        r"absurd_reports: .*'OK': [1-9]",
        r"fuzz: [1-9]\d\d messages.*to its end: True, same bits: True, escaped: \{\}, harm: \{\}\nno hole was found",
    ],
    "view": [r"8 members, 2 viewers, \d+ reports/s", r"median \d+ ms", r"takes -?\d+\.\d % of a core", r"load: \d+ kB"],
    "unequal_speeds": [r"time +\d.*%.*\n", r"steps +1\.0 .*%.*\n"],
}
"""Patterns in the output of each benchmark."""


SHORT = {"fuzz_contribution", "in_process", "link", "robust_means", "simulated_faults", "slow_uplink"}
"""Benchmarks that take at most three seconds at their smallest size."""
SMALLEST = [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in BENCHMARKS]


@pytest.mark.timeout(2 * TIMEOUT + 60)
@pytest.mark.parametrize("name", SMALLEST)
def test_it_runs_at_its_smallest(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_script(FOLDER / f"{name}.py", "--smoke", timeout=2 * TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    for pattern in PRINTED[name]:
        assert re.search(pattern, done.stdout), (pattern, done.stdout)


def test_it_is_said_what_every_benchmark_prints() -> None:
    assert sorted(PRINTED) == BENCHMARKS


def test_a_rehearsal_replaces_one_of_which_less_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long rehearsal would otherwise end with an error in place of its result."""
    monkeypatch.syspath_prepend(str(FOLDER))
    rehearse, apart = importlib.import_module("rehearse"), {"step_seconds": 0.1, "round_seconds": 0.2}
    found = {"date": "today", "woken_late_seconds": {"mean": 0.1}, "difference": apart}
    first = rehearse.least_disturbed(found, {"difference": apart})
    again = rehearse.least_disturbed(found | {"woken_late_seconds": {"mean": 0.3}}, first)
    assert again["woken_late_seconds"] == {"mean": 0.1} and len(again["attempts"]) == 2


def test_every_bug_can_be_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of a bug may have moved, or its test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    mutants = importlib.import_module("mutants")
    assert mutants.SMOKE in {bug.id for bug in mutants.listed()}
