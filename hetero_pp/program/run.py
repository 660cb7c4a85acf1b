"""`hetero-pp launch`: prepare, run in either way, record, show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hetero_pp.errors import HeteroPPError
from hetero_pp.program.display import LiveDisplay, print_result
from hetero_pp.program.in_process import run_in_process
from hetero_pp.program.inputs import new_run_folder, prepare
from hetero_pp.program.launch import launch
from hetero_pp.program.recorder import Recorder
from hetero_pp.program.resume import last_round, log_of, reports_until
from hetero_pp.program.run_state import RunState
from hetero_pp.program.yaml_file import ConfigFile, save_config
from hetero_pp.rpc.messages_pb2 import Report


def run_topology(path: Path, overrides: Sequence[str], runs: Path, in_process: bool, resume: bool = False) -> None:
    """Train the topology of a YAML and leave everything in a new folder under `runs`; or go on with the one there."""
    runs = runs.absolute()
    file = ConfigFile(path, overrides)
    console = Console()
    with console.status("reading the corpus"):
        prepared = prepare(file, runs)
    plan = prepared.plan
    folder, last, told = runs / plan.config.name, 0, []
    if resume:
        last = last_round(plan, folder)
        told = reports_until(folder, last)
        log_of(folder).forget_after(last)
        console.print(f"{plan.config.name}: going on after round {last}")
    else:
        new_run_folder(runs, plan.config.name)
        save_config(plan.config, folder / "config.yaml")
    state = RunState(plan)
    recorder = Recorder(plan, folder, state)

    def on_report(report: Report) -> None:
        state.apply(report)
        recorder.on_report(report)

    for report in told:
        on_report(report)
    start = run_in_process if in_process else launch
    try:
        with LiveDisplay(state, console):
            start(plan, folder, prepared.cache, on_report, last)
    except (HeteroPPError, KeyboardInterrupt) as error:
        recorder.fail(str(error) or "interrupted")
        raise
    finally:
        recorder.close()
    print_result(console, state.summary(), folder)
