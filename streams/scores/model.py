"""Score by a sequence classifier.

Guarantee: the weights are safetensors and the rest is JSON; no pickle and no code of the folder runs.
"""

import importlib.util
import math
from collections.abc import Sequence

import msgspec

from infra.chain.processor import Verdict, score
from infra.model.model import load_classifier, load_tokenizer
from schemas import Experience, Message
from schemas.errors import ConfigError

CHARS_PER_TOKEN = 8  # read at most: more text than this per token is not even tokenized


@score(version=2)
class Model:
    """Probability of the class `label` by a classifier: softmax over its classes, or the sigmoid of its only output.

    folder: Folder with config.json, weights, tokenizer and chat template, relative to the worker's working directory, read at
    the start. label: Index of the class. -1 is the last. max_tokens: Maximum tokens of the conversation; the score keeps its
    end. It reads at most 8 characters of text per token.
    """

    def __init__(self, *, folder: str, label: int = -1, max_tokens: int = 2048) -> None:
        for library in ("torch", "transformers"):
            if importlib.util.find_spec(library) is None:
                raise ConfigError(f"the score model needs {library}: pip install 'headrace[reward-model]'")
        self.folder = folder
        self.label = label
        self.max_tokens = max_tokens
        self._logits, self._tokenizer = load_classifier(folder), load_tokenizer(folder)

    def __call__(self, experience: Experience) -> Verdict:
        """Raises ValueError for a verdict that is not finite."""
        text = ending(experience.messages, CHARS_PER_TOKEN * self.max_tokens)
        tokens = self._tokenizer.encode_chat(text)[-self.max_tokens :]
        if not tokens:
            return Verdict(reason="nothing to judge")
        return Verdict(value=probability(self._logits(tokens), self.label))


def ending(messages: Sequence[Message], max_chars: int) -> tuple[Message, ...]:
    """The messages, of which the first ones lose text until no more than `max_chars` characters are left."""
    left = max_chars
    kept: list[Message] = []
    for message in reversed(messages):
        start = max(0, len(message.content) - left)
        kept.append(msgspec.structs.replace(message, content=message.content[start:]) if start else message)
        left -= len(message.content) - start
    return tuple(reversed(kept))


def probability(logits: list[float], label: int) -> float:
    """The probability of one class.

    >>> probability([0.0], -1), probability([0.0, 0.0], 1)
    (0.5, 0.5)
    """
    if not all(math.isfinite(logit) for logit in logits):
        raise ValueError(f"logits: got {logits}, expected finite numbers")
    if len(logits) == 1:
        return 1.0 / (1.0 + math.exp(-max(-700.0, min(700.0, logits[0]))))
    if not -len(logits) <= label < len(logits):
        raise ValueError(f"label: got {label} of {len(logits)} classes")
    highest = max(logits)
    weights = [math.exp(logit - highest) for logit in logits]
    return weights[label] / sum(weights)
