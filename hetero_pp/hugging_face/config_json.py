"""The config.json of a LLaMA checkpoint: the model's shape, and checks for features that this model does not have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hetero_pp.core.bounded import read_bounded_json
from hetero_pp.core.errors import ConfigError
from hetero_pp.model.transformer import ModelShape, RopeScaling

WEIGHTS_KEY = ("model", "weights")  # setting to which every error about a checkpoint refers

_NAMES = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "feed_forward": "intermediate_size",
    "vocabulary": "vocab_size",
    "norm_epsilon": "rms_norm_eps",
}


_SCALING_NAMES = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}


@dataclass(frozen=True)
class Architecture:
    """Content of a config.json that this model needs."""

    shape: ModelShape
    is_tied: bool  # whether the head is the token embedding


def to_json(
    shape: ModelShape,
    sequence_length: int,
    separator: int,
    dtype: str,
    is_tied: bool = False,
    earlier: int | None = None,
) -> dict[str, Any]:
    """Return the config.json of a model of this shape, trained on texts with `separator` before and after them.

    `earlier`: positions of the checkpoint from which the training started. If they are not known, scaled frequencies
    reach `factor` times their original length.
    """
    scaling, longest = None, max(sequence_length, earlier or 0)
    if shape.rope_scaling is not None:
        own = shape.rope_scaling
        scaling = {"rope_type": "llama3", **{theirs: getattr(own, ours) for ours, theirs in _SCALING_NAMES.items()}}
        if earlier is None:
            longest = max(longest, int(own.factor * own.original_length))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(shape, ours) for ours, theirs in _NAMES.items()},
        "num_key_value_heads": shape.groups,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": is_tied,
        "max_position_embeddings": longest,
        "bos_token_id": separator,
        "eos_token_id": separator,
        "torch_dtype": dtype,
    }


def read_architecture(folder: Path) -> Architecture:
    """Read the config.json in a folder. Raises ConfigError if it is missing, or not of a model like ours."""
    path = folder / "config.json"
    values = read_json(path)
    # The first check, because other models name the keys of their shapes otherwise.
    _require_values(path, values, {"model_type": "llama"})
    rope, scaling = _rope(values, path)
    shape = {ours: values.get(theirs) for ours, theirs in _NAMES.items()}
    shape["norm_epsilon"] = values.get("rms_norm_eps", 1e-6)  # transformers' own default, which older files leave out
    try:
        found = ModelShape.model_validate({**shape, "rope_theta": rope, "rope_scaling": scaling})
    except ValidationError as error:
        wrong = str(error.errors()[0]["loc"][0])
        raise _refused(path, _NAMES.get(wrong, wrong), shape.get(wrong, rope), "a number") from None
    # Features that this model cannot have are refused.
    if (fault := found.fault()) is not None:
        name, value, allowed = fault
        raise _refused(path, _NAMES.get(name, name), value, allowed)
    features = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    _require_values(path, {**features, **{key: value for key, value in values.items() if value is not None}}, features)
    return Architecture(found.reduced(), bool(values.get("tie_word_embeddings", False)))


def positions_of(folder: Path) -> int | None:
    """Return the positions (`max_position_embeddings`) of the checkpoint in a folder; None if they cannot be read."""
    try:
        found = read_json(folder / "config.json").get("max_position_embeddings")
    except ConfigError:
        return None
    return found if isinstance(found, int) and found > 0 else None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint. Raises ConfigError if it cannot be read."""
    try:
        values = read_bounded_json(path)
    except OSError as error:
        raise ConfigError(
            WEIGHTS_KEY, f"found no readable {path} ({error.strerror}), expected a folder that transformers can load"
        ) from None
    except ValueError as error:
        raise ConfigError(WEIGHTS_KEY, f"found {path} that is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(WEIGHTS_KEY, f"found a {type(values).__name__} in {path}, expected a JSON object")
    return values


def _rope(values: dict[str, Any], path: Path) -> tuple[Any, RopeScaling | None]:
    """Return base and scaling of the rotary frequencies, from the keys of old or new transformers."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default")) if isinstance(parameters, dict) else "?"
    if kind not in ("default", "llama3"):
        raise _refused(path, "rope scaling", kind, "none or `llama3`")
    theta = parameters.get("rope_theta", values.get("rope_theta", 10000.0))
    if kind == "default":
        return theta, None
    scaling = {ours: parameters.get(theirs) for ours, theirs in _SCALING_NAMES.items()}
    try:
        return theta, RopeScaling.model_validate(scaling)
    except ValidationError as error:
        wrong = str(error.errors()[0]["loc"][0])
        raise _refused(path, f"rope scaling: {_SCALING_NAMES[wrong]}", scaling[wrong], "a positive number") from None


def _require_values(path: Path, values: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key, expected in wanted.items():
        if values.get(key) != expected:
            raise _refused(path, key, values.get(key), f"`{expected}`")


def _refused(path: Path, key: str, found: object, expected: object) -> ConfigError:
    shown = "nothing" if found is None else f"`{found}`"
    return ConfigError(WEIGHTS_KEY, f"{path}: {key}: found {shown}, expected {expected}")
