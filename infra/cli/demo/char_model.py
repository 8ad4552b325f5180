"""A small Qwen3 with random weights (0.9 million parameters at its usual size) and a tokenizer of characters: the model of the
demo's toy, of `headrace init --tiny` and of most tests.

The same seed always gives the same bytes. A finished folder stays unchanged, so that a run can continue.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from infra.model.model import no_progress_bars

# Ids: the special tokens, then the printable ASCII characters from " " on, then the newline.
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
CHARACTERS = (*(chr(code) for code in range(32, 127)), "\n")
VOCABULARY_SIZE = 128
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
MIN_HEAD_DIM = 32  # of vLLM's attention on CPUs


class Size(msgspec.Struct, frozen=True):
    """Size of the model. hidden: width, a multiple of 4 heads. layers: of the decoder."""

    hidden: int = 128
    layers: int = 4


class Vocabulary(msgspec.Struct, frozen=True):
    """Vocabulary of the tokenizer. words: ids follow the special tokens. pattern: splits text. chat_template: Jinja."""

    words: tuple[str, ...]
    pattern: str
    chat_template: str


CHARACTERS_ALONE = Vocabulary(words=CHARACTERS, pattern=r"[\s\S]", chat_template=CHAT_TEMPLATE)


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
    _save_model(temporary, seed, size or Size())
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


def text_config(size: Size) -> dict[str, Any]:
    """Arguments of Qwen3's configuration."""
    return {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": max(MIN_HEAD_DIM, size.hidden // 4),
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _save_model(folder: Path, seed: int, size: Size) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(seed)
        Qwen3ForCausalLM(Qwen3Config(**text_config(size), dtype="float32")).save_pretrained(folder)
