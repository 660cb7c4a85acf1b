"""Draws loss.png: the losses of a run over its training."""

from __future__ import annotations

import math
from pathlib import Path

from hetero_pp.program.report.state import RunState
from hetero_pp.simulator.charts import HEIGHT, STYLE, draw_curve, new_figure, palette, save_figure

MOST_NAMED = 12  # most replicas in a legend
MOST_MARKS = 40  # most marked outer rounds; runs with more mark every second, fifth, tenth, ... one


def draw_losses(state: RunState, path: Path) -> None:
    """Draw training loss per inner step above, and validation loss per outer round below.

    Nothing is drawn before the first inner step.
    """
    from matplotlib import rc_context
    from matplotlib.ticker import MaxNLocator

    with state.lock, rc_context(STYLE):
        if state.first_step is None:
            return
        per_round = state.inner_steps or 1  # the axis is in inner steps, or in rounds if their steps vary
        figure = new_figure(HEIGHT)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        for colour, (name, replica) in zip(palette(len(state.replicas)), state.replicas.items(), strict=True):
            if losses := list(replica.training_losses()):
                width = 1.8 if len(losses) <= 500 else 0.9
                draw_curve(above, losses, 60, color=colour, lw=width, ms=4, label=f"{name} ({replica.kind})")
            told = [(round_ * per_round, loss) for round_, loss in sorted(replica.validation_loss.items())]
            if told:
                draw_curve(below, told, MOST_MARKS, color=colour, lw=1.5, ms=5, label=name)
        means = [(round_ * per_round, mean) for round_, mean in state.mean_validation_losses().items()]
        if means and len(state.replicas) > 1:
            below.plot(*zip(*means, strict=True), color="black", lw=2.5, ls="--", label="mean", zorder=3)
        if means and math.isfinite(means[-1][1]):
            below.annotate(f"{means[-1][1]:.3f}", means[-1], (8, 8), textcoords="offset points", weight="bold")
        above.set_title(f"{state.spec.config.name}: training loss")
        below.set_title("validation loss of the synced model, in each replica's own forward")
        every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 10**9) if state.rounds_planned <= n * MOST_MARKS)
        for axes in (above, below):
            axes.grid(axis="y")
            axes.set_ylabel("nats per token")
            # The legend names the mean, the first replicas, and the number of others.
            named = list(zip(*axes.get_legend_handles_labels(), strict=True))
            last, named = [one for one in named if one[1] == "mean"], [one for one in named if one[1] != "mean"]
            if len(named) > MOST_NAMED:
                more = f"and {len(named) - MOST_NAMED:,} more"
                named = [*named[:MOST_NAMED], (axes.plot([], [], color="none", label=more)[0], more)]
            if shown := [*named, *last]:
                axes.legend(*zip(*shown, strict=True), loc="upper right", ncols=1 + (len(shown) > 9))
            for round_ in (closed for closed in sorted(state.closed) if closed % every == 0):
                axes.axvline(round_ * per_round, color="#b5b5b5", lw=1, ls=":", zorder=0)
        what = f"inner steps of each replica; dotted: outer rounds of {state.inner_steps} steps"
        if state.inner_steps is None:
            what = "outer rounds, dotted; between them the inner steps of each replica"
        below.set_xlabel(what if every == 1 else f"{what}, one line in {every} rounds")
        below.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        save_figure(figure, path)
