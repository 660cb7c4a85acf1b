"""Settings that a joining host gets from the exchange. They cannot name any file or address of that host."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from hetero_pp.config.changes import Changes
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.shared import listen_told, own_configuration
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError, MalformedMessage

DATACENTER = {"name": "dc", "kind": "datacenter"}
HOME = {"name": "home", "kind": "participants", "stages": [{"layers": 2}, {"layers": 2, "listen": "10.0.0.7:22"}]}
TOLD: dict[str, Any] = {
    "name": "homes",
    "model": {"preset": "micro"},
    "outer": {"rounds": 3},
    "inner": {"steps": 2, "learning_rate": 1e-2},
    "replicas": [DATACENTER, HOME],
}


def _own(member: str = "dc", datacenter: dict[str, Any] | None = None, **more: Any) -> RunConfig:
    replicas = [DATACENTER | (datacenter or {}), HOME]
    return own_configuration(json.dumps(TOLD | {"replicas": replicas} | more), member, None, None)


HOSTILE: dict[str, Any] = {
    "flops_profiler": {"enabled": True, "output_file": "/home/anna/.bashrc"},
    "wandb": {"enabled": True, "host": "https://attacker.example"},
    "compile": {"enabled": True, "backend": "os.system"},
    "data_efficiency": {"data_sampling": {"curriculum_learning": {"data_cluster_path": "/home/anna"}}},
    "nebula": {"enabled": True, "persistent_storage_path": "/home/anna"},
    "zero_optimization": "/home/anna/zero.json",
    "zero_optimization.offload_optimizer.nvme_path": {"offload_optimizer": {"nvme_path": "/home/anna"}},
    "zero_optimization.offload_param.device": {"offload_param": {"device": "nvme"}},
    "zero_optimization.sub_group_size": {"sub_group_size": [1, "/home/anna"]},
    "a_section_of_a_later_version": {"path": "/home/anna"},
}
"""Key -> the content of its section."""


@pytest.mark.parametrize("key", HOSTILE)
def test_what_of_deepspeed_may_name_files_or_code_is_refused(key: str) -> None:
    section = {key.partition(".")[0]: HOSTILE[key]}
    with pytest.raises(ConfigError, match=rf"^replicas\[0\]\.deepspeed\.{key}: .*") as found:
        _own(datacenter={"engine": "deepspeed", "deepspeed": section})
    assert "." in key or "launch --only dc` and your own YAML" in str(found.value)
    _own("home.1", {"engine": "deepspeed", "deepspeed": section})  # nothing of it is used there


def test_unknown_keys_and_meeting_places_are_not_taken_from_an_exchange() -> None:
    # Unknown keys are refused.
    with pytest.raises(ConfigError, match="does not fit this version"):
        _own(data={"a_path": "/home/anna"})

    # A meeting slot is not taken from an exchange.
    with pytest.raises(ConfigError, match=r"replicas\[0\]\.nodes: found `2`, expected one host"):
        _own(datacenter={"engine": "torchtitan", "nodes": 2, "rendezvous": "10.0.0.7:22"})
    with pytest.raises(ConfigError, match=r"replicas\[0\]\.rendezvous: found `10\.0\.0\.7:22`"):
        _own(datacenter={"engine": "torchtitan", "rendezvous": "10.0.0.7:22"})


def test_what_deepspeed_computes_with_is_taken() -> None:
    deepspeed = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        "communication_data_type": "fp32",
    }
    assert _own(datacenter={"engine": "deepspeed", "deepspeed": deepspeed}).replicas[0].deepspeed == deepspeed  # type: ignore[union-attr]


def test_files_and_addresses_of_this_host_are_left_out(tmp_path: Path) -> None:
    own = _own(
        "home.1",
        model={"preset": "micro", "weights": "/home/anna/model"},
        store={"url": "s3://bucket", "endpoint": "http://169.254.169.254"},
        states={"to": "store"},
        exchange={"listen": "0.0.0.0:22", "relay": "0.0.0.0:23", "insecure": True},
        data={"corpus": "/home/anna/diary.txt"},
    )
    assert (own.model.weights, own.store.url, own.store.endpoint, own.states.to) == (None, None, None, "folder")
    assert (own.exchange.listen, own.exchange.relay, own.exchange.insecure) == ("127.0.0.1:0", None, False)
    assert own.replicas[1].listen_of(1) is None  # type: ignore[union-attr]
    assert listen_told(json.dumps(TOLD), "home.1") == "10.0.0.7:22"
    assert own.data.corpus == str(Path("diary.txt").absolute())
    with pytest.raises(ConfigError, match="give the path of the run's tokenizer with --tokenizer PATH"):
        _own(data={"tokenizer": "/home/anna/tokenizer.json"})


@pytest.mark.parametrize(
    "told", ["[" * 100_000, "[]", "{}", '{"name": ' + "9" * 5000 + "}", '{"replicas": 1}', "\udcff"]
)
def test_a_configuration_that_is_none_is_refused_in_one_line(told: str) -> None:
    with pytest.raises(ConfigError, match="does not fit this version of hetero-pp") as found:
        own_configuration(told, "dc", None, None)
    assert "\n" not in str(found.value)


def test_changes_of_a_run_name_only_keys_that_may_change() -> None:
    for key in ("data.tokenizer", "store.url", "model.weights", "no.such.key", "a"):
        with pytest.raises(MalformedMessage, match=f"changes of the run: {key}: found a key that cannot change"):
            RunSpec(RunConfig.model_validate(TOLD), 256, Changes.from_json(json.dumps({key: {"1": "/home/anna"}})))
    with pytest.raises(MalformedMessage, match="changes of the run: a value does not fit"):
        RunSpec(RunConfig.model_validate(TOLD), 256, Changes.from_json('{"outer.rounds": {"1": "many"}}'))


TEXTS = {
    "checked": "name device count deepspeed rendezvous",
    "left out": "weights url endpoint region listen relay hosts",
    "given by this host, sent, or one that every host has": "corpus tokenizer text_field",
    "of a dataset of the Hub": "subset revision split validation_split",
    "the name of an entry or a member": "hardware uplink link line members",
}
"""Reason why a text cannot name a file or an address of another host -> the keys that may hold any text."""


def _keys_of_texts(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        for kind in _kinds(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys_of_texts(kind)
            elif kind in (str, Any):
                yield name


def _kinds(annotation: Any) -> Iterator[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return
    if origin is dict:  # its keys are names, never paths
        yield from _kinds(typing.get_args(annotation)[1])
    elif origin is typing.Annotated:
        yield from _kinds(typing.get_args(annotation)[0])
    elif origin in (list, tuple, typing.Union, types.UnionType):
        for one in typing.get_args(annotation):
            yield from _kinds(one)
    else:
        yield annotation


def test_every_key_that_may_hold_a_text_has_a_reason() -> None:
    told = RunConfig.model_fields.keys() - {"simulate", "plan"}  # no member reads these
    found = set()
    for name in told:
        for kind in _kinds(RunConfig.model_fields[name].annotation):
            is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
            found |= set(_keys_of_texts(kind)) if is_section else {name} if kind in (str, Any) else set()
    assert found == {key for keys in TEXTS.values() for key in keys.split()}
