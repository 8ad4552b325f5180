"""The demo's model with an eye: a small LLaVA (a SigLIP tower, a Qwen3 of random weights), its tokenizer and image processor.

The same seed always gives the same bytes.
"""

from pathlib import Path

from infra.cli.demo.char_model import VOCABULARY_SIZE, Size, Vocabulary
from infra.model.model import no_progress_bars

IMAGE_TOKEN = "<image>"
PATCH = 8  # pixels a side that make one place of a picture
VISION_LAYERS = 1
# A message with images is a list of parts: each image stands as its token, the text behind them.
PARTS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + IMAGE_TOKEN + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
WORDS = ("count", "read", "box")
PICTURES = Vocabulary(
    words=(IMAGE_TOKEN, *WORDS, *"0123456789[], "),
    pattern=f"{IMAGE_TOKEN}|{'|'.join(WORDS)}|[\\s\\S]",
    chat_template=PARTS_TEMPLATE,
)


def save_eye_model(folder: Path, seed: int, size: Size, image_token: int) -> None:
    """Write the model, which takes pictures of `size.image` pixels a side, and how these are prepared."""
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    config = LlavaConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": size.hidden,
            "intermediate_size": 2 * size.hidden,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": 4,
            "image_size": size.image,
            "patch_size": PATCH,
            "vision_use_head": False,
        },
        text_config={
            "model_type": "qwen3",
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": size.hidden,
            "intermediate_size": 3 * size.hidden,
            "num_hidden_layers": size.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": size.head_dim or size.hidden // 4,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        image_token_index=image_token,
        image_seq_length=(size.image // PATCH) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlavaForConditionalGeneration(config)
    with no_progress_bars():
        model.save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": size.image, "width": size.image}).save_pretrained(folder)
