"""Text to the policy's own token ids, without transformers and so without torch: for roles that load no model.

Only `tokenizer.json` and the names of the end token are read; text alone is spelled, no chat template is applied.

Guarantee: no text gives ids of control tokens (see `infra.model.controls`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from infra.model.controls import Controls
from schemas.errors import ConfigError

FILE = "tokenizer.json"
MAX_HALVES = 8  # ids that may have to be looked at together


class Speller(Protocol):
    @property
    def end(self) -> int:
        """The id that ends an answer."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, nothing put before or after it."""


class TokenizerFile:
    """The tokenizer in a model folder (or of a model in the local Hugging Face cache). Raises ConfigError."""

    def __init__(self, model: str) -> None:
        path = _file(model, FILE)
        self._tokenizer = _opened(path)
        name = _end_name(_file(model, "tokenizer_config.json"))
        end = self._tokenizer.token_to_id(name)
        if end is None:
            raise ConfigError(f"policy.model: {path} knows no token {name!r}; set eos_token in tokenizer_config.json")
        self._end = int(end)
        self._controls = Controls(self._tokenizer, also=(name,))

    @property
    def end(self) -> int:
        return self._end

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, nothing put before or after it."""
        return self._controls.encode(text)


class TokenTexts:
    """Texts of token ids, by the tokenizer in a model folder (or of a model in the cache). Raises ConfigError."""

    def __init__(self, model: str) -> None:
        self._tokenizer = _opened(_file(model, FILE))

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each id; of ids that spell a character only together the last has it, and the others ""."""
        found, waiting = [], []
        for token in ids:
            waiting.append(token)
            text = self._tokenizer.decode(waiting, skip_special_tokens=False)
            is_half = text.endswith("\ufffd") and len(waiting) < MAX_HALVES
            found.append("" if is_half else text)
            if not is_half:
                waiting = []
        return found


def _opened(path: Path) -> Any:
    """The tokenizer in a file. Raises ConfigError."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"policy.model: {path} cannot be read as a tokenizer: {error}") from error


def _file(model: str, name: str) -> Path:
    if Path(model).is_dir():
        path: str | None = str(Path(model) / name)
    else:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, name)
        path = found if isinstance(found, str) else None
    if path is None or not Path(path).is_file():
        raise ConfigError(f"policy.model: {model!r} has no {name} here, expected a model folder or a name in the cache")
    return Path(path)


def _end_name(path: Path) -> str:
    """The end token in a tokenizer_config.json: a string, or an object with its content."""
    try:
        named = msgspec.json.decode(path.read_bytes()).get("eos_token")
    except (msgspec.DecodeError, AttributeError) as error:
        raise ConfigError(f"policy.model: {path} is not a JSON object: {error}") from error
    name = named.get("content") if isinstance(named, dict) else named
    if not isinstance(name, str):
        raise ConfigError(f"policy.model: {path} names no end token; set eos_token in it")
    return name
