"""Runs a topology with metrics, summary, pictures and a live view, and reads the earlier record of a resumed run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from hetero_pp.config.changes import (
    PENDING,
    REPLICAS,
    Agreement,
    Changes,
    Values,
    described,
    read_changes,
    write_changes,
)
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.spec import RunSpec, require_known_basis
from hetero_pp.config.yaml_file import save_config
from hetero_pp.core.errors import ConfigError, HeteroPPError, RunFailed
from hetero_pp.messages.messages_pb2 import Begun, Report
from hetero_pp.program.launch.claim import claim_all
from hetero_pp.program.launch.inputs import Prepared, new_run_folder, require_same_ranks
from hetero_pp.program.launch.mode import Invocation
from hetero_pp.program.launch.over import over_on_disk
from hetero_pp.program.launch.same_run import require_same_run, unheeded
from hetero_pp.program.report.display import LiveDisplay
from hetero_pp.program.report.lines import earlier_line, words_of
from hetero_pp.program.report.output import about, about_report, announce, standard_output, tell
from hetero_pp.program.report.recorder import INTERRUPTED, Recorder, reports_until
from hetero_pp.program.report.state import RunState
from replica_groups.exchange.log import fetch_configuration, keep_configuration, open_log, require_unused

MOST_REFUSALS = 20
"""Number of the exchange's refusals that are shown; metrics.jsonl has all of them."""
MOST_REFUSALS_OF_A_MEMBER = 5

OnReport = Callable[[Report], None]
Start = Callable[[RunSpec, RunFolder, OnReport, Values | None], None]
"""(spec, folder, on_report, changed keys if the run is resumed, else None); returns when the run is over."""


def run_and_record(
    prepared: Prepared, runs: Path, start: Start, resume: bool, invocation: Invocation, on_stopped: Callable[[], None]
) -> None:
    """Run a topology with metrics, summary, pictures and a live view.

    `on_stopped` is called after an interrupt, once everything but the pictures is saved. The mode prints the result.

    Raises RunFailed if the run ended early without a reason.
    """
    folder = RunFolder(runs.absolute() / prepared.spec.config.name)
    spec, changed = _going_on(prepared, folder) if resume else (prepared.spec, None)
    if not resume:
        begin_folder(spec, runs.absolute())
    elif over := over_on_disk(folder, spec.latest.outer.rounds):
        announce(f"{spec.config.name}: {over}")
        if _is_summarized(folder, spec.latest.outer.rounds):
            return
    recording, is_stopped = _Recording(spec, folder, resume, invocation), False
    state, console = recording.state, recording.console
    try:
        page = invocation.operations.page(state, recording.say)
        with page as show, LiveDisplay(state, console, since=invocation.since):
            recording.show = show
            start(spec, folder, recording.on_report, changed)
        _require_over(state)
    except (HeteroPPError, KeyboardInterrupt) as error:
        state.fail(str(error) or INTERRUPTED)
        is_stopped = isinstance(error, KeyboardInterrupt)
        raise
    except Exception as error:
        state.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        recording.recorder.close(on_stopped if is_stopped else None)
    with about("result"):
        invocation.mode.conclude(console, state, folder)


class _Recording:
    """Prints, shows and records the reports of a run, those of an earlier start included."""

    def __init__(self, spec: RunSpec, folder: RunFolder, resume: bool, invocation: Invocation) -> None:
        self._spec, self._folder, self._resume = spec, folder, resume
        self._operations, self._mode = invocation.operations, invocation.mode
        self.console = standard_output()
        self.state = RunState(spec)
        self._operations.observed.follow(self.state)
        self.recorder = Recorder(spec, folder, self.state, resume, self.say, self._operations.boards)
        self.show: OnReport = lambda report: None
        """Shows a report on the page of the run."""
        self._refuse = _teller_of_refusals(self.say)
        self._beginnings = Beginnings(resume)

    def say(self, line: str) -> None:
        tell(self.console, f"{self._spec.config.name}: {line}")

    def on_report(self, report: Report) -> None:
        """Take in a report of this start of the run."""
        with about_report(report):
            self._take_in(report)
        self._operations.on_report(report)

    def _take_in(self, report: Report) -> None:
        if report.HasField("begun") and report.member == EXCHANGE:
            if self._beginnings.is_taken_over(report.begun):
                self._catch_up(report)
                return
            if self._resume:
                self._go_on(report.begun)
                self.recorder.go_on()
        if report.HasField("refusal"):
            self._refuse(report)
        if self._take(report) and self.state.news is not None and self.state.news.is_line:
            self.say(words_of(self.state.news, self._spec))

    def _take(self, report: Report) -> bool:
        is_possible = self.state.apply(report)
        if is_possible:
            self.show(report)
            self._mode.on_report(report)
        self.recorder.on_report(report)
        return is_possible

    def _go_on(self, begun: Begun) -> None:
        """Take the reports of earlier rounds again, and print a line about them."""
        last_round = begun.last_round
        for damaged in begun.damaged:
            self.say(f"skipping a damaged file: {damaged}")
        self.say(f"resuming after round {last_round}")
        if begun.note:
            self.say(begun.note)
        for change in _changed_after(Changes.from_json(begun.changes), last_round):
            self.say(change)
        earlier = reports_until(self._spec.config, self._folder, last_round, self.say)
        with self.state.lock:  # the display then shows these rounds as one line only
            self.state.closed_earlier = last_round
            for one in earlier:
                self._take(one)
        if last_round:
            self.say(earlier_line(self.state))

    def _catch_up(self, report: Report) -> None:
        """Take the rounds that were recorded, but not reported before the earlier exchange ended."""
        log = open_log(self._spec.config, self._folder)
        for round_ in range(1, report.begun.last_round + 1):
            if round_ not in self.state.closed:
                self._take(Report(time=report.time, member=EXCHANGE, round_closed=log.read_record(round_)))


def _is_summarized(folder: RunFolder, rounds: int) -> bool:
    """Return whether nothing of the record of a finished run is missing, so that no member has to tell it again."""
    try:
        summary = json.loads(folder.summary.read_bytes())
        return (
            summary["rounds"] == rounds
            and "failed" not in summary
            and all((folder.path / name).is_file() for name in ("loss.png", "links.png"))
        )
    except (OSError, ValueError, KeyError):
        return False


def _require_over(state: RunState) -> None:
    """Raise RunFailed for a run that ended early."""
    if not state.is_over:
        found = f"the run ended after round {state.rounds} of {state.rounds_planned} without a reason"
        raise RunFailed(f"{found}; see the members' output in logs/")


def _teller_of_refusals(say: Callable[[str], None]) -> Callable[[Report], None]:
    """Return a function that prints each refusal once: sender, message and reason, regardless of the sender's port.

    Each process that refuses has its own limit of lines, so that no member can hide the refusals of others.
    """
    told: defaultdict[str, set[str]] = defaultdict(set)

    def refuse(report: Report) -> None:
        refusal, own = report.refusal, report.member in ("", EXCHANGE)
        refused = f"refused {refusal.sender.rpartition(':')[0] or refusal.sender}: {refusal.reason}"
        line = refused if own else f"{report.member} reports that it {refused}"
        lines = told[report.member]
        if line not in lines and len(lines) < (MOST_REFUSALS if own else MOST_REFUSALS_OF_A_MEMBER):
            lines.add(line)
            say(line)

    return refuse


def begin_folder(spec: RunSpec, runs: Path) -> RunFolder:
    """Make a new folder for the run, with its configuration.

    Raises OSError if the disk does not take it; an earlier run that was moved aside is then moved back.
    """
    folder = RunFolder(runs / spec.config.name)
    with claim_all(runs, spec.config.name):
        if spec.config.store.url is not None:
            require_unused(open_log(spec.config, folder))
        with new_run_folder(runs, spec.config.name):
            save_config(spec.config, folder.config)
            keep_configuration(spec.config, folder, open_log(spec.config, folder))
    return folder


def _going_on(prepared: Prepared, folder: RunFolder) -> tuple[RunSpec, Values]:
    """Return the run in the folder as far as it is known before it resumes, and the keys that change from then on.

    Its configuration is written to the folder again.
    """
    fetch_configuration(prepared.spec.config, folder)
    try:
        agreement = require_same_run(prepared.spec.config, prepared.given, folder)
        last_round = open_log(prepared.spec.config, folder).last_record()
        changes = agreement.changes.changed(agreement.first, last_round + 1, agreement.wanted)
        spec = RunSpec(agreement.first, prepared.spec.shape.vocabulary, changes)
        require_known_basis(spec)
        if (rounds := spec.latest.outer.rounds) < last_round:
            found = f"found {rounds}, expected at least {last_round}, the number of finished rounds"
            raise ConfigError(("outer", "rounds"), found)
        require_same_ranks(spec, prepared.spec.config, prepared.names, folder)
    except ConfigError as error:
        raise prepared.located(error) if error.key else error from None
    for line in unheeded(prepared.spec.config, agreement):
        announce(f"{prepared.spec.config.name}: {line}")
    _keep_wanted(agreement, folder)
    save_config(spec.config, folder.config)
    return spec, agreement.wanted


def _keep_wanted(agreement: Agreement, folder: RunFolder) -> None:
    """Record the wanted replicas in the folder, where the run's processes read them.

    `begin_run` decides from which round they hold. Leftovers of an earlier attempt that failed are removed.
    """
    found = agreement.changes
    if REPLICAS in agreement.wanted:
        found = found.changed(agreement.first, PENDING, {REPLICAS: agreement.wanted[REPLICAS]})
    if found != read_changes(folder.changes):
        write_changes(found, folder.changes)


class Beginnings:
    """Distinguishes a run that begins or resumes from an exchange that was restarted during the run."""

    def __init__(self, resume: bool) -> None:
        self._resume, self._has_begun = resume, False

    def is_taken_over(self, begun: Begun) -> bool:
        """Return whether a `begun` report is that of a restarted exchange.

        Call it for each such report in order. The first report may have been missed.
        """
        is_first, self._has_begun = not self._has_begun, True
        return not is_first or (begun.last_round > 0 and not self._resume)


def _changed_after(changes: Changes, last_round: int) -> Iterator[str]:
    """Yield, in words, the changes that take effect after a round."""
    for key, values in changes.history.items():
        for round_ in (since for since in values if since > max(last_round, 1)):
            before = max(since for since in values if since < round_)
            if key == REPLICAS:
                yield f"from round {round_} on {described(values[before], values[round_])}"
                continue
            yield f"{key}: {json.dumps(values[round_])} from round {round_} on (before: {json.dumps(values[before])})"
