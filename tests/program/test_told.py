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


HOSTILE = {
    "flops_profiler": {"enabled": True, "output_file": "/home/anna/.bashrc"},
    "csv_monitor": {"enabled": True, "output_path": "/home/anna", "job_name": ".ssh"},
    "tensorboard": {"enabled": True, "output_path": "/home/anna"},
    "wandb": {"enabled": True, "host": "https://attacker.example"},
    "comet": {"enabled": True},
    "aio": {"block_size": 1},
    "checkpoint": {"tag_validation": "Fail"},
    "compile": {"enabled": True, "backend": "os.system"},
    "autotuning": {"enabled": True, "results_dir": "/home/anna"},
    "compression_training": {},
    "data_efficiency": {"data_sampling": {"curriculum_learning": {"data_cluster_path": "/home/anna"}}},
    "nebula": {"enabled": True, "persistent_storage_path": "/home/anna"},
    "hybrid_engine": {},
    "zero_optimization": "/home/anna/zero.json",
    "a_section_of_a_later_version": {"path": "/home/anna"},
}
NESTED = {
    "zero_optimization.offload_optimizer.nvme_path": {"offload_optimizer": {"nvme_path": "/home/anna"}},
    "zero_optimization.offload_param.device": {"offload_param": {"device": "nvme"}},
    "zero_optimization.stage": {"stage": "/home/anna"},
    "zero_optimization.reduce_scatter": {"reduce_scatter": {"path": "/home/anna"}},
    "zero_optimization.sub_group_size": {"sub_group_size": [1, "/home/anna"]},
}


@pytest.mark.parametrize("section", HOSTILE)
def test_sections_of_deepspeed_that_name_files_or_code_are_refused(section: str) -> None:
    expected = rf"replicas\[0\]\.deepspeed\.{section}.*launch --only dc` and your own YAML"
    with pytest.raises(ConfigError, match=expected):
        _own(datacenter={"engine": "deepspeed", "deepspeed": {section: HOSTILE[section]}})
    _own("home.1", {"engine": "deepspeed", "deepspeed": {section: HOSTILE[section]}})  # nothing of it is used there


@pytest.mark.parametrize("key", NESTED)
def test_keys_of_deepspeed_that_may_name_a_path_are_refused(key: str) -> None:
    with pytest.raises(ConfigError) as found:
        _own(datacenter={"engine": "deepspeed", "deepspeed": {"zero_optimization": NESTED[key]}})
    assert str(found.value).startswith(f"replicas[0].deepspeed.{key}: ")


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit this version"):
        _own(data={"a_path": "/home/anna"})


def test_what_deepspeed_computes_with_is_taken() -> None:
    deepspeed = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        "communication_data_type": "fp32",
    }
    assert _own(datacenter={"engine": "deepspeed", "deepspeed": deepspeed}).replicas[0].deepspeed == deepspeed  # type: ignore[union-attr]


def test_a_meeting_slot_is_not_taken_from_an_exchange() -> None:
    with pytest.raises(ConfigError, match=r"replicas\[0\]\.nodes: found `2`, expected one host"):
        _own(datacenter={"engine": "torchtitan", "nodes": 2, "rendezvous": "10.0.0.7:22"})
    with pytest.raises(ConfigError, match=r"replicas\[0\]\.rendezvous: found `10\.0\.0\.7:22`"):
        _own(datacenter={"engine": "torchtitan", "rendezvous": "10.0.0.7:22"})


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
    "name": "of a run or a replica, checked",
    "weights": "left out",
    "corpus": "of --data, or one that every host has",
    "subset": "of a dataset of the Hub",
    "revision": "of a dataset of the Hub",
    "split": "of a dataset of the Hub",
    "validation_split": "of a dataset of the Hub",
    "text_field": "of a file that this host names",
    "tokenizer": "of --tokenizer, or sent",
    "url": "left out",
    "endpoint": "left out",
    "region": "left out",
    "listen": "left out; that of neighbours is dialled by TLS",
    "relay": "left out",
    "rendezvous": "refused",
    "deepspeed": "held against a list",
    "device": "one of a few names",
    "hardware": "the name of an entry",
    "uplink": "the name of an entry",
    "link": "the name of an entry",
    "line": "the name of an entry",
    "count": "a range of numbers",
    "members": "names of members",
}
"""Keys that may hold any text, with the reason why the text cannot name a file or an address of another host."""


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
    assert found == set(TEXTS)
