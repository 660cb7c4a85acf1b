"""Commands that check, predict and plan runs, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetero_pp.program.commands.errors import readable_errors
from hetero_pp.program.commands.options import Calibration, ConfigPath, Overrides, RunsFolder, new_file


def check(config: ConfigPath, runs: RunsFolder = Path("runs"), overrides: Overrides = []) -> None:  # noqa: B006
    """Validate a YAML; print its topology, parameters per stage, and bytes per link, step and round."""
    with readable_errors():
        from hetero_pp.program.check import print_check

        print_check(config, overrides, runs)


def simulate(
    config: ConfigPath,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            callback=new_file,
            help="Write the prediction to this file.",
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            callback=new_file,
            help="Write a trace for ui.perfetto.dev to this file.",
        ),
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option(
            callback=new_file,
            help="Draw a picture of the round (.png).",
        ),
    ] = None,
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
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            callback=new_file,
            help="Write the choices and their reasons to this file.",
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            callback=new_file,
            help="Write the YAML to this file; by default <CONFIG>.plan.yaml.",
        ),
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
        Path | None,
        typer.Option(
            callback=new_file,
            help="Write the costs to this file, for `simulate --calibration`.",
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Measure on this machine the time and memory of each member, and the machine's speed."""
    with readable_errors():
        from hetero_pp.program.calibrate import calibrate as measure

        measure(config, overrides, write)
