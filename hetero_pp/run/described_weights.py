"""Model shape and tokenizer of a configuration, read from the folder of a LLaMA checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetero_pp.hugging_face.config_json import read_architecture
from hetero_pp.model.transformer import PRESETS, ModelShape
from hetero_pp.run.config import RunConfig


def with_weights_described(config: RunConfig) -> RunConfig:
    """Return the configuration with the model's shape and tokenizer from the folder of `model.weights`, if set.

    A configuration that gives all of them, such as the one in a run's folder, is not changed. Nothing is read then,
    because members may run where the checkpoint is not. Raises ConfigError if the folder has no LLaMA.
    """
    if config.model.weights is None:
        return config
    folder, model = Path(config.model.weights).expanduser(), config.model
    given = {name for name in model.model_fields_set if getattr(model, name) is not None}
    given |= set(PRESETS[model.preset]) if "preset" in given else set()
    changes: dict[str, Any] = {}
    needed = {name for name, field in ModelShape.model_fields.items() if field.default is not None}
    if needed - given:
        changes["model"] = model.filled_from(read_architecture(folder).shape)
    if "tokenizer" not in config.data.model_fields_set and (folder / "tokenizer.json").is_file():
        changes["data"] = config.data.model_copy(update={"tokenizer": str(folder)})
    return config.model_copy(update=changes)
