"""Runs that this machine cannot train, or only very slowly, are reported before anything is read or started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from asking import sets
from control_groups import use_groups, use_machine
from typer.testing import CliRunner

from hetero_pp.config.predictions import CATALOG, hardware_of
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.core.errors import ConfigError
from hetero_pp.model import arithmetic
from hetero_pp.program.cli import app
from hetero_pp.program.launch import job as launch_job
from hetero_pp.program.launch import this_machine
from hetero_pp.program.launch.host_memory import host_memory
from hetero_pp.program.launch.this_machine import limits_of

YAML = """\
name: t
model: {preset: 1b, vocabulary: 32000}
data: {corpus: /nowhere/at/all, sequence_length: 512}
inner: {steps: 30}
outer: {rounds: 100}
replicas:
  - {name: dc, kind: datacenter}
  - {name: home, kind: participants, stages: 4}
"""
PARAMETERS = 1_204_881_408
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


A_LAYER, TOKENS = 10 * 2048 + 4 * 8192, 8 * 512
HEAD, GRADIENTS = 8 * 32000 * (1024 + 2048), 4 * TOKENS * (2 * 2048 + 2 * 8192)
DATACENTER = (TOKENS * 16 * A_LAYER * 4 + HEAD) / 1e9
TITAN = TOKENS * (16 * A_LAYER * 4 + 16 * 32000) / 1e9
HOME = (TOKENS * 16 * A_LAYER * 4 + HEAD + 3 * GRADIENTS) / 1e9
"""GB of activations in fp32 of one micro-batch, and of a piece of the loss.

They are those of a whole replica, of one without pieces, and of four stages.
"""
BOTH = DATACENTER + HOME


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with two cores, 32 GB, no GPU and no control group."""
    use_machine(monkeypatch, 32e9, 30e9)
    monkeypatch.setattr(this_machine, "usable_cores", lambda: 2)
    _have_gpus(monkeypatch, 0)
    return monkeypatch


def _have_gpus(machine: pytest.MonkeyPatch, count: int) -> None:
    kind = torch.device("cuda") if count else None
    machine.setattr(torch.accelerator, "current_accelerator", lambda check_available: kind)
    machine.setattr(torch.accelerator, "device_count", lambda: count)
    machine.setattr(arithmetic, "_is_fast_in_bf16", lambda device: device.type == "cuda")


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    path = tmp_path / "t.yaml"
    path.write_text(YAML)
    return path


def _limits(path: Path, *overrides: str, only: str | None = None) -> list[tuple[bool, str]]:
    spec = spec_of(ConfigFile(path, overrides))
    names = [name for name in spec.members if only is None or name.startswith(only)]
    return [(limit.is_final, limit.message) for limit in limits_of(spec, names)]


def _gigabytes(message: str) -> float:
    """Return what a message says that members need."""
    found = re.search(r"needs? ([\d.]+) GB", message)
    assert found is not None
    return float(found[1])


def _expected(bytes_each: float, activations: float, processes: int) -> float:
    """Return GB: 7 % of all tensors beside them, 50 MB a process, and 0.5 GB for the launcher."""
    return 0.5 + processes * 0.05 + 1.07 * (bytes_each * PARAMETERS / 1e9 + activations)


def _launch(path: Path, *arguments: str) -> str:
    """Return the error of a launch that must start nothing."""
    result = CliRunner().invoke(app, ["launch", str(path), "--runs", str(path.parent / "runs"), *arguments])
    assert result.exit_code == 2
    assert not (path.parent / "runs").exists()
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_what_no_memory_holds_is_refused_before_anything_is_read(yaml: Path) -> None:
    """The line names what the members and the exchange need, of what, and the key that would save most."""
    for said in (_launch(yaml), _launch(yaml, "--in-process")):
        who = f"found 5 members and the exchange with {2 * PARAMETERS:,} parameters to start on this machine"
        assert f"{yaml}:6: replicas: {who}" in said
        assert _gigabytes(said) == pytest.approx(_expected(40, BOTH, 6) + 4 * PARAMETERS / 1e9, rel=0.05)
        for words in ("(activations 30.5 GB, moments 19.3 GB, outer", "expected at most its 32 GB of memory: --set ",
                      "replicas.home.recompute=layers saves 11.2 GB, which is not enough; or start fewer"):  # fmt: skip
            assert words in said


@pytest.mark.parametrize(
    ("overrides", "only", "expected"),
    [
        ((), "", (40, BOTH, 5)),
        (("replicas.1.stages=1",), "home", (20, DATACENTER, 1)),
        ((), "home.1", None),
        (("replicas.0.device=cuda",), "", (20 + 12, HOME, 5)),
        (
            ("replicas.0.engine=torchtitan", "replicas.0.nodes=2", "replicas.0.rendezvous='127.0.0.1:1'"),
            "",
            (20 + 10, HOME + TITAN / 2, 5),
        ),
    ],
)
def test_memory_is_that_of_the_members_that_start_here(
    yaml: Path,
    machine: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    only: str,
    expected: tuple[float, float, int] | None,
) -> None:
    """`expected`: bytes per parameter of the model, GB of activations, and processes.

    During the only micro-batch there are no gradients yet. On GPUs a replica keeps error feedback and the round's start
    in the machine's memory, and at its start also the run checkpoint. With two nodes, each holds half of everything.
    """
    machine.setattr(this_machine, "free_bytes", lambda device: None)
    _have_gpus(machine, 8)
    on_cpus = ("replicas.0.device=cpu", "replicas.1.device=cpu")
    refused = [message for is_final, message in _limits(yaml, *on_cpus, *overrides, only=only) if is_final]
    assert bool(refused) == (expected is not None)
    assert expected is None or _gigabytes(refused[0]) == pytest.approx(_expected(*expected), rel=0.01)


@pytest.mark.parametrize(
    ("kind", "groups", "own", "root", "least"),
    [
        ("cgroup2", {"/": None, "/job": 20 * 10**8, "/job/step": None}, "/job/step", "/", ("/job", 2.0)),
        ("cgroup2", {"/job": 20 * 10**8, "/job/step": 10**8}, "/job/step", "/", ("/job/step", 0.1)),
        ("cgroup", {"/": None, "/slurm": None, "/slurm/job_1": 2 * 10**9}, "/slurm/job_1", "/", ("/slurm/job_1", 2.0)),
        ("cgroup", {"/": 2 * 10**9}, "/docker/1a2b", "/docker/1a2b", ("/", 2.0)),
        ("cgroup2", {"/": 2 * 10**9}, "/not/seen/inside", "/", ("/", 2.0)),
        ("cgroup2", {"/": None, "/job": 64 * 10**9}, "/job", "/", ("", 32.0)),
    ],
)
def test_a_control_group_and_those_above_it_may_have_less(
    machine: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    groups: dict[str, int | None],
    own: str,
    root: str,
    least: tuple[str, float],
) -> None:
    """Memory is free if nothing uses it, or only a cache of files."""
    use_groups(machine, tmp_path, kind, groups, own, root)
    found = host_memory()
    assert (found.group, found.total / 1e9) == least
    assert found.available == (0.875 * found.total if found.group else 30e9)


def test_what_fits_only_without_other_programs_is_a_warning(yaml: Path, machine: pytest.MonkeyPatch) -> None:
    needed = _expected(20, DATACENTER, 1)
    use_machine(machine, 64e9, needed * 1.01e9)
    assert not [message for _, message in _limits(yaml, only="dc") if "memory" in message]
    use_machine(machine, 64e9, needed * 0.99e9)
    [(is_final, message)] = [found for found in _limits(yaml, only="dc") if "memory" in found[1]]
    assert not is_final
    assert message.startswith(f"1 member with {PARAMETERS:,} parameters need")
    assert f"; {needed * 0.99:.3g} GB of its 64 GB of memory are free: --set replicas.dc.micro_batches=2" in message


def test_a_gpu_that_holds_too_little_is_refused_with_the_key_that_helps(
    yaml: Path, machine: pytest.MonkeyPatch
) -> None:
    """A GPU holds 16 bytes per parameter and activations in bf16; where torch does not know it, nothing is refused."""
    _have_gpus(machine, 1)
    on_gpu = ("replicas.0.device=cuda", "replicas.0.micro_batches=2")
    told = "found dc on cuda:0 with 23.8 GB (weights and gradients 9.64 GB, moments 9.64 GB, activations 4.54 GB), "
    for free, refused in ((24e9, False), (None, False), (23e9, True)):
        machine.setattr(this_machine, "free_bytes", lambda device, free=free: free)
        found = [message for is_final, message in _limits(yaml, *on_gpu, only="dc") if is_final]
        assert bool(found) == refused
    assert found[0].startswith(f"{told}expected at most the 23 GB that are free there: --set ")
    assert found[0].endswith("replicas.dc.micro_batches=4 saves 2.27 GB")


def test_members_that_share_a_gpu_share_its_memory(yaml: Path, machine: pytest.MonkeyPatch) -> None:
    """Four stages on two GPUs take them in turn."""
    _have_gpus(machine, 2)
    use_machine(machine, 640e9, 640e9)
    machine.setattr(this_machine, "free_bytes", lambda device: 6e9)
    found = [message for is_final, message in _limits(yaml, only="home") if is_final]
    assert [message.split(" with ")[0] for message in found] == [
        "found home.0, home.2 on cuda:0",
        "found home.1, home.3 on cuda:1",
    ]


def test_a_step_that_takes_minutes_is_a_warning(yaml: Path, machine: pytest.MonkeyPatch) -> None:
    """The estimate is six operations per parameter and token, plus attention, at half of a core's peak.

    One member uses one core, not two.
    """
    tokens, matrices = 8 * 512, PARAMETERS - 32000 * 2048 - 33 * 2048
    seconds = 3 * (2 * matrices + 16 * 2 * 512 * 2048) * tokens / 22.5e9
    minutes = f"a step would take about {round(seconds) // 60}:{round(seconds) % 60:02d} on 1 CPU core, and the run"
    use_machine(machine, 640e9, 640e9)
    [(is_final, message)] = _limits(yaml, only="dc")
    assert (is_final, message.startswith(minutes)) == (False, True)
    assert f"{3000 * seconds / 86400:.3g} days" in message
    both = f"on 2 CPU cores, and the run {3000 * 2 * seconds / 2 / 86400:.3g} days"
    assert any(both in message for _, message in _limits(yaml))
    machine.setattr(this_machine, "usable_cores", lambda: 1)
    assert any(f"{3000 * 2 * seconds / 86400:.3g} days" in message for _, message in _limits(yaml))
    _have_gpus(machine, 1)
    assert _limits(yaml, only="dc") == []


def test_a_gpu_that_is_not_there_is_refused(yaml: Path) -> None:
    said = _launch(yaml, "--set", "replicas.0.device=cuda")
    assert f"--set replicas.0.device=cuda: found `cuda`, expected `auto` or `cpu`: torch {torch.__version__} " in said


def test_a_rank_takes_a_gpu(yaml: Path, machine: pytest.MonkeyPatch) -> None:
    _have_gpus(machine, 2)
    four = ("replicas.0.engine=torchtitan", "replicas.0.ranks=4")
    found = [message for is_final, message in _limits(yaml, *four, only="dc") if is_final]
    assert found == ["found 4, expected at most the 2 GPUs of this machine: each rank uses one"]
    assert not [is_final for is_final, _ in _limits(yaml, *four, "replicas.0.ranks=2", only="dc") if is_final]


def test_check_tells_it_too(yaml: Path, corpus: Path) -> None:
    """The run may be meant for other hosts, so it is still valid."""
    overrides = (f"data.corpus={corpus}", "data.sequence_length=32", "data.validation_share=0.5")
    given = sets(*overrides, "replicas.0.device=cuda", "inner.steps=9000")
    result = CliRunner().invoke(app, ["check", str(yaml), "--runs", str(yaml.parent / "runs"), *given])
    said = " ".join(result.stdout.split())
    assert result.exit_code == 0, result.stderr
    assert "WARN memory" in said
    assert "--set replicas.0.device=cuda: found `cuda`" in said
    assert "replicas: found 5 members and the exchange" in said
    assert "a step would take about" in said


def test_the_quickstart_can_be_carried() -> None:
    assert _limits(QUICKSTART) == []


def test_a_limit_of_open_files_is_told_with_what_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_job.resource, "getrlimit", lambda _: (24, 24))
    told = r"found a limit of 24 open files, expected at least 72 for 4 processes; raise it with: ulimit -n 72"
    with pytest.raises(ConfigError, match=told):
        launch_job.require_open_files(4)
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(launch_job.resource, "getrlimit", lambda _: (24, 4096))
    monkeypatch.setattr(launch_job.resource, "setrlimit", lambda _, limits: raised.append(limits))
    launch_job.require_open_files(4)
    assert raised == [(72, 4096)]


@pytest.mark.parametrize(
    ("device", "entry"),
    [
        ("cuda:0 NVIDIA H100 80GB HBM3", "h100"),
        ("cuda:3 NVIDIA H200", "h200"),
        ("cuda:0 NVIDIA A100-SXM4-80GB", "a100"),
        ("cuda:0 NVIDIA A100-PCIE-40GB", "a100"),
        ("cuda:0 NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("cuda:0 NVIDIA H100 PCIe", None),
        ("cuda:0 NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("cuda:0 NVIDIA GeForce RTX 3090 Ti", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_whole_name(device: str, entry: str | None) -> None:
    assert hardware_of(device) is (None if entry is None else CATALOG[entry])
