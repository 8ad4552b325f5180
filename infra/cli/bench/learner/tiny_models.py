"""The smallest model of each family, built from its `transformers` configuration with random weights that make a difference.

Weights are drawn wide, so that logits differ as those of trained models do: with the usual spread a wrong mask would
hide below rounding. The same family gives the same bytes.
"""

from pathlib import Path
from typing import Any

from infra.cli.bench.learner.tiny_internvl import build_tiny_internvl

VOCABULARY = 128  # that of `infra.cli.demo.char_model`, whose tokenizer goes with it
SPREAD = 0.2
WINDOW = 8

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": SPREAD,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS: dict[str, Any] = {"head_dim": 8}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
LINEAR: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
ALTERNATING = ["sliding_attention", "full_attention"]

# Of each family: the class of its models, of its configuration, and what it has beyond SHAPE.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", HEADS | {"sliding_window": WINDOW}),
    "qwen2.5": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", HEADS),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        HEADS | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        HEADS
        | {
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        HEADS | {"sliding_window": WINDOW, "layer_types": ALTERNATING, "query_pre_attn_scalar": 8},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", {}),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        HEADS
        | EXPERTS
        | {
            "num_local_experts": 4,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "qwen3.5": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        HEADS | LINEAR | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", {"logit_scale": 0.1}),
    "llava": ("LlavaForConditionalGeneration", "LlavaConfig", {}),  # the demo's
    "internvl": ("InternVLForConditionalGeneration", "InternVLConfig", {}),  # InternVL 3 and 3.5
    "qwen2.5-vl": ("", "Qwen2_5_VLConfig", {}),  # refused by its configuration: it needs no weights
    "qwen3-vl": ("", "Qwen3VLConfig", {}),  # likewise
}


def build_tiny_model(folder: Path, family: str, **settings: Any) -> Path:
    """Write the model of a family to `folder`, without a tokenizer, and return it. settings: of its configuration."""
    import torch
    import transformers

    from infra.cli.demo.char_model import MIN_HEAD_DIM, PICTURES, Size, build_char_model
    from infra.model.model import no_progress_bars

    if family == "llava":
        return build_char_model(folder, 7, PICTURES, Size(hidden=32, layers=2, image=16, head_dim=MIN_HEAD_DIM))
    if family == "internvl":
        return build_tiny_internvl(folder, spread=SPREAD)
    model, config, further = FAMILIES[family]
    if not model:
        getattr(transformers, config)(**further).save_pretrained(folder)
        return folder
    with torch.random.fork_rng(), no_progress_bars():
        torch.manual_seed(7)
        built = getattr(transformers, model)(getattr(transformers, config)(**SHAPE | further | settings))
        for name, value in built.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(value)
        built.save_pretrained(folder)
    return folder
