"""Conversion of our parameters to the names and the layout of `transformers`' LLaMA, and back, bitwise exact.

Both rotate pairs of a head's dimensions. Our pairs are neighbours (2 j, 2 j + 1); theirs are half a head apart (j, j +
E / 2). So the rows of wq and wk are permuted within each head. Attention is unchanged, as q and k change alike.

Shapes: N heads, E head width, D width.
"""

from __future__ import annotations

from torch import Tensor

from hetero_pp.model.transformer import EMBEDDING as OUR_EMBEDDING

OUR_HEAD = "lm_head.weight"
_OF_THE_MODEL = {
    OUR_EMBEDDING: "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    OUR_HEAD: "lm_head.weight",
}
_OF_A_LAYER = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
EMBEDDING, HEAD = _OF_THE_MODEL[OUR_EMBEDDING], _OF_THE_MODEL[OUR_HEAD]


def their_name(name: str) -> str:
    """Return their name of a parameter: `layers.3.attention.wq.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in _OF_THE_MODEL:
        return _OF_THE_MODEL[name]
    layers, index, rest = name.split(".", 2)
    return f"model.{layers}.{index}.{_OF_A_LAYER[rest]}"


def is_rotated(name: str) -> bool:
    """Return whether the parameter of this name (ours) makes queries or keys."""
    return name.endswith(("attention.wq.weight", "attention.wk.weight"))


def halves_of_pairs(weight: Tensor, head_width: int) -> Tensor:
    """Permute rows [N E, D] with neighbouring pairs to rows whose pairs are half a head apart."""
    return weight.unflatten(0, (-1, head_width // 2, 2)).transpose(1, 2).reshape(weight.shape)


def pairs_of_halves(weight: Tensor, head_width: int) -> Tensor:
    """Invert `halves_of_pairs`."""
    return weight.unflatten(0, (-1, 2, head_width // 2)).transpose(1, 2).reshape(weight.shape)
