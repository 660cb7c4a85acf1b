"""What a part of the model costs on a machine: seconds of a micro-batch, and bytes of memory.

Shapes: B sequences of a micro-batch, L positions, D width, F feed-forward width, V vocabulary. A matrix product of a
parameter with T tokens is 2 T operations a parameter; attention adds 2 L D a token and layer to each of QK and AV,
halved as it is causal. Backward is twice forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero_pp.model import ModelShape
from hetero_pp.run.hardware import Hardware

BYTES_PER_PARAMETER = {"weights": 4, "gradients": 4, "optimizer": 8, "error feedback": 4, "round start": 4}
"""fp32 throughout: weights, gradients, two moments of AdamW, error feedback, theta at the start of the round."""

UPDATE_BYTES = 28
"""Read and written a parameter by AdamW: weight, gradient, two moments read; weight, two moments written."""

OUTER_BYTES = 40
"""Read and written a parameter by the outer round: difference, error feedback, selection, and applying the mean."""


@dataclass(frozen=True)
class Part:
    """What one member owns of the model."""

    layers: int
    embeds: bool
    predicts: bool
    parameters: int


@dataclass(frozen=True)
class Cost:
    """Of one member. Seconds, of one micro-batch where it says so."""

    forward: float
    """Of one micro-batch, with what turns messages into tensors and back."""
    backward: float
    update: float
    """One optimizer step."""
    contribute: float
    """From parameters to what is sent."""
    apply: float
    """From what others sent to parameters."""


def forward_flops(shape: ModelShape, part: Part, sequences: int, length: int) -> float:
    """Operations of a forward pass of [B, L] tokens through a part."""
    per_layer = 4 * shape.width**2 + 3 * shape.width * shape.feed_forward
    head = shape.width * shape.vocabulary if part.predicts else 0
    products = 2.0 * (part.layers * per_layer + head)
    attention = part.layers * 2.0 * length * shape.width
    return (products + attention) * sequences * length


def cost_on(shape: ModelShape, part: Part, hardware: Hardware, accelerators: int, sequences: int, length: int) -> Cost:
    """What a part costs on some accelerators that share it evenly."""
    forward = forward_flops(shape, part, sequences, length) / (hardware.achieved_flops * accelerators)
    per_byte = part.parameters / (hardware.memory_bytes_per_second * accelerators)
    outer = OUTER_BYTES / 2 * per_byte
    return Cost(forward, 2 * forward, UPDATE_BYTES * per_byte, outer, outer)


def memory_of(
    shape: ModelShape, part: Part, sequences: int, length: int, in_flight: int, bytes_per_value: int = 2
) -> dict[str, float]:
    """Bytes that a member holds, by what for, with so many micro-batches in flight and nothing recomputed.

    A layer keeps for backward: inputs of both norms and both blocks (4 D), q, k, v and the attention's output (4 D),
    three of the feed-forward's width (3 F); the head keeps the logits in fp32.
    """
    per_token = part.layers * (8 * shape.width + 3 * shape.feed_forward) * bytes_per_value
    per_token += 4 * shape.vocabulary if part.predicts else 0
    held = {name: float(part.parameters * size) for name, size in BYTES_PER_PARAMETER.items()}
    return held | {"activations": float(per_token * sequences * length * in_flight)}
