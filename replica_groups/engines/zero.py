"""`engine: deepspeed`: ZeRO 0 to 3 with DeepSpeed's own JSON passed through.

Nothing is compiled at start. DeepSpeed would otherwise build its shared-memory collectives, which a replica does not
need.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param
from torch import Tensor, nn

from hetero_pp.model.arithmetic import next_token_loss
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.model.transformer import ModelShape, build_filled
from replica_groups.engines.engine import Moments, Parameters, RateSchedule, Shape
from replica_groups.engines.ranks import Ranks


class ZeroEngine:
    """Implements Engine. `settings` is DeepSpeed's JSON without the keys that follow from the other arguments."""

    def __init__(
        self,
        shape: ModelShape,
        parameters: Parameters,
        inner: InnerSettings,
        total_steps: int | None,
        micro_batches: int,
        micro_batch_size: int,
        settings: Mapping[str, Any],
        ranks: Ranks,
        folder: Path | None = None,
    ) -> None:
        """`folder` holds copies for `undo` (Moments)."""
        self.inner, self.micro_batches, self.ranks = inner, micro_batches, ranks
        self.shapes: Mapping[str, Shape] = {name: tuple(tensor.shape) for name, tensor in sorted(parameters.items())}
        self.stage: int = settings.get("zero_optimization", {}).get("stage", 0)
        module = build_filled(shape, parameters).to(ranks.device)
        self._schedule = RateSchedule(inner, total_steps)
        config = {
            "zero_allow_untested_optimizer": True,  # torch's plain AdamW
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
            **settings,
            "train_micro_batch_size_per_gpu": micro_batch_size // ranks.world,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": inner.clip_norm or 0.0,
        }
        optimizer = None
        if "optimizer" not in settings:  # AdamW without decay on norms
            groups = [
                {"params": [one for one in module.parameters() if one.ndim > 1], "weight_decay": inner.weight_decay},
                {"params": [one for one in module.parameters() if one.ndim <= 1], "weight_decay": 0.0},
            ]
            rest: Any = {"lr": inner.learning_rate, "betas": inner.betas, "eps": inner.epsilon}
            optimizer = torch.optim.AdamW(groups, fused=ranks.device.type == "cuda", **rest)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.engine, self.optimizer, _, self.rates = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: self._schedule.share(step)
            ),
            config=config,
            dist_init_required=False,
        )
        self._named = dict(self.engine.module.named_parameters())
        for name, tensor in parameters.items():  # into fp32 master weights, because those made from bf16 are rounded
            self.write(name, tensor)
        self.finish_writing()
        self._moments = Moments([getattr(self.optimizer, "optimizer", self.optimizer)], folder=folder)
        self._before: tuple[dict, dict] = ({}, {})
        self.done = 0
        self._knows_no_norm = not hasattr(self.optimizer, "_global_grad_norm")
        """Plain data parallelism in fp32: every rank has the whole gradients, and DeepSpeed computes no norm."""

    def follow(self, rates: LearningRates) -> None:
        self._schedule.follow(rates, [self.rates])

    def inner_step(self, tokens: Tensor, step: int) -> tuple[float, float, float]:
        rate = self.rates.get_last_lr()[0]
        loss, norm = 0.0, None
        for micro_batch in tokens.chunk(self.micro_batches):
            loss += self.backward(micro_batch) / self.micro_batches
            if self._knows_no_norm and self.engine.is_gradient_accumulation_boundary():
                norm = nn.utils.get_total_norm([p.grad for p in self._named.values() if p.grad is not None])
            self.engine.step()
        norm = self.engine.get_global_grad_norm() if norm is None else norm
        return loss, float(norm), rate

    def remember(self, moments: bool) -> None:
        """Implement Engine.remember; every rank copies its part of the moments, and with fp16 the loss scale."""
        scaler = getattr(self.optimizer, "loss_scaler", None)
        self._before = dict(self.rates.state_dict()), {} if scaler is None else dict(vars(scaler))
        self._moments.remember(moments)

    def undo(self) -> None:
        rates, scale = self._before
        self.optimizer.zero_grad()
        self.rates.load_state_dict(rates)
        if scale:
            vars(self.optimizer.loss_scaler).update(scale)
        self._moments.restore()

    def backward(self, micro_batch: Tensor) -> float:
        """Accumulate the gradient of a micro-batch [b, L + 1]; return its mean loss."""
        own = micro_batch.to(self.ranks.device).chunk(self.ranks.world)[self.ranks.rank]
        loss = next_token_loss(self.engine(own[:, :-1]), own[:, 1:])
        self.engine.backward(loss)
        self.done += 1
        total = loss.detach().double()
        self.ranks.sum(total)
        return total.item() / self.ranks.world

    @torch.no_grad()
    def evaluate(self, validation: Sequence[Tensor]) -> float:
        """Implement Engine.evaluate.

        Every rank takes part in every forward; a rank without rows runs one with weight 0.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for tokens in validation:
            own = tokens.to(self.ranks.device).tensor_split(self.ranks.world)[self.ranks.rank]
            rows = own if len(own) else tokens[:1].to(self.ranks.device)
            total += next_token_loss(self.engine(rows[:, :-1]), rows[:, 1:]) * len(own)
        self.ranks.sum(total)
        return total.item() / sum(len(tokens) for tokens in validation)

    @torch.no_grad()
    def read(self, name: str, rows: range) -> Tensor:
        """Implement ParameterStore.read; gathers the whole parameter, because DeepSpeed splits flattened groups."""
        parameter = self._named[name]
        whole = safe_get_full_fp32_param(parameter)
        whole = parameter.detach().float() if whole is None else whole
        return whole.view(self.shapes[name])[rows.start : rows.stop]

    def read_gradient(self, name: str) -> Tensor:
        """Implement ParameterStore.read_gradient: the mean over ranks. The next step clears it, not this call."""
        gradient = safe_get_full_grad(self._named[name])
        if gradient is None:
            return torch.zeros(self.shapes[name], device=self.ranks.device)
        return gradient.detach().float().view(self.shapes[name])

    @torch.no_grad()
    def write(self, name: str, whole: Tensor) -> None:
        """Implement ParameterStore.write: writes the master weights, and the forward's own copy where there is one."""
        parameter = self._named[name]
        whole = whole.to(self.ranks.device)
        safe_set_full_fp32_param(parameter, whole)
        if self.stage == 3:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if self.ranks.is_first:
                    parameter.data.copy_(whole)
        else:  # otherwise DeepSpeed would gather all parameters from all ranks again
            parameter.data.copy_(whole)

    def finish_writing(self) -> None:
        """Do nothing: every write is complete."""

    def save(self, folder: Path) -> None:
        """Implement Engine.save in DeepSpeed's own format.

        Raises OSError for a failed disk only after DeepSpeed is done, because the ranks wait for each other there.
        """
        failures: list[str] = []
        files = self.engine.checkpoint_engine
        write = files.save

        def save(state_dict: dict, path: str) -> None:
            try:
                write(state_dict, path)
            except (OSError, RuntimeError) as error:  # torch reports a full disk by a RuntimeError
                failures.append(str(error).split("\n", 1)[0])

        files.save = save
        try:
            self.engine.save_checkpoint(str(folder), tag="state", save_latest=False)
        finally:
            files.save = write
        if failures:
            raise OSError(errno.EIO, failures[0], str(folder))

    def load(self, folder: Path) -> None:
        """Implement Engine.load. Raises FileNotFoundError if nothing was saved there."""
        found, _ = self.engine.load_checkpoint(str(folder), tag="state")
        if found is None:
            raise FileNotFoundError(f"{folder}: DeepSpeed found no checkpoint")
