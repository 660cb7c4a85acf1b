"""Settings of what trains a datacenter replica: where it runs, and how an engine spreads it over ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hetero_pp.settings import Settings

EngineName = Literal["torch", "torchtitan", "deepspeed"]
Checkpointing = Literal["none", "selective", "full"]

DEEPSPEED_OWNED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "scheduler",
)
"""Keys of DeepSpeed's JSON that follow from the rest of the YAML."""


class TorchtitanSettings(Settings):
    """How torchtitan spreads a replica; what is left of its ranks after both degrees shards parameters (FSDP2)."""

    tensor_parallel: int = Field(1, ge=1, description="ranks that share every matrix product")
    data_parallel_replicate: int = Field(1, ge=1, description="copies of the sharded replica (HSDP)")
    compile: bool = Field(False, description="torch.compile on every layer")
    activation_checkpointing: Checkpointing = "none"
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="of the layers' arithmetic; `auto`: bf16 on a GPU, fp32 on a CPU"
    )
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    cpu_offload: bool = Field(False, description="keep parameters, gradients and moments in CPU memory")
