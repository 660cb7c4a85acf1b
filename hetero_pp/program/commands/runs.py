"""Commands that start runs, join them and show their state."""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_pp.program.commands.options import (
    Boards,
    Calibration,
    ConfigPath,
    Device,
    JsonPath,
    LogFormat,
    Metrics,
    Otlp,
    Overrides,
    RunName,
    RunsFolder,
    StartNew,
    parsed,
    parsed_address,
    readable_errors,
)

if TYPE_CHECKING:
    from hetero_pp.program.operate.operations import Page


Weights = Annotated[
    Path | None, typer.Option("--from", metavar="FOLDER", help="Start from a LLaMA checkpoint; sets `model.weights`.")
]
Only = Annotated[
    str | None, typer.Option("--only", metavar="NAME", help="Start one part here: `exchange`, a replica, or a stage.")
]


def launch(
    config: ConfigPath,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Train in one process, without a network, to the same bits.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume runs/<name> from the newest round that all members saved.")
    ] = False,
    new: StartNew = False,
    weights: Weights = None,
    only: Only = None,
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
    page: Annotated[bool, typer.Option("--view", help="Show the run on a page of this machine, too.")] = False,
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
            host = Host(only, parsed_address("--exchange", exchange), token)
            run_on_this_host(config, settings, runs, host, in_process, resume, new, invocation)


def rehearse(
    config: ConfigPath,
    rounds: Annotated[int, typer.Option(min=1, help="Rehearse at most this many outer rounds.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Rehearse at most this many inner steps of each round.")] = 4,
    calibration: Calibration = None,
    json_path: JsonPath = None,
    page: Annotated[bool, typer.Option("--view", help="Show the rehearsal on a page of this machine, too.")] = False,
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
        from hetero_pp.program.rehearse.command import AsRehearsal

        settings: list[Given] = [*overrides, *calibrated(calibration)]
        mode = AsRehearsal(rounds, steps, json_path)
        with operated(metrics, page=_page(page)) as operations:
            invocation = Invocation(typed=typed(), since=_started(), operations=operations, mode=mode)
            run_topology(config, settings, runs, False, invocation=invocation)


def serve(
    config: ConfigPath,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume runs/<name>; hosts that were admitted stay admitted.")
    ] = False,
    new: StartNew = False,
    rehearsal: Annotated[
        bool, typer.Option("--rehearse", help="Serve a rehearsal, in which hosts try their lines and train nothing.")
    ] = False,
    token: Annotated[
        Path | None, typer.Option("--token-file", help="Read the run's token from this file, instead of a new one.")
    ] = None,
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
        from hetero_pp.program.rehearse.command import served_rehearsal

        since, mode = _started(), served_rehearsal(resume) if rehearsal else AS_A_RUN
        with operated(metrics, otlp, boards) as operations:
            invocation = Invocation(typed=typed(), since=since, operations=operations, mode=mode)
            run_on_this_host(config, overrides, runs, Host(EXCHANGE, token=token), False, resume, new, invocation)


def invite(
    run: RunName,
    slot: Annotated[
        str | None,
        typer.Option(
            "--slot",
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
    validator: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Print the pass of a validator, which has one vote, and no ticket."),
    ] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Print a ticket that admits one process to a run that this host serves."""
    with readable_errors():
        from hetero_pp.program.join.invite import invite as print_ticket
        from hetero_pp.program.join.invite import invite_validator, seconds_of

        reached = parsed_address("--address", address)
        if validator is not None:
            invite_validator(runs, run, validator, reached)
            return
        print_ticket(runs, run, slot, seconds_of(expires), reached)


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
    device: Device = "auto",
    rehearsal: Annotated[
        bool, typer.Option("--rehearse", help="Rehearse with this host's line and its neighbours, and train nothing.")
    ] = False,
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
    slot: Annotated[
        str | None,
        typer.Option("--slot", metavar="SLOT", help="Choose the slot, if several members joined from this host."),
    ] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Leave a run that this host has joined, and free its slot, as Ctrl-C does in `join`."""
    with readable_errors():
        from hetero_pp.program.join.membership import leave as end_join

        end_join(runs, run, slot)


def status(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run name, run folder, HOST:PORT of an exchange, or ticket.")
    ],
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Dial the exchange at this address instead of the known one."),
    ] = None,
    json_path: JsonPath = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Show the round or the end of a run, its slots and members, hosts that wait for a group, and open tickets.

    Works on every host that started, serves or joined the run, or that waits for a group. For a ticket: print the slot
    that it is for, its expiry, and whether it was used.
    """
    with readable_errors():
        from hetero_pp.program.join.status import status as ask_and_print

        ask_and_print(runs, run, parsed_address("--address", address), json_path)


def _started() -> float:
    """Return when the user started the command, in seconds since the epoch: imports alone may take seconds."""
    import psutil

    return psutil.Process().create_time()


def _page(is_wanted: bool) -> Page:
    """Return the page of a run, imported only if it is wanted."""
    if is_wanted:
        from hetero_pp.program.view.server import on_a_page

        return on_a_page
    from hetero_pp.program.operate.operations import without_page

    return without_page


def typed() -> list[str]:
    """Return the command as the user can type it again in the same folder."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return [sys.executable, "-P", "-m", "hetero_pp", *sys.argv[1:]]
    return [program.name if shutil.which(program.name) == str(program) else str(program), *sys.argv[1:]]
