"""Tiny random models of families that `transformers` knows, as folders with the demo's tokenizer."""

from pathlib import Path
from typing import Any

from infra.cli.demo.char_model import CHARACTERS_ALONE, VOCABULARY_SIZE, save_tokenizer
from infra.model.model import no_progress_bars

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Distributions far from uniform, so that a wrong matrix shows.
    "initializer_range": 0.2,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


def build_family(folder: Path, model_type: str, *, seed: int = 0, **sizes: Any) -> Path:
    """A model of `model_type` with its tokenizer; sizes: instead of those above."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**SIZES, **EXPERTS, **sizes}, dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    folder.mkdir(parents=True)
    with no_progress_bars():
        model.save_pretrained(folder)
    save_tokenizer(folder, CHARACTERS_ALONE)
    return folder
