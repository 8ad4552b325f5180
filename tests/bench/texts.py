"""Records for the benchmarks of the log: groups of answers cut from real prose and code, with logprobs like a model's.

The prose is docstrings of Python's standard library, the code its source. Token ids number word pieces; frequent pieces have
low ids, as in a trained vocabulary.
"""

import functools
import inspect
import re
import sys
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from schemas import Message

VOCABULARY = 151_643
CODE_CHARS = 1_000_000


class RawAnswer(msgspec.Struct, frozen=True):
    """One answer as an engine returns it. id: id of the experience. prompt, response: token ids. logprobs: log-probabilities of
    the response. messages: the conversation, in text.
    """

    id: str
    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    messages: tuple[Message, ...]


def samples(num_episodes: int, num_prompt: int, num_response: int, seed: int = 0) -> list[RawAnswer]:
    """A group: one prompt, `num_episodes` responses."""
    pieces, ids = _corpus()
    random = np.random.default_rng(seed)

    def passage(length: int) -> tuple[list[int], str]:
        start = int(random.integers(0, len(pieces) - length))
        part = pieces[start : start + length]
        return [ids[piece] for piece in part], "".join(part)

    prompt, question = passage(num_prompt)
    group = []
    for episode in range(num_episodes):
        response, answer = passage(num_response)
        logprobs = _sampled_logprobs(num_response, random)
        messages = (Message("user", question), Message("assistant", answer))
        group.append(RawAnswer(f"task-1.0.0-{episode}-0", prompt, response, logprobs, messages))
    return group


def _sampled_logprobs(count: int, random: np.random.Generator) -> list[float]:
    """Logprobs of sampled tokens from a float32 log-softmax, as an engine computes them.

    The best token leads by max(0, N(8, 5)), which leaves a little over half of all tokens above p = 0.99.
    """
    logits = random.normal(0, 2, (count, 256)).astype(np.float32)
    logits[:, 0] = logits.max(axis=1) + np.maximum(random.normal(8, 5, count), 0)
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    chosen = (logprobs + random.gumbel(size=logprobs.shape)).argmax(axis=1)
    sampled: list[float] = np.minimum(logprobs[np.arange(count), chosen], 0).tolist()
    return sampled


@functools.cache
def _corpus() -> tuple[list[str], dict[str, int]]:
    """Word pieces in their order, and an id for each."""
    modules = [sys.modules[name] for name in sorted(sys.modules) if name in sys.stdlib_module_names]
    texts = []
    for module in modules:
        texts.append(module.__doc__ or "")
        for _, member in inspect.getmembers(module, inspect.isroutine):
            texts.append(inspect.getdoc(member) or "")
    room = CODE_CHARS
    for module in modules:
        source = getattr(module, "__file__", None) or ""
        if room > 0 and source.endswith(".py"):
            texts.append(Path(source).read_text(errors="replace")[:room])
            room -= len(texts[-1])
    pieces = re.findall(r" ?\w{1,7}|\s+|[^\w\s]", "\n\n".join(texts))
    ranks = {piece: rank for rank, (piece, _) in enumerate(Counter(pieces).most_common())}
    spread = VOCABULARY / (len(ranks) + 1) ** 2
    return pieces, {piece: rank + int(spread * rank * rank) for piece, rank in ranks.items()}
