"""The command line. Heavy modules are imported inside the commands, so that help is fast."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from hetero_pp.program.interrupts import INTERRUPTED, interruptible

app = typer.Typer(
    help="Pre-train one language model on datacenters and groups of home machines in one run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

BAD_INPUT = 2
FAILED = 1

RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's name: its folder in runs/.")]
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML of the run.")]
RunsFolder = Annotated[Path, typer.Option("--runs", help="Keep runs and encoded corpora in this folder.")]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Replace one value of the YAML, such as `outer.rounds=20`."),
]

StartNew = Annotated[
    bool, typer.Option("--new", help="Start a new run though runs/<name> is unfinished; it is moved aside.")
]


@app.command()
def launch(
    config: ConfigPath,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Train in one process, without a network, to the same bits.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume runs/<name> from the newest round that all members saved.")
    ] = False,
    new: StartNew = False,
    weights: Annotated[
        Path | None,
        typer.Option("--from", metavar="FOLDER", help="Start from a LLaMA checkpoint; sets `model.weights`."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="NAME", help="Start one part here: `exchange`, a replica, or a stage."),
    ] = None,
    exchange: Annotated[
        str | None,
        typer.Option("--exchange", metavar="HOST:PORT", help="With --only: dial the exchange at this address."),
    ] = None,
    token: Annotated[
        Path | None, typer.Option("--token-file", help="With --only: read the run's token from this file.")
    ] = None,
    commands: Annotated[
        bool, typer.Option("--print-commands", help="Print the command for each host, and start nothing.")
    ] = False,
    runs: RunsFolder = Path("runs"),
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Train a run on this machine: start a process for each stage, each datacenter replica and the exchange.

    With --only, start the part of the run that this host carries (docs/hosts.md).

    The run writes its files to runs/<name>/. An earlier run of that name moves to runs/<name>.1, .2, ...
    """
    with readable_errors():
        from hetero_pp.program.launch.command import Host, print_commands, run_on_this_host, run_topology
        from hetero_pp.run.changes import Given, Override

        shown = shlex.join(["--from", str(weights)])
        from_weights = [] if weights is None else [Override(("model", "weights"), str(weights), shown)]
        settings: list[Given] = [*overrides, *from_weights]
        if commands:
            print_commands(config, settings)
        elif only is not None:
            host = Host(only, _address("--exchange", exchange), token)
            run_on_this_host(config, settings, runs, host, in_process, resume, typed(), new=new, since=_started())
        else:
            run_topology(config, settings, runs, in_process, resume, typed(), new=new, since=_started())


@app.command()
def serve(
    config: ConfigPath,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume runs/<name>; hosts that were admitted stay admitted.")
    ] = False,
    new: StartNew = False,
    token: Annotated[
        Path | None, typer.Option("--token-file", help="Read the run's token from this file, instead of a new one.")
    ] = None,
    runs: RunsFolder = Path("runs"),
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Serve a run's exchange on this host, and admit other hosts by tickets (docs/hosts.md)."""
    with readable_errors():
        from hetero_pp.config.links import EXCHANGE
        from hetero_pp.program.launch.command import Host, run_on_this_host

        host = Host(EXCHANGE, token=token)
        run_on_this_host(config, overrides, runs, host, False, resume, typed(), new=new, since=_started())


@app.command()
def invite(
    run: RunName,
    place: Annotated[
        str | None,
        typer.Option(
            metavar="SLOT",
            help="Reserve this datacenter replica or stage (home.2); by default, admit to any stage of a group.",
        ),
    ] = None,
    expires: Annotated[
        str, typer.Option(metavar="DURATION", help="Set the validity of the ticket, such as `24h`.")
    ] = "24h",
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Set the exchange's address for other hosts, if the YAML has none."),
    ] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Print a ticket that admits one process to a run that this host serves."""
    with readable_errors():
        from hetero_pp.program.join.invite import invite as print_ticket
        from hetero_pp.program.join.invite import seconds_of

        print_ticket(runs, run, place, seconds_of(expires), _address("--address", address))


@app.command()
def revoke(
    run: RunName,
    what: Annotated[
        str, typer.Argument(metavar="SLOT", help="Name of the replica or stage, such as home.2, or id of a ticket.")
    ],
    runs: RunsFolder = Path("runs"),
) -> None:
    """Revoke a member's slot and its unused tickets."""
    with readable_errors():
        from hetero_pp.program.join.invite import revoke as take_back

        take_back(runs, run, what)


@app.command()
def join(
    ticket: Annotated[
        str,
        typer.Argument(
            metavar="TICKET", help="Ticket that `hetero-pp invite` printed; `-` reads it from standard input."
        ),
    ],
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Read the run's text from this path, if this member needs it.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Read the run's tokenizer.json from this path, if it is too large to be sent."
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Listen here for the neighbouring stages (port 0: any free port); by default, dial them.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="Choose the device that computes: `auto`, `cpu`, `mps`, `xpu`, `cuda`, `cuda:1`, ..."),
    ] = "auto",
    runs: RunsFolder = Path("runs"),
) -> None:
    """Join a run with a ticket, and train until the run ends. Ctrl-C leaves the run and frees the slot."""
    with readable_errors():
        from hetero_pp.program.join.command import Here
        from hetero_pp.program.join.command import join as take_part
        from hetero_pp.rpc.tickets import MOST_CHARACTERS

        take_part(
            sys.stdin.readline(MOST_CHARACTERS) if ticket == "-" else ticket,
            Here(runs, data, tokenizer, _address("--listen", listen), _device("--device", device)),
        )


@app.command()
def leave(
    run: RunName,
    place: Annotated[
        str | None, typer.Option(metavar="SLOT", help="Choose the slot, if several members joined from this host.")
    ] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Leave a run that this host has joined, and free its slot, as Ctrl-C does in `join`."""
    with readable_errors():
        from hetero_pp.program.join.leave import leave as end_join

        end_join(runs, run, place)


@app.command()
def status(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Run name, run folder, HOST:PORT of an exchange, or ticket."),
    ],
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Dial the exchange at this address instead of the known one."),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the table to this file.")] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Show the round or the end of a run, its slots and members, hosts that wait for a group, and open tickets.

    Works on every host that started, serves or joined the run, or that waits for a group. For a ticket: print the slot
    that it is for, its expiry, and whether it was used.
    """
    with readable_errors():
        from hetero_pp.program.join.status import status as ask_and_print

        ask_and_print(runs, run, _address("--address", address), json_path)


def _address(option: str, text: str | None) -> str | None:
    """Return HOST:PORT as an option gave it, None if the option is absent. Raises ConfigError for any other text."""
    from hetero_pp.config.topology import parse_address
    from hetero_pp.core.errors import ConfigError

    try:
        return None if text is None else parse_address(text)
    except ValueError as error:
        raise ConfigError((), f"{option}: {error}") from None


def _device(option: str, text: str) -> str:
    """Return the name of a device as an option gave it. Raises ConfigError for any other text."""
    from hetero_pp.config.topology import parse_device
    from hetero_pp.core.errors import ConfigError

    try:
        return parse_device(text)
    except ValueError as error:
        raise ConfigError((), f"{option}: {error}") from None


def _started() -> float:
    """Return when the user started the command, in seconds since the epoch: imports alone may take seconds."""
    import psutil

    return psutil.Process().create_time()


def typed() -> list[str]:
    """Return the command as the user can type it again in the same folder."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return [sys.executable, "-m", "hetero_pp", *sys.argv[1:]]
    return [program.name if shutil.which(program.name) == str(program) else str(program), *sys.argv[1:]]


@app.command()
def check(config: ConfigPath, runs: RunsFolder = Path("runs"), overrides: Overrides = []) -> None:  # noqa: B006
    """Validate a YAML; print its topology, parameters per stage, and bytes per link, step and round."""
    with readable_errors():
        from hetero_pp.program.check import print_check

        print_check(config, overrides, runs)


@app.command()
def simulate(
    config: ConfigPath,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the prediction to this file.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Draw a picture of the round (.png).")] = None,
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
    calibration: Annotated[
        Path | None,
        typer.Option(help="Use the costs that `hetero-pp calibrate --write` measured instead of the catalog's."),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Predict times, utilization, bytes and memory of a run, without training."""
    with readable_errors():
        from hetero_pp.program.calibrate import load_calibration
        from hetero_pp.program.simulate import Outputs
        from hetero_pp.program.simulate import simulate as predict_and_print
        from hetero_pp.run.changes import Given, Override

        outputs = Outputs(json_path, timeline, chart)
        measured = {} if calibration is None else load_calibration(calibration)
        shown = f"--calibration {calibration}"
        costs = (Override(("simulate", key), value, shown) for key, value in measured.items())
        settings: list[Given] = [*overrides, *costs]
        predict_and_print(config, settings, sweep, curves, outputs)


@app.command()
def plan(
    config: ConfigPath,
    target: Annotated[
        str,
        typer.Option("--target-utilization", help="Reach this share of the utilization with free links."),
    ] = "0.97",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the choices and their reasons to this file.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the YAML to this file; by default <CONFIG>.plan.yaml.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Choose groups, layers, boundaries and outer rounds that reach a utilization; write a YAML for `launch`."""
    with readable_errors():
        from hetero_pp.program.plan import plan as search_and_write

        search_and_write(config, overrides, target, json_path, write)


@app.command()
def calibrate(
    config: ConfigPath,
    write: Annotated[
        Path | None, typer.Option(help="Write the costs to this file, for `simulate --calibration`.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Measure on this machine the time and memory of each member, and the machine's speed."""
    with readable_errors():
        from hetero_pp.program.calibrate import calibrate as measure

        measure(config, overrides, write)


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[EXPERIMENT]...", help="Names of experiments, such as `het-pp/table2`; by default all."
        ),
    ] = None,
    scale: Annotated[
        str | None, typer.Option(help="Choose the size of the models: micro (the default), small or paper.")
    ] = None,
    rows: Annotated[
        list[str], typer.Option(metavar="PATTERN", help="Train only rows with matching names, such as `128,*`.")
    ] = [],  # noqa: B006 (typer copies it)
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Train each row with N seeds.")] = 3,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Train N rows at a time, with one core each.")] = 1,
    show_list: Annotated[
        bool, typer.Option("--list", help="List the experiments with their claims and states.")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="With --list: write the list to this file.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate every row and print its cost.")] = False,
    train: Annotated[bool, typer.Option(help="Train missing rows; --no-train only writes tables.")] = True,
    sweep: Annotated[
        list[str], typer.Option(metavar="CELL=A,B", help="Repeat every row at several values, such as `rank=1/8,1/32`.")
    ] = [],  # noqa: B006 (typer copies it)
    corpus: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Read your own text: a path, or `hf:` and the name of a dataset to stream."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="PATH", help="Use your own tokenizer.json, or the folder that holds it.")
    ] = None,
    repeat: Annotated[bool, typer.Option("--repeat", help="Read a corpus more than once if it is too small.")] = False,
    device: Annotated[
        str, typer.Option(help="Choose cpu, cuda or auto (the scale's device if this machine has it).")
    ] = "auto",
    compiles: Annotated[bool, typer.Option("--compile/--no-compile", help="Use torch.compile where it works.")] = True,
    runs: RunsFolder = Path("runs"),
    results: Annotated[Path, typer.Option(help="Write the tables to this folder.")] = Path("benchmarks/results"),
    experiments: Annotated[Path, typer.Option(help="Read experiments from this folder.")] = Path("configs/experiments"),
    docs: Annotated[Path | None, typer.Option(help="Write an overview of all results to this file.")] = None,
) -> None:
    """Train the rows of a paper's tables; write the tables with the paper's numbers beside ours, and verdicts.

    Rows that are trained are not trained again, so this can be stopped and restarted at any time.
    """
    with readable_errors():
        from hetero_pp.research.experiments.catalog import Catalog
        from hetero_pp.research.experiments.command import reproduce as train_and_write
        from hetero_pp.research.experiments.jobs import Training
        from hetero_pp.research.experiments.listing import dry_run as print_costs
        from hetero_pp.research.experiments.listing import list_experiments
        from hetero_pp.research.experiments.overview import write_overview
        from hetero_pp.research.experiments.request import Request, scale_of, with_device

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
            sweeps=sweep,
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


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, such as runs/quickstart.")],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Write the files to this new or empty folder.")],
    format_: Annotated[
        Literal["hf"], typer.Option("--format", help="Choose the format: `hf` is for transformers, vLLM and llama.cpp.")
    ] = "hf",
    dtype: Annotated[Literal["bf16", "fp32"], typer.Option(help="Choose the data type of the weights.")] = "fp32",
    round_: Annotated[
        int | None,
        typer.Option("--round", min=0, help="Export the model after this round; by default, the newest snapshot."),
    ] = None,
) -> None:
    """Export a run's model as a LLaMA checkpoint with configuration and tokenizer, for other programs."""
    with readable_errors():
        from hetero_pp.program.export import export as write_checkpoint

        write_checkpoint(run, to, dtype, round_)


@app.command()
def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or URL of a run log.")],
    round_: Annotated[
        int | None,
        typer.Option("--round", min=0, help="Stop after this round; by default, after the last closed round."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the snapshot after the last replayed round to this file.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Rebuild a run's parameters from its log, and verify every file in the log."""
    with readable_errors():
        from hetero_pp.program.replay import replay_run

        replay_run(run, round_, json_path, to)


@app.command()
def compare(
    named: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Names of runs in runs/, or run folders.")],
    chart: Annotated[Path, typer.Option(help="Draw a picture of the losses in this file (.png).")] = Path(
        "compare.png"
    ),
    runs: RunsFolder = Path("runs"),
) -> None:
    """Compare runs: print the keys that differ and what each run reached, and draw their validation losses."""
    with readable_errors():
        from hetero_pp.program.compare import compare as print_and_draw

        print_and_draw(runs, named, chart)


@app.command()
def volume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or URL of a run log.")],
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the bytes of each round to this file.")
    ] = None,
) -> None:
    """Measure the bytes that a run's contributions would take with each collective: all-gather, or a ring."""
    with readable_errors():
        from hetero_pp.program.volume import print_volume

        print_volume(run, json_path)


@app.command()
def methods() -> None:
    """Print the table of methods: the parts of each, with paper and section."""
    with readable_errors():
        from hetero_pp.program.methods import print_methods

        print_methods()


@app.command()
def schema() -> None:
    """Print the JSON schema of a run's YAML, for editors."""
    with readable_errors():
        from hetero_pp.run.config import RunConfig

        print(json.dumps(RunConfig.model_json_schema(), indent=2))


@contextmanager
def readable_errors() -> Iterator[None]:
    """Print one line instead of a traceback for errors that the user caused or can fix, and exit.

    Exit codes: 1 for a failed run, 2 for bad input, 130 for an interrupt.
    """
    from hetero_pp.core.errors import ConfigError, HeteroPPError

    try:
        with interruptible():
            yield
    except ConfigError as error:
        _leave(str(error), BAD_INPUT)
    except HeteroPPError as error:
        _leave(str(error), FAILED)
    except UnicodeEncodeError as error:
        line = error.object[: error.end].rpartition("\n")[2] + error.object[error.end :].partition("\n")[0]
        _leave(f"{line.strip()!a}: cannot be encoded as {error.encoding}: set PYTHONUTF8=1", BAD_INPUT)
    except OSError as error:
        _leave_for(error)
    except KeyboardInterrupt:
        _leave("interrupted; all processes of the run have ended", INTERRUPTED)


def _leave_for(error: OSError) -> NoReturn:
    """Print one line for a file that cannot be written or read. Raises any other error as it is."""
    from hetero_pp.core.files import OF_FILES, complaint

    if error.errno not in OF_FILES:
        raise error
    if error.filename is None and error.errno == errno.ENOSPC:
        with suppress(OSError):  # the rest of the buffer cannot be written at exit either
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        named = f"{error.filename}: " if error.filename is not None else ""
        _leave(f"{named}{error.strerror}: raise the limit, such as with `ulimit -n 1024`, and start again", BAD_INPUT)
    _leave(complaint(error) if error.filename is not None else f"standard output: {error.strerror}", BAD_INPUT)


def _leave(message: str, code: int) -> NoReturn:
    from hetero_pp.program.report.output import complain

    complain(f"hetero-pp: {message}")
    raise typer.Exit(code)
