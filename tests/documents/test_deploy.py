"""The examples of docs/deploy: queries name existing metrics, manifests are valid, and the job script resumes a run.

`docs/deploy/check.sh`, which CI runs, checks them by promtool, shellcheck and systemd-analyze.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from ruamel.yaml import YAML
from typer.main import get_command

from hetero_pp.config.run_config import RunConfig
from hetero_pp.program.cli import app
from hetero_pp.program.operate.metrics import METRICS, build_info
from hetero_pp.program.operate.observed import Condition
from hetero_pp.program.report.state import Outcome

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "deploy"
LABELS = {one.name: set(one.labels) for one in METRICS} | {build_info().name: {"version", "python", "torch"}}
OF_PROMETHEUS = {"instance", "job"}


def _loaded(name: str) -> list[Any]:
    return list(YAML(typ="safe").load_all((FOLDER / name).read_text()))


def _panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / "grafana-dashboard.json").read_text())["panels"]
    return found


def _queries() -> list[str]:
    """Return all queries: of the dashboard, its variables and the alerts."""
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    variables = [one["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    alerts = [rule["expr"] for group in _loaded("alerts.yaml")[0]["groups"] for rule in group["rules"]]
    return [target["expr"] for panel in _panels() for target in panel["targets"]] + variables + alerts


def test_grafana_knows_every_key_of_the_dashboard() -> None:
    """Its types drop what they do not know."""
    source = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(source)))
    assert list(_lost(source, known, "dashboard")) == []


def _lost(source: Any, known: Any, path: str) -> Iterator[str]:
    """Yield the parts of a value that another one lacks or has otherwise."""
    if isinstance(source, dict) and isinstance(known, dict):
        for key, value in source.items():
            yield from _lost(value, known.get(key), f"{path}.{key}")
    elif isinstance(source, list) and isinstance(known, list) and len(source) == len(known):
        for index, pair in enumerate(zip(source, known, strict=True)):
            yield from _lost(*pair, f"{path}[{index}]")
    elif source != known:
        yield path


def test_every_query_names_metrics_and_labels_that_exist() -> None:
    assert len(_queries()) > 30
    for query in _queries():
        names = set(re.findall(r"\bhetero_pp_\w+", query))
        assert names <= LABELS.keys(), query
        assert names or "up{" in query, query
        known = set[str]().union(*(LABELS[name] for name in names)) | OF_PROMETHEUS
        used = re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", query)
        used += [label for group in re.findall(r"\b(?:by|ignoring) \(([^)]*)\)", query) for label in group.split(", ")]
        assert set(used) <= known, query


def test_every_metric_of_a_run_is_on_the_dashboard() -> None:
    """Exceptions are in the table beside another, or say what a configured rate is."""
    shown = {name for query in _queries() for name in re.findall(r"\bhetero_pp_\w+", query)}
    assert LABELS.keys() - shown == {
        "hetero_pp_build_info",
        "hetero_pp_member_round",
        "hetero_pp_contribution_bytes_total",
        "hetero_pp_link_capacity_bytes_per_second",
        "hetero_pp_line_capacity_bytes_per_second",
    }


def test_values_of_labels_in_queries_exist() -> None:
    values = {
        value for query in _queries() for value in re.findall(r'(?:condition|outcome)(?:=~|!=|=)"([^"]+)"', query)
    }
    assert {one for value in values for one in value.split("|")} <= {*Condition, *Outcome}


def test_manifests_are_valid() -> None:
    manifests = _loaded("kubernetes.yaml")
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.31", strict=True)
    broken = dict(manifests[0], datas={})
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.31", strict=True)
    [run] = (one for one in manifests if one["kind"] == "ConfigMap")
    assert RunConfig.model_validate(YAML(typ="safe").load(run["data"]["hosts.yaml"])).name == "hosts"
    [service] = (one for one in manifests if one["kind"] == "Service")
    assert {one["port"] for one in service["spec"]["ports"]} == {47600, 47601, 9464}


def test_options_of_the_examples_exist() -> None:
    commands: dict[str, Any] = getattr(get_command(app), "commands")  # noqa: B009 (the type has none)
    found = 0
    for path in sorted(FOLDER.iterdir()):
        for command, rest in re.findall(
            r"\bhetero-pp (launch|serve|join|invite)\b([^\n]*(?:\n +--[^\n]*)?)", path.read_text()
        ):
            known = {option for one in commands[command].params for option in one.opts}
            assert set(re.findall(r"(?<!\S)--[\w-]+", rest)) <= known, (path.name, rest)
            found += 1
    assert found >= 7


FAKE = """#!/bin/bash
echo "$(basename "$0")" "$@" >> {folder}/calls
[ "$(basename "$0")" = scontrol ] && exit 0
trap 'exit 130' USR1
touch {folder}/started
[ -e {folder}/waits ] || exit 0
while true; do read -rt 0.05 < {folder}/nothing; done
"""


@pytest.mark.starts_processes
@pytest.mark.parametrize("is_cut", [True, False])
def test_the_job_script_requeues_a_run_that_is_cut_and_resumes_it(is_cut: bool, tmp_path: Path) -> None:
    for name in ("hetero-pp", "scontrol"):
        (tmp_path / name).write_text(FAKE.format(folder=tmp_path))
        (tmp_path / name).chmod(stat.S_IRWXU)
    os.mkfifo(tmp_path / "nothing")
    held = os.open(tmp_path / "nothing", os.O_RDWR)
    (tmp_path / "run.yaml").write_text("name: mine\n")
    if is_cut:
        (tmp_path / "waits").touch()
    else:
        (tmp_path / "runs" / "mine").mkdir(parents=True)
        (tmp_path / "runs" / "mine" / "config.yaml").touch()
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    # The signal comes once the fake launcher has started: Slurm's batch shell alone gets it.
    wrapper = f"""
bash {shlex.quote(str(FOLDER / "slurm.sh"))} run.yaml & job=$!
until [ -e started ]; do read -rt 0.05 < nothing; done
{"kill -USR1 $job" if is_cut else ":"}
wait $job
"""
    done = subprocess.run(["bash", "-c", wrapper], cwd=tmp_path, env=environment, timeout=60, check=False)
    os.close(held)
    calls = (tmp_path / "calls").read_text().splitlines()
    options = "--metrics 9464 --log-format json"
    if is_cut:
        assert (done.returncode, calls) == (130, [f"hetero-pp launch run.yaml {options}", "scontrol requeue 7"])
    else:
        assert (done.returncode, calls) == (0, [f"hetero-pp launch run.yaml --resume {options}"])
