"""Weights & Biases: one run of the project, which a resumed run continues. WANDB_MODE=offline keeps it on the disk."""

from __future__ import annotations

import os

import wandb

from hetero_pp.program.report.sinks.sink import PROJECT, Scalar, ServiceRun
from hetero_pp.program.report.state import RunState

_SECONDS = 30.0
"""Seconds in which the service has to answer at the start and at the end."""


class WandbSink:
    """Logs each curve over its own axis. Nothing but curves and the configuration leaves this machine."""

    def __init__(self, state: RunState, kept: ServiceRun) -> None:
        """Raises wandb's errors if the service cannot be reached, or if the user has no key for it."""
        settings = wandb.Settings(
            console="off",
            silent=True,
            save_code=False,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            init_timeout=_SECONDS,
            finish_timeout=_SECONDS,
        )
        config = state.spec.with_changes(state.changes).latest
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=config.name,
            id=kept.id,
            resume="allow",
            dir=str(kept.folder),
            config=config.model_dump(mode="json"),
            settings=settings,
        )
        self._known: set[str] = set()

    def write(self, scalar: Scalar) -> None:
        """Queue a scalar; a thread of wandb sends it."""
        if scalar.tag not in self._known:
            self._known.add(scalar.tag)
            self._run.define_metric(scalar.tag, step_metric=scalar.axis)
        self._run.log({scalar.tag: scalar.value, scalar.axis: scalar.step})

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()
