"""`engine: torchtitan`: FSDP2, tensor parallelism, checkpointing and compilation, composed from torchtitan's parts.

The model is the project's own; torchtitan's Trainer is not used. Parameters are DTensors in fp32.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import clip_grad_norm_

from hetero_pp.config.topology import TorchtitanSettings
from hetero_pp.model.arithmetic import next_token_loss
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.model.transformer import ModelShape, Transformer
from replica_groups.engines.engine import Moments, Parameters, RateSchedule, Shape
from replica_groups.engines.ranks import Ranks


class TitanEngine:
    """Implements Engine. `parameters` are the whole model's; every rank keeps its shards of them."""

    def __init__(
        self,
        shape: ModelShape,
        parameters: Parameters,
        inner: InnerSettings,
        total_steps: int | None,
        micro_batches: int,
        settings: TorchtitanSettings,
        ranks: Ranks,
        folder: Path | None = None,
    ) -> None:
        """`folder` holds copies for `undo` (Moments)."""
        self.inner, self.micro_batches, self.ranks = inner, micro_batches, ranks
        self.shapes: Mapping[str, Shape] = {name: tuple(tensor.shape) for name, tensor in sorted(parameters.items())}
        self.data_parallel = ranks.world // settings.tensor_parallel
        self.part = ranks.rank // settings.tensor_parallel  # index of this rank's part of a micro-batch
        with torch.device("meta"):
            self.module = Transformer(shape)
        # The ranks by their roles; the first and the last only if they have more than one. ParallelDims.build_mesh
        # would take the device that torchtitan found at its import, a GPU if the host has one.
        copies, parts = settings.data_parallel_replicate, settings.tensor_parallel
        sizes = {"dp_replicate": copies, "fsdp": ranks.world // (copies * parts), "tp": parts}
        used = {name: size for name, size in sizes.items() if name == "fsdp" or size > 1}
        mesh = init_device_mesh(ranks.device.type, tuple(used.values()), mesh_dim_names=tuple(used))
        _parallelise(self.module, mesh, settings, ranks.device)
        self.module.to_empty(device="cpu" if settings.cpu_offload else ranks.device)
        self._named = {  # without the prefixes of wrappers
            name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): parameter
            for name, parameter in self.module.named_parameters()
        }
        for name, tensor in parameters.items():
            self.write(name, tensor)
        # AdamW without decay on norms. Not fused on a CPU, where the fused one does not support DTensors.
        values = {"lr": inner.learning_rate, "betas": inner.betas, "eps": inner.epsilon}
        groups = [
            ParamGroupConfig(
                pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**values, "weight_decay": decay}
            )
            for pattern, decay in (("norm", 0.0), (".*", inner.weight_decay))
        ]
        implementation = "fused" if ranks.device.type == "cuda" else "foreach"
        config = OptimizersContainer.Config(param_groups=groups, implementation=implementation)
        self.optimizers = OptimizersContainer(config, model_parts=[self.module])
        self._schedule = RateSchedule(inner, total_steps)
        self.rates = LRSchedulersContainer(self.optimizers, lambda step: self._schedule.share(step))
        self._is_local: dict[str, bool] = {}
        self._moments = Moments(
            self.optimizers.optimizers, lambda one: one.to_local() if isinstance(one, DTensor) else one, folder
        )
        self._rates_before: dict = {}
        self.done = 0

    def follow(self, rates: LearningRates) -> None:
        self._schedule.follow(rates, self.rates.schedulers)

    def inner_step(self, tokens: Tensor, step: int) -> tuple[float, float, float]:
        micro_batches = tokens.chunk(self.micro_batches)
        loss = sum(self.backward(micro_batch, tokens[:, 1:].numel()) for micro_batch in micro_batches)
        rate = self.rates.schedulers[0].get_last_lr()[0]
        limit = self.inner.clip_norm
        norm = clip_grad_norm_(list(self.module.parameters()), float("inf") if limit is None else limit)
        self.optimizers.step()
        self.rates.step()
        self.optimizers.zero_grad()
        return loss, norm.item(), rate

    def remember(self, moments: bool) -> None:
        """Implement Engine.remember; every rank copies its shards."""
        self._rates_before = self.rates.state_dict()
        self._moments.remember(moments)

    def undo(self) -> None:
        self.optimizers.zero_grad()
        self.rates.load_state_dict(self._rates_before)
        self._moments.restore()

    def backward(self, micro_batch: Tensor, targets: int) -> float:
        """Accumulate the gradient of a micro-batch [b, L + 1]; return its summed loss divided by `targets`."""
        own = micro_batch.to(self.ranks.device).chunk(self.data_parallel)[self.part]
        logits = self.module(own[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), own[:, 1:].flatten(), reduction="sum") / targets
        loss.backward()
        self.done += 1
        return self._over_parts(loss.detach().double())

    @torch.no_grad()
    def evaluate(self, validation: Sequence[Tensor]) -> float:
        """Implement Engine.evaluate.

        Every rank takes part in every forward; a rank without rows runs one with weight 0.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for tokens in validation:
            own = tokens.to(self.ranks.device).tensor_split(self.data_parallel)[self.part]
            rows = own if len(own) else tokens[:1].to(self.ranks.device)
            total += next_token_loss(self.module(rows[:, :-1]), rows[:, 1:]) * len(own)
        return self._over_parts(total) / sum(len(tokens) for tokens in validation)

    def _over_parts(self, value: Tensor) -> float:
        """Return the sum over the parts of a batch; ranks that share a part hold the same value."""
        self.ranks.sum(value)
        return value.item() * self.data_parallel / self.ranks.world

    @torch.no_grad()
    def read(self, name: str, rows: range) -> Tensor:
        """Implement ParameterStore.read; no communication if every rank asks for its own shard."""
        parameter = self._named[name].detach()
        assert isinstance(parameter, DTensor)
        if name not in self._is_local:  # agreed on once, as gathering needs all ranks
            share = -(-len(parameter) // self.ranks.world)
            start, stop = (min(rank * share, len(parameter)) for rank in (self.ranks.rank, self.ranks.rank + 1))
            is_sharded = list(parameter.placements) == [Shard(0)]
            self._is_local[name] = all(self.ranks.gather(is_sharded and rows == range(start, stop)))
        if self._is_local[name]:
            return parameter.to_local()
        return parameter.full_tensor()[rows.start : rows.stop]

    def read_gradient(self, name: str) -> Tensor:
        gradient, self._named[name].grad = self._named[name].grad, None
        if gradient is None:
            return torch.zeros(self.shapes[name], device=self.ranks.device)
        assert isinstance(gradient, DTensor)
        return gradient.full_tensor()

    @torch.no_grad()
    def write(self, name: str, whole: Tensor) -> None:
        parameter = self._named[name]
        assert isinstance(parameter, DTensor)
        whole = whole.to(parameter.device_mesh.device_type)
        local = parameter.to_local()
        if list(parameter.placements) == [Shard(0)]:
            start = min(self.ranks.rank * -(-len(whole) // self.ranks.world), len(whole))
            local.copy_(whole[start : start + len(local)])
            return
        new = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        local.copy_(new.to_local())

    def finish_writing(self) -> None:
        """Free gathered parameters: the next forward would use those of an evaluation, which has no backward."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def save(self, folder: Path) -> None:
        """Implement Engine.save in torch's distributed format, which another number of ranks can read."""
        try:
            dcp.save(self._state(), checkpoint_id=folder)
        except CheckpointException as error:  # raised on every rank, even if the disk of only one failed
            cause, _ = next(iter(error.failures.values()))
            if not isinstance(cause, OSError | RuntimeError):
                raise
            number = cause.errno if isinstance(cause, OSError) and cause.errno else errno.EIO
            raise OSError(number, str(cause).split("\n", 1)[0], str(folder)) from error

    def load(self, folder: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        self.optimizers.load_state_dict(state["optimizer"])
        self.rates.load_state_dict(state["rates"])

    def _state(self) -> dict[str, dict]:
        return {
            "parameters": {name: parameter.detach() for name, parameter in self._named.items()},
            "optimizer": self.optimizers.state_dict(),
            "rates": self.rates.state_dict(),
        }


def _parallelise(module: Transformer, mesh: DeviceMesh, settings: TorchtitanSettings, device: torch.device) -> None:
    """Apply in torchtitan's order: tensor parallelism, checkpointing, compilation, FSDP2."""
    if settings.tensor_parallel > 1:
        _apply_tensor_parallelism(module, mesh["tp"])
    if settings.activation_checkpointing != "none":
        policy = FullAC if settings.activation_checkpointing == "full" else SelectiveAC
        policy(policy.Config()).apply(module)
    if settings.compile:
        unused = ParallelDims.from_config(ParallelismConfig(), mesh.size())  # for asynchronous tensor parallelism
        apply_compile(module, compile_config=CompileConfig(enable=True, components=["model"]), parallel_dims=unused)
    is_bf16 = settings.precision == "bf16" or (settings.precision == "auto" and device.type == "cuda")
    apply_fsdp_to_decoder(
        module,
        mesh["dp_replicate", "fsdp"] if settings.data_parallel_replicate > 1 else mesh["fsdp"],
        param_dtype=torch.bfloat16 if is_bf16 else torch.float32,
        reduce_dtype=torch.float32,
        pp_enabled=False,
        cpu_offload=settings.cpu_offload,
        reshard_after_forward_policy=settings.reshard_after_forward,
    )
    if device.type == "cpu":  # gloo cannot scale while it sums
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)


def _apply_tensor_parallelism(module: Transformer, mesh: DeviceMesh) -> None:
    """Apply Megatron's plan with sequence parallelism: columns, then rows; hidden states are split by position."""
    outer: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(module, mesh, outer)
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    gather_first = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    for block in module.layers.values():
        layer: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": gather_first,
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": gather,
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(block, mesh, layer)
