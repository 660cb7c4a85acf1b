"""Commands before a run: they write, check, predict and plan it, without training."""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_pp.core.errors import ConfigError
from hetero_pp.program.commands.options import (
    FAILED,
    Address,
    Boards,
    Calibration,
    ConfigPath,
    Device,
    JsonPath,
    LogFormat,
    Metrics,
    Otlp,
    Overrides,
    Resume,
    RunName,
    RunsFolder,
    ShowPage,
    StartNew,
    TokenFile,
    new_file,
    parsed,
    parsed_address,
    readable_errors,
)

if TYPE_CHECKING:
    from hetero_pp.program.operate.operations import Page


def init(
    path: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML to write, by default NAME.yaml.")
    ] = None,
    machines: Annotated[str | None, typer.Option(help="Train `here`, on `4` homes, or on `4 + datacenter`.")] = None,
    line: Annotated[str | None, typer.Option(metavar="UP/DOWN", help="Set a home's Mbit/s, such as `20/100`.")] = None,
    text: Annotated[str | None, typer.Option(help="Train on a path, `hf:DATASET` or `standard-library`.")] = None,
    model: Annotated[str | None, typer.Option(help="Train micro, 178m, 512m, 1b, or e.g. `5M` parameters.")] = None,
    time: Annotated[str | None, typer.Option(help="Train for this long: `10 min`, `50M tokens`.")] = None,
    name: Annotated[str | None, typer.Option(help="Choose the name of the run, and of its folder in runs/.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Predict times for this hardware, such as `rtx-4090`.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a first YAML from five answers. On a terminal, ask for those that no option gives; else use defaults."""
    with readable_errors():
        from hetero_pp.program.init import init as write_first

        given = {"machines": machines, "line": line, "text": text, "model": model, "time": time, "name": name}
        write_first(path, given, hardware, force)


def check(
    named: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG|TICKET|RUN]",
            help="YAML, name of a shipped one, ticket, or run of this host; by default the machine alone.",
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Compare this text with the run of a ticket.")
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", callback=new_file, help="Write the checks to this file; `-` prints them alone."),
    ] = None,
    runs: RunsFolder = Path("runs"),
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Validate a YAML, a ticket or a run, and check this machine in a few seconds: one line a check, with its remedy.

    It prints a YAML's topology, parameters per stage, and bytes per link, step and round. Nothing is started or
    enrolled; a ticket stays usable. The exit code is 1 if a check failed.
    """
    with readable_errors():
        from hetero_pp.program.check.command import check as make_checks

        if not make_checks(named, overrides, runs, data, json_path):
            raise typer.Exit(FAILED)


def simulate(
    config: ConfigPath,
    json_path: JsonPath = None,
    timeline: Annotated[Path | None, typer.Option(callback=new_file, help="Write a trace for perfetto.dev.")] = None,
    chart: Annotated[Path | None, typer.Option(callback=new_file, help="Draw a picture of the round (.png).")] = None,
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
    calibration: Calibration = None,
    page: ShowPage = False,
    runs: RunsFolder = Path("runs"),
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Predict times, utilization, bytes and memory of a run, without training."""
    with readable_errors():
        from hetero_pp.config.overrides import Given
        from hetero_pp.program.calibrate import calibrated
        from hetero_pp.program.simulate import Outputs
        from hetero_pp.program.simulate import simulate as predict_and_print

        outputs = Outputs(json_path, timeline, chart)
        settings: list[Given] = [*overrides, *calibrated(calibration)]
        predict_and_print(config, settings, sweep, curves, outputs)
        if page:
            from hetero_pp.program.view.command import show_prediction

            show_prediction(config, settings, runs)


def plan(
    config: ConfigPath,
    target: Annotated[
        str | None,
        typer.Option("--target-utilization", help="Reach this share of the speed with free links, by default 0.97."),
    ] = None,
    json_path: JsonPath = None,
    write: Annotated[
        Path | None, typer.Option(callback=new_file, help="Write the YAML to this file; by default <CONFIG>.plan.yaml.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(help="Use lines and costs that a rehearsal measured (rehearsal.json), instead of the YAML's."),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Choose groups, layers, boundaries and outer rounds that reach a utilization; write a YAML for `launch`."""
    with readable_errors():
        from hetero_pp.program.plan import plan as search_and_write

        search_and_write(config, overrides, target, json_path, write, measured)


def calibrate(
    config: ConfigPath,
    write: Annotated[
        Path | None, typer.Option(callback=new_file, help="Write the costs to this file, for `simulate --calibration`.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Measure on this machine the time and memory of each member, and the machine's speed."""
    with readable_errors():
        from hetero_pp.program.calibrate import calibrate as measure

        measure(config, overrides, write)


# Commands that start runs, join them and show their state.


def launch(
    config: ConfigPath,
    in_process: Annotated[bool, typer.Option("--in-process", help="Train in one process, to the same bits.")] = False,
    resume: Resume = False,
    new: StartNew = False,
    weights: Annotated[Path | None, typer.Option("--from", metavar="FOLDER", help="Start from LLaMA weights.")] = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAME", help="Start only `exchange`, a replica or a stage.")
    ] = None,
    exchange: Annotated[
        str | None, typer.Option(metavar="HOST:PORT,...", help="With --only: dial this exchange.")
    ] = None,
    token: TokenFile = None,
    commands: Annotated[bool, typer.Option("--print-commands", help="Print the command for each host only.")] = False,
    page: ShowPage = False,
    metrics: Metrics = None,
    otlp: Otlp = None,
    boards: Boards = [],  # noqa: B006 (typer copies it)
    log_format: LogFormat = "text",
    runs: RunsFolder = Path("runs"),
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Train a run on this machine: start a process for each stage, each datacenter replica and the exchange.

    With --only, start the part of the run that this host carries (docs/hosts.md).

    The run writes its files to runs/<name>/. An earlier run of that name moves to runs/<name>.1, .2, ...
    """
    with readable_errors(log_format):
        from hetero_pp.program.launch.fork_server import importing

        with importing():
            from hetero_pp.config.overrides import Given, Override
            from hetero_pp.program.launch.command import (
                Host,
                Invocation,
                print_commands,
                run_on_this_host,
                run_topology,
            )
            from hetero_pp.program.operate.operations import operated

        as_typed = shlex.join(["--from", str(weights)])
        from_weights = [] if weights is None else [Override(("model", "weights"), str(weights), as_typed)]
        settings: list[Given] = [*overrides, *from_weights]
        if commands:
            print_commands(config, settings)
            return
        with operated(metrics, otlp, boards, _page(page)) as operations:
            invocation = Invocation(typed=typed(), since=_started(), operations=operations)
            if only is None:
                run_topology(config, settings, runs, in_process, resume, new, invocation=invocation)
                return
            host = Host(only, parsed_address("--exchange", exchange, several=True), token)
            run_on_this_host(config, settings, runs, host, in_process, resume, new, invocation)


def rehearse(
    config: ConfigPath,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rehearse at most this many outer rounds, or one per fragment.")
    ] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Rehearse at most this many inner steps of each round.")] = 4,
    calibration: Calibration = None,
    json_path: JsonPath = None,
    page: ShowPage = False,
    metrics: Metrics = None,
    log_format: LogFormat = "text",
    runs: RunsFolder = Path("runs"),
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Rehearse a run on this machine: links, messages and rounds are real, and timed waits take the place of compute.

    Prints times, utilization and bytes beside what `simulate` predicts, and where they part (docs/rehearse.md).
    """
    with readable_errors(log_format):
        from hetero_pp.config.overrides import Given
        from hetero_pp.program.calibrate import calibrated
        from hetero_pp.program.launch.command import Invocation, run_topology
        from hetero_pp.program.operate.operations import operated
        from hetero_pp.program.rehearse import AsRehearsal

        settings: list[Given] = [*overrides, *calibrated(calibration)]
        mode = AsRehearsal(rounds, steps, json_path)
        with operated(metrics, page=_page(page)) as operations:
            invocation = Invocation(typed=typed(), since=_started(), operations=operations, mode=mode)
            run_topology(config, settings, runs, False, invocation=invocation)


def serve(
    config: ConfigPath,
    resume: Resume = False,
    new: StartNew = False,
    standby: Annotated[
        bool, typer.Option("--standby", help="Serve the run as soon as no other of `exchange.hosts` does.")
    ] = False,
    rehearsal: Annotated[bool, typer.Option("--rehearse", help="Serve a rehearsal, which trains nothing.")] = False,
    token: TokenFile = None,
    metrics: Metrics = None,
    otlp: Otlp = None,
    boards: Boards = [],  # noqa: B006 (typer copies it)
    log_format: LogFormat = "text",
    runs: RunsFolder = Path("runs"),
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Serve a run's exchange on this host, and admit other hosts by tickets (docs/hosts.md)."""
    with readable_errors(log_format):
        from hetero_pp.config.lines import EXCHANGE
        from hetero_pp.program.launch.command import AS_A_RUN, Host, Invocation, run_on_this_host
        from hetero_pp.program.operate.operations import operated
        from hetero_pp.program.rehearse import ROUNDS, STEPS, AsRehearsal

        if resume and rehearsal:
            raise ConfigError((), "--resume: found --rehearse, too, expected only one of them: no rehearsal is resumed")
        if standby and (new or rehearsal):
            found = "--new" if new else "--rehearse"
            raise ConfigError((), f"--standby: found {found}, too, expected only one of them")
        since, mode = _started(), AsRehearsal(ROUNDS, STEPS) if rehearsal else AS_A_RUN
        with operated(metrics, otlp, boards) as operations:
            invocation = Invocation(typed=typed(), since=since, operations=operations, mode=mode)
            host = Host(EXCHANGE, token=token, standby=standby)
            run_on_this_host(config, overrides, runs, host, False, resume, new, invocation)


def invite(
    run: RunName,
    slot: Annotated[str | None, typer.Option(metavar="SLOT", help="Reserve this slot; by default, any stage.")] = None,
    expires: Annotated[str, typer.Option(metavar="DURATION", help="Set the time for its first use.")] = "24h",
    address: Address = None,
    validator: Annotated[str | None, typer.Option(metavar="NAME", help="Print the pass of this validator.")] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Print a ticket that admits one process to a run that this host serves."""
    with readable_errors():
        from hetero_pp.program.join.invite import invite as print_ticket
        from hetero_pp.program.join.invite import invite_validator, seconds_of

        reached = parsed_address("--address", address, several=True)
        if validator is not None:
            invite_validator(runs, run, validator, reached)
            return
        print_ticket(runs, run, slot, seconds_of(expires), reached)


def revoke(
    run: RunName,
    what: Annotated[str, typer.Argument(metavar="SLOT", help="Replica or stage, such as home.2, or id of a ticket.")],
    runs: RunsFolder = Path("runs"),
) -> None:
    """Revoke a member's slot and its unused tickets."""
    with readable_errors():
        from hetero_pp.program.join.invite import revoke as take_back

        take_back(runs, run, what)


def join(
    ticket: Annotated[str, typer.Argument(metavar="TICKET", help="Ticket of `hetero-pp invite`; `-`: standard input.")],
    data: Annotated[str | None, typer.Option(metavar="PATH", help="Read the run's text from here, if needed.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(metavar="PATH", help="Read a tokenizer too large to send.")] = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Listen here for neighbour stages.")] = None,
    device: Device = "auto",
    rehearsal: Annotated[bool, typer.Option("--rehearse", help="Rehearse with this line, and train nothing.")] = False,
    metrics: Metrics = None,
    log_format: LogFormat = "text",
    runs: RunsFolder = Path("runs"),
) -> None:
    """Join a run with a ticket, and train until the run ends. Ctrl-C leaves the run and frees the slot."""
    with readable_errors(log_format):
        from hetero_pp.config.topology import parse_device
        from hetero_pp.program.join.command import JoiningHost
        from hetero_pp.program.join.command import join as take_part
        from hetero_pp.program.operate.operations import operated

        text = _read_ticket() if ticket == "-" else ticket
        own = JoiningHost(
            runs,
            data,
            tokenizer,
            parsed_address("--listen", listen),
            parsed("--device", parse_device, device),
            rehearsal,
        )
        with operated(metrics) as operations:
            take_part(text, own, operations)


def _read_ticket() -> str:
    """Return a ticket from standard input, up to the line that completes it, because a mail may have wrapped it."""
    from hetero_pp.core.errors import Refused
    from hetero_pp.rpc.identities import MOST_CHARACTERS, Ticket

    text = ""
    while len(text) < MOST_CHARACTERS and (line := sys.stdin.readline(MOST_CHARACTERS)):
        text += line
        with suppress(Refused):
            Ticket.from_text(text)
            break
    return text


def leave(
    run: RunName,
    slot: Annotated[str | None, typer.Option(metavar="SLOT", help="Leave only this slot of several.")] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Leave a run that this host has joined, and free its slot, as Ctrl-C does in `join`."""
    with readable_errors():
        from hetero_pp.program.join.membership import leave as end_join

        end_join(runs, run, slot)


def status(
    run: RunName,
    address: Address = None,
    json_path: JsonPath = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Show the round or the end of a run, its slots and members, hosts that wait for a group, and open tickets.

    Works on every host that started, serves or joined the run. `check` has the state of a ticket.
    """
    with readable_errors():
        from hetero_pp.program.join.status import status as ask_and_print

        ask_and_print(runs, run, parsed_address("--address", address, several=True), json_path)


def _started() -> float:
    """Return when the user started the command, in seconds since the epoch: imports alone may take seconds."""
    import psutil

    return psutil.Process().create_time()


def _page(is_wanted: bool) -> Page | None:
    """Return the page of a run, imported only if it is wanted."""
    if not is_wanted:
        return None
    from hetero_pp.program.view.server import on_a_page

    return on_a_page


def typed() -> list[str]:
    """Return the command as the user can type it again in the same folder."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return [sys.executable, "-P", "-m", "hetero_pp", *sys.argv[1:]]
    return [program.name if shutil.which(program.name) == str(program) else str(program), *sys.argv[1:]]
