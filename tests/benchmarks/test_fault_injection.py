"""A file of faults: its checks, when its faults happen, and missed contributions that give the same bits."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from started import run_script
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from fault_injection.file import read_faults
from fault_injection.schedule import Schedule, missed, schedule_of
from fault_injection.settings import FAULTS, FaultFile, Kind, kind_of
from launch_with_faults import app

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ConfigError
from hetero_pp.store.faults import FaultPhase

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MIXED = Path(__file__).parents[1] / "equivalence" / "mixed.yaml"
CONFIGS = Path(__file__).parents[2] / "configs"
MEMBERS = ["dc", "home.0", "home.1", "home.2"]


def _spec(*overrides: str) -> RunSpec:
    return RunSpec(ConfigFile(MIXED, overrides).config, 256)


def _read(text: str, folder: Path, *overrides: str, in_process: bool = False) -> FaultFile:
    path = folder / "faults.yaml"
    path.write_text(f"faults:\n{text}\n")
    return read_faults(path, _spec(*overrides), in_process)


def _schedule(text: str, folder: Path, *overrides: str) -> Schedule:
    return schedule_of(_read(text, folder, *overrides), _spec(*overrides))


@pytest.mark.parametrize(
    ("entry", "key", "complaint"),
    [
        ("{kill: home.7, after: 1 s}", "faults[0].kill", "found `home.7`, expected one of exchange, dc, home.0"),
        ("{cut: dc-home, after: 1 s}", "faults[0].cut", "found `dc-home`, expected one of dc-exchange, home.0-1"),
        (
            "{kill: dc, at: {rund: 2}}",
            "faults[0].at.rund",
            "found an unknown key, expected one of micro_batch, phase, ",
        ),
        ("{kill: dc, at: {round: 2, phase: lunch}}", "faults[0].at.phase", "found `lunch`, expected 'training', "),
        ("{kill: dc, at: {round: 2, step: 1}}", "faults[0].at.step", "found 1 of dc, which is no stage, expected none"),
        ("{kill: dc, at: {round: 4}}", "faults[0].at.round", "found 4, expected at most the 3 of `outer.rounds`"),
        (
            "{kill: dc, at: {round: 1, phase: saving}}",
            "faults[0].at.round",
            "found 1, expected a round after which states",
        ),
        ("{kill: dc}", "faults[0]", "found neither, expected one of `at: {round: 3}` and `after: 30 s`"),
        ("{kill: dc, at: {round: 2}, after: 1 s}", "faults[0]", "found both, expected one of"),
        ("{kill: dc, rank: 0, after: 1 s}", "faults[0].rank", "found 0, expected less than dc's 0 ranks"),
        ("{freeze: dc, lasts: 5, after: 1 s}", "faults[0].lasts", "found `5`, expected a number and a unit such as"),
        ("{corrupt: exchange, after: 1 s}", "faults[0].what", "found `theta` of exchange, expected `theta` or `state`"),
        ("{shoot: dc, after: 1 s}", "faults[0]", "found no fault, expected one of the keys kill, freeze, cut, delay"),
        ("{miss: home.0, rounds: [1]}", "faults[0].miss", "found `home.0`, expected one of dc, home"),
        ("{miss: home, rounds: [1, 7]}", "faults[0].rounds[1]", "found 7, expected at most the 3 of `outer.rounds`"),
        ("{rate: 125, of: [kill]}", "faults[0].rate", "found `125`, expected a number and a unit such as `125/h`"),
        ("{rate: 9/h, of: [miss]}", "faults[0].of[0]", "found `miss`, expected one of `kill`, `freeze`"),
        ("{rate: 9/h, of: [kill], members: [home]}", "faults[0].members[0]", "found `home`, expected one of exchange"),
    ],
)
def test_what_cannot_be_is_told_with_its_line(entry: str, key: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _read(f"  - {entry}", tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert re.fullmatch(rf".*faults\.yaml:2: {re.escape(key)}: {re.escape(complaint)}.*", message), message


def test_a_round_that_could_never_close_is_refused(tmp_path: Path) -> None:
    both = "  - {miss: home, rounds: [1]}\n  - {miss: dc, rounds: [2, 1]}"
    with pytest.raises(ConfigError, match=r"faults.yaml:2: .*: found 1, for which 0 of 2 replicas remain; expected at"):
        _read(both, tmp_path)
    assert missed(_read(both.replace(", 1]", "]"), tmp_path)) == {"home": {1}, "dc": {2}}


def test_ranks_tell_less(tmp_path: Path) -> None:
    ranks = ["replicas.0.engine=torchtitan", "replicas.0.ranks=2"]
    assert len(_schedule("  - {kill: dc, rank: 1, at: {round: 2}}", tmp_path, *ranks).at) == 1
    for entry in ("{kill: dc, at: {round: 2, phase: waiting}}", "{corrupt: dc, after: 1 s}", "{fill: dc, after: 1 s}"):
        with pytest.raises(ConfigError, match="ranks"):
            _read(f"  - {entry}", tmp_path, *ranks)


def test_threads_can_only_miss(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text("faults:\n  - {miss: home, rounds: [1]}\n  - {kill: home.1, at: {round: 2}}\n")
    settings = ["--set", f"data.corpus={corpus}", "--runs", str(tmp_path / "runs"), "--faults", str(path)]
    done = CliRunner().invoke(app, [str(MIXED), "--in-process", *settings])
    assert done.exit_code == 2
    told = "faults.yaml:3: faults[1].kill: found a fault that needs processes, expected only `miss` with --in-process"
    assert told in " ".join(done.stderr.split())
    assert not (tmp_path / "runs" / "mixed").exists()


def test_the_schema_is_up_to_date() -> None:
    printed = CliRunner().invoke(app, ["--schema"]).stdout
    assert (BENCHMARKS / "fault_injection" / "schema.json").read_text() == printed
    assert json.loads(printed) == FaultFile.model_json_schema()


def test_the_faults_for_the_quickstart_fit_it_and_show_every_kind() -> None:
    run = RunSpec(ConfigFile(CONFIGS / "quickstart.yaml").config, 256)
    shown = read_faults(BENCHMARKS / "fault_injection" / "quickstart.yaml", run)
    assert {kind_of(one.model_dump()) for one in shown.faults} == set(FAULTS)


# ---- when ----


def test_a_moment_is_that_of_whom_it_concerns(tmp_path: Path) -> None:
    cut = "  - {cut: home.1-2, at: {round: 2, phase: waiting}, lasts: 3 s}"
    schedule = _schedule(f"{cut}\n  - {{kill: exchange, at: {{round: 1}}}}\n  - {{kill: dc, after: 4 s}}", tmp_path)
    assert set(schedule.at) == {("home.1", (2, FaultPhase.WAITING)), (EXCHANGE, (1, FaultPhase.TRAINING))}
    (found,) = schedule.at["home.1", (2, FaultPhase.WAITING)]
    assert (found.kind, found.link, found.seconds) == (Kind.CUT, "home.1-2", 3.0)
    assert [(time, str(one)) for time, one in schedule.timed()] == [(4.0, "kill of dc")]


def _drawn(text: str, folder: Path, count: int) -> list[Any]:
    return list(itertools.islice(_schedule(text, folder).timed(), count))


def test_random_faults_have_their_rate_and_are_those_of_their_seed(tmp_path: Path) -> None:
    text = "  - {rate: 120/h, of: [kill, freeze, cut], lasts: 7 s, seed: 5}"
    found = _drawn(text, tmp_path, 3000)
    assert found == _drawn(text, tmp_path, 3000)
    assert found != _drawn(text.replace("seed: 5", "seed: 6"), tmp_path, 3000)
    times = [time for time, _ in found]
    assert times == sorted(times)
    assert times[-1] / 3000 == pytest.approx(30.0, rel=0.1)  # the mean of 3000 gaps has a spread of 2 %
    kinds, members = Counter(one.kind for _, one in found), Counter(one.member for _, one in found)
    assert set(members) == {EXCHANGE, *MEMBERS}
    assert all(count > 400 for count in members.values())
    assert set(kinds) == {Kind.KILL, Kind.FREEZE, Kind.CUT}
    assert all(one.seconds == (0.0 if one.kind is Kind.KILL else 7.0) for _, one in found)
    cuts = {one.link for _, one in found if one.kind is Kind.CUT}
    assert cuts == set(_spec().links)
    assert {one.member for _, one in found if one.link == "home.1-2"} == {"home.1"}


def test_all_faults_come_in_order_of_time(tmp_path: Path) -> None:
    text = (
        "  - {rate: 1200/h, of: [kill], members: [dc]}\n  - {kill: home.0, after: 10 s}\n  - {kill: home.1, after: 5 s}"
    )
    found = _drawn(text, tmp_path, 40)
    assert [time for time, _ in found] == sorted(time for time, _ in found)
    assert {(5.0, "home.1"), (10.0, "home.0")} <= {(time, one.member) for time, one in found}


# ---- missed rounds ----

GRACE = 'exchange.grace={"factor": 1, "least": "6 s", "most": "6 s"}'
"""A grace window far longer than these replicas are apart on a busy machine, because rounds wait for missing replicas.
"""


@pytest.mark.starts_processes
@pytest.mark.parametrize("cells", [[], ["outer.keep_local=true", "replicas.1.boundary.rank=full"]])
def test_missed_rounds_have_the_same_bits_over_the_network(cells: list[str], corpus: Path, tmp_path: Path) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text("faults: [{miss: home, rounds: [1]}, {miss: dc, rounds: [3]}]")

    def outcome(way: str, *flags: str) -> tuple[dict[str, str], list[float], list[list[str]]]:
        """Return a run's parameters, its losses and the replicas that each round includes."""
        command = [str(MIXED), "--runs", str(tmp_path / way), *flags, "--set", f"data.corpus={corpus}"]
        command += [part for cell in cells for part in ("--set", cell)]
        done = run_script(BENCHMARKS / "launch_with_faults.py", *command, "--set", GRACE, "--faults", str(faults))
        assert done.returncode == 0, done.stdout + done.stderr
        folder = tmp_path / way / "mixed"
        summary = json.loads((folder / "summary.json").read_text())
        records = [json.loads((folder / f"log/round-{n:06d}/record.json").read_text()) for n in (1, 2, 3)]
        counted = [[one["replica"] for one in record["contributions"]] for record in records]
        return summary["parameters_sha256"], summary["validation_loss"], counted

    with ThreadPoolExecutor(2) as pool:  # both wait for the grace window in two rounds
        threads = pool.submit(outcome, "threads", "--in-process")
        processes = pool.submit(outcome, "processes")
    assert processes.result() == threads.result()
    assert threads.result()[2] == [["dc"], ["dc", "home"], ["home"]]
