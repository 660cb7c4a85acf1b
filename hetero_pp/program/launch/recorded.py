"""Runs what starts a run, with metrics, summary, pictures and a live view; goes on with what was recorded before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from hetero_pp.errors import HeteroPPError, RunFailed
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch.claim import claim_all
from hetero_pp.program.launch.inputs import Prepared, new_run_folder
from hetero_pp.program.launch.same_run import require_same_run
from hetero_pp.program.report.display import LiveDisplay, print_result
from hetero_pp.program.report.earlier import reports_until
from hetero_pp.program.report.recorder import Recorder
from hetero_pp.program.report.state import RunState
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.spec import RunSpec
from hetero_pp.run.yaml_file import save_config
from hetero_pp.topology import EXCHANGE

Start = Callable[[RunSpec, RunFolder, Callable[[Report], None], bool], None]
"""(spec, folder, on_report, whether it goes on): runs until the run is over."""


def run_and_record(prepared: Prepared, runs: Path, start: Start, resume: bool) -> None:
    """Run it, with metrics, summary, pictures and a live view.

    Raises RunFailed if it ended early without saying why.
    """
    spec, console = prepared.spec, Console()
    folder = folder_for(spec, runs.absolute(), resume)

    def say(line: str) -> None:
        console.print(f"{spec.config.name}: {line}", soft_wrap=True, highlight=False, markup=False)

    state = RunState(spec)
    recorder = Recorder(spec, folder, state, resume, say)

    def on_report(report: Report) -> None:
        if report.HasField("begun") and report.member == EXCHANGE and resume:
            _go_on(folder, report, state, recorder, say)
        state.apply(report)
        recorder.on_report(report)

    try:
        with LiveDisplay(state, console):
            start(spec, folder, on_report, resume)
        if not state.is_over or state.rounds < state.rounds_planned:
            raise RunFailed(f"ended after round {state.rounds} of {state.rounds_planned}, and nobody said why")
    except (HeteroPPError, KeyboardInterrupt) as error:
        recorder.fail(str(error) or "interrupted")
        raise
    except Exception as error:
        recorder.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        recorder.close()
    print_result(console, state.summary(), folder.path)


def folder_for(spec: RunSpec, runs: Path, resume: bool) -> RunFolder:
    """The folder of the run, with its configuration: a new one, or that of the run that goes on."""
    folder = RunFolder(runs / spec.config.name)
    if resume:
        require_same_run(spec.config, folder)
    else:
        with claim_all(runs, spec.config.name):
            new_run_folder(runs, spec.config.name)
    save_config(spec.config, folder.config)
    return folder


def _go_on(folder: RunFolder, report: Report, state: RunState, recorder: Recorder, say: Callable[[str], None]) -> None:
    """Tell again what had been reported of the rounds before."""
    last_round = report.begun.last_round
    for damaged in report.begun.damaged:
        say(f"passed over: {damaged}")
    say(f"going on after round {last_round}")
    for one in reports_until(folder, last_round, say):
        state.apply(one)
        recorder.on_report(one)
    recorder.go_on()
