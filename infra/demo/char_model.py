"""The demo's model: a character-level Qwen3 of 0.9 million parameters with random weights, and its tokenizer.

The same seed always gives the same bytes. A finished folder is left as it is, so that a run can be started again.
"""

import os
import shutil
from pathlib import Path

from infra.model import no_progress_bars

# Ids: the special tokens, then the printable ASCII characters from " " on, then the newline.
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
CHARACTERS = (*(chr(code) for code in range(32, 127)), "\n")
VOCABULARY_SIZE = 128
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_char_model(folder: Path, seed: int) -> Path:
    """Write model and tokenizer to `folder` (whole, or not at all) and return it."""
    if (folder / "config.json").is_file():
        return folder
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _save_tokenizer(temporary)
    _save_model(temporary, seed)
    try:
        temporary.rename(folder)  # replaces an empty folder, and refuses any other
    except OSError:
        shutil.rmtree(temporary)
        if not (folder / "config.json").is_file():  # where another process was faster, its folder is the same
            raise
    return folder


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: index for index, character in enumerate(SPECIAL_TOKENS + CHARACTERS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<pad>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def _save_model(folder: Path, seed: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
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
