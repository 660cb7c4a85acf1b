"""Settings of a datacenter replica's engine: its name, and how it distributes the replica over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from hetero_pp.config.settings import Settings

EngineName = Literal["torch", "torchtitan", "deepspeed"]
Checkpointing = Literal["none", "selective", "full"]
Precision = Literal["auto", "fp32", "bf16"]
Recomputation = Literal["none", "layers"]

DEEPSPEED_OWNED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "scheduler",
)
"""Keys of DeepSpeed's JSON that follow from the rest of the YAML."""


class TorchtitanSettings(Settings):
    """Distribution of a replica by torchtitan. Ranks that remain after both degrees shard the parameters (FSDP2)."""

    tensor_parallel: int = Field(1, ge=1, description="ranks that split every matrix product (tensor parallelism)")
    data_parallel_replicate: int = Field(1, ge=1, description="copies of the sharded replica (HSDP)")
    compile: bool = Field(False, description="use torch.compile on every layer")
    activation_checkpointing: Checkpointing = "none"
    precision: Precision = Field(
        "auto", description="precision of the layers' arithmetic; `auto`: bf16 on a GPU, fp32 on a CPU"
    )
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    cpu_offload: bool = Field(False, description="keep parameters, gradients and moments in CPU memory")


# ---- what an exchange may tell a host that joins ----

_DTYPES = ("fp32", "fp16", "bf16", "float32", "float16", "bfloat16")


def _numbers(keys: str) -> dict[str, tuple[str, ...]]:
    """Return keys that have no text among their values."""
    return dict.fromkeys(keys.split(), ())


_OFFLOAD: Mapping[str, Any] = {"device": ("none", "cpu"), **_numbers("pin_memory buffer_count buffer_size ratio")}

_DEEPSPEED_TOLD: Mapping[str, Any] = {
    "zero_optimization": {
        **_numbers(
            "stage allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size "
            "contiguous_gradients round_robin_gradients sub_group_size cpu_offload stage3_max_live_parameters "
            "stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold "
            "stage3_model_persistence_threshold stage3_gather_16bit_weights_on_model_save zero_hpz_partition_size "
            "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients "
            "ignore_unused_parameters"
        ),
        "offload_optimizer": _OFFLOAD,
        "offload_param": {**_OFFLOAD, "max_in_cpu": ()},
    },
    "bf16": _numbers("enabled"),
    "fp16": _numbers(
        "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
        "min_loss_scale"
    ),
    "optimizer": {
        "type": ("Adam", "AdamW", "SGD", "Lion", "Lamb"),
        "params": _numbers("lr betas eps weight_decay momentum amsgrad adam_w_mode torch_adam bias_correction"),
    },
    "activation_checkpointing": _numbers(
        "partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints "
        "synchronize_checkpoint_boundary"
    ),
    "data_types": {"grad_accum_dtype": _DTYPES},
    "communication_data_type": _DTYPES,
    **_numbers(
        "prescale_gradients gradient_predivide_factor zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
        "wall_clock_breakdown steps_per_print"
    ),
}
"""Keys of DeepSpeed's JSON that name no path, no address and no code, each with its allowed texts.

Every other value is a number, true, false or null, or a list of them. DeepSpeed writes files for other sections, such
as flops_profiler, csv_monitor and aio, and loads code for others. A list of allowed keys stays safe when a later
DeepSpeed adds sections.
"""


def untold_deepspeed_key(settings: object, allowed: Any = _DEEPSPEED_TOLD) -> tuple[str, ...] | None:
    """Return the first key of DeepSpeed's JSON that a host does not accept from an exchange; None if there is none."""
    if isinstance(allowed, Mapping):
        if not isinstance(settings, Mapping):
            return ()
        for key, value in settings.items():
            found = untold_deepspeed_key(value, allowed[key]) if key in allowed else ()
            if found is not None:
                return (str(key), *found)
        return None
    values = settings if isinstance(settings, list) else [settings]
    is_told = all(value is None or isinstance(value, int | float) or value in allowed for value in values)
    return None if is_told else ()
