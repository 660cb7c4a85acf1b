"""A tokenizer that the user names for a scale; its vocabulary replaces the scale's."""

from __future__ import annotations

from typing import Any

from hetero_pp.core.errors import ConfigError
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokenizers import load_tokenizer
from hetero_pp.research.experiments.definition import Scale


def with_tokenizer(scale: Scale, path: str | None) -> Scale:
    """Return the scale with the tokenizer at `path`, or else the one in its `data.tokenizer`.

    Returns the scale itself if neither is set. Raises ConfigError if the tokenizer cannot be read. Raises it, too, if
    the vocabulary differs from the scale's, for a scale of a paper or a tokenizer named in the scale's file.
    """
    data: dict[str, Any] = scale.base.get("data") or {}
    named = path or data.get("tokenizer")
    if not isinstance(named, str):
        return scale
    try:
        vocabulary = load_tokenizer(DataSettings.model_validate({"tokenizer": named})).vocabulary
    except ConfigError as error:
        raise _complaint(scale, path, error.message) from None
    if vocabulary != scale.vocabulary and (path is None or scale.bring is not None):
        whose = "its `vocabulary`" if scale.bring is None else f"{scale.bring.tokenizer} ({scale.bring.paper})"
        raise _complaint(
            scale, path, f"found {vocabulary:,} tokens in `{named}`, expected {scale.vocabulary:,}: {whose}"
        )
    base = {**scale.base, "data": {**data, "tokenizer": named}}
    return scale.model_copy(update={"base": base, "vocabulary": vocabulary})


def _complaint(scale: Scale, path: str | None, message: str) -> ConfigError:
    """Return an error that names the option, or the line of the scale's file, that named the tokenizer."""
    if path is not None:
        return ConfigError((), f"--tokenizer {path}: {message}")
    return scale.located(ConfigError(("base", "data", "tokenizer"), message))
