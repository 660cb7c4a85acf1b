"""Export and import of LLaMA checkpoints, compared with transformers and bit for bit."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shutil
import stat
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from asking import ask, told
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from hetero_pp.config.checkpoint import open_checkpoint
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile, with_weights_described
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_whole
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokenizers import ByteTokenizer, FileTokenizer, load_tokenizer
from hetero_pp.hugging_face.config_json import read_architecture
from hetero_pp.hugging_face.reading import read_parameters
from hetero_pp.hugging_face.writing import write_model, write_tokenizer, write_weights
from hetero_pp.model.transformer import ModelSettings, ModelShape, Transformer, initialise

if TYPE_CHECKING:
    import transformers

SHAPE = ModelShape(width=48, layers=2, heads=3, feed_forward=80, vocabulary=300, rope_theta=5000.0, norm_epsilon=1e-4)
TEXTS = [
    "",
    "plain text",
    "  spaces,\ttabs\r\nand lines\n",
    "Grüße, 世界 🌍",
    "<|endoftext|> spelt out",
    "N\0UL",
    "\x7f\x80ÿ",
]


def _transformers() -> ModuleType:
    """Import transformers, which takes seconds, so that only workers that run these tests import it."""
    return importlib.import_module("transformers")


@pytest.fixture(scope="module")
def model() -> Transformer:
    """Return a model whose norms differ, so that a swapped norm is noticed."""
    module = Transformer(SHAPE)
    initialise(module, seed=4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif name.startswith("layers"):
                parameter.mul_(2)  # so that attention affects the logits
    return module


def _parameters(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _shapes(shape: ModelShape = SHAPE) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Transformer(shape).named_parameters()}


def _export(model: Transformer, folder: Path, dtype: Any = "fp32") -> Path:
    folder.mkdir(exist_ok=True)
    write_model(folder, _parameters(model).__getitem__, _shapes(), SHAPE, DataSettings(sequence_length=32), dtype)
    return folder


def _logits(model: Transformer, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(SHAPE.vocabulary, (3, 32), generator=torch.Generator().manual_seed(2))


def test_transformers_has_the_same_logits(model: Transformer, tokens: Tensor, tmp_path: Path) -> None:
    theirs = _transformers().AutoModelForCausalLM.from_pretrained(_export(model, tmp_path / "out"))
    assert isinstance(theirs, _transformers().LlamaForCausalLM)
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        found = theirs(tokens).logits
    expected = _logits(model, tokens)
    assert expected.std() > 0.5  # otherwise the comparison shows little
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_what_was_written_is_read_to_the_bit(model: Transformer, tmp_path: Path) -> None:
    # What was written is read to the bit.
    folder = _export(model, tmp_path / "out")
    assert read_architecture(folder).shape == SHAPE
    shares: list[float] = []
    read = read_parameters(folder, _shapes(), lambda _, share: shares.append(share))
    assert shares == sorted(shares)
    assert (len(shares), shares[-1]) == (len(read), 1.0)
    assert list(read) == sorted(_shapes())
    for name, parameter in _parameters(model).items():
        assert torch.equal(read[name], parameter), name

    # Bf16 is the rounded parameter.
    folder = _export(model, tmp_path / "out", "bf16")
    assert _transformers().AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    for name, parameter in read_parameters(folder, _shapes()).items():
        assert torch.equal(parameter, _parameters(model)[name].bfloat16().float()), name


def test_shards_have_an_index_that_transformers_follows(model: Transformer, tokens: Tensor, tmp_path: Path) -> None:
    folder = _export(model, tmp_path / "out")
    (folder / "model.safetensors").unlink()
    size = write_weights(folder, _parameters(model).__getitem__, _shapes(), SHAPE.head_size, torch.float32, 60_000)
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 2
    assert size == sum(tensor.numel() * 4 for file in files for tensor in load_file(file).values())
    assert all(sum(t.numel() * 4 for t in load_file(file).values()) <= 60_000 for file in files)
    theirs = _transformers().AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, _logits(model, tokens), rtol=0, atol=1e-5)
    read = read_parameters(folder, _shapes())
    assert all(torch.equal(read[name], parameter) for name, parameter in _parameters(model).items())


SCALING = {
    "rope_type": "llama3",
    "rope_theta": 700.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FORMATS: dict[str, dict[str, Any]] = {
    "wide heads": {"head_dim": 16},
    "SmolLM2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Llama 3.2": {"num_key_value_heads": 3, "tie_word_embeddings": True, "rope_parameters": SCALING},
}


def _theirs(folder: Path, changes: dict[str, Any]) -> transformers.LlamaForCausalLM:
    """Return a model of transformers with random weights, and save it to a folder."""
    torch.manual_seed(3)
    values: dict[str, Any] = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "intermediate_size": 56,
        "vocab_size": SHAPE.vocabulary,
        "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    }
    model = _transformers().LlamaForCausalLM(_transformers().LlamaConfig(**(values | changes))).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", FORMATS)
def test_checkpoints_of_transformers_are_read_and_returned(name: str, tokens: Tensor, tmp_path: Path) -> None:
    """The returned folder has the same tensors to the bit, and no head if the head is the embedding."""
    theirs = _theirs(tmp_path / "theirs", FORMATS[name])
    architecture = read_architecture(tmp_path / "theirs")
    shape = architecture.shape
    assert (shape.rope_theta, shape.norm_epsilon) == (700.0, 1e-6)
    assert (shape.kv_heads, shape.head_width) == (
        FORMATS[name].get("num_key_value_heads"),
        FORMATS[name].get("head_dim"),
    )
    ours, read = Transformer(shape), read_parameters(tmp_path / "theirs", _shapes(shape))
    ours.load_state_dict(read)
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(_logits(ours, tokens), expected, rtol=0, atol=1e-5)

    back = tmp_path / "back"
    back.mkdir()
    write_model(back, read.__getitem__, _shapes(shape), shape, DataSettings(sequence_length=32), "fp32")
    first, returned = (load_file(folder / "model.safetensors") for folder in (tmp_path / "theirs", back))
    assert first.keys() == returned.keys()
    assert all(torch.equal(returned[key], tensor) for key, tensor in first.items())
    assert read_architecture(back) == architecture
    with torch.no_grad():
        again = _transformers().AutoModelForCausalLM.from_pretrained(back)(tokens).logits
    assert torch.equal(again, expected)


REFUSED = {
    "architecture": ({"model_type": "qwen2"}, "model_type: found `qwen2`, expected `llama`"),
    "no architecture": ({"model_type": None}, "model_type: found nothing, expected `llama`"),
    "biases": ({"attention_bias": True}, "attention_bias: found `True`, expected `False`"),
    "head width": ({"head_dim": 15}, "head_dim: found `15`, expected an even number"),
    "new scaling": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
        "rope scaling: found `yarn`, expected none or `llama3`",
    ),
    "half a scaling": (
        {"rope_scaling": {**SCALING, "low_freq_factor": None}},
        "rope scaling: low_freq_factor: found nothing, expected a positive number",
    ),
    "scaling upside down": (
        {"rope_scaling": {**SCALING, "high_freq_factor": 0.5}},
        "rope_scaling: found `0.5`, expected a high frequency factor above the low one, 1.0",
    ),
    "no groups": ({"num_key_value_heads": 0}, "num_key_value_heads: found `0`, expected a divisor"),
    "uneven groups": ({"num_key_value_heads": 2}, "num_key_value_heads: found `2`, expected a divisor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_models_are_refused(case: str, model: Transformer, tmp_path: Path) -> None:
    changes, words = REFUSED[case]
    path = _export(model, tmp_path / "out") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError) as caught:
        read_architecture(path.parent)
    assert caught.value.key == ("model", "weights")
    assert words in caught.value.message


def test_damaged_checkpoints_are_refused(model: Transformer, tmp_path: Path) -> None:
    folder = _export(model, tmp_path / "out")
    file = folder / "model.safetensors"
    good = load_file(file)

    def complaint(tensors: dict[str, Tensor]) -> str:
        save_file(tensors, file)
        with pytest.raises(ConfigError) as caught:
            read_parameters(folder, _shapes())
        assert caught.value.key == ("model", "weights")
        return caught.value.message

    name = "model.layers.1.mlp.up_proj.weight"
    assert f"no tensor `{name}`" in complaint({key: value for key, value in good.items() if key != name})
    assert "[80, 47]" in complaint(good | {name: good[name][:, 1:].contiguous()})
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert f"found the tensor `{bias}`" in complaint(good | {bias: torch.zeros(48)})
    file.write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match="no readable"):
        read_parameters(folder, _shapes())
    file.unlink()
    with pytest.raises(ConfigError, match="no readable"):
        read_parameters(folder, _shapes())
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        read_architecture(folder)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "..", 7])
def test_an_index_names_only_files_of_its_folder(file: object, model: Transformer, tmp_path: Path) -> None:
    folder = _export(model, tmp_path / "out")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
    told = rf"{re.escape(str(index))}: weight_map.lm_head.weight: found `{file}`, expected the name of a file in"
    with pytest.raises(ConfigError, match=told):
        read_parameters(folder, _shapes())


def test_the_byte_tokenizer_is_the_same_everywhere(tmp_path: Path) -> None:
    separator = write_tokenizer(DataSettings(), tmp_path)
    ours, file, theirs = (
        ByteTokenizer(),
        FileTokenizer(tmp_path / "tokenizer.json"),
        _transformers().AutoTokenizer.from_pretrained(tmp_path),
    )
    assert (separator, file.separator, file.vocabulary) == (ours.separator, ours.separator, ours.vocabulary)
    assert (theirs.eos_token_id, theirs.bos_token_id, len(theirs)) == (0, 0, 256)
    for text, expected in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
        assert file.encode_batch([text])[0].tolist() == expected.tolist(), text
        if "<|endoftext|>" not in text:  # transformers takes it for the token
            assert theirs(text)["input_ids"] == expected.tolist(), text
            assert theirs.decode(expected) == ours.decode(expected.tolist()), text
    broken = torch.randint(256, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    assert file.decode(broken) == ours.decode(broken)
    assert file.decode(range(256)) == ours.decode(range(256))


@pytest.mark.parametrize("end", ["</s>", None])
def test_a_tokenizer_of_the_user_is_copied(end: str | None, tmp_path: Path) -> None:
    """The copy gets a token for the separator if it has none. Without that token, the test compares byte by byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=[end] if end else [], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the replica sends what the stage of the replica waits for"] * 9, trainer)
    own, copied = tmp_path / "own", tmp_path / "copied"
    own.mkdir()
    copied.mkdir()
    tokenizer.save(str(own / "tokenizer.json"))
    if end:
        (own / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, "model_max_length": 77}))
    before = load_tokenizer(DataSettings(tokenizer=str(own)))
    separator = write_tokenizer(DataSettings(tokenizer=str(own / "tokenizer.json")), copied)
    after, theirs = FileTokenizer(copied / "tokenizer.json"), _transformers().AutoTokenizer.from_pretrained(copied)
    assert separator == before.separator == after.separator == theirs.eos_token_id
    assert before.vocabulary == after.vocabulary == len(theirs)
    is_same = (own / "tokenizer.json").read_bytes() == (copied / "tokenizer.json").read_bytes()
    assert is_same == (end is not None)
    assert theirs.eos_token == (end or "<|endoftext|>")
    assert (theirs.model_max_length == 77) == (end is not None)
    text = "the replica waits, für immer"
    ids = before.encode_batch([text])[0].tolist()
    assert after.encode_batch([text])[0].tolist() == theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text


RUN = """\
name: first
model: {width: 32, heads: 2, feed_forward: 48, layers: 3, rope_theta: 900.0}
data: {corpus: CORPUS, sequence_length: 24, validation_share: 0.1, validation_sequences: 6}
inner: {steps: 3, learning_rate: 1e-2, warmup_steps: 2}
outer: {rounds: 3, momentum: 0.5, nesterov: true}
replicas:
  - {name: a, kind: datacenter, batch_size: 4}
  - {name: b, kind: datacenter, batch_size: 4}
checkpoints: {every: 1}
"""
CONTINUED = """\
name: second
data: {corpus: CORPUS, sequence_length: 24, validation_share: 0.1, validation_sequences: 6}
inner: {steps: 2, learning_rate: 1e-2, warmup_steps: 1}
outer: {rounds: 2}
links: {home: {bandwidth: 1 Gbit/s}}
replicas:
  - {name: dc, kind: datacenter, batch_size: 4}
  - {name: home, kind: participants, stages: 3, batch_size: 4, link: home, boundary: {rank: 1/4}}
"""


def _invoke(*arguments: object) -> tuple[int, str]:
    return ask(*arguments)[::2]


def _losses(run: Path) -> dict[str, Any]:
    summary = json.loads((run / "summary.json").read_text())
    return {replica["name"]: replica for replica in summary["replicas"]}


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of three rounds."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "run.yaml").write_text(RUN.replace("CORPUS", str(corpus)))
    assert _invoke("launch", "--in-process", folder / "run.yaml", "--runs", folder / "runs") == (0, "")
    return folder / "runs" / "first"


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    """Return the folder of the run's exported model."""
    assert _invoke("export", run, "--to", run.parent / "hf", "--dtype", "fp32") == (0, "")
    return run.parent / "hf"


def test_a_round_without_a_checkpoint_is_replayed(run: Path, tmp_path: Path) -> None:
    kept = open_checkpoint(run / "log" / "checkpoint-000002.safetensors").checkpoint().parameters
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for number in (1, 2, 3):
        (copy / "log" / f"checkpoint-{number:06d}.safetensors").unlink(missing_ok=True)
    assert _invoke("export", copy, "--to", tmp_path / "hf", "--round", 2) == (0, "")
    read = read_parameters(tmp_path / "hf", {name: tuple(tensor.shape) for name, tensor in kept.items()})
    assert all(torch.equal(read[name], tensor) for name, tensor in kept.items())
    code, errors = _invoke("export", copy, "--to", tmp_path / "other", "--round", 4)
    assert (code, "the log in" in errors, "ends before round 4" in errors) == (2, True, True)
    assert not (tmp_path / "other").exists()
    (copy / "log" / "checkpoint-000000.safetensors").unlink()
    assert "found no run checkpoint" in _invoke("export", copy, "--to", tmp_path / "other")[1]


def test_what_cannot_be_exported_is_said(run: Path, exported: Path, tmp_path: Path) -> None:
    for folder, to, words in [
        (tmp_path, tmp_path / "new", f"{Path('runs').absolute()}: found no run {tmp_path} that this host started"),
        (run, exported, f"--to {exported}: found files in this folder, expected a new or empty folder"),
        (run, run / "config.yaml" / "new", f"--to {run / 'config.yaml' / 'new'}: cannot be created (Not a directory)"),
    ]:
        code, errors = _invoke("export", folder, "--to", to)
        assert code == 2
        assert errors.startswith(f"hetero-pp: {words}"), errors
        assert len(errors.splitlines()) == 1


def test_an_uncompressed_run_goes_on_where_the_first_one_ended(run: Path, exported: Path, tmp_path: Path) -> None:
    """The folder gives shape and tokenizer. The loss before the first step is the last loss of the first run."""
    path = tmp_path / "run.yaml"
    path.write_text((run.parent.parent / "run.yaml").read_text().replace("model: {", "# {"))
    assert _invoke("launch", "--in-process", path, "--runs", tmp_path, "--from", exported) == (0, "")
    last = _losses(run)["a"]["validation_loss"][-1]
    assert _losses(tmp_path / "first")["a"]["initial_validation_loss"] == last
    resolved = ConfigFile(tmp_path / "first" / "config.yaml").config
    assert resolved.model.weights == str(exported)
    assert RunSpec(resolved, 256).shape == read_architecture(exported).shape
    assert resolved.data.tokenizer == str(exported)


def test_a_mixed_run_goes_on_from_another_format(corpus: Path, tmp_path: Path) -> None:
    """Heads of keys stay shared. A tied head is trained apart, and is exported as tied while it is equal."""
    theirs, path = tmp_path / "theirs", tmp_path / "run.yaml"
    _theirs(theirs, FORMATS["Llama 3.2"] | {"num_hidden_layers": 3})
    path.write_text(CONTINUED.replace("CORPUS", str(corpus)))
    arguments = ["launch", "--in-process", path, "--runs", tmp_path, "--from", theirs, "--set", "checkpoints.every=1"]
    printed = told(*arguments)
    expected = f"model.weights: {theirs} ties its head to its token embedding; from here on they train apart, "
    assert expected + "which makes 14,400 more parameters" in printed
    run = tmp_path / "second"
    losses = {name: found["validation_loss"] for name, found in _losses(run).items()}
    assert losses["dc"][-1] < _losses(run)["dc"]["initial_validation_loss"]
    model = ConfigFile(run / "config.yaml").config.model
    assert (model.kv_heads, model.head_width) == (3, None)
    assert model.rope_scaling == read_architecture(theirs).shape.rope_scaling
    assert _invoke("launch", "--in-process", run / "config.yaml", "--runs", tmp_path, "--resume") == (0, "")

    for number, is_tied in ((0, True), (2, False)):
        to = tmp_path / f"after {number}"
        assert _invoke("export", run, "--to", to, "--round", number, "--dtype", "fp32") == (0, "")
        assert read_architecture(to).is_tied == is_tied
        assert ("lm_head.weight" in load_file(to / "model.safetensors")) == (not is_tied)
        assert _positions(to) == _positions(theirs) == 2048
    first, returned = (load_file(folder / "model.safetensors") for folder in (theirs, tmp_path / "after 0"))
    assert all(torch.equal(returned[key], tensor) for key, tensor in first.items())
    trained = open_checkpoint(run / "log" / "checkpoint-000002.safetensors").checkpoint().parameters
    ours = Transformer(read_architecture(tmp_path / "after 2").shape)
    ours.load_state_dict(trained)
    tokens = torch.randint(SHAPE.vocabulary, (2, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found = _transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "after 2")(tokens).logits
    torch.testing.assert_close(found, _logits(ours, tokens), rtol=0, atol=1e-5)
    (theirs / "config.json").unlink()
    assert _invoke("export", run, "--to", tmp_path / "without", "--dtype", "bf16") == (0, "")
    assert _positions(tmp_path / "without") == 8 * 64  # factor times original length


def _positions(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["max_position_embeddings"])


MISMATCHES = {
    "width": ("model: {width: 64}", "model.width: found 64, expected 32 as in"),
    "rotation": ("model: {rope_theta: 10000.0}", "model.rope_theta: found 10000.0, expected 900.0 as in"),
    "heads": ("model: {kv_heads: 1}", "model.kv_heads: found 1, expected null as in"),
    "folder": ("model: {weights: /nowhere}", "model.weights: found no readable /nowhere/config.json"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_weights_of_another_shape_are_refused(case: str, exported: Path, corpus: Path, tmp_path: Path) -> None:
    model, words = MISMATCHES[case]
    path = tmp_path / "run.yaml"
    path.write_text(model + "\n" + CONTINUED.replace("CORPUS", str(corpus)))
    extra = [] if "weights" in model else ["--from", exported]
    code, errors = _invoke("launch", path, "--runs", tmp_path / "runs", *extra)
    assert code == 2
    assert errors.startswith(f"hetero-pp: {path}:1: {words}"), errors
    assert len(errors.splitlines()) == 1


def test_weights_that_are_not_finite_are_refused(exported: Path, corpus: Path, tmp_path: Path) -> None:
    """Otherwise the members train to NaN, and honest contributions are refused."""
    weights = Path(shutil.copytree(exported, tmp_path / "weights"))
    tensors = load_file(weights / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][0, 1] = math.nan
    save_file(tensors, weights / "model.safetensors")
    path = tmp_path / "run.yaml"
    path.write_text(CONTINUED.replace("CORPUS", str(corpus)))
    code, errors = _invoke("launch", "--in-process", path, "--runs", tmp_path / "runs", "--from", weights)
    told = f"found 1 of {tensors[name].numel():,} values that are NaN or infinite in `{name}`, expected finite weights"
    assert (code, errors) == (2, f"hetero-pp: model.weights: {told}\n")


def test_what_is_given_counts_before_what_the_folder_has() -> None:
    # A configuration that names all reads no folder. A preset sets values that the resolved configuration of an
    # imported run then has, so no folder is needed.
    model = {"preset": "micro", "vocabulary": 300, "rope_theta": 900.0, "norm_epsilon": 1e-5, "weights": "/nowhere"}
    config = RunConfig.model_validate({"name": "t", "model": model, "outer": {"rounds": 1}})
    assert with_weights_described(config).model == config.model
    with pytest.raises(ConfigError, match=r"found no readable /nowhere/config\.json"):
        with_weights_described(RunConfig.model_validate({**config.model_dump(), "model": {"weights": "/nowhere"}}))

    # The shape of the folder fills what is not given. A preset's values count as given, together with the values
    # that override them.
    assert ModelSettings().filled_from(SHAPE).resolve(256) == SHAPE
    assert ModelSettings(heads=4).filled_from(SHAPE).resolve(256) == SHAPE.model_copy(update={"heads": 4})
    preset = ModelSettings(preset="micro", layers=7).filled_from(SHAPE).resolve(256)
    assert (preset.width, preset.layers, preset.vocabulary) == (64, 7, 300)


def test_the_umask_decides_who_may_read_what_is_written(corpus: Path, tmp_path: Path) -> None:
    """This concerns run checkpoints, states, pictures, exports and the encoded corpus. Secret files stay private."""
    text = CONTINUED.replace("CORPUS", str(corpus)).replace("rounds: 2", "rounds: 1")
    (tmp_path / "run.yaml").write_text(text)
    before = os.umask(0o007)
    try:
        assert _invoke("launch", "--in-process", tmp_path / "run.yaml", "--runs", tmp_path / "runs") == (0, "")
        assert _invoke("export", tmp_path / "runs" / "second", "--to", tmp_path / "runs" / "exported") == (0, "")
        options = ["--target-utilization", "0.1", "--write", tmp_path / "runs" / "plan.yaml"]
        assert _invoke("plan", tmp_path / "run.yaml", *options) == (0, "")
        write_whole(tmp_path / "key.pem", b"secret", is_secret=True)
    finally:
        os.umask(before)
    modes: dict[int, set[str]] = {}
    for path in (tmp_path / "runs").rglob("*"):
        if path.is_file() and ".locks" not in path.parts:
            modes.setdefault(stat.S_IMODE(path.stat().st_mode), set()).add(path.name)
    assert set(modes) == {0o660}, modes
    names = modes[0o660]
    assert {"model.safetensors", "outer-0-of-1.safetensors", "checkpoint-000001.safetensors", "loss.png"} <= names
    assert {"config.yaml", "plan.yaml", "tokenizer.json", "summary.json"} <= names
    assert stat.S_IMODE((tmp_path / "key.pem").stat().st_mode) == 0o600
