"""The settings of DeepSpeed: the trainer's own settings, with DeepSpeed's JSON from the TOML laid over them."""

from collections.abc import Mapping
from typing import Any

from schemas.errors import ConfigError
from trainer.config import TrainerConfig

# What the trainer decides or computes itself: passed through, it would be decided twice.
OWN_KEYS = {
    "train_batch_size": "the draw decides how much a step trains on ([pacing])",
    "train_micro_batch_size_per_gpu": "trainer.max_tokens_per_microbatch bounds a microbatch",
    "gradient_accumulation_steps": "a step accumulates as many microbatches as it has",
    "gradient_clipping": "set trainer.gradient_clip",
    "optimizer": "set trainer.learning_rate, trainer.betas and trainer.weight_decay",
    "scheduler": "set trainer.schedule",
    "bf16": "set trainer.dtype",
    "fp16": "set trainer.dtype; half precision has no loss scaling here",
    "data_types": "gradients are summed in float32, weights are of trainer.dtype",
}

# Values that ZeRO sends, gathers or updates at once. With its own 5e8 and 1e9 a rank holds several float32 copies of a model of
# that size beside its shards; a network and kernels are kept busy by these.
AT_ONCE = 20_000_000


def engine_settings(config: TrainerConfig, stage: int, offload: bool, json: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of DeepSpeed: ours, with `json` laid over it table by table. Raises ConfigError."""
    where = "trainer.learner.options"
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"{where}.stage: got {stage}, expected 0, 1, 2 or 3")
    half = config.dtype == "bfloat16"
    if stage == 1 and half:
        raise ConfigError(
            f"{where}.stage: got 1 with {config.dtype}, expected 2 or 3: DeepSpeed sums no gradients of microbatches in "
            "float32 there with an optimizer whose state other numbers of ranks can read; 2 holds no more than 1"
        )
    if stage == 0 and (offload or config.dtype != "float32"):
        got = "offload" if offload else config.dtype
        raise ConfigError(
            f"{where}.stage: got 0 with {got}, expected 1, 2 or 3: stage 0 keeps no float32 masters apart"
        )
    for key, instead in OWN_KEYS.items():
        if key in json:
            raise ConfigError(f"{where}.json.{key}: got {json[key]!r}, expected it left out: {instead}")
    sizes = ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size")
    zero: dict[str, Any] = {"stage": stage, **dict.fromkeys(sizes, AT_ONCE)}
    if stage == 3 and not config.activation_checkpointing:  # with it a layer's weights are used again at once
        zero["stage3_max_reuse_distance"] = AT_ONCE
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if (other := json.get("zero_optimization", {}).get("stage", stage)) != stage:
        raise ConfigError(f"{where}.json.zero_optimization.stage: got {other}, expected {stage} as in {where}.stage")
    ours = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.gradient_clip,
        "zero_optimization": zero,
        "bf16": {"enabled": half},
        # Sums over microbatches, and over ranks; in bfloat16 they would lose the small ones.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    return _laid_over(ours, json)


def reference_settings(dtype: str) -> dict[str, Any]:
    """Of a reference model whose weights are sharded, and never trained."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": dtype == "bfloat16"},
        "steps_per_print": 10**9,
    }


def _laid_over(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(ours)
    for key, value in theirs.items():
        held = found.get(key)
        found[key] = _laid_over(held, value) if isinstance(held, dict) and isinstance(value, Mapping) else value
    return found
