"""The command line: all commands in the order of the help text."""

from __future__ import annotations

import typer

from hetero_pp.program.commands import first_steps, predictions, results, runs

app = typer.Typer(
    help="Pre-train one language model on datacenters and groups of home machines in one run.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda name: "slot" if name == "place" else name},  # the earlier option
)

for command in (
    first_steps.init,
    first_steps.doctor,
    runs.launch,
    runs.rehearse,
    runs.serve,
    runs.invite,
    runs.revoke,
    runs.join,
    runs.leave,
    runs.status,
    runs.validate,
    results.view,
    predictions.check,
    predictions.simulate,
    predictions.plan,
    predictions.calibrate,
    results.reproduce,
    results.export,
    results.replay,
    results.verify,
    results.scores,
    results.compare,
    results.volume,
    results.methods,
    results.schema,
):
    app.command()(command)
