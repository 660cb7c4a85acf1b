"""Replicas that are added to a resumed run or removed from it: what is kept, agreed on and distributed again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_run import MIXED, summary_in, train
from ruamel.yaml import YAML

from hetero_pp.config.changes import (
    Agreement,
    changed_entries,
    described,
    replicas_of,
    wanted_replicas,
)
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.member_inputs import replica_batches
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import read_run
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.settings import NotPartOf, meaning
from hetero_pp.data.sources import open_source

H = 2
"""Inner steps of a round."""
SECOND = {"name": "dc2", "kind": "datacenter", "batch_size": 4, "device": "cpu"}


def _yaml(folder: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
    """Write a smaller topology of the same kinds, with a change, to a file."""
    content = YAML(typ="safe").load(MIXED)
    content["inner"]["steps"] = H
    content["data"]["validation_sequences"] = 4
    content["replicas"][0]["micro_batches"] = 1
    change(content)
    path = folder / "run.yaml"
    YAML().dump(content, path)
    return path


def _train(config: Path, corpus: Path, runs: Path, *settings: str, resume: bool = True) -> dict[str, Any]:
    return train(corpus, runs, *settings, config=config, resume=resume)


def _summary(runs: Path) -> dict[str, Any]:
    return summary_in(runs / "mixed")


def _counted(runs: Path) -> list[list[str]]:
    """Return the included replicas of each round."""
    folder = RunFolder(runs / "mixed")
    records = sorted(folder.log.glob("round-*/record.json"))
    return [sorted(one["replica"] for one in json.loads(path.read_text())["contributions"]) for path in records]


@pytest.fixture(scope="module")
def begun(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train three rounds of two replicas."""
    runs = tmp_path_factory.mktemp("begun")
    _train(_yaml(runs), corpus, runs, resume=False)
    return runs


@pytest.fixture(scope="module")
def grown(corpus: Path, begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train three more rounds with a third replica, which the YAML lists first."""
    runs = tmp_path_factory.mktemp("grown") / "runs"
    shutil.copytree(begun, runs)
    _train(_yaml(runs, lambda it: it["replicas"].insert(0, SECOND)), corpus, runs, "outer.rounds=6")
    return runs


@pytest.fixture
def runs(grown: Path, tmp_path: Path) -> Path:
    """Return a copy of the run with three replicas."""
    shutil.copytree(grown, tmp_path / "runs")
    return tmp_path / "runs"


def test_who_comes_is_counted_and_the_run_stays_what_it_was(begun: Path, grown: Path) -> None:
    assert _counted(grown) == [["dc", "home"]] * 3 + [["dc", "dc2", "home"]] * 3
    assert _summary(grown)["validation_loss"][:3] == _summary(begun)["validation_loss"]
    for round_ in (1, 2, 3):
        record = Path("mixed", "log", f"round-{round_:06d}", "record.json")
        assert (begun / record).read_bytes() == (grown / record).read_bytes()
    before, after = (read_run(RunFolder(runs / "mixed")) for runs in (begun, grown))
    assert (before.run, before.agreed) == (after.run, after.agreed)
    assert [replica.name for replica in after.at(1).replicas] == ["dc", "home"]
    assert [replica.name for replica in after.config.replicas] == ["dc", "home", "dc2"]
    names = {
        since: [entry["name"] for entry in entries] for since, entries in _summary(grown)["changes"]["replicas"].items()
    }
    assert names == {"1": ["dc", "home"], "4": ["dc", "home", "dc2"]}


def test_each_reads_its_share_of_the_round(grown: Path, corpus: Path, tmp_path: Path) -> None:
    """No two replicas read the same text, and the share depends on how many replicas there are."""
    spec = read_run(RunFolder(grown / "mixed"))
    source = open_source(spec.config.data, tmp_path)
    read: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for name in ("dc", "home.0", "dc2"):
        member = spec.members[name]
        batches, _ = replica_batches(spec, member, source)
        for round_ in range(1 if name != "dc2" else 4, 7):
            share = spec.share_of(member.replica.name, round_)
            assert share.replicas == (2 if round_ < 4 else 3)
            batches.take(share, (round_ - 1) * H)
            rows = torch.cat([batches.train((round_ - 1) * H + step) for step in range(H)])
            read[name, round_] = {tuple(row.tolist()) for row in rows}
    for first, last in ((1, 3), (4, 6)):
        everything = [one for (_, round_), rows in read.items() if first <= round_ <= last for one in rows]
        assert len(everything) == len(set(everything)) > 0


def test_a_run_that_has_grown_goes_on_to_the_bits_of_an_unbroken_one(grown: Path, runs: Path, corpus: Path) -> None:
    folder = RunFolder(runs / "mixed")
    for round_ in (5, 6):
        shutil.rmtree(folder.log / f"round-{round_:06d}")
        for path in [*folder.log.glob(f"*{round_:06d}*"), *folder.path.glob(f"state/*/*{round_:06d}*")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    config = _yaml(runs, lambda it: it["replicas"].append(SECOND))
    assert _train(config, corpus, runs)["parameters_sha256"] == _summary(grown)["parameters_sha256"]


def test_who_comes_has_no_state_that_the_others_would_have_to_do_without(
    begun: Path, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The old replicas resume from their newest common state, which is older than the last record."""
    shutil.copytree(begun, tmp_path / "runs")
    for path in (tmp_path / "runs" / "mixed" / "state").glob("*/*000003*"):
        shutil.rmtree(path)
    config = _yaml(tmp_path, lambda it: it["replicas"].append(SECOND))
    _train(config, corpus, tmp_path / "runs", "outer.rounds=4")
    said = capsys.readouterr().out
    assert "mixed: resuming after round 2\n" in said
    assert "mixed: from round 3 on with dc2\n" in said
    assert _counted(tmp_path / "runs") == [["dc", "home"]] * 2 + [["dc", "dc2", "home"]] * 2


def test_who_comes_back_is_who_left(runs: Path, corpus: Path) -> None:
    """A returning replica must have its former split of layers, because its saved states and its log entries do."""
    _train(_yaml(runs, lambda it: it.update(replicas=[it["replicas"][0], SECOND])), corpus, runs, "outer.rounds=7")

    def otherwise(content: dict[str, Any]) -> None:
        content["replicas"][1]["stages"] = 2
        content["replicas"].append(SECOND)

    with pytest.raises(ConfigError, match=r"--resume: replicas\[1\].stages: found 2, expected 3 entries"):
        _train(_yaml(runs, otherwise), corpus, runs, "outer.rounds=8")
    config = _yaml(runs, lambda it: it["replicas"].append(SECOND))
    _train(config, corpus, runs, "outer.rounds=8")
    assert _counted(runs)[6:] == [["dc", "dc2"], ["dc", "dc2", "home"]]


def test_a_replica_that_was_needed_may_come_and_go_from_then_on(grown: Path) -> None:
    spec = read_run(RunFolder(grown / "mixed"))
    before = replicas_of(spec.config)
    config = spec.config.model_copy(
        update={"replicas": [spec.config.replicas[0].model_copy(update={"optional": True}), *spec.config.replicas[1:]]}
    )
    assert list(changed_entries(config, [before])) == []
    changes = spec.changes.changed(spec.at(1), 7, {"replicas": wanted_replicas(config, before)})
    now = RunSpec(config, 256, changes)
    assert now.run == spec.run
    assert [[one.optional for one in now.replicas_in(round_)] for round_ in (6, 7)] == [
        [False] * 3,
        [True, False, False],
    ]
    assert described(before, replicas_of(config)) == "without requiring dc"
    assert described(replicas_of(config), before[:2]) == "without dc2 and needing dc"


def test_a_host_may_have_the_replicas_of_any_time_and_no_others(grown: Path) -> None:
    spec = read_run(RunFolder(grown / "mixed"))
    agreement = Agreement(spec.at(1), spec.changes, {})
    for round_ in (1, 6):
        config = spec.changes.at(spec.config, round_)
        assert agreement.complaint(meaning(config, NotPartOf.RUN)) == ""
    other = meaning(spec.config, NotPartOf.RUN)
    other["replicas"].reverse()  # the order is told by the exchange
    assert agreement.complaint(other) == ""
    other["replicas"].reverse()
    other["replicas"][2]["batch_size"] = 8
    assert agreement.complaint(other) == "replicas[2].batch_size: found 8, expected 4"
    del other["replicas"][1:]
    assert agreement.complaint(other) == "replicas: found 1 entries, expected 3 entries"


def _other_rank(content: dict[str, Any]) -> None:
    content["replicas"].append(content["replicas"][1] | {"name": "wide", "boundary": {"rank": "1/2"}})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda it: it["replicas"][1].update(batch_size=8),
            "--resume: replicas[1].batch_size: found 8, expected 4, as in ",
        ),
        (
            _other_rank,
            "replicas[3].boundary.rank: found 16, expected at most 8, the largest rank at the start of the run",
        ),
        (
            lambda it: it.update(links={"slow": {"bandwidth": "1 Mbit/s"}}),
            "links.slow: found 5 entries, expected null",
        ),
    ],
    ids=["another batch size", "a rank without a basis", "another kind of link"],
)
def test_what_does_not_fit_is_refused_in_one_line(
    change: Callable[[dict[str, Any]], object], complaint: str, runs: Path, corpus: Path
) -> None:
    before = (runs / "mixed" / "changes.yaml").read_bytes()

    def also(content: dict[str, Any]) -> None:
        content["replicas"].append(SECOND)
        change(content)

    with pytest.raises(ConfigError) as refused:
        _train(_yaml(runs, also), corpus, runs, "outer.rounds=8")
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)
    assert (runs / "mixed" / "changes.yaml").read_bytes() == before


def test_a_text_that_is_read_once_is_not_shared_out_anew(tmp_path: Path, corpus: Path) -> None:
    def once(content: dict[str, Any]) -> None:
        content["data"]["repeat"] = False

    _train(_yaml(tmp_path, once), corpus, tmp_path, "outer.rounds=1", resume=False)

    def grown(content: dict[str, Any]) -> None:
        once(content)
        content["replicas"].append(SECOND)

    complaint = "replicas: found dc, home, dc2, expected dc, home: with `data.repeat: false` the replicas cannot"
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        _train(_yaml(tmp_path, grown), corpus, tmp_path, "outer.rounds=2")
