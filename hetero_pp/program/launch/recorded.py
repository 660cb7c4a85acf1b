"""Runs a topology with metrics, summary, pictures and a live view, and reads the earlier record of a resumed run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from hetero_pp.config.changed_keys import PENDING, REPLICAS, Changes, Values, read_changes, write_changes
from hetero_pp.config.links import EXCHANGE
from hetero_pp.core.errors import ConfigError, HeteroPPError, RunFailed
from hetero_pp.messages.messages_pb2 import Begun, Report
from hetero_pp.program.launch.claim import claim_all
from hetero_pp.program.launch.inputs import Prepared, new_run_folder
from hetero_pp.program.launch.mode import AS_A_RUN, Mode
from hetero_pp.program.launch.same_run import require_same_run, unheeded
from hetero_pp.program.operate.operations import Operations
from hetero_pp.program.report.display import LiveDisplay
from hetero_pp.program.report.earlier import reports_until
from hetero_pp.program.report.happenings import Happenings
from hetero_pp.program.report.json_lines import about, about_report
from hetero_pp.program.report.output import standard_output, tell
from hetero_pp.program.report.recorder import INTERRUPTED, Recorder
from hetero_pp.program.report.round_lines import earlier_line
from hetero_pp.program.report.state import RunState
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.membership import described, require_known_basis
from hetero_pp.run.same import Agreement
from hetero_pp.run.spec import RunSpec
from hetero_pp.run.yaml_file import save_config
from replica_groups.exchange.open_log import fetch_configuration, keep_configuration, open_log, require_unused

MOST_REFUSALS = 20
"""Number of the exchange's refusals that are shown; metrics.jsonl has all of them."""
MOST_REFUSALS_OF_A_MEMBER = 5

OnReport = Callable[[Report], None]
Start = Callable[[RunSpec, RunFolder, OnReport, Values | None], None]
"""(spec, folder, on_report, changed keys if the run is resumed, else None); returns when the run is over."""


def run_and_record(
    prepared: Prepared,
    runs: Path,
    start: Start,
    resume: bool,
    since: float,
    on_stopped: Callable[[], None],
    operations: Operations | None = None,
    mode: Mode = AS_A_RUN,
) -> None:
    """Run a topology with metrics, summary, pictures and a live view. `since`: when the user started the command.

    `on_stopped` is called after an interrupt, once everything but the pictures is saved. `mode` prints the result.

    Raises RunFailed if the run ended early without a reason.
    """
    console, folder = standard_output(), RunFolder(runs.absolute() / prepared.spec.config.name)
    spec, changed = _going_on(prepared, folder) if resume else (prepared.spec, None)
    if not resume:
        begin_folder(spec, runs.absolute())

    def say(line: str) -> None:
        tell(console, f"{spec.config.name}: {line}")

    state, operations = RunState(spec), operations or Operations()
    operations.follow(state)
    recorder = Recorder(spec, folder, state, resume, say, operations.boards)
    refuse, happenings, begun = _teller_of_refusals(say), Happenings(spec), Beginnings(resume)

    def take(report: Report) -> None:
        if state.apply(report):
            show(report)
            mode.on_report(report)
        recorder.on_report(report)

    def on_report(report: Report) -> None:
        with about_report(report):
            take_in(report)
        operations.on_report(report)

    def take_in(report: Report) -> None:
        if report.HasField("begun") and report.member == EXCHANGE:
            if begun.is_taken_over(report.begun):
                _catch_up(spec, folder, report, state, take)
                return
            if resume:
                _go_on(spec, folder, report, state, take, say)
                recorder.go_on()
        if report.HasField("refusal"):
            refuse(report)
        for line in happenings.lines(report):
            say(line)
        take(report)

    is_stopped = False
    try:
        with operations.page(state, say) as show, LiveDisplay(state, console, since=since):
            start(spec, folder, on_report, changed)
        _require_over(state)
    except (HeteroPPError, KeyboardInterrupt) as error:
        recorder.fail(str(error) or INTERRUPTED)
        is_stopped = isinstance(error, KeyboardInterrupt)
        raise
    except Exception as error:
        recorder.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        recorder.close(on_stopped if is_stopped else None)
    with about("result"):
        mode.conclude(console, state, folder)


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
        next_round = open_log(prepared.spec.config, folder).last_record() + 1
        changes = agreement.changes.changed(agreement.first, next_round, agreement.wanted)
        spec = RunSpec(agreement.first, prepared.spec.shape.vocabulary, changes)
        require_known_basis(spec)
    except ConfigError as error:
        raise prepared.located(error) if error.key else error from None
    for line in unheeded(prepared.spec.config, agreement):
        tell(standard_output(), f"{prepared.spec.config.name}: {line}")
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


def _go_on(
    spec: RunSpec, folder: RunFolder, report: Report, state: RunState, take: OnReport, say: Callable[[str], None]
) -> None:
    """Apply and record the reports of earlier rounds again, and print a line about them."""
    last_round = report.begun.last_round
    for damaged in report.begun.damaged:
        say(f"skipping a damaged file: {damaged}")
    say(f"resuming after round {last_round}")
    if report.begun.note:
        say(report.begun.note)
    for change in _changed_after(Changes.from_json(report.begun.changes), last_round):
        say(change)
    earlier = reports_until(spec.config, folder, last_round, say)
    with state.lock:  # the display then shows these rounds as one line only
        state.closed_earlier = last_round
        for one in earlier:
            take(one)
    if last_round:
        say(earlier_line(state))


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


def _catch_up(spec: RunSpec, folder: RunFolder, report: Report, state: RunState, take: OnReport) -> None:
    """Report the rounds that were recorded, but not reported before the earlier exchange ended."""
    log = open_log(spec.config, folder)
    for round_ in range(1, report.begun.last_round + 1):
        if round_ not in state.closed:
            take(Report(time=report.time, member=EXCHANGE, round_closed=log.read_record(round_)))


def _changed_after(changes: Changes, last_round: int) -> Iterator[str]:
    """Yield, in words, the changes that take effect after a round."""
    for key, values in changes.history.items():
        for round_ in (since for since in values if since > max(last_round, 1)):
            before = max(since for since in values if since < round_)
            if key == REPLICAS:
                yield f"from round {round_} on {described(values[before], values[round_])}"
                continue
            yield f"{key}: {json.dumps(values[round_])} from round {round_} on (before: {json.dumps(values[before])})"
