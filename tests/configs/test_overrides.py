"""Values beside the YAML: `--set KEY=VALUE` equals the same value in the YAML, and errors name what was typed."""

from __future__ import annotations

import io
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from rewritten import agree
from ruamel.yaml import YAML
from typer.testing import CliRunner

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ConfigError
from hetero_pp.program.cli import app

MIXED = """\
name: mixed
outer: {rounds: 4}
lines: {dsl: {up: 20 Mbit/s, down: 100 Mbit/s, latency: 15 ms}}
replicas:
  - {name: dc, kind: datacenter, batch_size: 8}
  - {name: home, kind: participants, stages: {count: 4, line: dsl}, batch_size: 8, micro_batches: 4,
     boundary: {rank: 1/2, bits: 4}}
  - {name: office, kind: participants, stages: [{layers: 3, line: dsl}, {layers: 1, line: dsl}], batch_size: 8}
"""


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.yaml"
    path.write_text(MIXED)
    return path


def _config(path: Path, *sets: str) -> dict[str, Any]:
    return ConfigFile(path, sets).config.model_dump(mode="json")


def _error(path: Path, *sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        ConfigFile(path, sets)
    return str(caught.value)


# ---- the same as in the YAML ----


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, types.UnionType):
        yield from (found for part in get_args(annotation) for found in _sections(part))


def _keys(model: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{above}{name}"
        for section in _sections(field.annotation):
            yield from _keys(section, f"{above}{name}.")


KEYS = [
    *_keys(RunConfig),
    *_keys(DatacenterReplica, "replicas.0."),
    *_keys(ParticipantsReplica, "replicas.1."),
    *("lines.dsl.up", "lines.dsl.jitter", "replicas.1.link.0", "replicas.2.stages.0.layers"),
]
VALUES = [
    *("4", "0", "-1", "1.5", "1e-3", "1/8", "12.5 %", "full", "true", "null", "", "20 ms", "5 min", "100 Mbit/s"),
    *("1_000 s", "512 MiB", "x", "a b", "'a: b'", '"12"', "[1, 2]", "[a, {b: 1}]", "{a: 1}", "{count: 2}", "{}", "[]"),
    *("127.0.0.1:0", "0.0.0.0:47600", "'[::1]:0'", "diloco", "adamw_ddp", "micro", "docstrings", "/tmp/a # b", "dsl"),
]


def _in_the_yaml(path: Path, key: str, value: str) -> Path:
    """Write a value into the YAML at its key, as a user would."""
    yaml = YAML(typ="safe")
    node = root = yaml.load(path)
    *parents, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    for parent in parents:
        if isinstance(node, dict) and node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
    node[last] = yaml.load(value)
    text = io.StringIO()
    yaml.dump(root, text)
    written = path.with_name("written.yaml")
    written.write_text(text.getvalue())
    return written


def _outcome(path: Path, *sets: str) -> Any:
    """Return the configuration, or the part of an error that says what was found and expected."""
    try:
        return _config(path, *sets)
    except ConfigError as error:
        return str(error)[str(error).index("found ") :]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from([key for key in KEYS if key != "outer.method"]), value=st.sampled_from(VALUES))
@example(key="replicas.1.stages", value="true")
def test_a_value_beside_the_yaml_is_that_value_in_the_yaml(mixed: Path, key: str, value: str) -> None:
    if key.startswith("replicas.1.stages") and value.lstrip("-").isdigit():
        return  # a number of stages keeps their line, see below
    try:
        written = _in_the_yaml(mixed, key, value)
    except (TypeError, IndexError, KeyError):  # the YAML has a single value or one entry less there
        assert "found " in _error(mixed, f"{key}={value}") or "single value" in _error(mixed, f"{key}={value}")
        return
    added = "found a name that no setting uses"
    found = _outcome(mixed, f"{key}={value}")
    assert found == _outcome(written) or str(found).startswith(added)


def test_an_address_needs_no_quotes(mixed: Path) -> None:
    for shown in ("[::1]:0", "[fe80::1]:47600", "'[::1]:0'", '"[::1]:0"', "[::ffff:10.0.0.1]:1"):
        assert _config(mixed, f"exchange.listen={shown}")["exchange"]["listen"] == shown.strip("'\"")


@pytest.mark.parametrize(
    ("address", "form"), [("::1:0", "[::1]:0"), ("fe80::1:47600", "[fe80::1]:47600"), ("[home]:1", "[::1]:47500")]
)
def test_an_ipv6_address_needs_brackets(address: str, form: str, mixed: Path) -> None:
    told = f"found `{address}`, expected an IPv6 address in brackets such as `{form}`"
    assert _error(mixed, f"exchange.listen='{address}'").endswith(told)
    asked = CliRunner().invoke(app, ["invite", "mixed", "--address", address])
    assert (asked.exit_code, asked.stderr) == (2, f"hetero-pp: --address: {told}\n")


def test_text_that_is_not_yaml_is_told_with_its_form(mixed: Path) -> None:
    assert _error(mixed, "data.corpus=[a").startswith("--set data.corpus=[a: found a value that is not YAML (")


# ---- the number of stages ----


@pytest.mark.parametrize("key", ["replicas.1.stages", "replicas.home.stages", "replicas.home.stages.count"])
def test_the_number_of_stages_keeps_their_line(key: str, mixed: Path) -> None:
    assert _config(mixed, f"{key}=2")["replicas"][1]["stages"] == {"count": 2, "line": "dsl", "device": None}


def test_a_number_instead_of_a_list_keeps_its_common_line(mixed: Path) -> None:
    assert _config(mixed, "replicas.office.stages=4")["replicas"][2]["stages"] == {
        "count": 4,
        "line": "dsl",
        "device": None,
    }
    own = "replicas.2.stages.0.uplink=null"
    told = _error(mixed, own, "replicas.office.stages=4")
    assert told.startswith("--set replicas.office.stages=4: found a number for `replicas.2.stages`")
    assert "but its entries set `uplink`" in told
    assert _config(mixed, own, "replicas.office.stages={count: 4}")["replicas"][2]["stages"]["line"] is None


def test_a_number_of_stages_gets_a_line(mixed: Path) -> None:
    mixed.write_text(MIXED.replace("{count: 4, line: dsl}", "4"))
    assert _config(mixed, "replicas.home.stages.line=dsl")["replicas"][1]["stages"] == {
        "count": 4,
        "line": "dsl",
        "device": None,
    }


# ---- replicas by name, or all of them ----


def test_a_replica_is_called_by_its_name(mixed: Path) -> None:
    for key in ("boundary.rank=1/4", "stages.line=null", "batch_size=4", "boundary={rank: full}"):
        assert _config(mixed, f"replicas.home.{key}") == _config(mixed, f"replicas.1.{key}")
    by_name = ConfigFile(mixed, changes={"replicas": {"home": {"boundary": {"rank": "1/4"}}}}).config
    assert by_name == ConfigFile(mixed, ["replicas.home.boundary.rank=1/4"]).config


def test_without_a_name_all_replicas_are_meant_that_have_the_key(mixed: Path) -> None:
    dc, home, office = _config(mixed, "replicas.boundary.rank=1/4")["replicas"]
    assert "boundary" not in dc
    assert (home["boundary"]["rank"], office["boundary"]["rank"]) == (0.25, 0.25)
    assert [one["batch_size"] for one in _config(mixed, "replicas.batch_size=4")["replicas"]] == [4, 4, 4]


def test_an_ambiguous_name_lists_those_that_there_are(mixed: Path) -> None:
    mixed.write_text(MIXED.replace("name: home", "name: boundary"))
    told = _error(mixed, "replicas.boundary.rank=1/4")
    assert "found `boundary`, which is entry 1 (boundary) and a key of replicas of `replicas`" in told
    assert told.endswith("0 (dc), 1 (boundary), 2 (office)")
    assert _config(mixed, "replicas.1.boundary.rank=1/4")["replicas"][1]["boundary"]["rank"] == 0.25


def test_participants_of_a_plan_are_called_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("name: p\nouter: {rounds: 1}\nplan: {stages: 2, participants: [{name: a}, {name: b}]}\n")
    found = _config(path, "plan.participants.b.hardware=rtx-4090")["plan"]["participants"]
    assert [one["hardware"] for one in found] == [None, "rtx-4090"]


# ---- errors name what was typed ----


WRONG = (
    *(f"replicas.{part}.batch_size=4" for part in ("hone", "7", "home-1")),
    "replicas.home.boundary.rank=x",
    "replicas.home.boundary={rank: x}",
    "replicas.homes=1",
    "name=a/b",
    f"name={'a' * 101}",
    "data.corpus={a: 1}",
    "outer.overlap=2",
    "outer.method=diloko",
    "outer.rounds=0",
)


def test_an_error_names_what_was_typed(mixed: Path) -> None:
    found = {change: _error(mixed, change) for change in WRONG}
    assert all(_error(mixed, "seed=2", change, "threads=2") == told for change, told in found.items())
    agree(Path(__file__).with_name("overrides.json"), found)


def test_what_the_file_has_wrong_is_the_files(mixed: Path) -> None:
    mixed.write_text(MIXED.replace("{rounds: 4}", "{rounds: 4, momentum: 0.9, optimizer: adam}"))
    assert _error(mixed, "outer.rounds=5").startswith(f"{mixed}:2: outer: ")
    mixed.write_text(MIXED.replace("{rounds: 4}", "{rounds: 4, optimizer: adam}"))
    assert _error(mixed, "outer.momentum=0.9").startswith(
        "--set outer.momentum=0.9: outer: sparseloco_signs: found momentum"
    )


def test_a_file_that_another_option_gave_is_named(mixed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    cost = "{forward: 1 ms, backward: 1 ms, update: 1 ms, contribute: 1 ms, apply: 1 ms, evaluate: 1 ms}"
    other.write_text(f"hardware: {{}}\nmeasured: {{elsewhere: {cost}}}\n")
    asked = CliRunner().invoke(app, ["simulate", str(mixed), "--calibration", str(other)])
    assert asked.exit_code == 2
    assert asked.stderr.startswith(
        f"hetero-pp: --calibration {other}: simulate.measured.elsewhere: found costs of `elsewhere`"
    ), asked.stderr
    assert "which is not a member of this run, expected those of its members: measure" in asked.stderr
    asked = CliRunner().invoke(app, ["launch", str(mixed), "--from", str(other)])
    assert asked.stderr.startswith(f"hetero-pp: --from {other}: "), asked.stderr
