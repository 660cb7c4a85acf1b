"""Prints the command that resumes an interrupted run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hetero_pp.config.links import EXCHANGE
from hetero_pp.core.units import format_count
from hetero_pp.program.launch.inputs import Prepared
from hetero_pp.program.report.output import SafeConsole
from hetero_pp.run.folder import RunFolder
from replica_groups.exchange.open_log import open_log
from replica_groups.loop.saved_states import SavedStates


@contextmanager
def told_how_to_go_on(prepared: Prepared, folder: RunFolder, command: Sequence[str]) -> Iterator[None]:
    """If the block is interrupted, print how to resume the run. `command`: the command as the user typed it."""
    try:
        yield
    except KeyboardInterrupt:
        line = f"{prepared.spec.config.name}: {how_to_go_on(prepared, folder, command)}"
        SafeConsole().print(line, soft_wrap=True, highlight=False, markup=False)
        raise


def how_to_go_on(prepared: Prepared, folder: RunFolder, command: Sequence[str]) -> str:
    """Return one line that ends with the command to type."""
    command = [part for part in command if part != "--new"]
    has_exchange = EXCHANGE in prepared.names
    members = [name for name in prepared.names if name != EXCHANGE]
    if not has_exchange:
        return f"after the exchange has been resumed, rejoin it with: {shlex.join(command)}"
    resuming = [*command, *(() if "--resume" in command else ("--resume",))]
    if not members:
        token = () if "--token-file" in resuming else ("--token-file", str(folder.token))
        return f"resume with (on other hosts, repeat their commands): {shlex.join([*resuming, *token])}"
    suffice = any if prepared.spec.config.outer.counts else all  # a member that has only waited has nothing to save
    if suffice(_states(prepared, folder, member) for member in members):
        return f"resume with: {shlex.join(resuming)}"
    every = format_count(prepared.spec.latest.states_every, "round")
    saved = f"no state has been saved yet (states are saved every {every})"
    if open_log(prepared.spec.config, folder).last_record() == 0:
        return f"{saved}; start the run again with: {shlex.join(command)}"
    return f"{saved}; resume from the log, with new optimizer moments, with: {shlex.join(resuming)}"


def _states(prepared: Prepared, folder: RunFolder, member: str) -> list[int]:
    return SavedStates(folder.state(member), prepared.spec.run, prepared.spec.latest.states_every).rounds()
