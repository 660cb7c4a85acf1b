"""Reports of a made-up run of a datacenter and a group of two stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import LinkUse, Report
from hetero_pp.program.report.state import RunState

ROUNDS, STEPS = 2, 2
START = 1000.0
ROUND_SECONDS = 10.0
KILLED = "home.1 was killed by SIGKILL"
LEFT = "no restart is left, so the run continues without it"
RESTART = f"{KILLED}; restarting it (attempt 1 of 3 within 10 min)"


def made_up_spec(**changes: Any) -> RunSpec:
    """Return a run of one datacenter and a group of two stages.

    The group's link has 8 Mbit/s forward and 4 Mbit/s backward.
    """
    settings = {
        "name": "made-up",
        "inner": {"steps": STEPS},
        "outer": {"rounds": ROUNDS},
        "links": {"home": {"bandwidth": "8 Mbit/s", "backward": {"bandwidth": "4 Mbit/s"}}},
        "replicas": [
            {"name": "dc", "kind": "datacenter"},
            {"name": "home", "kind": "participants", "stages": 2, "link": "home", "boundary": {"rank": 8}},
        ],
    }
    return RunSpec(RunConfig.model_validate(settings | changes), 256)


def inner_step(time: float, member: str, replica: str, round_: int, step: int, **values: Any) -> Report:
    return Report(time=time, member=member, inner_step=pb.InnerStep(replica=replica, round=round_, step=step, **values))


def evaluation(time: float, replica: str, round_: int, loss: float) -> Report:
    return Report(time=time, member=replica, evaluation=pb.Evaluation(replica=replica, round=round_, loss=loss))


def link_use(time: float, link: str, direction: str, round_: int, payload: int, busy: float = 0.0) -> Report:
    """Return a report of a link's use. It has ten wire bytes more than payload bytes."""
    sizes = {"payload_bytes": payload, "wire_bytes": payload + 10}
    use = LinkUse(link=link, direction=direction, round=round_, busy_seconds=busy, **sizes)
    return Report(time=time, member="whoever", link_use=use)


def round_closed(time: float, round_: int) -> Report:
    """Return a record in which each replica contributes 500 values in 1000 bytes, in two blobs."""
    blobs = [pb.BlobEntry(block=block, size=500, kept_values=250) for block in ("layers.0", "norm")]
    sent = [pb.ContributionEntry(replica=name, weight=1, digest=b"\x01\x02", blobs=blobs) for name in ("dc", "home")]
    return Report(time=time, member="exchange", round_closed=pb.RoundRecord(round=round_, contributions=sent))


def verified(time: float, replica: str, round_: int, sha256: bytes) -> Report:
    hashed = pb.RoundVerified(replica=replica, round=round_, parameters_sha256=sha256)
    return Report(time=time, member="exchange", round_verified=hashed)


def failure(time: float, member: str, cause: str, consequence: bool = False) -> Report:
    return Report(time=time, member=member, failure=pb.Failure(cause=cause, consequence=consequence))


def joined(time: float, member: str, incarnation: int = 0) -> Report:
    return Report(time=time, member=member, joined=pb.Joined(incarnation=incarnation))


def begun(time: float, last_round: int) -> Report:
    return Report(time=time, member="exchange", begun=pb.Begun(last_round=last_round))


def member_round(member: str, round_: int, wait: float = 2.0) -> Report:
    parts: dict[str, Any] = {
        "compute_seconds": 5.0,
        "wait_seconds": wait,
        "outer_seconds": 2.5,
        "evaluation_seconds": 0.5,
    }
    return Report(time=START + 10, member=member, member_round=pb.MemberRound(round=round_, **parts))


def waiting(time: float, awaited: pb.Awaited, *missing: str, seconds: float = 0.0) -> Report:
    lacking = [pb.Missing(member=member) for member in missing]
    told = pb.Waiting(awaited=awaited, round=2, seconds=seconds, missing=lacking)
    return Report(time=time, member="exchange", waiting=told)


def so_far(time: float, **values: Any) -> Report:
    """Return the counters of a run, which a host that joins is told behind what holds."""
    return Report(time=time, member="exchange", so_far=pb.SoFar(**values))


def finished(time: float, member: str) -> Report:
    return Report(time=time, member=member, finished=pb.Nothing())


def made_up_round(round_: int) -> Iterator[Report]:
    """Yield the reports of a round of ten seconds. Losses fall by one per round."""
    start, loss = START + (round_ - 1) * ROUND_SECONDS, 6.0 - round_
    for step in range(STEPS):
        time = start + step
        yield inner_step(time, "dc", "dc", round_, step, loss=loss, gradient_norm=1.5, learning_rate=0.1, tokens=100)
        yield inner_step(time, "home.0", "home", round_, step, gradient_norm=2.5, learning_rate=0.1, tokens=100)
        yield inner_step(time, "home.1", "home", round_, step, loss=loss + step)
    yield link_use(start + 2, "home.0-1", "forward", round_, 1000, busy=1.0)
    yield round_closed(start + 8, round_)
    for replica in ("dc", "home"):
        yield verified(start + 8.5, replica, round_, bytes([round_]) * 32)
    yield evaluation(start + 9, "dc", round_, loss - 0.5)
    yield evaluation(start + 9, "home", round_, loss - 0.3)
    yield link_use(start + 10, "home.0-1", "forward", round_, 4000, busy=5.0)
    yield link_use(start + 10, "home.0-1", "backward", round_, 2000, busy=2.5)
    yield link_use(start + 10, "dc-exchange", "forward", round_, 1000)


def made_up_reports() -> list[Report]:
    """Return the reports of a run of twenty seconds, after two seconds for its start."""
    reports = [joined(START - 2, member) for member in ("dc", "home.0", "home.1")]
    reports += [evaluation(START - 1, "dc", 0, 6.0), evaluation(START - 1, "home", 0, 6.2)]
    reports.append(link_use(START - 1, "dc-exchange", "backward", 0, 50_000))
    for round_ in range(1, ROUNDS + 1):
        reports += made_up_round(round_)
    end = START + ROUNDS * ROUND_SECONDS
    return [*reports, *(finished(end, member) for member in ("dc", "home.0", "home.1"))]


def state_of(reports: list[Report], spec: RunSpec | None = None) -> RunState:
    state = RunState(made_up_spec() if spec is None else spec)
    for report in reports:
        state.apply(report)
    return state


def timed_reports() -> Iterator[Report]:
    """Yield reports of rounds that last 8 s.

    The datacenter takes 3 and 5 steps, the group takes 1 and 2.
    """
    for round_, (fast, slow) in enumerate(((3, 1), (5, 2)), start=1):
        start = START + (round_ - 1) * ROUND_SECONDS
        for step in range(fast):
            yield inner_step(start + step, "dc", "dc", round_, step, loss=6.0 - round_, tokens=100)
        for step in range(slow):
            yield inner_step(start + 3 * step, "home.0", "home", round_, step, tokens=100)
            yield inner_step(start + 3 * step, "home.1", "home", round_, step, loss=7.0 - round_ + step)
        yield evaluation(start + 9, "dc", round_, 5.0 - round_)
        yield evaluation(start + 9, "home", round_, 5.0 - round_)
        yield round_closed(start + 8, round_)


TIMED = {"inner": {"seconds": 8}}


# ---- members that leave and return ----


def membership_event(time: float, what: pb.MembershipEventKind, **values: Any) -> Report:
    return Report(time=time, member="exchange", membership_event=pb.MembershipEvent(what=what, **values))


def closed_without(time: float, round_: int, replica: str, late: bool = False) -> Report:
    report = round_closed(time, round_)
    record = report.round_closed
    kept = [one for one in record.contributions if one.replica != replica]
    del record.contributions[:]
    record.contributions.extend(kept)
    record.late.extend([replica] * late)
    return report


def killed(time: float) -> Iterator[Report]:
    """Yield the reports of a killed stage. Its launcher reports first."""
    home = {"replica": "home", "incarnation": 1}
    yield membership_event(time, pb.RESTARTED, slot="home.1", cause=RESTART)
    yield membership_event(time, pb.INCARNATION_OVER, slot="home.1", cause=KILLED, **home)
    yield membership_event(time, pb.SUSPENDED, slot="home.1", cause=KILLED, **home)


def back(time: float) -> Report:
    return joined(time, "home.1", 2)


def there() -> list[Report]:
    """Return the reports of a run that all three members have joined and that has begun."""
    return [*(joined(START - 2, member, 1) for member in ("dc", "home.0", "home.1")), begun(START - 1, 0)]
