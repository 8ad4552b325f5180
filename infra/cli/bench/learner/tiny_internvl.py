"""The smallest InternVL: a vision tower whose features are halved in both directions, before a Qwen3; with the tokenizer and
the image processor that such folders have.

The same seed gives the same bytes.
"""

from pathlib import Path

from infra.cli.demo.char_model import (
    IMAGE_TOKEN,
    MIN_HEAD_DIM,
    PARTS_TEMPLATE,
    PATCH,
    PICTURES,
    SPECIAL_TOKENS,
    VOCABULARY_SIZE,
    Vocabulary,
    save_tokenizer,
)

FRAME = ("<img>", "</img>")
SHRUNK = 2  # so many patches a side become one place
VIDEO = "<video>"  # that its processor asks for, and no prompt has
WORDS = (*PICTURES.words, *FRAME, VIDEO)
VOCABULARY = Vocabulary(
    words=WORDS, pattern=f"{'|'.join((*FRAME, VIDEO))}|{PICTURES.pattern}", chat_template=PARTS_TEMPLATE
)


def build_tiny_internvl(
    folder: Path, seed: int = 7, *, hidden: int = 32, layers: int = 2, places: int = 2, spread: float = 0.02
) -> Path:
    """Write it to `folder` and return that. places: a picture has, a side. spread: of its random weights."""
    import torch
    from transformers import InternVLConfig, InternVLForConditionalGeneration
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    from infra.model.model import no_progress_bars

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
        text_config={
            "model_type": "qwen3",
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": MIN_HEAD_DIM,
            "max_position_embeddings": 512,
            "initializer_range": spread,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
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
    save_tokenizer(folder, VOCABULARY, names)
    GotOcr2ImageProcessorPil(size={"height": side, "width": side}, crop_to_patches=True).save_pretrained(folder)
    return folder
