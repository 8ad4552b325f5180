"""How a rank begins: it finds the others, and DeepSpeed its device."""

import os
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

import torch

from infra.roles.memory import give_back_large_blocks
from trainer.config import TrainerConfig


def begin_ranks(config: TrainerConfig, timeout_s: float) -> tuple[Any, str]:
    """Find the other ranks. The library, and this rank's device."""
    give_back_large_blocks()
    gpu = torch.cuda.is_available()
    if not gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if config.threads:
        torch.set_num_threads(config.threads)
    import deepspeed

    _default_to_one_rank(os.environ)
    deepspeed.ops.__compatible_ops__ = {}  # else it compiles kernels for a collective that only inference calls
    deepspeed.init_distributed(dist_backend="nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout_s))
    return deepspeed, f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if gpu else "cpu"


def _default_to_one_rank(environment: MutableMapping[str, str]) -> None:
    """One rank, where no launcher set the environment."""
    if "WORLD_SIZE" not in environment:
        environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
