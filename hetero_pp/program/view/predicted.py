"""`hetero-pp simulate --view`: the prediction of a YAML on a page, beside its run or else its rehearsal."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_pp.core.bounded import read_json_object
from hetero_pp.core.errors import ConfigError
from hetero_pp.program.view.command import show
from hetero_pp.program.view.prediction import MeasuredStep, PredictedStep, measured_of_rehearsal, measured_of_run
from hetero_pp.program.view.record import RecordedRun
from hetero_pp.program.view.run_view import RunView
from hetero_pp.run.changes import Given
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.read import spec_of
from hetero_pp.run.spec import RunSpec
from hetero_pp.run.yaml_file import ConfigFile


def show_prediction(path: Path, overrides: Sequence[Given], runs: Path) -> None:
    """Serve the page of a YAML's prediction until an interrupt, with the run of its name or else its rehearsal."""
    file = ConfigFile(path, overrides)
    spec = spec_of(file)
    folders = [RunFolder(runs / name) for name in (spec.config.name, spec.config.rehearsal_name)]
    record = next((RecordedRun(folder) for folder in folders if folder.config.is_file()), None)
    show({spec.config.name: Predicted(file, spec, record)})


class Predicted:
    """A predicted step, beside the run or its rehearsal if there is one. Implements Source."""

    predicts = True

    def __init__(self, file: ConfigFile, spec: RunSpec, record: RecordedRun | None) -> None:
        """Raises ConfigError for a topology that cannot be predicted."""
        self._record = record
        try:
            self._step = PredictedStep(spec)
        except ConfigError as error:
            raise file.located(error) from None

    @property
    def view(self) -> RunView | None:
        return None if self._record is None else self._record.view

    @property
    def prediction(self) -> dict[str, Any]:
        return self._step.beside(self._measured())

    def _measured(self) -> MeasuredStep:
        """Return what the run or the rehearsal measured so far."""
        record = self._record
        if record is not None and record.view.state.spec.config.rehearsal is None:
            return measured_of_run(record.view)
        if record is not None:
            # It may still go on, or the file may be damaged.
            with suppress(OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
                return measured_of_rehearsal(read_json_object(record.folder.rehearsal), self._step.found)
        return MeasuredStep({}, [])

    def start(self) -> None:
        if self._record is not None:
            self._record.start()

    def wait(self, seconds: float) -> bool:
        return self._record is None or self._record.wait(seconds)

    def close(self) -> None:
        if self._record is not None:
            self._record.close()
