"""SparseLoCo for a training loop of one's own: the outer round of a run, over torch.distributed.

It has the arithmetic and the codec of a run, so the same differences give the same bits. Source: SparseLoCo, algorithm
1. All ranks of the process group take part in every round, and a lost rank ends all of them: for members that come and
go, use a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetero_pp.core.device import CPU
from hetero_pp.model.transformer import shapes_of
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.robust import robust_mean
from hetero_pp.outer.step import OuterOptimizer, mean_of
from hetero_pp.pipeline.coefficients import is_finite
from hetero_pp.pseudo_gradient.contribution import BlobAddress, ReceivedBlob, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import Selection, select
from hetero_pp.pseudo_gradient.quantise import Quantised
from hetero_pp.pseudo_gradient.selection import generator_of

_VALUES_AT_ONCE = 1 << 24  # values of the parameters whose contributions are gathered in one call


class SparseLoCo:
    """Averages the compressed parameter differences of all ranks after every `sync_every` inner steps.

    Call `step` after each step of the inner optimizer. Between two rounds the ranks do not communicate.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        sync_every: int = 30,
        density: float = 1 / 128,
        bits: int = 2,
        process_group: dist.ProcessGroup | None = None,
        settings: OuterSettings | None = None,
    ) -> None:
        """Start from the parameters of the group's first rank, which are copied to all others.

        `sync_every`: H, the inner steps of a round. `density`: share of each chunk that is sent. `bits`: of a sent
        value, 2, 3, 4, 8, 32 for fp32, or 1 for our signs; the paper's are 1/128 or 1/32, and 2. `process_group`: ranks
        that hold the same parameters, one for each replica; by default the whole world. With sharded parameters
        (DTensor) they are the ranks that hold the same shard, and each shard is compressed by itself. `settings`
        replace `density` and `bits`: `OuterSettings(method="diloco", rounds=N)` is DiLoCo; with `method="demo"`, plain
        SGD and `sync_every=1` it is DeMo. Schedules of the outer learning rate end after `rounds`. Raises ValueError
        for settings that need a run, and for a parameter of the optimizer that is not the model's.
        """
        if sync_every < 1:
            raise ValueError(f"sync_every: got {sync_every}, expected at least 1")
        if settings is None:
            method = "sparseloco_signs" if bits == 1 else "sparseloco"
            compression = {"density": density, "value_bits": bits}
            settings = OuterSettings.model_validate({"rounds": 1, "method": method, "compression": compression})
        needs_a_run = {
            "source": "difference",
            "overlap": 0,
            "keep_local": False,
            "weights": "equal",
            "fragments": 1,
            "mixing": 0.0,
        }
        for name, expected in needs_a_run.items():
            if (found := getattr(settings, name)) != expected:
                raise ValueError(f"settings.{name}: got {found!r}, expected {expected!r} outside of a run")
        trained = {id(one) for group in inner_optimizer.param_groups for one in group["params"]}
        self._parameters = {name: one for name, one in sorted(model.named_parameters()) if id(one) in trained}
        if len(self._parameters) != len(trained):
            found = f"{len(trained)} parameters, {len(self._parameters)} of them the model's"
            raise ValueError(f"inner_optimizer: got {found}, expected only parameters of the model")
        self.settings, self.sync_every, self._group = settings, sync_every, process_group
        self._optimizer = OuterOptimizer(settings)
        self.steps = 0  # inner steps since the start of training
        self._rank, self._world = (
            (dist.get_rank(process_group), dist.get_world_size(process_group)) if dist.is_initialized() else (0, 1)
        )
        self._start: dict[str, Tensor] = {}  # fp32 copy of each parameter after the last round
        for name, one in self._parameters.items():
            if self._world > 1:
                dist.broadcast(_local(one), group=process_group, group_src=0)
            self._start[name] = _local(one).float().clone()
        self._error = {name: torch.zeros_like(one) for name, one in self._start.items()}

    @torch.no_grad()
    def step(self) -> bool:
        """Count an inner step, and average if it ends a round. Return whether it did.

        Raises ValueError if a parameter is not finite, on the rank that has it: the run has diverged.
        """
        self.steps += 1
        if self.steps % self.sync_every:
            return False
        round_ = self.steps // self.sync_every
        self._optimizer.begin(round_, {})
        for names in self._batches():
            shapes = shapes_of({name: self._start[name] for name in names})
            addresses = [BlobAddress("", round_, str(rank), names[0]) for rank in range(self._world)]
            selected = ((name, shapes[name], self._select(name, round_)) for name in names)
            blobs = self._gather(encode_blob(addresses[self._rank], selected, self.settings.compression))
            # In the order of ranks, so that all of them get the same bits.
            received = [
                ReceivedBlob(blob, address, shapes, self.settings.compression)
                for blob, address in zip(blobs, addresses, strict=True)
            ]
            for name in names:
                weighted = [(1.0, blob.tensor(name)) for blob in received]
                if self.settings.is_robust:
                    mean = robust_mean(shapes[name], weighted, self.settings, range(shapes[name][0]))
                else:
                    mean = mean_of(shapes[name], weighted, self.settings.divides_by)
                theta = {name: self._start[name].cpu()}  # as in a run: all devices then have the same bits
                self._optimizer.take(theta, name, mean)
                self._start[name].copy_(theta[name])
                _local(self._parameters[name]).copy_(theta[name])
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what the next rounds depend on beside the parameters, as tensors that are still in use.

        Each rank has its own, because error feedback differs.
        """
        return {
            "steps": self.steps,
            "start": dict(self._start),
            "error": dict(self._error),
            "outer": dict(self._optimizer.state),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `state_dict`. Raises ValueError if it is of other parameters."""
        for kept, saved in ((self._start, state["start"]), (self._error, state["error"])):
            if shapes_of(kept) != shapes_of(saved):
                raise ValueError("got the state of other parameters than the model's")
            for name, tensor in saved.items():
                kept[name].copy_(tensor)
        self.steps = state["steps"]
        self._optimizer.load(state["outer"], self.steps // self.sync_every)

    def _batches(self) -> Iterator[list[str]]:
        """Yield names of parameters that are gathered together: a round needs few calls, and little memory."""
        names, values = list[str](), 0
        for name, tensor in self._start.items():
            if names and values + tensor.numel() > _VALUES_AT_ONCE:
                yield names
                names, values = [], 0
            names.append(name)
            values += tensor.numel()
        if names:
            yield names

    def _select(self, name: str, round_: int) -> Selection:
        """Select what to send of one parameter; error feedback keeps the rest."""
        delta = self._start[name] - _local(self._parameters[name]).float()
        if not is_finite(delta):
            raise ValueError(f"{name} is not finite after round {round_}")
        generator = generator_of("", round_, str(self._rank), name)
        found = select(self._error[name], delta, self.settings.compression, None, generator)
        sent = found.quantised
        codes, levels, magnitudes = (
            None if one is None else one.cpu() for one in (sent.codes, sent.levels, sent.magnitudes)
        )
        quantised = Quantised(sent.values.cpu(), codes, levels, magnitudes, sent.base)
        return Selection(tuple(one.cpu() for one in found.positions), found.indices.cpu(), quantised)

    def _gather(self, own: bytes) -> Sequence[bytes]:
        if self._world == 1:
            return [own]
        device = torch.device("cuda") if dist.get_backend(self._group) == "nccl" else CPU
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self._world)]
        dist.all_gather(sizes, torch.tensor([len(own)], device=device), group=self._group)
        room = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        room[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        parts = [torch.empty(len(room), dtype=torch.uint8, device=device) for _ in sizes]
        dist.all_gather(parts, room.to(device), group=self._group)
        return [part[: int(size)].cpu().numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def _local(parameter: Tensor) -> Tensor:
    """Return the values of a parameter that this rank holds, in their own memory."""
    values = parameter.detach()
    return values.to_local() if hasattr(values, "to_local") else values
