"""The curves of a run, from its reports, and the boards that get them: TensorBoard always, others on demand."""

from __future__ import annotations

import io
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from hetero_pp.config.yaml_file import config_text
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import LastingLog, write_whole
from hetero_pp.messages.messages_pb2 import LinkUse, Report
from hetero_pp.program.report.state import RunState

_WANDB_SECONDS = 30.0  # seconds in which the service has to answer at the start and at the end
PROJECT = "hetero-pp"  # project under which services keep runs


class Scalar(NamedTuple):
    """One value of a curve."""

    time: float  # seconds since 1970
    tag: str  # name of the curve, such as `training_loss/dc`
    value: float
    step: int  # position on the axis
    axis: Literal["inner_step", "round"]


class Sink(Protocol):
    """Takes the scalars of a run until it is closed. Both methods may raise any exception."""

    def write(self, scalar: Scalar) -> None: ...

    def close(self) -> None: ...


MakeSink = Callable[[RunState, Path, str, bool], Sink]
"""Makes a sink from a folder for the service's files, and the id of its run, which every start of a run continues.

The last argument says whether the service has the run already.
"""


class OptionalSink:
    """A sink without which the run continues: it complains once about a failure, and takes no more scalars."""

    def __init__(
        self, name: str, make: MakeSink, state: RunState, folder: Path, complain: Callable[[str], None]
    ) -> None:
        """`folder`: keeps the service's files and the id of its run."""
        self._name, self._complain = name, complain
        self._sink: Sink | None = None
        self._has_earlier = False  # whether the service has what is told again until `go_on`

        def begin() -> None:
            file = folder / "id"
            self._has_earlier = file.is_file()
            if not self._has_earlier:
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(file, secrets.token_hex(4).encode())
            self._sink = make(state, folder, file.read_text(encoding="utf-8").strip(), self._has_earlier)

        self._attempt(begin)

    def write(self, scalar: Scalar) -> None:
        """Take one scalar, unless the sink has failed."""
        if self._sink is not None and not self._has_earlier:
            sink = self._sink
            self._attempt(lambda: sink.write(scalar))

    def go_on(self) -> None:
        """Take scalars from here on: those of earlier rounds were told again."""
        self._has_earlier = False

    def close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            self._attempt(sink.close)

    def _attempt(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # noqa: BLE001 (another program's bug or absence must not fail the run)
            self._sink = None
            why = " ".join(str(error).split()) or type(error).__name__
            self._complain(f"{self._name} gets no more curves, but the run continues: {why}")


class TensorBoard:
    """TensorBoard's event file of a run.

    The file is created with the first scalar, so that a failed resume leaves no file. TensorBoard's own writer is not
    used: it writes in a thread, which ends for good when a disk is full for a moment.
    """

    def __init__(self, folder: Path, state: RunState) -> None:
        self._folder, self._state = folder, state
        self._before = list(folder.glob("events.*"))  # files of earlier starts of the run
        self.log: LastingLog | None = None  # the open file; None until there is something to write

    def write(self, scalar: Scalar) -> None:
        """Write one scalar; `log.failure` shows whether it still waits for the disk."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import text

        events = []
        if self.log is None:
            name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{id(self)}"
            self.log = LastingLog(self._folder / name)
            config = text("configuration", f"```yaml\n{config_text(self._state.changed.latest)}```")
            events.append(Event(wall_time=time.time(), file_version="brain.Event:2"))
            events.append(Event(wall_time=scalar.time, step=0, summary=config))
        summary = Summary(value=[Summary.Value(tag=scalar.tag, simple_value=scalar.value)])
        for event in (*events, Event(wall_time=scalar.time, step=scalar.step, summary=summary)):
            RecordWriter(self.log).write(event.SerializeToString())

    def go_on(self) -> None:
        """Remove the files of earlier starts, after all reports to keep from them were reported again."""
        for path in self._before:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Flush. Raises OSError if the disk does not take the rest."""
        if self.log is not None:
            self.log.close()


class WandbSink:
    """Weights & Biases: one run of the project, which a resumed run continues. WANDB_MODE=offline keeps it on the disk.

    Each curve has its own axis. Nothing but curves and the configuration leaves this machine.
    """

    def __init__(self, state: RunState, folder: Path, identifier: str, goes_on: bool) -> None:
        """Raises wandb's errors if the service cannot be reached, or if the user has no key for it."""
        import wandb

        quiet = {"console": "off", "silent": True, "save_code": False, "disable_code": True, "disable_git": True}
        unwatched = {"x_disable_meta": True, "x_disable_stats": True}
        timeouts = {"init_timeout": _WANDB_SECONDS, "finish_timeout": _WANDB_SECONDS}
        config = state.changed.latest
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=config.name,
            id=identifier,
            resume="allow",
            dir=str(folder),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(**quiet, **unwatched, **timeouts),
        )
        self._known: set[str] = set()
        self.close = self._run.finish  # waits until everything is sent

    def write(self, scalar: Scalar) -> None:
        """Queue a scalar; a thread of wandb sends it."""
        if scalar.tag not in self._known:
            self._known.add(scalar.tag)
            self._run.define_metric(scalar.tag, step_metric=scalar.axis)
        self._run.log({scalar.tag: scalar.value, scalar.axis: scalar.step})


class TrackioSink:
    """Keeps curves on this machine, in TRACKIO_DIR; `trackio show --project hetero-pp` shows them."""

    def __init__(self, state: RunState, folder: Path, identifier: str, goes_on: bool) -> None:
        import trackio

        self._finish = trackio.finish  # unlike the run's own method, this leaves nothing to do at exit
        config = state.changed.latest
        with redirect_stdout(io.StringIO()):  # it prints colours even to a pipe
            self._run = trackio.init(
                project=PROJECT,
                name=f"{config.name}-{identifier}",  # trackio continues a run by its name
                resume="allow" if goes_on else "never",
                config=config.model_dump(mode="json"),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def write(self, scalar: Scalar) -> None:
        """Queue a scalar; a thread of trackio writes it."""
        self._run.log({scalar.tag: scalar.value}, step=scalar.step)

    def close(self) -> None:
        """Wait until everything is written. Call it in the thread that made the sink."""
        with redirect_stdout(io.StringIO()):
            self._finish()


def makers_of(names: Sequence[str]) -> dict[str, MakeSink]:
    """Return functions that make the named sinks. Raises ConfigError for a name that is unknown or not installed."""
    boards: dict[str, MakeSink] = {"wandb": WandbSink, "trackio": TrackioSink}
    for name in names:
        if name not in boards:
            raise ConfigError((), f"--board: found `{name}`, expected one of {', '.join(boards)}")
        if find_spec(name) is None:
            mend = f"install it with: pip install 'hetero-pp[{name}]'"
            raise ConfigError((), f"--board {name}: the package is not installed; {mend}")
        import_module(name)  # its messages come before those of the run
    return {name: boards[name] for name in names}


class Scalars:
    """Passes scalars to sinks, one value per tag and step.

    The step is the global inner step for inner steps, and the round for everything else.
    """

    def __init__(self, state: RunState, sinks: Sequence[Sink]) -> None:
        self._state, self._sinks = state, sinks
        self._newest: dict[str, int] = {}  # step of the last passed value, by tag
        self._uses: dict[tuple[str, str], tuple[float, LinkUse]] = {}
        self._tokens: dict[int, dict[str, int]] = {}
        """Tokens up to the end of a round, by round and replica, until those of all replicas are passed."""
        self._written: dict[str, tuple[int, float]] = {}
        """Last passed (tokens, training seconds), by replica and for all."""

    def on_report(self, report: Report) -> None:
        when, state = report.time, self._state
        match report.WhichOneof("event"):
            case "inner_step":
                step = report.inner_step
                replica = state.replicas.get(step.replica)
                index = 0 if replica is None else replica.index(step.round, step.step)
                for field, tag in (("loss", "training_loss"), ("gradient_norm",) * 2, ("learning_rate",) * 2):
                    if step.HasField(field):
                        self._scalar(when, f"{tag}/{step.replica}", getattr(step, field), index, "inner_step")
            case "evaluation":
                told = report.evaluation
                self._scalar(when, f"validation_loss/{told.replica}", told.loss, told.round)
                mean = state.mean_validation_loss(told.round)
                if mean is not None:
                    self._scalar(when, "validation_loss/mean", mean, told.round)
            case "link_use":  # counts are cumulative: that of a round is final once the first of the next arrives
                use, key = report.link_use, (report.link_use.link, report.link_use.direction)
                if key in self._uses and self._uses[key][1].round != use.round:
                    self._round_over(*self._uses[key])
                self._uses[key] = (when, use)
            case "member_round":  # once its first member has finished a round, a replica has reported all of its steps
                round_ = report.member_round.round
                for name, replica in state.replicas.items():
                    if report.member in (name, f"{name}.0"):
                        tokens = replica.tokens_until(round_)
                        self._tokens.setdefault(round_, {})[name] = tokens
                        self._write_tokens(when, name, tokens, round_)
                for earlier in sorted(self._tokens):
                    if earlier < round_ - 1 or self._tokens[earlier].keys() >= state.replicas.keys():
                        self._write_tokens(when, "all", sum(self._tokens.pop(earlier).values()), earlier)

    def _scalar(
        self, when: float, tag: str, value: float, step: int, axis: Literal["inner_step", "round"] = "round"
    ) -> None:
        if step > self._newest.get(tag, -1):  # a resumed run evaluates again what it resumes from
            self._newest[tag] = step
            for sink in self._sinks:
                sink.write(Scalar(when, tag, value, step, axis))

    def _write_tokens(self, when: float, name: str, tokens: int, round_: int) -> None:
        seconds = self._state.training_seconds(when)
        tokens_before, seconds_before = self._written.get(name, (0, 0.0))
        self._written[name] = tokens, seconds
        self._scalar(when, f"tokens/{name}", tokens, round_)
        if seconds > seconds_before:
            rate = (tokens - tokens_before) / (seconds - seconds_before)
            self._scalar(when, f"tokens_per_second/{name}", rate, round_)

    def _round_over(self, when: float, use: LinkUse) -> None:
        self._scalar(when, f"wire_bytes/{use.link}/{use.direction}", use.wire_bytes, use.round)
        link = self._state.links.get(use.link)
        for way, direction in link.ways.items() if link is not None else ():
            share = direction.busy_share(self._state.training_seconds(when))
            if way == use.direction and share is not None:
                self._scalar(when, f"busy_share/{use.link}/{way}", share, use.round)

    def close(self) -> None:
        """Write the last round of each link. The sinks stay open."""
        for when, use in self._uses.values():
            self._round_over(when, use)
        self._uses.clear()
