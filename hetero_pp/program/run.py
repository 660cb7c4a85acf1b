"""`hetero-pp launch`: prepare, run in one of the ways, record, show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from hetero_pp.errors import ConfigError, HeteroPPError
from hetero_pp.program.config import RunPlan
from hetero_pp.program.display import LiveDisplay, print_result
from hetero_pp.program.in_process import run_in_process
from hetero_pp.program.inputs import Prepared, new_run_folder, prepare
from hetero_pp.program.launch import launch
from hetero_pp.program.only import commands, launch_exchange, launch_members, new_token, read_token, write_token
from hetero_pp.program.recorder import Recorder
from hetero_pp.program.resume import last_round, log_of, reports_until
from hetero_pp.program.run_state import RunState
from hetero_pp.program.yaml_file import ConfigFile, save_config
from hetero_pp.rpc.messages_pb2 import Report
from hetero_pp.topology import EXCHANGE

Start = Callable[[RunPlan, Path, Path, Callable[[Report], None], int], None]
"""(plan, folder, cache, on_report, last round): runs until the run is over."""


@dataclass(frozen=True)
class Host:
    """Which part of a run this host carries, and how it reaches the rest."""

    only: str
    exchange: str | None = None
    """HOST:PORT"""
    token: Path | None = None


def run_topology(path: Path, overrides: Sequence[str], runs: Path, in_process: bool, resume: bool = False) -> None:
    """Train the topology of a YAML and leave everything in a new folder under `runs`; or go on with the one there."""
    prepared = _prepare(path, overrides, runs, None)
    _run_and_record(prepared, runs, run_in_process if in_process else launch, resume)


def run_on_this_host(
    path: Path, overrides: Sequence[str], runs: Path, host: Host, in_process: bool, resume: bool
) -> None:
    """Carry a part of a run: the exchange, which records and shows it, or members that join one.

    Raises ConfigError if this host cannot reach the rest.
    """
    if in_process:
        raise ConfigError((), f"--only {host.only}: leave out --in-process, other hosts carry the rest")
    prepared = _prepare(path, overrides, runs, host.only)
    if host.only == EXCHANGE:
        token = new_token() if host.token is None else read_token(host.token)

        def start(plan: RunPlan, folder: Path, cache: Path, on_report: Callable[[Report], None], last: int) -> None:
            Console().print(f"Members need --exchange HOST:{_port(plan)} and the token in {write_token(folder, token)}")
            launch_exchange(folder, cache, token, last, on_report)

        _run_and_record(prepared, runs, start, resume)
        return
    if host.exchange is None or host.token is None:
        raise ConfigError((), f"--only {host.only}: expected --exchange HOST:PORT and --token-file FILE beside it")
    if resume:
        raise ConfigError((), f"--only {host.only}: leave out --resume, the exchange says after which round to go on")
    folder = runs.absolute() / prepared.plan.config.name
    folder.mkdir(parents=True, exist_ok=True)
    save_config(prepared.plan.config, folder / "config.yaml")
    Console().print(f"{prepared.plan.config.name}: {', '.join(prepared.names)} (what they print: {folder}/logs)")
    launch_members(prepared.names, folder, prepared.cache, host.exchange, read_token(host.token))


def print_commands(path: Path, overrides: Sequence[str]) -> None:
    """What to run on each host."""
    file = ConfigFile(path, overrides)
    try:
        file.config.require_grouped()
        lines = commands(file.config, path, overrides)
    except ConfigError as error:
        raise file.located(error) from None
    print("\n".join(lines))


def _prepare(path: Path, overrides: Sequence[str], runs: Path, only: str | None) -> Prepared:
    file = ConfigFile(path, overrides)
    with Console().status("reading the corpus"):
        return prepare(file, runs.absolute(), only)


def _port(plan: RunPlan) -> str:
    return plan.config.exchange.listen.rpartition(":")[2]


def _run_and_record(prepared: Prepared, runs: Path, start: Start, resume: bool) -> None:
    """Run it, with metrics, summary, pictures and a live view."""
    plan, console = prepared.plan, Console()
    folder, last, told = runs.absolute() / plan.config.name, 0, []
    if resume:
        last = last_round(plan, folder, [name for name in prepared.names if name != EXCHANGE])
        told = reports_until(folder, last)
        log_of(folder).forget_after(last)
        console.print(f"{plan.config.name}: going on after round {last}")
    else:
        new_run_folder(runs.absolute(), plan.config.name)
        save_config(plan.config, folder / "config.yaml")
    state = RunState(plan)
    recorder = Recorder(plan, folder, state)

    def on_report(report: Report) -> None:
        state.apply(report)
        recorder.on_report(report)

    for report in told:
        on_report(report)
    try:
        with LiveDisplay(state, console):
            start(plan, folder, prepared.cache, on_report, last)
    except (HeteroPPError, KeyboardInterrupt) as error:
        recorder.fail(str(error) or "interrupted")
        raise
    finally:
        recorder.close()
    print_result(console, state.summary(), folder)
