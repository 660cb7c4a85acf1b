"""Memory that code allocates for tensors, counted exactly by PyTorch's profiler, on this thread and the CPU."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(do: Callable[[], object]) -> int:
    """Return the most bytes that tensors allocated by `do` take at the same time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        do()
    events = profiled.profiler.kineto_results.events()
    sizes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for _, size in sizes:
        held += size
        peak = max(peak, held)
    return peak
