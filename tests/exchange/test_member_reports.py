"""Reports of members: every number has a range, their count is bounded, and the exchange sets their times."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from small_run import Run

from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import Refused
from hetero_pp.core.progress import steady_clock
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import Refusal
from hetero_pp.messages.refusals import SECONDS_BETWEEN, TOLD_AT_ONCE, Kind, Refusals
from hetero_pp.messages.report_bounds import MOST_BYTES, MOST_LOSS, MOST_NORM, ReportBounds, complaint
from hetero_pp.rpc.callers import REPORTS
from hetero_pp.rpc.limits import MOST_CHARACTERS, plain
from replica_groups.exchange import reports as reports_module
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.reports import MemberReports
from replica_groups.member import reporter as reporter_module
from replica_groups.member.reporter import Reporter

STEPS, TOKENS = 10, 400


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of three replicas in round 1 of 9."""
    run = Run(tmp_path, {"a": 1, "b": 1, "c": 1})
    run.exchange.reports._reports = MemberReports(run.roster, ReportBounds(STEPS, {"a": TOKENS}))
    run.assign(0)
    return run


def _step(**values: float) -> pb.Report:
    told = {"replica": "a", "round": 1, "step": 0, "loss": 3.0, "tokens": TOKENS} | values
    return pb.Report(member="a", time=1.0, inner_step=pb.InnerStep(**told))  # type: ignore[arg-type]


def _use(**values: float) -> pb.Report:
    use = pb.LinkUse(link="a-exchange", direction="forward", **({"round": 1} | values))  # type: ignore[arg-type]
    return pb.Report(member="a", link_use=use)


def _evaluation(**values: float) -> pb.Report:
    told = pb.Evaluation(replica="a", **({"round": 1, "loss": 3.0} | values))  # type: ignore[arg-type]
    return pb.Report(member="a", evaluation=told)


def _round(**values: float) -> pb.Report:
    return pb.Report(member="a", member_round=pb.MemberRound(**({"round": 1} | values)))  # type: ignore[arg-type]


def _refusal(**values: object) -> pb.Report:
    return pb.Report(member="a", refusal=pb.Refusal(**({"kind": Kind.STRANGER} | values)))  # type: ignore[arg-type]


def _activity(doing: int = pb.FORWARD) -> pb.Report:
    return pb.Report(member="a", activity=pb.Activity(doing=doing))  # type: ignore[arg-type]


OUT_OF_RANGE = {
    "a round that is not open": _step(round=2),
    "no round": _step(round=0),
    "a step beyond the round": _step(step=STEPS),
    "tokens beyond the batch": _step(tokens=TOKENS + 1),
    "a huge loss": _step(loss=1e308),
    "a negative loss": _step(loss=-1.0),
    "minus infinity": _step(loss=-math.inf),
    "a huge norm": _step(gradient_norm=1e308),
    "no learning rate": _step(learning_rate=math.nan),
    "an evaluation of a made-up round": _evaluation(round=2**32 - 1),
    "a huge evaluation": _evaluation(loss=1e308),
    "tokens of no evaluation": _evaluation(tokens=2**63),
    "a link in a made-up round": _use(round=2**32 - 1),
    "bytes that no link carries": _use(wire_bytes=MOST_BYTES + 1),
    "payload that no link carries": _use(payload_bytes=2**64 - 1),
    "messages that no link carries": _use(messages=2**64 - 1),
    "a link busy for ever": _use(busy_seconds=math.inf),
    "a made-up round": _round(round=2**32 - 1),
    "a round of no time": _round(wait_seconds=math.nan),
    "a negative wait for a neighbour": _round(wait_next_seconds=-1.0),
    "a round of all time": _round(compute_seconds=1e308),
    "a state of a made-up round": pb.Report(member="a", state_saving=pb.StateSaving(round=2**32 - 1)),
    "more refusals than calls": _refusal(count=2**64 - 1),
    "a made-up kind of refusal": _refusal(kind="made up"),
    "a made-up activity": _activity(99),
    "no activity": _activity(0),
    "a line without bandwidth": pb.Report(member="a", measured_line=pb.MeasuredLine(up=0.0, down=1e6)),
    "a line of no number": pb.Report(member="a", measured_line=pb.MeasuredLine(up=1e6, down=math.nan)),
}


@pytest.mark.parametrize("report", OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_what_is_out_of_range_is_refused_in_the_senders_name(report: pb.Report, run: Run) -> None:
    """Other reports of the same call are passed on."""
    with pytest.raises(Refused, match=r"a: `\w+\.\w+`: got .*, expected "):
        run.exchange.report([report, _step(loss=2.0)])
    run.exchange.end_watching()
    told = list(run.exchange.watch())
    assert [one.inner_step.loss for one in told if one.HasField("inner_step")] == [2.0]
    assert [(one.refusal.sender, one.refusal.kind) for one in told if one.HasField("refusal")] == [
        ("a", Kind.MALFORMED)
    ]
    assert report not in told


def test_every_number_that_a_member_may_report_has_a_range() -> None:
    """Finds fields that were added without a range: no field accepts the largest number of its type."""
    for event in REPORTS:
        told = pb.Report.DESCRIPTOR.fields_by_name[event].message_type
        assert told is not None
        for field in told.fields:
            if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64, field.CPPTYPE_DOUBLE):
                is_real = field.cpp_type == field.CPPTYPE_DOUBLE
                most = 1e308 if is_real else 2**32 - 1 if field.cpp_type == field.CPPTYPE_UINT32 else 2**64 - 1
                report = pb.Report(member="a")
                setattr(getattr(report, event), field.name, most)
                assert complaint(report, 9, ReportBounds()) is not None, f"{event}.{field.name}"


def test_losses_of_a_run_that_diverges_end_at_their_largest_number(run: Run) -> None:
    """Such losses are honest, but not numbers that readers of JSON and statistics could use."""
    diverged = [_step(loss=math.nan, gradient_norm=3e38), _evaluation(loss=math.inf), _step(loss=1e12)]
    run.exchange.report([*diverged, _step(loss=3.0), _evaluation(loss=4.0)])
    run.exchange.end_watching()
    told = [one for one in run.exchange.watch() if one.member == "a" and not one.HasField("joined")]
    losses = [getattr(one, one.WhichOneof("event") or "").loss for one in told]
    assert losses == [MOST_LOSS, MOST_LOSS, MOST_LOSS, 3.0, 4.0]
    assert told[0].inner_step.gradient_norm == MOST_NORM
    assert not told[3].inner_step.HasField("gradient_norm")
    assert run.exchange.runner.refusals.counts.total() == 0


@pytest.mark.parametrize("make", [_evaluation, _round, _use, _refusal, _activity])
def test_a_flood_of_reports_is_bounded_by_the_rounds_of_the_run(make: object, run: Run) -> None:
    """Otherwise memory and disk of every watcher would fill up."""
    assert callable(make)
    refused = 0
    for _ in range(3_000):
        try:
            run.exchange.report([make()])
        except Refused:
            refused += 1
    told = [one for one in _told(run.exchange) if one.WhichOneof("event") == make().WhichOneof("event")]
    assert sum(one.member == "a" for one in told) == 3_000 - refused < 300


def _told(exchange: Exchange) -> list[pb.Report]:
    exchange.end_watching()
    return list(exchange.watch())


class _Clock:
    def __init__(self, *times: float) -> None:
        self._times: Iterator[float] = iter(times)

    def __call__(self) -> float:
        return next(self._times)


def _dated(reports: MemberReports, time: float, sent: float | None = None) -> float:
    report = pb.Report(member="a", time=time, sent=sent, finished=pb.Nothing())
    reports.take(report)
    return report.time


def test_confirmations_in_a_loop_are_reported_a_bounded_number_of_times(run: Run) -> None:
    """Each confirmation that completes a replica's hash makes a report.

    Without a bound they would fill the run's record.
    """
    run.deposit(1, "a", "b", "c")
    hashes = dict.fromkeys(run.checkpoint.parameters, bytes(32))
    most = reports_module.TRIES * (1 + reports_module.ROUNDS_BEFORE)
    for _ in range(most):
        run.exchange.confirm("a", 1, hashes)
    for _ in range(100):
        with pytest.raises(Refused, match=r"a: `round_verified`: got more than \d+ reports up to round 1"):
            run.exchange.confirm("a", 1, hashes)
    run.exchange.confirm("b", 1, hashes)  # no other member is limited by it
    told = run.exchange.watch()
    run.exchange.end_watching()
    verified = [one.round_verified.replica for one in told if one.HasField("round_verified")]
    assert verified == ["a"] * most + ["b"]


def test_reports_are_dated_by_the_exchange() -> None:
    """The time is that of arrival less the reported age.

    It never precedes the member's previous report, whatever its clock.
    """
    roster = Roster({"a": "a"}, {"a": frozenset()})
    reports = MemberReports(roster, ReportBounds(), _Clock(1000, 1010, 1020, 1030, 1040, 1050, 1060, 1055))
    assert _dated(reports, 5.0, 8.0) == 1007.0  # made 3 s before it was sent
    assert _dated(reports, 0.0) == 1020.0
    assert _dated(reports, -math.inf, 8.0) == 1030.0
    assert _dated(reports, math.nan, math.nan) == 1040.0
    assert _dated(reports, 0.0, 1e12) == 1040.0  # not before the previous report
    assert _dated(reports, 1e12, 0.0) == 1060.0  # nor after its arrival
    assert reports.now() == 1060.0  # although the clock was set back


def test_a_run_lasts_as_long_as_it_does_when_the_date_of_the_machine_is_set() -> None:
    date, seconds = [1000.0], [50.0]
    clock = steady_clock(lambda: date[0], lambda: seconds[0])
    reports = MemberReports(Roster({"a": "a"}, {"a": frozenset()}), ReportBounds(), clock)
    first = reports.now()
    date[0], seconds[0] = 90_000.0, 53.0
    assert (first, reports.now()) == (1000.0, 1003.0)


def test_a_reporter_outlives_a_report_that_is_refused(run: Run) -> None:
    reporter = Reporter(run.exchange, "a", interval=0.0)
    for report in (_step(loss=1e308), _step(loss=2.5)):
        reporter.tell(inner_step=report.inner_step)
        reporter.flush()
    reporter.close()
    told = [one for one in _told(run.exchange) if one.HasField("inner_step")]
    assert [one.inner_step.loss for one in told] == [2.5]
    assert told[0].HasField("sent")


class _Heard:
    """An exchange that keeps what members report."""

    def __init__(self) -> None:
        self.heard: list[pb.Report] = []
        self._changed = threading.Condition()

    def report(self, reports: Sequence[pb.Report]) -> None:
        with self._changed:
            self.heard += reports
            self._changed.notify_all()

    def wait_for(self, doings: list[int]) -> bool:
        """Return whether exactly these activities were reported, in this order, within a minute."""
        with self._changed:
            return self._changed.wait_for(lambda: self.doings[: len(doings)] == doings, 60)

    @property
    def doings(self) -> list[int]:
        return [one.activity.doing for one in self.heard if one.HasField("activity")]


def test_a_reporter_samples_what_its_member_does_and_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "SECONDS_BETWEEN_SAMPLES", 1e-3)
    exchange, now = _Heard(), [pb.FORWARD]
    reporter = Reporter(exchange, "a", interval=0.0)  # type: ignore[arg-type]
    asked = threading.Semaphore(0)
    reporter.does(lambda: asked.release() or now[0])  # type: ignore[func-returns-value]
    assert all(asked.acquire(timeout=60) for _ in range(4))
    assert exchange.wait_for([pb.FORWARD])
    now[0] = pb.WAITING_FOR_NEXT
    assert exchange.wait_for([pb.FORWARD, pb.WAITING_FOR_NEXT])
    reporter.does(pb.OUTER_ROUND)
    reporter.tell(inner_step=_step().inner_step)
    assert exchange.wait_for([pb.FORWARD, pb.WAITING_FOR_NEXT, pb.OUTER_ROUND])
    reporter.close()
    assert len(exchange.doings) == 3


def test_a_taken_over_run_lets_members_report_the_round_that_they_train(run: Run) -> None:
    """Until the exchange has read its log, it does not know the current round."""
    exchange = run._open(goes_on=True)
    exchange.report([_step(round=7)])
    assert exchange.runner.refusals.counts.total() == 0
    assert [one.inner_step.round for one in _told(exchange)] == [7]


class Refusing:
    """A clock, and the refusals that were reported."""

    def __init__(self) -> None:
        self.time, self.told = 7.0, list[Refusal]()
        self.refusals = Refusals(self.told.append, lambda: self.time)

    def counts(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for refusal in self.told:
            found[refusal.kind] += refusal.count
        return found


def test_few_are_told_as_they_come() -> None:
    told = Refusing()
    for kind in Kind:
        told.refusals.add("home.0", f"a reason: {kind}", kind)
    assert told.told == [Refusal(sender="home.0", reason=f"a reason: {kind}", kind=kind, count=1) for kind in Kind]


def test_many_are_counted_and_told_together() -> None:
    told = Refusing()
    for number in range(100_000):
        told.refusals.add(f"mallory:{number}", "a stranger", Kind.STRANGER)
    told.refusals.add("home.0", "too long", Kind.MALFORMED)
    assert len(told.told) == TOLD_AT_ONCE
    assert told.refusals.counts == {Kind.STRANGER: 100_000, Kind.MALFORMED: 1}
    told.time += SECONDS_BETWEEN
    told.refusals.add("mallory:last", "a stranger", Kind.STRANGER)
    assert len(told.told) == TOLD_AT_ONCE + 1
    assert told.told[-1] == Refusal(
        sender="mallory:last", reason="a stranger", kind=Kind.STRANGER, count=100_001 - TOLD_AT_ONCE
    )
    told.refusals.flush()
    assert told.counts() == told.refusals.counts
    told.refusals.flush()
    assert told.counts() == told.refusals.counts


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a cause: 3 of 4, ünïcode → 你好", "a cause: 3 of 4, ünïcode → 你好"),
        ("\x1b]0;title\x07\x1b[2J", "\\x1b]0;title\\x07\\x1b[2J"),
        ("one\nexchange: all is well\r\ttwo", "one exchange: all is well  two"),
        ("\u202eabc\u200b", "\\u202eabc\\u200b"),
        ("\x9b31m", "\\x9b31m"),
        ("a" * (MOST_CHARACTERS + 1), "a" * MOST_CHARACTERS + "…"),
    ],
)
def test_text_for_a_terminal(text: str, shown: str) -> None:
    assert plain(text) == shown
    assert plain(shown) == shown or len(shown) > MOST_CHARACTERS
