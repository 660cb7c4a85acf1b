"""Commands before a run: they write, check, predict and plan it, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetero_pp.program.commands.options import (
    FAILED,
    Calibration,
    ConfigPath,
    JsonPath,
    Overrides,
    RunsFolder,
    new_file,
    readable_errors,
)


def init(
    path: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML to write; by default the name with `.yaml`.")
    ] = None,
    machines: Annotated[
        str | None, typer.Option(help="Train on these: `here`, a number of homes such as `4`, or `4 + datacenter`.")
    ] = None,
    line: Annotated[
        str | None, typer.Option(metavar="UP/DOWN", help="Set the Mbit/s of a home's line, such as `20/100`.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Train on this file, folder, `hf:` and a dataset, or `standard-library`.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Train micro, 178m, 512m, 1b, or a number of parameters such as `5M`.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="Train for this time or number of tokens: `10 min`, `50M tokens`.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Choose the name of the run, and of its folder in runs/.")] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Predict times for this hardware, such as `rtx-4090`; by default a CPU core, or this machine."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a first YAML from five answers. On a terminal, ask for those that no option gives; else use defaults."""
    with readable_errors():
        from hetero_pp.program.init.command import init as write_first

        given = {"machines": machines, "line": line, "text": text, "model": model, "time": time, "name": name}
        write_first(path, given, hardware, force)


def check(
    named: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG|TICKET|RUN]",
            help="YAML, name of a shipped one, ticket, or run of this host; by default the machine alone.",
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Compare the text at this path with the run's, for a ticket.")
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", callback=new_file, help="Write the checks to this file; `-` prints them alone."),
    ] = None,
    runs: RunsFolder = Path("runs"),
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Validate a YAML, a ticket or a run, and check this machine in a few seconds: one line a check, with its remedy.

    It prints a YAML's topology, parameters per stage, and bytes per link, step and round. Nothing is started or
    enrolled; a ticket stays usable. The exit code is 1 if a check failed.
    """
    with readable_errors():
        from hetero_pp.program.check.command import check as make_checks

        if not make_checks(named, overrides, runs, data, json_path):
            raise typer.Exit(FAILED)


def simulate(
    config: ConfigPath,
    json_path: JsonPath = None,
    timeline: Annotated[
        Path | None, typer.Option(callback=new_file, help="Write a trace for ui.perfetto.dev to this file.")
    ] = None,
    chart: Annotated[Path | None, typer.Option(callback=new_file, help="Draw a picture of the round (.png).")] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=A..B", help="Predict at several values, such as `links.home.bandwidth=10Mbit/s..10Gbit/s`."
        ),
    ] = None,
    curves: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=A,B",
            help="With --sweep: repeat the sweep at each of these values, such as `inner.steps=10,50`.",
        ),
    ] = None,
    calibration: Calibration = None,
    page: Annotated[
        bool, typer.Option("--view", help="Show a step on a page, beside the run or the rehearsal of this name.")
    ] = False,
    runs: RunsFolder = Path("runs"),
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Predict times, utilization, bytes and memory of a run, without training."""
    with readable_errors():
        from hetero_pp.config.overrides import Given
        from hetero_pp.program.calibrate import calibrated
        from hetero_pp.program.simulate import Outputs
        from hetero_pp.program.simulate import simulate as predict_and_print

        outputs = Outputs(json_path, timeline, chart)
        settings: list[Given] = [*overrides, *calibrated(calibration)]
        predict_and_print(config, settings, sweep, curves, outputs)
        if page:
            from hetero_pp.program.view.command import show_prediction

            show_prediction(config, settings, runs)


def plan(
    config: ConfigPath,
    target: Annotated[
        str | None,
        typer.Option(
            "--target-utilization",
            help="Reach this share of the tokens per second with free links; by default 0.97, or less where a point of "
            "it costs more than a point of loss.",
        ),
    ] = None,
    json_path: JsonPath = None,
    write: Annotated[
        Path | None, typer.Option(callback=new_file, help="Write the YAML to this file; by default <CONFIG>.plan.yaml.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(help="Use lines and costs that a rehearsal measured (rehearsal.json), instead of the YAML's."),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Choose groups, layers, boundaries and outer rounds that reach a utilization; write a YAML for `launch`."""
    with readable_errors():
        from hetero_pp.program.plan import plan as search_and_write

        search_and_write(config, overrides, target, json_path, write, measured)


def calibrate(
    config: ConfigPath,
    write: Annotated[
        Path | None, typer.Option(callback=new_file, help="Write the costs to this file, for `simulate --calibration`.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Measure on this machine the time and memory of each member, and the machine's speed."""
    with readable_errors():
        from hetero_pp.program.calibrate import calibrate as measure

        measure(config, overrides, write)
