"""Lines that a host prints about the rounds of its own members."""

from __future__ import annotations

from test_run_state import START, begun, evaluation, inner_step, joined, link_use, made_up_spec, so_far

from hetero_pp.messages.messages_pb2 import INCARNATION_OVER, Over, Report
from hetero_pp.program.launch.command import AS_A_RUN
from hetero_pp.program.report.lines import OwnRoundLines


def member_round(member: str, round_: int, wait: float = 2.0) -> Report:
    report = Report(time=START + 10, member=member)
    told = report.member_round
    told.round, told.compute_seconds, told.wait_seconds = round_, 5.0, wait
    told.outer_seconds, told.evaluation_seconds = 2.5, 0.5
    return report


def shown(members: list[str], reports: list[Report]) -> list[str]:
    lines: list[str] = []
    rounds = OwnRoundLines(made_up_spec(), members, lines.append)
    for report in [so_far(START - 5), *reports]:
        rounds.on_report(report)
    return lines[1:]


def test_a_round_with_what_is_known_here() -> None:
    """Only sent bytes count: not `backward` on the link to the exchange, nor `forward` from the previous stage."""
    links = [
        link_use(START, "home.0-1", "backward", 1, 3000),
        link_use(START, "home.0-1", "forward", 1, 500_000),
        link_use(START, "home.1-exchange", "forward", 1, 1000),
        link_use(START, "home.1-exchange", "backward", 1, 700_000),
    ]
    losses = [inner_step(START, "home.1", "home", 1, step, loss=5.0 + step) for step in range(2)]
    end = member_round("home.1", 1)
    assert shown(["home.1"], [*losses, *links, evaluation(START, "home", 1, 4.5), end]) == [
        "round 1/2: home.1: validation loss 4.5000, training loss 5.5000, 10 s "
        "(waiting for neighbours 2 s, exchange with other replicas 2.5 s), 205 tokens/s, sent 4.02 kB"
    ]


def test_a_round_of_a_member_that_knows_no_loss() -> None:
    assert shown(["home.0"], [link_use(START, "home.0-1", "forward", 1, 990), member_round("home.0", 1)]) == [
        "round 1/2: home.0: 10 s (waiting for neighbours 2 s, exchange with other replicas 2.5 s), "
        "205 tokens/s, sent 1 kB"
    ]
    assert shown(["dc"], [member_round("dc", 2, wait=0.0)]) == [
        "round 2/2: dc: 8 s (exchange with other replicas 2.5 s), 256 tokens/s, sent 0 B"
    ]


def test_a_host_that_joins_is_told_what_holds_and_not_what_was() -> None:
    """The first state of the run ends the past, of which only the present state remains."""
    killed = Report(time=START + 50, member="exchange")
    killed.membership_event.what, killed.membership_event.slot, killed.membership_event.replica = (
        INCARNATION_OVER,
        "home.1",
        "home",
    )
    killed.membership_event.incarnation, killed.membership_event.cause = 1, "home.1 was killed by SIGKILL"
    before = [joined(START, "dc"), joined(START, "home.0"), joined(START, "home.1"), begun(START + 31, 1), killed]
    lines: list[str] = []
    rounds = OwnRoundLines(made_up_spec(outer={"rounds": 300}), ["dc"], lines.append)
    for report in [*before, member_round("dc", 236), so_far(START + 60, last_round=236)]:
        rounds.on_report(report)
    assert lines == [
        "round 237 of 300 is open; 2 of 3 members are present",
        "home.1 was killed by SIGKILL; its slot is vacant",
    ]
    back = joined(START + 61, "home.1")
    back.joined.incarnation = 2
    rounds.on_report(back)
    rounds.on_report(so_far(START + 90, last_round=236))  # the connection was interrupted
    assert lines[2:] == ["home.1 has joined again (incarnation 2)"]
    assert shown(["dc"], []) == []
    early: list[str] = []
    rounds = OwnRoundLines(made_up_spec(), ["dc"], early.append)
    for report in [joined(START, "dc"), so_far(START)]:
        rounds.on_report(report)
    assert early == ["1 of 3 members have joined, missing: home.0, home.1"]


def test_a_host_that_took_no_part_in_the_last_round_says_that_the_run_is_over() -> None:
    over = Report(time=START + 40, member="exchange", over=Over(round=2, rounds=2, finishing=["dc"]))
    assert shown(["home.0"], [over]) == ["made-up: the run is over (round 2 of 2); no round was left to train"]
    assert shown(["dc"], [over]) == []


def test_a_host_learns_once_that_its_replica_diverged_also_from_its_groups_last_stage() -> None:
    far = [evaluation(START, "home", round_, 99.0) for round_ in (1, 2)]
    [line] = shown(["home.0"], [*far, evaluation(START, "dc", 1, 99.0)])
    assert line.startswith("Training diverged: loss of the untrained model ") and "home 99.0000 in round 1" in line
    assert AS_A_RUN.watched(made_up_spec(), ["home.0", "dc"]) == ["home.1"]
