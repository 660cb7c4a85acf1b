"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's name: its folder in runs/.")]
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML of the run.")]
RunsFolder = Annotated[Path, typer.Option("--runs", help="Keep runs and encoded corpora in this folder.")]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Replace one value of the YAML, such as `outer.rounds=20`."),
]

Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[ADDRESS:]PORT",
        help="Serve /metrics for Prometheus and /healthz here; without an address, to this host only.",
    ),
]
Otlp = Annotated[
    str | None,
    typer.Option("--otlp", metavar="URL", help="Export traces of rounds to this OTLP collector, over gRPC."),
]
Boards = Annotated[
    list[str],
    typer.Option("--board", metavar="NAME", help="Write the curves of TensorBoard to `wandb` or `trackio`, too."),
]
LogFormat = Annotated[
    str, typer.Option("--log-format", metavar="FORMAT", help="Print each line as `text` or as a `json` object.")
]

StartNew = Annotated[
    bool, typer.Option("--new", help="Start a new run though runs/<name> is unfinished; it is moved aside.")
]
