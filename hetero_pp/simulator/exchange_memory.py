"""Memory of the exchange's process, with its auditor: the formula of `hetero_pp/simulator/memory.py` for it."""

from __future__ import annotations

import math

from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.loads import blob_sizes
from hetero_pp.simulator.memory import (
    APPLY,
    PROCESS_BYTES,
    SAVE,
    START,
    TENSORS_OF_A_STEP,
    TRAINED,
    Memory,
    Term,
    decoded_bytes,
    largest_block_bytes,
    outer_moment_bytes,
    parameters_of_model,
)
from hetero_pp.simulator.volumes import RINGS, replica_count

CONNECTION_BYTES = 2e6
"""Streams and threads of one member: benchmarks/exchange_load.py, runs of the smallest model."""
RELAY_BYTES = 2**18
"""Memory of the relay for each direction of a relayed link: half of 0.51 MB, the mean of 19 links in one process."""
MOST_DECODED = 16
"""Largest number of tensors that are decoded at the same time, with two cores."""
INDEX_BYTES = 8
KEPT_BYTES = 32 * 2**20
"""Smallest block of memory that the allocator does not keep (hetero_pp/rpc/memory.py)."""


def memory_of_exchange(spec: RunSpec, members: int, relayed_links: int, way: str) -> Memory:
    """Return the memory with so many members and relayed stage links. `way`: see `ExchangeLoad.way`."""
    moments, shapes = outer_moment_bytes(spec.config), spec.parameter_shapes
    model, tensor = 4.0 * parameters_of_model(spec), 4.0 * max(map(math.prod, shapes.values()))
    block = 4.0 * max(sum(map(math.prod, one.values())) for one in shapes_by_block(shapes).values())
    is_whole = spec.config.outer.source == "gradient"
    decodes = way not in RINGS
    blob = max(size for blobs in blob_sizes(spec).values() for size in blobs.values())
    return Memory(
        [
            Term("process", PROCESS_BYTES),
            Term("members", CONNECTION_BYTES * members),
            Term("first snapshot", model, START),  # first_snapshot, until it is written
            Term("momentum", moments / 4 * model, TRAINED),  # Auditor._optimizer
            Term("parameters", model if is_whole else block, APPLY),  # Auditor._replay; the rest is on disk (Scratch)
            Term("averaged gradients", model if is_whole else 0.0, APPLY),  # GradientOptimizer
            Term("outer step", TENSORS_OF_A_STEP[moments] * tensor, APPLY),  # replay
            Term("snapshot", model, SAVE),  # Auditor._save
            Term("one block of all contributions", largest_block_bytes(spec) if decodes else 0.0, APPLY),
            Term("decoding", _decoding_bytes(spec) if decodes else 0.0, APPLY),
            Term("messages in flight", float(members * blob) if way == "gather" else 0.0, APPLY),
            Term("relay", float(2 * RELAY_BYTES * relayed_links)),
        ],
        allocator_share=0.0,  # it frees whole models and blocks, and trims its memory (`giving_freed_memory_back`)
    )


def _decoding_bytes(spec: RunSpec) -> float:
    """Return the memory to decode the largest tensor of each replica, as it arrives and for the auditor."""
    largest = max(spec.parameter_shapes.values(), key=math.prod)
    return min(2 * replica_count(spec), MOST_DECODED) * decoded_bytes(largest, spec.config.outer.compression)


def is_freed_at_once(values: int) -> bool:
    """Return whether the allocator returns the memory of that number of decoded values to the system at once."""
    return values * INDEX_BYTES >= KEPT_BYTES
