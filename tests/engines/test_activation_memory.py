"""Predicted memory of activations, compared with what autograd holds under torchtitan's checkpointing."""

from __future__ import annotations

import pytest
import torch
from live_bytes import LiveBytes

from hetero_pp.config.topology import Checkpointing
from hetero_pp.model.arithmetic import next_token_loss
from hetero_pp.model.transformer import ModelShape, Transformer
from hetero_pp.simulator.costs import StagePart
from hetero_pp.simulator.memory import Trains, activation_bytes

ROWS, LENGTH, LAYERS = 2, 128, 4


def _most_bytes(shape: ModelShape, checkpointing: Checkpointing) -> int:
    """Return the maximum for forward and backward of one micro-batch as in the engine. Gradients exist already."""
    module = Transformer(shape)
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    if checkpointing != "none":
        from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # takes seconds

        policy = FullAC if checkpointing == "full" else SelectiveAC
        policy(policy.Config()).apply(module)
    tokens = torch.randint(0, shape.vocabulary, (ROWS, LENGTH + 1))
    others = [*parameters, *(one.grad for one in parameters if one.grad is not None)]
    with LiveBytes([*others, module.rope(LENGTH, torch.device("cpu"))]) as live:
        logits = module(tokens[:, :-1])
        next_token_loss(logits, tokens[:, 1:]).backward()
    return live.most


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("feed_forward", "vocabulary", "kv_heads"), [(192, 64, None), (512, 64, None), (192, 4096, None), (192, 64, 2)]
)
def test_activations_take_what_is_predicted(
    checkpointing: Checkpointing, feed_forward: int, vocabulary: int, kv_heads: int | None
) -> None:
    """In fp32 on a CPU, in one case mostly for layers, and in another mostly for logits."""
    torch.manual_seed(0)
    shape = ModelShape(
        width=128, layers=LAYERS, heads=4, feed_forward=feed_forward, vocabulary=vocabulary, kv_heads=kv_heads
    )
    part = StagePart(LAYERS, predicts=True, parameters=0)
    predicted = activation_bytes(shape, part, Trains(ROWS, LENGTH, 1, 1, value_bytes=4, checkpointing=checkpointing))
    assert predicted == pytest.approx(_most_bytes(shape, checkpointing), rel=0.03)
