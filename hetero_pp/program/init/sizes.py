"""The shape of a model with about a given number of parameters."""

from __future__ import annotations

import math

from hetero_pp.model.transformer import ModelSettings, ModelShape

_HEAD_WIDTH, _LEAST_WIDTH, _MOST_WIDTH = 64, 64, 16384
_LAYER_WIDTH = 128
"""Width for each layer, from the papers' models: 1024 / 9, 1536 / 12, 2048 / 16."""
_FEWEST_LAYERS = 4
_FEED_FORWARD = 8 / 3


def model_of(size: str | float, vocabulary: int, layers: int) -> dict[str, str | int]:
    """Return the `model` section: a preset, or the shape whose number of parameters is nearest to `size`.

    `layers`: least number of layers.
    """
    if isinstance(size, str):
        return {"preset": size}
    widths = range(_LEAST_WIDTH, _MOST_WIDTH + 1, _HEAD_WIDTH)
    return min((_model(width, layers) for width in widths), key=lambda one: _distance(one, size, vocabulary))


def parameters_of(shape: ModelShape) -> int:
    """Return the number of parameters of a model."""
    layer = shape.attention_numbers + 3 * shape.width * shape.feed_forward + 2 * shape.width
    return shape.layers * layer + shape.width + 2 * shape.vocabulary * shape.width


def _distance(model: dict[str, str | int], size: float, vocabulary: int) -> float:
    shape = ModelSettings.model_validate(model).resolve(vocabulary)
    return abs(math.log(parameters_of(shape) / size))


def _model(width: int, layers: int) -> dict[str, str | int]:
    return {
        "width": width,
        "layers": max(_FEWEST_LAYERS, layers, round(width / _LAYER_WIDTH)),
        "heads": max(2, width // _HEAD_WIDTH),
        "feed_forward": _HEAD_WIDTH * round(_FEED_FORWARD * width / _HEAD_WIDTH),
    }
