"""The demo's model: a small Qwen3 with random weights (0.9 million parameters at its usual size), and its tokenizer. For
pictures a small LLaVA: a SigLIP tower before the same Qwen3, and its image processor.

The same seed always gives the same bytes. A finished folder stays unchanged, so that a run can continue.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from infra.model.model import no_progress_bars

# Ids: the special tokens, then the printable ASCII characters from " " on, then the newline.
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
CHARACTERS = (*(chr(code) for code in range(32, 127)), "\n")
VOCABULARY_SIZE = 128
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
# An answer ends with the token that ended it when it was sampled, so that a next turn extends it.
TURNS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)

MIN_HEAD_DIM = 32  # of vLLM's attention on CPUs


class Size(msgspec.Struct, frozen=True):
    """How large the model is. hidden: width, a multiple of 4 heads. layers: of the decoder. image: pixels a side of the
    pictures it takes, 0 for text alone. head_dim: width of a head, 0 for the usual.

    Example: Size(hidden=128, layers=4)
    """

    hidden: int = 128
    layers: int = 4
    image: int = 0
    head_dim: int = 0


class Vocabulary(msgspec.Struct, frozen=True):
    """What text is made of. words: their ids follow the special tokens. pattern: how a text falls into words.
    chat_template: in Jinja.

    Example: Vocabulary(words=("00", "01", ">"), pattern=r"[0-9][0-9]|.", chat_template=TURNS_TEMPLATE)
    """

    words: tuple[str, ...]
    pattern: str
    chat_template: str


CHARACTERS_ALONE = Vocabulary(words=CHARACTERS, pattern=r"[\s\S]", chat_template=CHAT_TEMPLATE)

IMAGE_TOKEN = "<image>"
PATCH = 8  # pixels a side that make one place of a picture
VISION_LAYERS = 1
# A message with images is a list of parts: each image becomes its token, the text follows.
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


def build_char_model(
    folder: Path, seed: int, vocabulary: Vocabulary = CHARACTERS_ALONE, size: Size | None = None
) -> Path:
    """Write model and tokenizer to `folder`, whole or not at all, and return the folder."""
    if (folder / "config.json").is_file():
        return folder
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_tokenizer(temporary, vocabulary)
    size = size or Size()
    image_token = len(SPECIAL_TOKENS) + vocabulary.words.index(IMAGE_TOKEN) if size.image else None
    _save_model(temporary, seed, size, image_token)
    try:
        temporary.rename(folder)  # replaces an empty folder, and refuses any other
    except OSError:
        shutil.rmtree(temporary)
        if not (folder / "config.json").is_file():  # where another process was faster, its folder is the same
            raise
    return folder


def save_tokenizer(folder: Path, vocabulary: Vocabulary, special: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write a tokenizer of these words. special: words by the names that its family has for them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    assert len(SPECIAL_TOKENS) + len(vocabulary.words) <= VOCABULARY_SIZE, "the model has no rows for more words"
    ids = {word: index for index, word in enumerate(SPECIAL_TOKENS + vocabulary.words)}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(vocabulary.pattern), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<pad>",
        **({"extra_special_tokens": dict(special)} if special else {}),
    )
    tokenizer.chat_template = vocabulary.chat_template
    tokenizer.save_pretrained(folder)


def _save_model(folder: Path, seed: int, size: Size, image_token: int | None) -> None:
    """Write the model, one that takes pictures of `size.image` pixels a side where there is an image token."""
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM

    text = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": size.head_dim or max(MIN_HEAD_DIM if image_token is None else 0, size.hidden // 4),
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(seed)
        if image_token is None:
            Qwen3ForCausalLM(Qwen3Config(**text, dtype="float32")).save_pretrained(folder)
            return
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        eye = {
            "model_type": "siglip_vision_model",
            "hidden_size": size.hidden,
            "intermediate_size": 2 * size.hidden,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": 4,
            "image_size": size.image,
            "patch_size": PATCH,
            "vision_use_head": False,
        }
        config = LlavaConfig(
            vision_config=eye,
            text_config={"model_type": "qwen3", **text},
            image_token_index=image_token,
            image_seq_length=(size.image // PATCH) ** 2,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            tie_word_embeddings=False,
            dtype="float32",
        )
        LlavaForConditionalGeneration(config).save_pretrained(folder)
        SiglipImageProcessorPil(size={"height": size.image, "width": size.image}).save_pretrained(folder)
