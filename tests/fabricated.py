"""Runs that never happened, in the form that the page reads: two kinds of replicas with faults, and 100 members."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
MEGABIT = 125_000.0
ROUND_SECONDS = 6.0


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
    is_live: bool = False
    empty: int = 0
    """Optional groups in which nobody is any more."""

    @property
    def span(self) -> float:
        """Seconds of the run."""
        return self.rounds * ROUND_SECONDS + 2

    def replicas(self) -> dict[str, list[str]]:
        """Return the members of each replica."""
        names = [f"dc{n}" for n in range(1, self.datacenters + 1)] if self.datacenters > 1 else ["dc"]
        members = {name: [name] for name in names}
        for n in range(1, self.groups + 1):
            name = f"home{n}" if self.groups > 1 else "home"
            members[name] = [f"{name}.{stage}" for stage in range(self.stages)]
        return members | {f"guest-{n}": [f"guest-{n}.{stage}" for stage in range(2)] for n in range(1, self.empty + 1)}

    def is_away(self, member: str, time: float) -> bool:
        """Return whether an outage covers this moment."""
        if member.startswith("guest-"):
            return True
        start, end = self.outages.get(member, (math.inf, math.inf))
        return start <= time < end

    def data(self) -> Json:
        """Return all that an exported page holds."""
        times = [n * self.span / 160 for n in range(161)]
        return {
            "runs": [{"id": self.name, "name": self.name, "kind": "run", "is_live": self.is_live, "predicts": False}],
            "histories": {self.name: self.history()},
            "frames": {self.name: [self.frame(time) for time in times]},
            "predictions": {self.name: prediction(self.stages)},
        }

    def history(self) -> Json:
        """Return the run from its first to its last report."""
        return {
            "id": self.name,
            "name": self.name,
            "is_live": self.is_live,
            "outcome": None if self.is_live else "over",
            "span": self.span,
            "rounds_planned": self.rounds,
            "inner_steps": 10,
            "topology": self.topology(),
            "settings": {"outer.rounds": self.rounds, "inner.steps": 10, "replicas": len(self.replicas())},
            "rounds": [self.round(number) for number in range(1, self.rounds + 1)],
            "steps": {name: self.steps(name) for name in self.replicas()},
            "marks": self.marks(),
            "problems": [],
            "cost": {"tokens": 163_840, "training_seconds": self.span, "wire_bytes": 81_000_000},
        }

    def topology(self) -> Json:
        """Return sites, replicas, members, links and lines."""
        replicas = self.replicas()
        members, links, lines = [], [], []
        for name, own in replicas.items():
            for stage, member in enumerate(own):
                is_group = len(own) > 1
                members.append(
                    {
                        "id": member,
                        "replica": name,
                        "stage": stage if is_group else None,
                        "layers": f"layer {stage + 1}" if is_group else "layers 1-4",
                        "engine": "torch",
                        "site": next((site for site, inside in self.sites.items() if member in inside), None),
                    }
                )
                limit = (
                    {"there": 20 * MEGABIT, "back": 20 * MEGABIT}
                    if is_group
                    else dict.fromkeys(("there", "back"), 1000 * MEGABIT)
                )
                delay = dict.fromkeys(("there", "back"), 0.03 if is_group else 0.005)
                facts = {"bandwidth": limit, "latency": delay}
                links.append(
                    {"id": f"{member}-exchange", "source": member, "target": "exchange", "kind": "exchange", **facts}
                )
                if stage:
                    links.append(
                        {
                            "id": f"{own[stage - 1]}-{member}",
                            "source": own[stage - 1],
                            "target": member,
                            "kind": "stage",
                            **facts,
                        }
                    )
                up, down = (20, 100) if is_group else (1000, 1000)
                lines.append(
                    {"id": member, "up": up * MEGABIT, "down": down * MEGABIT, "latency": 0.015, "members": [member]}
                )
        return {
            "sites": [{"id": site, "label": site} for site in self.sites],
            "replicas": [
                {
                    "id": name,
                    "kind": "participants" if len(own) > 1 else "datacenter",
                    "optional": name.startswith("guest-"),
                    "members": own,
                    "boundary": "64 of 128, 4 bits" if len(own) > 1 else None,
                    "batch_size": 8,
                }
                for name, own in replicas.items()
            ],
            "members": members,
            "links": links,
            "lines": lines,
        }

    def round(self, number: int) -> Json:
        """Return one closed round."""
        closed = number * ROUND_SECONDS
        cells = {name: self.cell(name, own, number) for name, own in self.replicas().items()}
        known = [cell["validation_loss"] for cell in cells.values() if cell["validation_loss"] is not None]
        return {
            "round": number,
            "closed": closed,
            "seconds": ROUND_SECONDS,
            "bytes": 60_000 * len(known),
            "tokens": 10_240 * number * len(cells),
            "validation_loss": sum(known) / len(known) if known else None,
            "cells": cells,
        }

    def cell(self, replica: str, members: list[str], number: int) -> Json:
        """Return what one replica did in one round."""
        closed = number * ROUND_SECONDS
        dice = random.Random(f"{replica} {number}")
        away = any(self.is_away(member, closed - 1) for member in members)
        state = (
            "absent" if away else "late" if dice.random() < 0.03 else "rejected" if dice.random() < 0.02 else "included"
        )
        loss = None if away else _loss(number) + 0.03 * dice.random()
        return {
            "state": state,
            "why": {"absent": "a member was away", "late": "the round had closed", "rejected": "norm too large"}.get(
                state
            ),
            "training_loss": loss and loss + 0.04,
            "validation_loss": loss,
            "bytes": 0 if away else 58_000 + dice.randrange(4000),
            "compute_seconds": None if away else 3.2 + 0.3 * dice.random(),
            "wait_seconds": None if away else 1.1,
            "outer_seconds": None if away else 0.8,
            "blocked_seconds": None if away else 0.1,
            "evaluation_seconds": None if away else 0.3,
        }

    def steps(self, replica: str) -> list[list[float]]:
        """Return time, step and training loss."""
        dice = random.Random(replica)
        return [
            [step * ROUND_SECONDS / 10, step, _loss(step / 10) + 0.08 + 0.1 * dice.random()]
            for step in range(1, self.rounds * 10 + 1)
        ]

    def marks(self) -> list[Json]:
        """Return joins, kills and returns."""
        found = []
        for replica, members in self.replicas().items():
            for place, member in enumerate(members):
                found.append(_mark(0.2 + place * 0.1, "joined", member, replica, f"{member} joined"))
                start, end = self.outages.get(member, (math.inf, math.inf))
                if start < self.span:
                    found.append(_mark(start, "killed", member, replica, f"{member} was killed"))
                if end < self.span:
                    found.append(_mark(end, "joined", member, replica, f"{member} has joined again (incarnation 2)"))
        return [{"id": n} | mark for n, mark in enumerate(sorted(found, key=lambda mark: mark["time"]))]

    def frame(self, time: float) -> Json:
        """Return the run at one moment."""
        replicas = self.replicas()
        topology = self.topology()
        members = {member: self.member(member, own, time) for own in replicas.values() for member in own}
        is_over = time >= self.span - 1 and not self.is_live
        closed = min(self.rounds, int(time // ROUND_SECONDS))
        share = (time % ROUND_SECONDS) / ROUND_SECONDS
        return {
            "time": time,
            "phase": "joining" if time < 1 else "over" if is_over else "training",
            "message": "",
            "rounds_closed": closed,
            "step_done": 10 if is_over else int(10 * share),
            "step_total": 10,
            "elapsed": time,
            "seconds_left": max(0.0, self.span - time),
            "members": members,
            "replicas": {
                name: {
                    "state": "suspended"
                    if any(members[m]["state"] == "vacant" for m in own)
                    else "finished"
                    if is_over
                    else "training",
                    "loss": _loss(time / ROUND_SECONDS) + 0.05,
                    "validation_loss": _loss(closed),
                    "tokens_per_second": 1700.0,
                    "tokens": int(1700 * time),
                    "steps_done": int(time / ROUND_SECONDS * 10),
                    "included": sum(self.cell(name, own, one)["state"] == "included" for one in range(1, closed + 1)),
                    "missed": sum(self.cell(name, own, one)["state"] != "included" for one in range(1, closed + 1)),
                }
                for name, own in replicas.items()
            },
            "links": {link["id"]: _flow(link, time) for link in topology["links"]},
            "lines": {
                line["id"]: {
                    "up": {"rate": 0.3 * line["up"], "busy": 0.3, "bytes": int(0.3 * line["up"] * time)},
                    "down": {"rate": 0.1 * line["down"], "busy": 0.1, "bytes": int(0.1 * line["down"] * time)},
                }
                for line in topology["lines"]
            },
            "exchange": {
                "missing": [m for m, facts in members.items() if facts["state"] == "vacant"],
                "store_error": "",
                "refusals": 0,
            },
        }

    def member(self, member: str, own: list[str], time: float) -> Json:
        """Return what one member does at one moment."""
        place = own.index(member)
        within = time % ROUND_SECONDS
        away = [other for other in own if self.is_away(other, time)]
        state, detail = ("forward", "backward", "waiting")[int(time * 3 + place) % 3], ""
        if len(own) == 1:
            state = "computing"
        if within > 4.8:
            state = "outer"
        if state == "waiting":
            detail = f"waits for {own[place - 1]}"
        if away:
            state, detail = ("vacant", "") if member in away else ("suspended", f"waits for {away[0]}")
        if time < 0.2 + place * 0.1:
            state, detail = "absent", ""
        if time >= self.span - 1 and not self.is_live:
            state, detail = "finished", ""
        return {
            "state": state,
            "detail": detail,
            "since": max(0.0, time - 0.4),
            "device": "cpu" if len(own) > 1 else "cuda:0",
            "incarnation": 2 if time > self.outages.get(member, (0, math.inf))[1] else 1,
            "round": int(time // ROUND_SECONDS) + 1,
            "heard": time,
        }


def _loss(rounds: float) -> float:
    return 2.1 + 3.4 * math.exp(-rounds / 4)


def _mark(time: float, kind: str, member: str, replica: str, text: str) -> Json:
    return {
        "time": time,
        "kind": kind,
        "member": member,
        "replica": replica,
        "round": int(time // ROUND_SECONDS) + 1,
        "text": text,
    }


def _flow(link: Json, time: float) -> Json:
    wave = 0.5 + 0.5 * math.sin(time + len(link["id"]))
    found: Json = {}
    for way, limit in link["bandwidth"].items():
        busy = wave * (0.8 if link["kind"] == "stage" else 0.15)
        found[way] = {"rate": busy * limit, "busy": busy, "awaited": 0.4 * busy, "bytes": int(0.4 * limit * time)}
    return found


def prediction(stages: int, micro_batches: int = 4) -> Json:
    """Return a 1F1B step of `stages` stages."""
    forward, backward, transfer = 0.06, 0.1, 0.03
    bars: list[list[Json]] = [[] for _ in range(stages)]
    links: list[list[Json]] = [[] for _ in range(stages - 1)]
    for batch in range(micro_batches):
        for stage in range(stages):
            start = batch * (forward + backward) + stage * (forward + transfer)
            bars[stage].append({"start": start, "end": start + forward, "kind": "forward", "micro_batch": batch})
            if stage < stages - 1:
                links[stage].append(
                    {"start": start + forward, "end": start + forward + transfer, "kind": "there", "micro_batch": batch}
                )
            back = (
                stages * (forward + transfer)
                + batch * (forward + backward)
                + (stages - 1 - stage) * (backward + transfer)
            )
            bars[stage].append({"start": back, "end": back + backward, "kind": "backward", "micro_batch": batch})
            if stage:
                links[stage - 1].append(
                    {"start": back + backward, "end": back + backward + transfer, "kind": "back", "micro_batch": batch}
                )
    return {
        "step_seconds": 1.52,
        "utilization": 0.42,
        "bubble": 0.31,
        "members": [
            {"id": f"home1.{n}", "bars": sorted(own, key=lambda bar: bar["start"])} for n, own in enumerate(bars)
        ],
        "links": [{"id": f"home1.{n}-home1.{n + 1}", "bars": own} for n, own in enumerate(links)],
        "values": [
            {"name": "step time", "unit": "s", "predicted": 1.52, "measured": 1.61},
            {"name": "bytes of a round", "unit": "B", "predicted": 118_000, "measured": 120_000},
            {"name": "utilization", "unit": "", "predicted": 0.42, "measured": None},
        ],
    }


def two_kinds() -> Fabricated:
    """Return a datacenter and two groups of four, one of which loses a member for a while."""
    return Fabricated(
        "faulty", sites={"office": ["home2.1", "home2.2"]}, outages={"home1.2": (31.0, 44.0), "home2.0": (70.0, 73.0)}
    )


def hundred_members(rounds: int = 40) -> Fabricated:
    """Return four datacenters and 24 groups of four."""
    outages = {f"home{n}.{n % 4}": (10.0 * n, 10.0 * n + 15) for n in range(1, 20)}
    return Fabricated("hundred", datacenters=4, groups=24, rounds=rounds, outages=outages)
