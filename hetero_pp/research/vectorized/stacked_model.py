"""Model of hetero_pp.model.transformer for n replicas at once: every parameter has a leading dimension of replicas.

Shapes: n replicas, B sequences, L positions, D width, F any other width, V vocabulary. Products are batched over
replicas; all other operations treat their sequences as one batch. The model is written out, because torch.vmap of it
would copy each matrix once a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_pp.model.transformer import EMBEDDING, AfterLayer, ModelShape, per_query, rotate

Block = Callable[[Tensor, Mapping[str, Tensor], Tensor, ModelShape], Tensor]
"""(hidden states [n, B, L, D], the layer's parameters by their names in it, rotations, shape) -> hidden states"""


def stacked_block(x_nBLD: Tensor, weights: Mapping[str, Tensor], rope_LE: Tensor, shape: ModelShape) -> Tensor:
    """Apply one layer of every replica, as hetero_pp.model.transformer.TransformerBlock does."""
    normed = _norm(x_nBLD, weights["attention_norm.weight"], shape)
    q, k, v = (
        _linear(normed, weights[f"attention.{name}.weight"]).flatten(0, 1).unflatten(-1, (-1, shape.head_size))
        for name in ("wq", "wk", "wv")
    )
    q, k = rotate(q, rope_LE), rotate(k, rope_LE)
    k, v = per_query(k, q), per_query(v, q)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    x_nBLD = x_nBLD + _linear(
        out.transpose(1, 2).flatten(2).unflatten(0, x_nBLD.shape[:2]), weights["attention.wo.weight"]
    )
    normed = _norm(x_nBLD, weights["ffn_norm.weight"], shape)
    w1, w2, w3 = (weights[f"feed_forward.{name}.weight"] for name in ("w1", "w2", "w3"))
    return x_nBLD + _linear(F.silu(_linear(normed, w1)) * _linear(normed, w3), w2)


def stacked_losses(
    parameters: Mapping[str, Tensor],
    tokens: Tensor,
    shape: ModelShape,
    rope_LE: Tensor,
    after_layer: AfterLayer,
    block: Block = stacked_block,
) -> Tensor:
    """Return the mean cross entropy [n] in nats of tokens [n, B, L + 1], for each replica.

    `after_layer` may change the hidden states [n B, L, D] after each layer. `block` may be compiled.
    """
    replicas, inputs = len(tokens), tokens[..., :-1]
    x_nBLD = _embed(inputs, parameters[EMBEDDING])
    for layer in range(shape.layers):
        prefix = f"layers.{layer}."
        weights = {name.removeprefix(prefix): p for name, p in parameters.items() if name.startswith(prefix)}
        x_nBLD = block(x_nBLD, weights, rope_LE, shape)
        x_nBLD = after_layer(layer, x_nBLD.flatten(0, 1)).unflatten(0, (replicas, -1))
    logits = _linear(_norm(x_nBLD, parameters["norm.weight"], shape), parameters["lm_head.weight"])
    losses = F.cross_entropy(logits.flatten(0, 2).float(), tokens[..., 1:].flatten(), reduction="none")
    return losses.view(replicas, -1).mean(1)


def _embed(tokens_nBL: Tensor, tables_nVD: Tensor) -> Tensor:
    firsts = torch.arange(len(tables_nVD), device=tokens_nBL.device) * tables_nVD.shape[1]
    return F.embedding(tokens_nBL + firsts[:, None, None], tables_nVD.flatten(0, 1))


def _linear(x_nBLD: Tensor, weight_nFD: Tensor) -> Tensor:
    return torch.bmm(x_nBLD.flatten(1, 2), weight_nFD.transpose(1, 2)).unflatten(1, x_nBLD.shape[1:3])


def _norm(x_nBLD: Tensor, weight_nD: Tensor, shape: ModelShape) -> Tensor:
    return F.rms_norm(x_nBLD, (shape.width,), eps=shape.norm_epsilon) * weight_nD[:, None, None, :]
