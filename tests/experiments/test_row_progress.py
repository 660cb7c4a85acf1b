"""Progress of a row in training: lines now and then, and its outcome at the end."""

from __future__ import annotations

from itertools import count

import pytest

from hetero_pp.research.experiments.outcomes import read_outcomes
from hetero_pp.research.experiments.training import Job, Training, train_job


@pytest.mark.starts_processes
def test_a_long_row_tells_how_far_it_is(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """The clock goes on by half a minute at each look: the first line comes after a minute, the next two later."""
    job.rows.parent.mkdir(exist_ok=True)
    seconds = count(step=30)
    train_job(job, Training(compiles=False), clock=lambda: float(next(seconds)))
    [outcome] = read_outcomes(job.rows).values()
    assert len(outcome["validation_loss"]) == 3
    loss = outcome["validation_loss"][1]
    assert capsys.readouterr().err.splitlines() == [f"all, seed 2: loss {loss:.4f}, round 2/3"]
