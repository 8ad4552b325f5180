"""Small tokenizers in the styles of well-known chat models: their kind of vocabulary, special tokens and chat template."""

import json
from pathlib import Path
from typing import Any

import msgspec

CHATML = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}{%- for tool in tools or [] %}{{- '\\n' }}
{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.name if message.name else '') + message.content }}
{%- for call in message.tool_calls %}{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>' + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA3 = """{{- bos_token }}{%- for tool in tools or [] %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- tool | tojson(indent=4) }}{{- '<|eot_id|>' }}{%- endfor %}{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + (message.name if message.name else '') }}
{{- message['content'] | trim }}{%- for call in message.tool_calls %}{{- '{"name": "' + call.function.name + '", ' }}
{{- '"parameters": ' }}{{- call.function.arguments | tojson }}{{- '}' }}{%- endfor %}{{- '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """{{- bos_token }}{%- if tools %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}{%- if message.role == 'user' or message.role == 'system' %}
{{- '[INST] ' + (message.name if message.name else '') + message.content + '[/INST]' }}{%- else %}
{{- ' ' + (message.name if message.name else '') + message.content }}{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS] [' + call.function.name }}{{- call.function.arguments | tojson }}{{- ']' }}{%- endfor %}{{- eos_token }}
{%- endif %}{%- endfor %}"""
GEMMA = """{{- bos_token }}{%- for tool in tools or [] %}{{- '<start_of_turn>user\\n' }}{{- tool | tojson }}
{{- '<end_of_turn>\\n' }}
{%- endfor %}{%- for message in messages %}{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\\n' + (message.name if message.name else '') + message.content | trim }}
{%- for call in message.tool_calls %}{{- call.function.name }}{{- call.function.arguments | tojson }}{%- endfor %}
{{- '<end_of_turn>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""


class Style(msgspec.Struct, frozen=True):
    """controls: its special tokens, the end of a turn first. words: added tokens that are not special."""

    template: str
    controls: tuple[str, ...]
    bos: str = ""
    words: tuple[str, ...] = ()
    spaces: bool = False  # of the SentencePiece kind, where a space is a character of words


RESERVED = tuple(f"<|reserved_special_token_{index}|>" for index in range(12))
STYLES = {
    "chatml": Style(CHATML, ("<|im_end|>", "<|im_start|>", "<|endoftext|>"), words=("<tool_call>", "</tool_call>")),
    "llama3": Style(
        LLAMA3,
        ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", *RESERVED),
        bos="<|begin_of_text|>",
    ),
    "mistral": Style(
        MISTRAL,
        ("</s>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
        bos="<s>",
        spaces=True,
    ),
    "gemma": Style(
        GEMMA, ("<end_of_turn>", "<start_of_turn>", "<bos>", "<eos>"), bos="<bos>", words=("<unused0>",), spaces=True
    ),
}
TEXT = [
    "The quick brown fox jumps over the lazy dog, and so do we; 0123456789 of them say hello to everybody. user system"
]


def build_chat_model(folder: Path, style: Style) -> Path:
    """Write a tokenizer with its template to `folder`, and as much of a model's configuration as a tokenizer asks for."""
    folder.mkdir(parents=True)
    _tokenizer(style).save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": style.controls[0]}
    settings |= {"bos_token": style.bos} if style.bos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "chat_template.jinja").write_text(style.template)
    return folder


def _tokenizer(style: Style) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if style.spaces:
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        steps: list[Any] = [normalizers.Replace(" ", "▁")]
        if style.bos == "<s>":  # of the two kinds there are, the one that writes a space before each text
            steps = [normalizers.Prepend("▁"), *steps]
        made.normalizer = normalizers.Sequence(steps)
        strip = [decoders.Strip(" ", 1, 0)] if style.bos == "<s>" else []
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
        # The names of control tokens stand in the vocabulary too, as SentencePiece puts them there.
        first = ["<unk>", *style.controls, *(f"<0x{byte:02X}>" for byte in range(256))]
        alphabet: list[str] = []
    else:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        first, alphabet = [], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=first, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXT, trainer)
    if first:  # the trainer has marked the bytes special too
        state = json.loads(made.to_str())
        state["added_tokens"] = []
        made = Tokenizer.from_str(json.dumps(state))
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in style.controls])
    made.add_tokens([AddedToken(name, normalized=False) for name in style.words])
    return made
