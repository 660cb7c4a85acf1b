"""The device that a setting means on a machine, and the message about a device that is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hetero_pp.config.member_inputs import devices_of, in_words
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.shared import own_configuration
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.device import CPU, name_of, resolved
from hetero_pp.core.errors import ConfigError
from hetero_pp.program.cli import app


def _have(machine: pytest.MonkeyPatch, kind: str | None, count: int = 0) -> None:
    found = None if kind is None else torch.device(kind)
    machine.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    machine.setattr(torch.accelerator, "device_count", lambda: count)


def _config(**group: Any) -> dict[str, Any]:
    home = {"name": "home", "kind": "participants", "stages": 3} | group
    return {
        "name": "t",
        "model": {"preset": "micro", "layers": 3},
        "outer": {"rounds": 1},
        "replicas": [{"name": "dc", "kind": "datacenter"}, home],
    }


def _spec(**group: Any) -> RunSpec:
    return RunSpec(RunConfig.model_validate(_config(**group)), 256)


def _stages(*devices: str | None) -> list[dict[str, Any]]:
    return [{"layers": 1} | ({} if device is None else {"device": device}) for device in devices]


def _devices(spec: RunSpec, *names: str) -> list[str]:
    return [str(device) for device in devices_of(spec, names or ["exchange", *spec.members]).values()]


def test_without_an_accelerator_all_compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch, None)
    assert _devices(_spec()) == ["cpu"] * 4
    assert in_words(dict.fromkeys(_spec().members, "cpu")) == "dc, home.0 .. home.2 on cpu"


@pytest.mark.parametrize(("kind", "count"), [("cuda", 2), ("xpu", 3), ("mps", 1)])
def test_members_of_a_host_take_its_accelerators_in_turn(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _have(monkeypatch, kind, count)
    assert _devices(_spec()) == [f"{kind}:{turn % count}" for turn in range(4)]
    assert _devices(_spec(device=kind)) == _devices(_spec())
    assert _devices(_spec(), "home.2") == [f"{kind}:0"]


def test_a_stage_may_name_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch, "cuda", 2)
    assert _devices(_spec(stages=_stages("cuda:1", None, "auto"), device="cpu")) == [
        "cuda:0",
        "cuda:1",
        "cpu",
        "cuda:1",
    ]


@pytest.mark.parametrize(
    ("group", "key", "found"),
    [
        (
            {"stages": _stages("cuda:0", "cuda:1", "cuda:2")},
            ("replicas", 1, "stages", 2, "device"),
            "found `cuda:2`, expected one of `cuda:0`, `cuda:1`, or `auto`: `auto` shares them among the members of "
            "this host",
        ),
        (
            {"device": "mps"},
            ("replicas", 1, "device"),
            f"found `mps`, expected `auto` or `cpu`: torch {torch.__version__} finds cuda:0, cuda:1",
        ),
    ],
)
def test_a_device_that_is_not_there(
    group: dict[str, Any], key: tuple[str | int, ...], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _have(monkeypatch, "cuda", 2)
    with pytest.raises(ConfigError) as error:
        _devices(_spec(**group))
    assert (error.value.key, error.value.message) == (key, found)


@pytest.mark.parametrize("setting", ["gpu", "cuda:", "cuda:-1", "cuda:01", "cpu:0", "lazy", 1])
def test_a_device_that_there_is_nowhere(setting: object) -> None:
    with pytest.raises(
        ValueError, match=f"found `{setting}`, expected `auto`, `cpu`, `cuda`, `cuda:1`, `mps` or `xpu`"
    ):
        _spec(device=setting)


def test_the_device_is_no_part_of_the_run() -> None:
    assert len({_spec(device=device).run for device in ("auto", "cpu", "cuda:1")}) == 1
    assert _spec(stages=_stages("mps", None, None)).run == _spec(stages=_stages(None, None, "cpu")).run


def test_a_host_that_joins_computes_where_it_says() -> None:
    for group in ({"device": "cuda:3"}, {"stages": _stages("cpu", "cuda:3", None)}):
        told = json.dumps(RunConfig.model_validate(_config(**group)).model_dump(mode="json"))
        for device in ("auto", "cuda:1"):
            own = RunSpec(own_configuration(told, "home.1", None, None, device), 256)
            assert own.members["home.1"].setting("device")[0] == device
    assert RunSpec(own_configuration(told, "dc", "text", None, "mps"), 256).members["dc"].setting("device")[0] == "mps"


def test_join_refuses_a_device_before_it_asks_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch, None)
    for device, told in (("cuda:1", "expected `auto` or `cpu`: torch"), ("gpu", "expected `auto`, `cpu`, `cuda`, ")):
        found = CliRunner().invoke(app, ["join", "hpp1.none", "--device", device])
        assert found.exit_code == 2
        assert f"hetero-pp: --device: found `{device}`, {told}" in " ".join(found.stderr.split())


def test_check_names_the_devices(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch, "cuda", 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Card {device.index}")
    path = tmp_path / "t.yaml"
    path.write_text(json.dumps(_config(device="cuda:1")), encoding="utf-8")
    sets = ["--set", f"data.corpus={corpus}", "--set", "data.sequence_length=16", "--runs", str(tmp_path / "runs")]
    found = CliRunner().invoke(app, ["check", str(path), *sets])
    assert found.exit_code == 0, found.stderr
    told = "OK memory enough memory; dc on cuda:0 Card 0; home.0 .. home.2 on cuda:1 Card 1"
    assert told in " ".join(found.stdout.split())


def test_people_read_the_name_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert name_of(torch.device("cuda", 1)) == "cuda:1 NVIDIA H100 80GB HBM3"
    assert name_of(resolved("cpu")) == str(CPU)
    assert name_of(torch.device("mps", 0)) == "mps:0"
