"""A run in a notebook: trained round by round in this process, by the code behind `hetero-pp launch --in-process`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import Direction, Way
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.core.errors import ConfigError, HeteroPPError, RunFailed
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.export import theta_after
from hetero_pp.program.launch.command import begin_folder
from hetero_pp.program.launch.earlier import claim
from hetero_pp.program.launch.in_process import MemberThreads
from hetero_pp.program.launch.inputs import prepare
from hetero_pp.program.report.recorder import INTERRUPTED, Recorder
from hetero_pp.program.report.state import RunState
from hetero_pp.simulator.prediction import Prediction, predict

SECONDS_TO_LEAVE = 5.0
"""Seconds that the end of a run waits for members.

A member that a slow link still delays after that trains no more, and ends once the link releases it.
"""


@contextmanager
def _own_defaults() -> Iterator[None]:
    """Create tensors as a launched process does, fp32 on the CPU, whatever defaults the notebook has set."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@dataclass(frozen=True)
class RoundResult:
    """Results of one outer round."""

    round: int  # number of the round, from 1
    validation_loss: float  # mean over the replicas of the synced model's validation loss, in nats per token
    validation_losses: Mapping[str, float]
    """Validation loss by replica, in the replica forward: through its boundaries, if it compresses."""
    training_losses: Mapping[str, float]  # mean training loss over the round's inner steps, by replica
    link_bytes: Mapping[str, Mapping[Direction, int]]
    """Bytes on the wire by link and direction, with headers and framing."""
    line_bytes: Mapping[str, Mapping[Way, int]]
    """Bytes on the wire by line and direction (up, down), over all links of a machine or site."""
    contribution_bytes: int  # bytes of the round's contributions, one per replica
    seconds: float  # seconds from the call of `round` to its return
    parameters_sha256: str  # SHA-256 of the parameters, equal on all replicas
    not_counted: Mapping[str, str] = field(default_factory=dict)
    """Reasons why contributions of replicas were excluded from the round; usually empty."""


class Run:
    """One training run, with its members as threads of this process.

    Nothing starts before the first request for a round, a loss or parameters. Then the members evaluate the initial
    weights, and train when `round` is called; between two calls they wait.

    A member's error is raised by the call that waits for the member, and ends the run. An interrupt ends it, too. The
    results of a run that has ended can be read until it is closed.
    """

    def __init__(self, file: ConfigFile, runs: Path | None = None) -> None:
        """Read the YAML. Raises ConfigError with file and line.

        `runs`: folder for the run's files, by default a temporary one.
        """
        self.spec: RunSpec = spec_of(file)
        self.results: list[RoundResult] = []  # results of the rounds so far
        self._file = file
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if runs is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="hetero-pp-", ignore_cleanup_errors=True)
        self._runs = Path(self._temporary.name if self._temporary is not None else runs or "").absolute()
        self._state = RunState(self.spec)
        self._members: MemberThreads | None = None
        self._held = ExitStack()  # resources that are released at the end of the run
        self._ended: str | None = None

    @classmethod
    def from_yaml(
        cls, path: str | os.PathLike[str], *, runs: str | os.PathLike[str] | None = None, **changes: Any
    ) -> Run:
        """Return the run of a YAML, with some of its keys changed: `outer={"rounds": 3}, seed=1`.

        A mapping changes the entries that it names; entries of a list are named by their name or number:
        `replicas={"home": {"batch_size": 4}}`. Any other value replaces the old one. The run writes its files to
        `runs`/<name>/, as a launched run does; by default to a temporary folder, which `close` removes. Raises
        ConfigError with the file and the key.
        """
        return cls(ConfigFile(Path(path), changes=changes), None if runs is None else Path(runs))

    # ---- training ----

    def round(self) -> RoundResult:
        """Train the next outer round and return its results.

        Raises HeteroPPError if all rounds are trained, if the run has ended, or with the first error if it fails now.
        """
        started, number = time.monotonic(), len(self.results) + 1
        if self.is_over:
            raise HeteroPPError(f"{self!r}: all rounds are trained, so there is no next round")
        self._train(number)
        self.results.append(self._result(number, time.monotonic() - started))
        return self.results[-1]

    def __iter__(self) -> Iterator[RoundResult]:
        """Train the remaining rounds, and yield the result of each."""
        while not self.is_over:
            yield self.round()

    def train(self) -> list[RoundResult]:
        """Train the remaining rounds, and return the results of all rounds."""
        for _ in self:
            pass
        return self.results

    @property
    def is_over(self) -> bool:
        """Whether every round is trained."""
        if self._members is None:
            return False
        coordinator = self._members.exchange.coordinator
        return coordinator.is_over and len(self.results) == coordinator.last_round

    # ---- results ----

    @property
    def validation_loss(self) -> float:
        """Mean validation loss in nats per token after the rounds so far; at first that of the initial weights."""
        self._require_begun()
        return self._validation_loss(len(self.results))

    def parameters(self) -> dict[str, Tensor]:
        """Return the synced model after the rounds so far: fp32 tensors by name, which share no memory with the run."""
        self._require_begun()
        with _own_defaults(), theta_after(self.spec, self.folder, len(self.results)) as (_, tensor):
            return {name: tensor(name) for name in self.spec.parameter_shapes}

    def predict(self) -> Prediction:
        """Return what `hetero-pp simulate` predicts for this YAML. Starts nothing.

        Raises ConfigError with file and line.
        """
        try:
            return predict(self.spec)
        except ConfigError as error:
            raise self._file.located(error) from None

    @property
    def folder(self) -> RunFolder:
        """Folder with the run's files."""
        return RunFolder(self._runs / self.spec.config.name)

    def __repr__(self) -> str:
        return f"Run({self.spec.config.name}: {len(self.results)} of {self._state.rounds_planned} rounds)"

    # ---- end ----

    def close(self) -> None:
        """End the run after the rounds so far, and remove its folder if that is temporary."""
        self._end("closed")
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- internals ----

    def _require_begun(self) -> None:
        if self._members is None:
            self._train(0)

    def _train(self, round_: int) -> None:
        """Start the members if the run has not begun, and train all rounds up to `round_`.

        Any error or interrupt ends the run.
        """
        if self._ended is not None:
            raise RunFailed(f"{self!r} has ended: {self._ended}")
        try:
            with _own_defaults():
                members = self._begin() if self._members is None else self._members
                members.train(round_)
            if self._state.failed is not None:
                raise RunFailed(self._state.failed)
        except BaseException as error:
            self._end(str(error) or INTERRUPTED)
            raise
        rules = members.exchange.coordinator
        if rules.is_over and round_ == rules.last_round:  # with overlap, it is trained beside the one before
            self._end(None)

    def _begin(self) -> MemberThreads:
        """Start the members, and wait until they have evaluated the initial weights. Raises HeteroPPError."""
        prepared, held, name = prepare(self._file, self._runs), self._held, self.spec.config.name
        held.enter_context(claim(self._runs, name, prepared.names))
        folder = begin_folder(prepared.spec, self._runs)
        held.callback(torch.set_num_threads, torch.get_num_threads())
        recorder = Recorder(prepared.spec, folder, self._state)
        held.callback(recorder.close)

        def on_report(report: Report) -> None:
            self._state.apply(report)
            recorder.on_report(report)

        members = MemberThreads(prepared.spec, folder, on_report)

        def leave() -> None:
            if self._state.failed is not None:
                members.abort(self._state.failed, self._state.failed)
            members.join(SECONDS_TO_LEAVE)
            members.end_watching()

        held.callback(leave)
        members.begin()
        members.train(0)
        self._members = members
        return members

    def _end(self, cause: str | None) -> None:
        """Release everything but the folder. `cause`: why the run ends early; None after its last round."""
        if self._ended is None:
            self._ended = cause or "every round is trained"
            if cause is not None:
                self._state.fail(cause)
            self._held.close()

    def _validation_loss(self, round_: int) -> float:
        loss = self._state.mean_validation_loss(round_)
        if loss is None:
            lacking = ", ".join(self._state.awaited_losses(round_)) or "any replica"
            raise RunFailed(f"{self!r}: no validation loss of {lacking} after round {round_}")
        return loss

    def _result(self, round_: int, seconds: float) -> RoundResult:
        with self._state.lock:
            replicas = self._state.replicas
            links = {
                name: {way: direction.of_round(round_).wire_bytes for way, direction in link.ways.items()}
                for name, link in self._state.links.items()
            }
            losses = {name: replica.round_loss(round_) for name, replica in replicas.items()}
            validation = {name: replica.validation_loss.get(round_) for name, replica in replicas.items()}
            closed = self._state.closed.get(round_)
            sha256 = next((one.sha256[round_] for one in replicas.values() if round_ in one.sha256), None)
            if closed is None or sha256 is None:
                raise RunFailed(f"{self!r}: received no report of the end of round {round_}")
            return RoundResult(
                round=round_,
                validation_loss=self._validation_loss(round_),
                validation_losses={name: loss for name, loss in validation.items() if loss is not None},
                training_losses={name: loss for name, loss in losses.items() if loss is not None},
                link_bytes=links,
                line_bytes={
                    name: {way: traffic.of_round(round_).wire_bytes for way, traffic in line.ways.items()}
                    for name, line in self._state.lines.items()
                },
                contribution_bytes=closed.bytes,
                seconds=seconds,
                parameters_sha256=sha256,
                not_counted={name: why.cause for name, why in self._state.not_counted(round_).items()},
            )
