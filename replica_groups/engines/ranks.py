"""The ranks of torchrun, and their collectives.

A process without torchrun is a single rank, on which collectives have no effect.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported before any group exists: its functions keep a group, which could not be closed
from torch import Tensor

from hetero_pp.core.device import CPU


@dataclass(frozen=True)
class Ranks:
    """This process among `world` ranks. All ranks have to call every method."""

    rank: int = 0
    world: int = 1
    device: torch.device = CPU  # device of this rank's tensors
    devices: tuple[torch.device, ...] = ()  # several devices over which the layers of a stage lie, `device` first
    in_group: bool = False
    """Whether there is a process group to leave. torchrun with one rank creates one too, because engines require it."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place; all ranks get the same bits."""
        if self.world > 1:
            dist.all_reduce(tensor)

    def gather(self, value: float) -> list[float]:
        """Return the numbers of all ranks in the order of ranks, the same list on every rank."""
        if self.world == 1:
            return [value]
        own = torch.tensor([value], dtype=torch.float64, device=self.device)
        values = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(values, own)
        return torch.cat(values).tolist()

    def wait(self) -> None:
        """Wait for all ranks (barrier)."""
        self.gather(0.0)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Return the first rank's bytes on every rank; the other ranks pass None."""
        if self.world == 1:
            return data or b""
        size = torch.tensor([len(data or b"")], device=self.device)
        dist.broadcast(size, 0)
        content = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        if self.is_first and data:
            content.copy_(_as_tensor(data))
        dist.broadcast(content, 0)
        return content.cpu().numpy().tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks in the order of ranks, the same list on every rank."""
        if self.world == 1:
            return [data]
        sizes = [int(size) for size in self.gather(len(data))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        if data:
            padded[: len(data)] = _as_tensor(data).to(self.device)
        everyone = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(everyone, padded)
        return [one[:size].cpu().numpy().tobytes() for one, size in zip(everyone, sizes, strict=True)]

    def gather_rows(self, part: Tensor, rows: int) -> Tensor:
        """Return the whole tensor of `rows` rows from the parts of `rows_of`: equal parts, except the last ones."""
        if self.world == 1:
            return part
        share = int(max(self.gather(len(part))))
        own = part.contiguous()
        if len(part) < share:
            own = part.new_zeros(share, *part.shape[1:])
            own[: len(part)] = part
        whole = part.new_empty(self.world * share, *part.shape[1:])
        for rank, target in enumerate(whole.split(share)):  # in place: all_gather over gloo holds it twice
            if rank == self.rank:
                target.copy_(own)
            dist.broadcast(target, rank)
        return whole[:rows]

    def close(self) -> None:
        """Leave the group that `init_ranks` joined."""
        if self.in_group:
            dist.destroy_process_group()


ALONE = Ranks()


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def init_ranks(device: torch.device, timeout: timedelta | None = None) -> Ranks:
    """Join the ranks that torchrun started: gloo on a CPU, NCCL on GPUs, with one GPU per process.

    Without torchrun, return a single rank. Call `close` at the end. `timeout` is how long a collective waits for the
    slowest rank; None means PyTorch's default.
    """
    if "WORLD_SIZE" not in os.environ:
        return Ranks(device=device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    return Ranks(dist.get_rank(), dist.get_world_size(), device, in_group=True)
