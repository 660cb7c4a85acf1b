"""Commands that read, show, verify, judge and export runs, and that make tables of experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hetero_pp.program.commands.options import (
    Device,
    JsonPath,
    LogFormat,
    Round,
    RunName,
    RunOrLog,
    RunsFolder,
    folder,
    new_file,
    parsed,
    parsed_address,
    readable_errors,
)

log = typer.Typer(
    name="log",
    no_args_is_help=True,
    help="Replay a run's log, verify evidence, and measure the volume of contributions.",
)
audit = typer.Typer(
    name="audit", no_args_is_help=True, help="Validate contributions for a run, and show the scores of its replicas."
)


def reproduce(
    names: Annotated[list[str] | None, typer.Argument(metavar="[EXPERIMENT]...", help="Names; by default all.")] = None,
    scale: Annotated[str | None, typer.Option(help="Choose the models' size: micro, small or paper.")] = None,
    rows: Annotated[list[str], typer.Option(metavar="PATTERN", help="Train matching rows only, such as `128,*`.")] = [],  # noqa: B006 (typer copies it)
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Train each row with N seeds.")] = 3,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Train N rows at a time, with one core each.")] = 1,
    show_list: Annotated[bool, typer.Option("--list", help="List experiments with claims and states.")] = False,
    json_path: JsonPath = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate every row and print its cost.")] = False,
    train: Annotated[bool, typer.Option(help="Train missing rows; --no-train only writes tables.")] = True,
    corpus: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Read your own text: path or `hf:DATASET`.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="PATH", help="Use your own tokenizer.json.")] = None,
    repeat: Annotated[bool, typer.Option("--repeat", help="Read a corpus more than once if it is too small.")] = False,
    device: Annotated[str, typer.Option(help="Choose cpu, cuda or auto.")] = "auto",
    compiles: Annotated[bool, typer.Option("--compile/--no-compile", help="Use torch.compile where it works.")] = True,
    runs: RunsFolder = Path("runs"),
    results: Annotated[Path, typer.Option(callback=folder, help="Write the tables to this folder.")] = Path(
        "benchmarks/results"
    ),
    experiments: Annotated[Path, typer.Option(help="Read experiments from this folder.")] = Path("configs/experiments"),
    docs: Annotated[Path | None, typer.Option(callback=new_file, help="Write an overview of all results.")] = None,
) -> None:
    """Train the rows of a paper's tables; write the tables with the paper's numbers beside ours, and verdicts.

    Rows that are trained are not trained again, so this can be stopped and restarted at any time.
    """
    with readable_errors():
        from hetero_pp.research.experiments.command import (
            Request,
            experiments_in,
            list_experiments,
            results_in,
            scale_of,
            with_device,
        )
        from hetero_pp.research.experiments.command import dry_run as print_costs
        from hetero_pp.research.experiments.command import reproduce as train_and_write
        from hetero_pp.research.experiments.definition import Catalog
        from hetero_pp.research.experiments.pages import write_overview
        from hetero_pp.research.experiments.training import Training

        experiments = experiments_in(experiments)
        results = results_in(results, writes=not (show_list or dry_run or json_path is not None))
        catalog = Catalog(experiments)
        request = Request(
            catalog=catalog,
            names=names or [],
            scale=scale or scale_of(catalog, names or []),
            rows=rows,
            seeds=seeds,
            workers=workers,
            corpus=corpus,
            tokenizer=tokenizer,
            repeat=repeat,
            runs=runs,
            results=results,
            trains=train,
            training=Training(compiles=compiles),
        )
        if show_list or json_path is not None:
            list_experiments(request, json_path)
        elif dry_run:
            print_costs(with_device(request, device))
        else:
            train_and_write(with_device(request, device))
        if docs is not None:
            write_overview(results, docs, experiments)


def export(
    run: RunName,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Write the files to this new or empty folder.")],
    dtype: Annotated[Literal["bf16", "fp32"], typer.Option(help="Choose the data type of the weights.")] = "fp32",
    round_: Round = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Export a run's model as a LLaMA checkpoint with configuration and tokenizer, for other programs."""
    with readable_errors():
        from hetero_pp.program.export import export as write_checkpoint

        write_checkpoint(runs, run, to, dtype, round_)


@log.command()
def replay(
    run: RunOrLog,
    round_: Round = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=new_file, help="Write the last run checkpoint to this file.")
    ] = None,
    json_path: JsonPath = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Rebuild a run's parameters from its log, and verify every file in the log."""
    with readable_errors():
        from hetero_pp.program.run_log import replay_run

        replay_run(runs, run, round_, json_path, to)


@log.command()
def verify(
    evidence: Annotated[str, typer.Argument(metavar="EVIDENCE", help="Folder of evidence in the log of a run.")],
    log: Annotated[str | None, typer.Option(metavar="LOG", help="Read this log, if the folder is not in it.")] = None,
    corpus: Annotated[str | None, typer.Option(metavar="TEXT", help="Read the run's text from this path.")] = None,
    tolerance: Annotated[float | None, typer.Option(min=0, help="Use this instead of the evidence's.")] = None,
) -> None:
    """Check evidence that a replica contributed something else: compute its round again, and compare."""
    with readable_errors():
        from hetero_pp.program.evidence import verify as check

        check(evidence, log, corpus, tolerance)


@audit.command()
def validate(
    run: RunOrLog,
    pass_: Annotated[Path | None, typer.Option("--pass", help="Read what `invite --validator` printed.")] = None,
    device: Device = "auto",
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Set another name than this host's.")] = None,
    log_format: LogFormat = "text",
    runs: RunsFolder = Path("runs"),
) -> None:
    """Check the contributions to a run for its exchange, in a process of its own (docs/audit.md)."""
    with readable_errors(log_format):
        from hetero_pp.config.topology import parse_device
        from hetero_pp.program.audits import validate as follow

        where = parsed("--device", parse_device, device)
        follow(runs, run, pass_, where, name)


@audit.command()
def scores(run: RunOrLog, json_path: JsonPath = None, runs: RunsFolder = Path("runs")) -> None:
    """Show the scores of a run's replicas, and which of them are excluded and why (docs/audit.md)."""
    with readable_errors():
        from hetero_pp.program.audits import print_scores

        print_scores(runs, run, json_path)


def view(
    named: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Names of runs in runs/, run folders, or HOST:PORT of an exchange."),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Serve the page at this port; 0: any free port.")] = 0,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve the page here; other machines need a member's certificate."),
    ] = None,
    export_path: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", callback=new_file, help="Write the page to an HTML file.")
    ] = None,
    compared: Annotated[
        Path | None,
        typer.Option("--compare", metavar="FILE", callback=new_file, help="Draw losses (.png), and print differences."),
    ] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Show runs on a page: topology, rounds, any moment again, and several runs side by side.

    With --compare, print a table of several runs instead.
    """
    with readable_errors():
        if compared is not None:
            from hetero_pp.program.compare import compare

            compare(runs, named, compared)
            return
        from hetero_pp.program.view.command import view as show

        show(runs, named, parsed_address("--listen", listen) or f"127.0.0.1:{port}", export_path)


@log.command()
def volume(run: RunOrLog, json_path: JsonPath = None, runs: RunsFolder = Path("runs")) -> None:
    """Measure the bytes that a run's contributions would take with each collective: all-gather, or a ring."""
    with readable_errors():
        from hetero_pp.program.run_log import print_volume

        print_volume(runs, run, json_path)
