"""Trackio: keeps curves on this machine, without an account. `trackio show --project hetero-pp` shows them."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import trackio

from hetero_pp.program.report.sinks.sink import PROJECT, Scalar, ServiceRun
from hetero_pp.program.report.state import RunState


class TrackioSink:
    """Logs curves to trackio's folder, which TRACKIO_DIR sets."""

    def __init__(self, state: RunState, kept: ServiceRun) -> None:
        config = state.spec.with_changes(state.changes).latest
        with redirect_stdout(io.StringIO()):  # it prints colours even to a pipe
            self._run = trackio.init(
                project=PROJECT,
                name=f"{config.name}-{kept.id}",  # trackio continues a run by its name
                resume="allow" if kept.goes_on else "never",
                config=config.model_dump(mode="json"),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def write(self, scalar: Scalar) -> None:
        """Queue a scalar; a thread of trackio writes it."""
        self._run.log({scalar.tag: scalar.value}, step=scalar.step)

    def close(self) -> None:
        """Wait until everything is written. Call it in the thread that made the sink."""
        with redirect_stdout(io.StringIO()):
            trackio.finish()  # unlike the run's own method, this leaves nothing to do at exit
