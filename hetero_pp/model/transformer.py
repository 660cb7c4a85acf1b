"""Model: a LLaMA decoder in plain PyTorch, with torchtitan's module layout and parameter names.

Shapes: B sequences, L positions, D width, N heads, G heads of keys and values, E head width, F feed-forward width, V
vocabulary.

Attributes and names (`tok_embeddings`, `layers.3.attention.wq.weight`, `norm`, `lm_head`) are those that torchtitan's
parallelisms expect. So the same class serves a whole replica and, with layers left out, one stage. Parts that a stage
does not own are None; its layers keep their global index in their names.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.seeds import seed_of
from hetero_pp.core.settings import NotPartOf, Settings
from hetero_pp.model.arithmetic import GradientOfLogits, Linear, RMSNorm, gradient_of_logits, loss_of_hidden
from hetero_pp.model.part_settings import StageSpec

PRESETS: dict[str, dict[str, int]] = {
    "micro": {"width": 64, "layers": 4, "heads": 2, "feed_forward": 192},
    "178m": {"width": 1024, "layers": 9, "heads": 8, "feed_forward": 2688},
    "512m": {"width": 1536, "layers": 12, "heads": 12, "feed_forward": 5440},
    "1b": {"width": 2048, "layers": 16, "heads": 16, "feed_forward": 8192},
}
"""The paper's sizes (Het-PP Table 9, read so that the parameter counts match their names) and a CPU-sized one."""


EMBEDDING = "tok_embeddings.weight"

LAYERS = "layers."  # prefix of the names of a layer's parameters
Shapes = dict[str, tuple[int, ...]]  # shapes of parameters, by name
AfterLayer = Callable[[int, Tensor], Tensor]  # (layer, hidden states [B, L, D] after it) -> hidden states that go on


class RopeScaling(Settings):
    """Llama 3's scaling of rotary frequencies, for texts longer than those of the first training.

    The rule depends on the number of turns of a frequency in `original_length` positions. Numbers between the two
    limits are interpolated. Source: Meta's llama-models, `apply_scaling`.
    """

    factor: float = Field(ge=1, description="divides slow frequencies")
    low_frequency_factor: float = Field(gt=0, description="frequencies with fewer turns are slow")
    high_frequency_factor: float = Field(gt=0, description="frequencies with more turns stay")
    original_length: int = Field(ge=1, description="positions of the first training")

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies, in radians per position."""
        turns = frequencies * (self.original_length / (2 * math.pi))
        kept = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        kept = kept.clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


class ModelSettings(Settings):
    """Shape of the model: a preset, with single values overridden."""

    preset: Literal["micro", "178m", "512m", "1b"] = "micro"
    width: int | None = Field(None, ge=1, description="d_model; by default the preset's")
    layers: int | None = Field(None, ge=1)
    heads: int | None = Field(None, ge=1)
    kv_heads: int | None = Field(
        None,
        ge=1,
        description="heads of keys and values, shared by `heads / kv_heads` queries each; by default `heads`",
    )
    head_width: int | None = Field(None, ge=2, description="by default `width / heads`")
    feed_forward: int | None = Field(None, ge=1)
    vocabulary: int | None = Field(None, ge=2, description="vocabulary size; by default the tokenizer's")
    rope_theta: float = Field(10000.0, gt=0)
    rope_scaling: RopeScaling | None = Field(
        None, description="Llama 3's scaling of rotary frequencies; by default none"
    )
    norm_epsilon: float = Field(1e-5, gt=0)
    weights: Annotated[str | None, NotPartOf.RUN] = Field(
        None,
        description="folder of a LLaMA checkpoint (config.json and .safetensors) to start from. Its shape, and its "
        "tokenizer if it has one, replace values that are not set. By default, weights are drawn at random",
    )

    def filled_from(self, shape: ModelShape) -> ModelSettings:
        """Return the settings with missing values taken from `shape`: those that neither a key nor the preset gives."""
        given = set(PRESETS[self.preset]) if "preset" in self.model_fields_set else set()
        given |= {name for name in self.model_fields_set if getattr(self, name) is not None}
        missing = {name: value for name, value in shape if name not in given}
        return self.model_copy(update=missing)

    def with_absolute_paths(self) -> ModelSettings:
        """Return the settings with an absolute path, valid from any folder."""
        if self.weights is None:
            return self
        return self.model_copy(update={"weights": str(Path(self.weights).expanduser().absolute())})

    def resolve(self, vocabulary: int | None) -> ModelShape:
        """Return the concrete shape. Raises ConfigError if it cannot be built."""
        values = PRESETS[self.preset] | {
            name: value
            for name in ("width", "layers", "heads", "kv_heads", "head_width", "feed_forward")
            if (value := getattr(self, name)) is not None
        }
        size = self.vocabulary or vocabulary
        if size is None:
            raise ConfigError(
                ("model", "vocabulary"), "found nothing, expected a number: there is no tokenizer to take it from"
            )
        if vocabulary is not None and size < vocabulary:
            raise ConfigError(
                ("model", "vocabulary"), f"found {size}, expected at least the tokenizer's {vocabulary} tokens"
            )
        shape = ModelShape(
            **values,
            vocabulary=size,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
            norm_epsilon=self.norm_epsilon,
        )
        if (fault := shape.fault()) is not None:
            name, found, expected = fault
            raise ConfigError(("model", name), f"found {found}, expected {expected}")
        return shape.reduced()


class ModelShape(Settings):
    """Concrete shape of the model. Equal models have equal shapes once they are `reduced`."""

    width: int
    layers: int
    heads: int
    feed_forward: int
    vocabulary: int
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    kv_heads: int | None = None  # None: as many as `heads`
    head_width: int | None = None  # None: `width / heads`
    rope_scaling: RopeScaling | None = None

    @property
    def groups(self) -> int:
        """G, the number of heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        """E, the width of a head."""
        return self.width // self.heads if self.head_width is None else self.head_width

    @property
    def attention_numbers(self) -> int:
        """Number of parameters in the attention of one layer."""
        return 2 * self.width * self.head_size * (self.heads + self.groups)

    def reduced(self) -> ModelShape:
        """Return the same shape without values that equal their defaults."""
        usual = {"kv_heads": self.heads, "head_width": self.width // self.heads}
        return self.model_copy(update={name: None for name, value in usual.items() if getattr(self, name) == value})

    def fault(self) -> tuple[str, object, str] | None:
        """Return a field that prevents this shape, its value, and what is expected; None if there is none."""
        if self.heads < 1 or (self.head_width is None and self.width % (2 * self.heads)):
            return "heads", self.heads, f"a divisor of half the width {self.width}"
        if self.groups < 1 or self.heads % self.groups:
            return "kv_heads", self.groups, f"a divisor of the {self.heads} heads"
        if self.head_size < 2 or self.head_size % 2:
            return "head_width", self.head_size, "an even number, because dimensions are rotated in pairs"
        scaling = self.rope_scaling
        if scaling is not None and scaling.high_frequency_factor <= scaling.low_frequency_factor:
            found, least = scaling.high_frequency_factor, scaling.low_frequency_factor
            return "rope_scaling", found, f"a high frequency factor above the low one, {least}"
        return None


class Attention(nn.Module):
    """Causal self-attention with rotary positions. Several queries may share a head of keys and values."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_width = shape.head_size
        queries, keys = shape.heads * shape.head_size, shape.groups * shape.head_size
        self.wq = Linear(shape.width, queries)
        self.wk = Linear(shape.width, keys)
        self.wv = Linear(shape.width, keys)
        self.wo = Linear(queries, shape.width)

    def forward(self, x_BLD: Tensor, rope_LE: Tensor) -> Tensor:
        batch, length, _ = x_BLD.shape
        # the number of heads follows from the output: under tensor parallelism, those of this rank
        q, k, v = (w(x_BLD).view(batch, length, -1, self.head_width) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, rope_LE), rotate(k, rope_LE)
        k, v = per_query(k, q), per_query(v, q)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.w1 = Linear(shape.width, shape.feed_forward)
        self.w2 = Linear(shape.feed_forward, shape.width)
        self.w3 = Linear(shape.width, shape.feed_forward)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BLD)) * self.w3(x_BLD))


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.feed_forward = FeedForward(shape)
        self.attention_norm = RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.ffn_norm = RMSNorm(shape.width, eps=shape.norm_epsilon)

    def forward(self, x_BLD: Tensor, rope_LE: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rope_LE)
        return x_BLD + self.feed_forward(self.ffn_norm(x_BLD))


class Transformer(nn.Module):
    """The whole decoder, or the part of it that a stage owns."""

    def __init__(
        self,
        shape: ModelShape,
        layers: Iterable[int] | None = None,
        embeds: bool = True,
        predicts: bool = True,
        compute_dtype: torch.dtype | None = None,
        recomputes: bool = False,
    ) -> None:
        """`compute_dtype`: dtype of hidden states and products; by default that of the parameters.

        `recomputes`: whether the forward keeps only the inputs of layers, and the backward computes layers again.
        """
        super().__init__()
        self.shape = shape
        self.compute_dtype = compute_dtype
        self.recomputes = recomputes
        self.enable_weight_tying = False
        owned = range(shape.layers) if layers is None else layers
        # nn.Embedding initializes its weights, and on the meta device that needs a second of imports of torch.
        self.tok_embeddings = (
            nn.Embedding.from_pretrained(torch.empty(shape.vocabulary, shape.width), freeze=False) if embeds else None
        )
        self.layers = nn.ModuleDict({str(index): TransformerBlock(shape) for index in owned})
        self.norm = RMSNorm(shape.width, eps=shape.norm_epsilon) if predicts else None
        self.lm_head = Linear(shape.width, shape.vocabulary) if predicts else None
        self.gradient_of_logits: GradientOfLogits = gradient_of_logits
        self.devices: Sequence[torch.device] = ()
        """Devices over which the layers lie (`place`). Inputs come to the first, and outputs and loss return there."""
        self._rope_LE: dict[torch.device, Tensor] = {}

    def place(self, devices: Sequence[torch.device]) -> None:
        """Give parameters on the meta device memory, without values: on the devices in order, about as many on each."""
        parts = [part for part in (self.tok_embeddings, *self.layers.values(), self.norm, self.lm_head) if part]
        sizes = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
        for part, size, until in zip(parts, sizes, accumulate(sizes), strict=True):
            materialise(part, devices[int(len(devices) * (until - size / 2) / sum(sizes))])
        self.devices = devices if len(devices) > 1 else ()

    def _towards(self, weight: Tensor, *tensors: Tensor) -> Sequence[Tensor]:
        """Return tensors on the device of a weight, if the layers lie on several devices."""
        return [tensor.to(weight.device) for tensor in tensors] if self.devices else tensors

    def forward(self, inputs: Tensor, after_layer: AfterLayer | None = None) -> Tensor:
        """Map tokens [B, L], or hidden states [B, L, D] without an embedding, to logits [B, L, V] or hidden states.

        `after_layer` may change the hidden states after each layer: a boundary inside a whole replica.
        """
        x_BLD = self.hidden(inputs, after_layer)
        if self.lm_head is not None:
            (x_BLD,) = self._towards(self.lm_head.weight, x_BLD)
            x_BLD = self.lm_head(x_BLD)
        return x_BLD.to(self.devices[0]) if self.devices else x_BLD

    def loss(self, inputs: Tensor, targets_BL: Tensor, after_layer: AfterLayer | None = None) -> Tensor:
        """Return the mean cross entropy in nats of a part that predicts. Arguments are those of `forward`."""
        assert self.lm_head is not None
        x_BLD, targets_BL = self._towards(self.lm_head.weight, self.hidden(inputs, after_layer), targets_BL)
        loss = loss_of_hidden(x_BLD, self.lm_head.weight, targets_BL, self.gradient_of_logits)
        return loss.to(self.devices[0]) if self.devices else loss

    def hidden(self, inputs: Tensor, after_layer: AfterLayer | None = None) -> Tensor:
        """Return the hidden states [B, L, D] before the logits, or of a stage. Arguments are those of `forward`."""
        x_BLD = inputs if self.tok_embeddings is None else self.tok_embeddings(inputs)
        if self.compute_dtype is not None:
            x_BLD = x_BLD.to(self.compute_dtype)
        for index, block in self.layers.items():
            (x_BLD,) = self._towards(next(block.parameters()), x_BLD)
            rope_LE = self.rope(inputs.shape[1], x_BLD.device)
            if self.recomputes and torch.is_grad_enabled():
                x_BLD = checkpoint(block, x_BLD, rope_LE, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BLD = block(x_BLD, rope_LE)
            if after_layer is not None:
                x_BLD = after_layer(int(index), x_BLD)
        return x_BLD if self.norm is None else self.norm(*self._towards(self.norm.weight, x_BLD))

    def rope(self, length: int, device: torch.device) -> Tensor:
        """Return the rotations [L, E / 2, 2], cached between calls."""
        known, shape = self._rope_LE.get(device), self.shape
        if known is None or len(known) < length:
            known = rope_table(length, shape.head_size, shape.rope_theta, device, shape.rope_scaling)
            self._rope_LE[device] = known
        return known[:length]


def build_part(
    shape: ModelShape, spec: StageSpec, compute_dtype: torch.dtype | None = None, recomputes: bool = False
) -> Transformer:
    """Build the module of a stage. Parameters keep the whole model's names; values are not set."""
    return Transformer(shape, spec.layers, spec.is_first, spec.is_last, compute_dtype, recomputes)


def build_filled(
    shape: ModelShape,
    values: Mapping[str, Tensor],
    stage: StageSpec | None = None,
    device: torch.device | None = None,
    compute_dtype: torch.dtype | None = None,
    recomputes: bool = False,
    devices: Sequence[torch.device] = (),
) -> Transformer:
    """Build the whole model, or a stage's part, with the parameter values given by name; by default on the CPU.

    With several `devices` its layers lie on them in order (Transformer.place).
    """
    stage = stage or StageSpec(0, 1, range(shape.layers))
    with torch.device("meta"):
        module = build_part(shape, stage, compute_dtype, recomputes)
    module.place(devices or [device or torch.device("cpu")])
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values[name])
    return module


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give the parameters of a module on the meta device memory, without values.

    `Module.to_empty` would import SymPy, in half a second of each process.
    """
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            room = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            part.register_parameter(name, nn.Parameter(room))


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the module's parameters by name, in a fixed order."""
    return dict(sorted(module.named_parameters()))


def rope_table(
    length: int, head_width: int, theta: float, device: torch.device | None = None, scaling: RopeScaling | None = None
) -> Tensor:
    """Return cosine and sine of position theta^(-2 j / E), [L, E / 2, 2] (RoFormer, equation 15)."""
    steps = torch.arange(0, head_width, 2, dtype=torch.float64, device="cpu")  # some devices lack fp64
    frequencies = theta ** (-steps / head_width)
    frequencies = frequencies if scaling is None else scaling.scaled(frequencies)
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), frequencies)
    return torch.stack([angles.cos(), angles.sin()], dim=-1).float().to(device)


def rotate(x_BLNE: Tensor, rope_LE: Tensor) -> Tensor:
    """Rotate neighbouring pairs of a head's dimensions by the position's angles, [L, E / 2, 2].

    Uses real numbers, with the same bits as complex ones, because a compiler can fuse them.
    """
    pairs, angles = x_BLNE.float().unflatten(-1, (-1, 2)), rope_LE[:, None]
    even, odd, cosine, sine = pairs[..., 0], pairs[..., 1], angles[..., 0], angles[..., 1]
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1).flatten(-2).type_as(x_BLNE)


def per_query(x_BLGE: Tensor, like_BLNE: Tensor) -> Tensor:
    """Repeat each head of keys or values for the N / G neighbouring queries that share it, [B, L, N, E].

    The attention of torch can do this itself, but not on every device.
    """
    repeats = like_BLNE.shape[2] // x_BLGE.shape[2]
    if repeats == 1:
        return x_BLGE
    return x_BLGE.unsqueeze(3).expand(-1, -1, -1, repeats, -1).flatten(2, 3)


def block_of(parameter: str) -> str:
    """Return the layer block of a parameter, the unit in which contributions are grouped and fetched."""
    parts = parameter.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def shapes_by_block(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Shapes]:
    """Group parameter shapes by layer block, in block order."""
    blocks: dict[str, Shapes] = defaultdict(dict)
    for name, shape in sorted(shapes.items()):
        blocks[block_of(name)][name] = shape
    return dict(sorted(blocks.items()))


def initialise(model: Transformer, seed: int) -> None:
    """Draw every parameter from (seed, its name), so that a stage's weights equal the whole model's.

    Standard deviations: embedding 0.05, matrices 0.8 / sqrt(d), output projections 0.04 / sqrt(2 layers). They were
    found to train well at small width; at the paper's widths they are close to the usual 0.02.
    """
    with ThreadPoolExecutor() as pool:  # torch draws numbers on one thread
        deque(pool.map(lambda named: _draw(named[0], named[1], model.shape, seed), model.named_parameters()), maxlen=0)


@torch.no_grad()
def _draw(name: str, parameter: Tensor, shape: ModelShape, seed: int) -> None:
    if parameter.ndim == 1:
        parameter.fill_(1.0)
        return
    if name.startswith("tok_embeddings"):
        deviation = 0.05
    elif name.endswith(("attention.wo.weight", "feed_forward.w2.weight")):
        deviation = 0.04 / math.sqrt(2 * shape.layers)
    else:
        deviation = 0.8 / math.sqrt(shape.width)
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    is_plain = parameter.device.type == "cpu" and parameter.dtype == torch.float32
    values = parameter if is_plain else torch.empty(parameter.shape)
    values.normal_(generator=generator).mul_(deviation)
    if not is_plain:
        parameter.copy_(values)


# ---- compilation: needs a C++ compiler for the CPU, Triton for a GPU ----


@lru_cache(maxsize=4)
def can_compile(device: torch.device) -> bool:
    """Return whether torch.compile works here, by compiling one operation (takes seconds; torch caches it on disk)."""
    try:
        torch.compile(torch.sin, dynamic=False)(torch.ones(2, device=device))
    except RuntimeError:  # the base of all compiler errors
        return False
    return True


def require_compiler(device: torch.device) -> None:
    """Raise ConfigError unless torch.compile works here."""
    if not can_compile(device):
        needed = "Triton" if device.type == "cuda" else "a C++ compiler"
        raise ConfigError(("compile",), f"found `true` without {needed}, which torch.compile needs; expected `false`")


def compile_layers(models: Iterable[Transformer]) -> None:
    """Compile the layers of models of one shape, and the loss between the logits and their gradient.

    One compilation serves all layers. Compiling the whole model would take longer for no further gain. Boundaries lie
    between layers and are not compiled.
    """
    for model in models:
        model.gradient_of_logits = _compiled_gradient()
        for block in model.layers.values():
            block.compile(dynamic=False)


@lru_cache(maxsize=1)
def _compiled_gradient() -> GradientOfLogits:
    compiled: GradientOfLogits = torch.compile(gradient_of_logits, dynamic=False)
    return compiled
