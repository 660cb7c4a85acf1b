"""`hetero-pp simulate`: predict a YAML's topology, print the prediction, and write the requested files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hetero_pp.config.overrides import Given
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_json
from hetero_pp.program.report.output import standard_output
from hetero_pp.program.show_prediction import print_assumption, print_prediction, print_sweep
from hetero_pp.simulator.charts import Sweep, Timeline, draw_prediction, draw_sweep, require_format
from hetero_pp.simulator.costs import assumed_in
from hetero_pp.simulator.prediction import Prediction, predict, waiting


@dataclass(frozen=True)
class Outputs:
    """Files to write; None for those that were not requested."""

    json: Path | None = None
    timeline: Path | None = None
    chart: Path | None = None


def simulate(path: Path, overrides: Sequence[Given], sweep: str | None, curves: str | None, outputs: Outputs) -> None:
    """Predict once, or at every value of a sweep, or for every row of `simulate.rows`.

    Options of the command line take precedence over the `simulate` section of the YAML.
    """
    require_format(outputs.chart)
    file = ConfigFile(path, overrides)
    settings = file.config.simulate
    by_sweep, by_curves = ("--sweep" if sweep else "simulate.sweep"), ("--curves" if curves else "simulate.curves")
    sweep, curves = sweep or settings.sweep, curves or settings.curves
    if sweep is not None or settings.rows:
        values = Sweep.of_rows(settings.rows) if sweep is None else Sweep.parse(sweep, by_sweep)
        _simulate_sweep(path, overrides, values, None if curves is None else Sweep.parse(curves, by_curves), outputs)
        return
    if curves is not None:
        raise ConfigError((), f"--curves {curves}: expected --sweep, too")
    spec = spec_of(file)
    timeline = None if outputs.timeline is None else Timeline()
    prediction = _predict(file, spec, timeline)
    console = standard_output()
    waits = waiting(spec, prediction)
    print_prediction(console, path, spec, prediction, waits)
    print_assumption(console, assumed_in(spec))
    if timeline is not None and outputs.timeline is not None:
        timeline.write(outputs.timeline)
    write_json(outputs.json, prediction.as_json() | {"waiting": None if waits is None else asdict(waits)})
    if outputs.chart is not None:
        draw_prediction(spec, prediction, outputs.chart)


def _simulate_sweep(
    path: Path, overrides: Sequence[Given], sweep: Sweep, curves: Sweep | None, outputs: Outputs
) -> None:
    if outputs.timeline is not None:
        raise ConfigError((), "--timeline: found a sweep, which has no single timeline; leave out one of them")
    found: dict[str, dict[str, Prediction]] = {}
    assumed = ""
    for curve in [""] if curves is None else curves.values:
        changed = [*overrides, *([] if curves is None else curves.overrides(curve))]
        for value in sweep.values:
            file = ConfigFile(path, [*changed, *sweep.overrides(value)])
            spec = spec_of(file)
            assumed = assumed_in(spec) or assumed
            found.setdefault(curve, {})[value] = _predict(file, spec, None)
    console = standard_output()
    print_sweep(console, sweep, curves, found)
    print_assumption(console, assumed)
    points = {
        curve: [sweep.point(value) | prediction.as_point() for value, prediction in predictions.items()]
        for curve, predictions in found.items()
    }
    curves_of = None if curves is None else curves.key
    write_json(outputs.json, {"sweep": sweep.key, "curves_of": curves_of, "curves": points})
    if outputs.chart is not None:
        draw_sweep(sweep, curves, found, outputs.chart)


def _predict(file: ConfigFile, spec: RunSpec, timeline: Timeline | None) -> Prediction:
    try:
        return predict(spec, None if timeline is None else timeline.of)
    except ConfigError as error:
        raise file.located(error) from None
