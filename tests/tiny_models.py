"""The smallest model of each family, built from its `transformers` configuration with random weights that make a difference.

Weights are drawn wide: with the usual spread a wrong mask would hide below rounding. The same family gives the same bytes.
"""

import io
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from infra.cli.demo.char_model import CHARACTERS, SPECIAL_TOKENS, Size, Vocabulary, save_tokenizer, text_config
from infra.model.model import no_progress_bars
from infra.store.images import image_named
from schemas import Image

VOCABULARY = 128  # that of `infra.cli.demo.char_model`, whose tokenizer goes with it
SPREAD = 0.2
WINDOW = 8

IMAGE_TOKEN = "<image>"
PATCH = 8  # pixels a side that make one place of a picture
# A message with images is a list of parts: each image becomes its token, the text follows.
PARTS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + IMAGE_TOKEN + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
PICTURES = Vocabulary(
    words=(IMAGE_TOKEN, "count", "read", "box", *"0123456789[], "),
    pattern=f"{IMAGE_TOKEN}|count|read|box|[\\s\\S]",
    chat_template=PARTS_TEMPLATE,
)

# An answer ends with the token that ended it when it was sampled, so that a next turn extends it.
TURNS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
TURNS = Vocabulary(words=CHARACTERS, pattern=r"[\s\S]", chat_template=TURNS_TEMPLATE)

FRAME = ("<img>", "</img>")
SHRUNK = 2  # so many patches a side become one place
VIDEO = "<video>"  # that its processor asks for, and no prompt has
WORDS = (*PICTURES.words, *FRAME, VIDEO)
INTERNVL_VOCABULARY = Vocabulary(
    words=WORDS, pattern=f"{'|'.join((*FRAME, VIDEO))}|{PICTURES.pattern}", chat_template=PARTS_TEMPLATE
)

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

    if family == "llava":
        return build_tiny_llava(folder, 7, Size(hidden=32, layers=2))
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


def build_tiny_internvl(
    folder: Path, seed: int = 7, *, hidden: int = 32, layers: int = 2, places: int = 2, spread: float = 0.02
) -> Path:
    """Write it to `folder` and return that. places: a picture has, a side. spread: of its random weights."""
    import torch
    from transformers import InternVLConfig, InternVLForConditionalGeneration
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    side = places * SHRUNK * PATCH
    config = InternVLConfig(
        vision_config={
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": [side, side],
            "patch_size": [PATCH, PATCH],
            "initializer_range": spread,
        },
        text_config={"model_type": "qwen3", **text_config(Size(hidden, layers)), "initializer_range": spread},
        image_token_id=len(SPECIAL_TOKENS) + WORDS.index(IMAGE_TOKEN),
        image_seq_length=places**2,
        downsample_ratio=1 / SHRUNK,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(seed)
        InternVLForConditionalGeneration(config).save_pretrained(folder)
    before, after = FRAME
    names = {
        "start_image_token": before,
        "end_image_token": after,
        "context_image_token": IMAGE_TOKEN,
        "video_token": VIDEO,
    }
    save_tokenizer(folder, INTERNVL_VOCABULARY, names)
    GotOcr2ImageProcessorPil(size={"height": side, "width": side}, crop_to_patches=True).save_pretrained(folder)
    return folder


def build_tiny_llava(folder: Path, seed: int, size: Size, side: int = 16) -> Path:
    """Write a LLaVA of a SigLIP tower before a Qwen3 to `folder`, and return that. side: of its pictures in pixels."""
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    save_tokenizer(folder, PICTURES)
    eye = {
        "model_type": "siglip_vision_model",
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": side,
        "patch_size": PATCH,
        "vision_use_head": False,
    }
    config = LlavaConfig(
        vision_config=eye,
        text_config={"model_type": "qwen3", **text_config(size)},
        image_token_index=len(SPECIAL_TOKENS) + PICTURES.words.index(IMAGE_TOKEN),
        image_seq_length=(side // PATCH) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(seed)
        LlavaForConditionalGeneration(config).save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)
    return folder


SIZE = Size(hidden=16, layers=1)
NUM_PLACES = 4  # two by two places a picture


def build_eye_model(folder: Path, seed: int = 0, family: str = "llava") -> Path:
    if family == "internvl":
        return build_tiny_internvl(folder, seed, hidden=SIZE.hidden, layers=SIZE.layers)
    return build_tiny_llava(folder, seed, SIZE)


class Drawing(NamedTuple):
    """A picture of one to three squares. answer: their number."""

    picture: bytes
    answer: str

    @property
    def image(self) -> Image:
        return image_named(self.picture)


def drawings(count: int, seed: int = 0) -> list[Drawing]:
    """Different pictures of 16 × 16 pixels, of squares in the cells of a grid."""
    from PIL import Image as Picture
    from PIL.ImageDraw import Draw

    random, found = Random(seed), dict[bytes, Drawing]()
    while len(found) < count:
        canvas, answer = Picture.new("RGB", (16, 16), "white"), random.randint(1, 3)
        for cell in random.sample(range(4), answer):
            left, top = 8 * (cell % 2) + random.randint(0, 2), 8 * (cell // 2) + random.randint(0, 2)
            colour = random.choice(("red", "blue", "green", "purple", "black"))
            Draw(canvas).rectangle((left, top, left + 4, top + 4), fill=colour)
        held = io.BytesIO()
        canvas.save(held, format="PNG")
        found[held.getvalue()] = Drawing(held.getvalue(), str(answer))
    return list(found.values())
