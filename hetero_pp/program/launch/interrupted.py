"""Prints the command that resumes an interrupted run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hetero_pp.config.links import EXCHANGE
from hetero_pp.core.units import format_count
from hetero_pp.program.launch.inputs import Prepared
from hetero_pp.program.report.output import SafeConsole
from hetero_pp.run.folder import RunFolder
from replica_groups.exchange.open_log import open_log
from replica_groups.loop.saved_states import SavedStates


class ResumeHint:
    """Prints how to resume the run, once, if the block is interrupted."""

    def __init__(self, prepared: Prepared, folder: RunFolder, command: Sequence[str], resumes: bool = True) -> None:
        """`command`: the command as the user typed it. `resumes`: whether there is something to resume."""
        self._prepared, self._folder, self._command = prepared, folder, command
        self._is_printed = not resumes

    def print_once(self) -> None:
        """Print how to resume the run, if it is not printed yet. Call it once the member checkpoints are saved."""
        if not self._is_printed:
            name = self._prepared.spec.config.name
            line = f"{name}: {how_to_go_on(self._prepared, self._folder, self._command)}"
            SafeConsole().print(line, soft_wrap=True, highlight=False, markup=False)
        self._is_printed = True

    def __enter__(self) -> ResumeHint:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self.print_once()


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
    if all(_states(prepared, folder, member) for member in members):
        return f"resume with: {shlex.join(resuming)}"
    every = format_count(prepared.spec.latest.states_every, "round")
    saved = f"no state has been saved yet (states are saved every {every})"
    if open_log(prepared.spec.config, folder).last_record() == 0:
        return f"{saved}; start the run again with: {shlex.join(command)}"
    return f"{saved}; resume from the log, with new optimizer moments, with: {shlex.join(resuming)}"


def _states(prepared: Prepared, folder: RunFolder, member: str) -> list[int]:
    return SavedStates(folder.state(member), prepared.spec.run, prepared.spec.latest.states_every).rounds()
