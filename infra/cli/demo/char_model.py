"""The demo's model: a small Qwen3 with random weights (0.9 million parameters at its usual size), and its tokenizer.

The same seed always gives the same bytes. A finished folder is left as it is, so that a run can be started again.
"""

import os
import shutil
from pathlib import Path

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
    """How large the model is: width, a multiple of 4 heads, and layers. image: pixels a side of the pictures it takes, 0 for
    text alone. head_dim: width of a head, 0 for the usual.

    Example: Size(hidden=128, layers=4)
    """

    hidden: int = 128
    layers: int = 4
    image: int = 0
    head_dim: int = 0


class Vocabulary(msgspec.Struct, frozen=True):
    """What text is made of. words: their ids follow the special tokens. pattern: how a text falls into words.

    Example: Vocabulary(words=("00", "01", ">"), pattern=r"[0-9][0-9]|.", chat_template=TURNS_TEMPLATE)
    """

    words: tuple[str, ...]
    pattern: str
    chat_template: str


CHARACTERS_ALONE = Vocabulary(words=CHARACTERS, pattern=r"[\s\S]", chat_template=CHAT_TEMPLATE)


def build_char_model(
    folder: Path, seed: int, vocabulary: Vocabulary = CHARACTERS_ALONE, size: Size | None = None
) -> Path:
    """Write model and tokenizer to `folder` (whole, or not at all) and return it."""
    if (folder / "config.json").is_file():
        return folder
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _save_tokenizer(temporary, vocabulary)
    size = size or Size()
    if size.image:
        from infra.cli.demo.eye_model import IMAGE_TOKEN, save_eye_model

        save_eye_model(temporary, seed, size, len(SPECIAL_TOKENS) + vocabulary.words.index(IMAGE_TOKEN))
    else:
        _save_model(temporary, seed, size)
    try:
        temporary.rename(folder)  # replaces an empty folder, and refuses any other
    except OSError:
        shutil.rmtree(temporary)
        if not (folder / "config.json").is_file():  # where another process was faster, its folder is the same
            raise
    return folder


def _save_tokenizer(folder: Path, vocabulary: Vocabulary) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    assert len(SPECIAL_TOKENS) + len(vocabulary.words) <= VOCABULARY_SIZE, "the model has no rows for more words"
    ids = {word: index for index, word in enumerate(SPECIAL_TOKENS + vocabulary.words)}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(vocabulary.pattern), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<pad>"
    )
    tokenizer.chat_template = vocabulary.chat_template
    tokenizer.save_pretrained(folder)


def _save_model(folder: Path, seed: int, size: Size) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=size.head_dim or max(MIN_HEAD_DIM, size.hidden // 4),
        max_position_embeddings=512,
        # Tied embeddings leave a stale packed output matrix after a hot reload on the CPU engine.
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    with no_progress_bars():
        model.save_pretrained(folder)
