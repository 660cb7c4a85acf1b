"""Runs that never happened, as the page shows them: two kinds of replicas with faults, and 100 members."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hetero_pp.config.lines import DIRECTIONS, EXCHANGE
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.report.state import RunState
from hetero_pp.program.view.command import data_of
from hetero_pp.program.view.prediction import PredictedStep
from hetero_pp.program.view.run_view import RunView
from hetero_pp.program.view.sources import Source

Json = dict[str, Any]
START, ROUND_SECONDS, STEPS, TOKENS = 1_000_000.0, 6.0, 10, 1024
_DOINGS = (pb.FORWARD, pb.BACKWARD, pb.WAITING_FOR_PREVIOUS)


@dataclass
class Fabricated:
    """One run: `groups` groups of `stages` stages beside `datacenters` datacenters, for `rounds` rounds."""

    name: str
    datacenters: int = 1
    groups: int = 2
    stages: int = 4
    rounds: int = 16
    sites: dict[str, list[str]] = field(default_factory=dict)
    outages: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Member -> the seconds between which it is away."""
    empty: int = 0
    """Optional groups in which nobody is any more."""

    @cached_property
    def spec(self) -> RunSpec:
        dcs = [f"dc{n}" for n in range(1, self.datacenters + 1)] if self.datacenters > 1 else ["dc"]
        homes = [f"home{n}" for n in range(1, self.groups + 1)] if self.groups > 1 else ["home"]
        guests = [f"guest-{n}" for n in range(1, self.empty + 1)]
        group = {"kind": "participants", "stages": {"count": self.stages, "line": "dsl"}}
        replicas: list[Json] = [{"name": name, "kind": "datacenter", "line": "fibre"} for name in dcs]
        replicas += [{"name": name, "boundary": {"rank": "1/2", "bits": 4}} | group for name in homes]
        two = group | {"optional": True, "stages": {"count": 2, "line": "dsl"}}
        replicas += [{"name": name} | two for name in guests]
        settings = {
            "name": "fabricated",
            "inner": {"steps": STEPS},
            "outer": {"rounds": self.rounds},
            "lines": {"dsl": {"up": "20 Mbit/s", "down": "100 Mbit/s"}, "fibre": {"bandwidth": "1 Gbit/s"}},
            "replicas": replicas,
        }
        return RunSpec(RunConfig.model_validate(settings), 256)

    def is_away(self, member: str, time: float) -> bool:
        """Return whether an outage covers this moment."""
        start, end = self.outages.get(member, (math.inf, math.inf))
        return member.startswith("guest-") or start <= time < end

    def reports(self) -> Iterator[Report]:
        """Yield all reports, without an order."""
        for place, (name, member) in enumerate(self.spec.members.items()):
            replica = member.replica.name
            joined = START + 0.1 * (place % self.stages)
            yield Report(time=joined, member=name, joined=pb.Joined(incarnation=1))
            yield Report(time=joined, member=name, computes=pb.Computes(device="cpu" if member.stage else "cuda:0"))
            away = [(START + 0.5, math.inf)] if name.startswith("guest-") else []
            away += (
                [(START + start, START + end) for start, end in [self.outages[name]]] if name in self.outages else []
            )
            for start, end in away:
                over: dict[str, Any] = {"slot": name, "replica": replica, "incarnation": 1, "cause": "was killed"}
                yield Report(
                    time=start, member=EXCHANGE, membership_event=pb.MembershipEvent(what=pb.INCARNATION_OVER, **over)
                )
                if end < math.inf:
                    yield Report(time=end, member=name, joined=pb.Joined(incarnation=2))
            if not name.startswith("guest-"):
                yield from self._training(place, name, replica)
        yield Report(time=START + 0.6, member=EXCHANGE, begun=pb.Begun())
        for number in range(1, self.rounds + 1):
            record = pb.RoundRecord(round=number)
            for one in self.spec.config.replicas:
                if not one.optional and not self._missed(one.members, number):
                    sent = record.contributions.add(replica=one.name, weight=1, steps=STEPS, tokens=STEPS * TOKENS)
                    sent.blobs.add(size=58_000, kept_values=20_000)
            yield Report(time=START + number * ROUND_SECONDS, member=EXCHANGE, round_closed=record)

    def _missed(self, members: Any, number: int) -> bool:
        return any(self.is_away(member, number * ROUND_SECONDS - 1) for member in members)

    def _training(self, place: int, name: str, replica: str) -> Iterator[Report]:
        """Yield what one member reports: its steps, activities, links and rounds."""
        member = self.spec.members[name]
        is_first, is_last = member.stage is None or member.stage.is_first, member.stage is None or member.stage.is_last
        for step in range(self.rounds * STEPS):
            time, round_ = (step + 1) * ROUND_SECONDS / STEPS, step // STEPS + 1
            if self._missed(member.replica.members, round_):
                continue
            told = pb.InnerStep(replica=replica, round=round_, step=step % STEPS, tokens=TOKENS if is_first else 0)
            if is_last:
                told.loss = _loss(step / STEPS) + 0.08 + 0.01 * place
            doing = pb.COMPUTING if member.stage is None else _DOINGS[(step + place) % len(_DOINGS)]
            yield Report(time=START + time, member=name, activity=pb.Activity(doing=doing))
            yield Report(time=START + time, member=name, inner_step=told)
        for number in range(1, self.rounds + 1):
            closed = START + number * ROUND_SECONDS
            for link in self.spec.links.values():
                for way in DIRECTIONS if link.source == name else ():
                    size = 4_000_000 if link.target != EXCHANGE else 60_000
                    use = pb.LinkUse(link=link.name, direction=way, round=number, wire_bytes=size, payload_bytes=size)
                    yield Report(time=closed - 2, member=name, link_use=use)
            if not self._missed(member.replica.members, number):
                waits: dict[str, Any] = {"wait_seconds": 1.1, "wait_previous_seconds": 0.5, "wait_next_seconds": 0.6}
                outer: dict[str, Any] = {"outer_seconds": 0.9, "blocked_seconds": 0.1, "evaluation_seconds": 0.3}
                told_round = pb.MemberRound(round=number, compute_seconds=3.2, **waits, **outer)
                yield Report(time=closed + 0.2, member=name, member_round=told_round)
                if is_last:
                    loss = pb.Evaluation(replica=replica, round=number, loss=_loss(number) + 0.01 * place)
                    yield Report(time=closed + 0.1, member=name, evaluation=loss)
        yield Report(time=START + self.rounds * ROUND_SECONDS + 1, member=name, finished=pb.Nothing())

    def data(self) -> Json:
        """Return all that an exported page holds."""
        view = RunView(RunState(self.spec))
        for report in sorted(self.reports(), key=lambda one: one.time):
            assert view.state.apply(report), report
            view.take(report)
        view.end("over", False)
        data = data_of({"fabricated": Source(view)})
        history = data["histories"]["fabricated"]
        for name, members in self.sites.items():  # a name that no YAML may have is data of the page, too
            for member in history["topology"]["members"]:
                member["site"] = name if member["id"] in members else member["site"]
        found: Json = json.loads(json.dumps(data).replace('"fabricated"', json.dumps(self.name)))
        return found


def _loss(rounds: float) -> float:
    return 2.1 + 3.4 * math.exp(-rounds / 4)


def prediction() -> Json:
    """Return the predicted step of a datacenter and two equal groups, of which the first is shown."""
    return PredictedStep(two_kinds().spec).beside({}, [])


def two_kinds() -> Fabricated:
    """Return a datacenter and two groups of four, one of which loses a member for a while."""
    return Fabricated(
        "faulty", sites={"office": ["home2.1", "home2.2"]}, outages={"home1.2": (31.0, 44.0), "home2.0": (70.0, 73.0)}
    )


def hundred_members(rounds: int = 40) -> Fabricated:
    """Return four datacenters and 24 groups of four."""
    outages = {f"home{n}.{n % 4}": (10.0 * n, 10.0 * n + 15) for n in range(1, 20) if 10 * n + 15 < 6 * rounds}
    return Fabricated("hundred", datacenters=4, groups=24, rounds=rounds, outages=outages)
