"""The engine: turns prompts into tokens under a policy that can be replaced while it generates.

Guarantees (one contract, every engine): a recorded logprob is the policy's own, of the version its span names, at the
sampling temperature; `load` drops no request; a refused policy leaves the old one serving.

At a load an engine computes the keys and values of running requests again, or keeps them (`KvMode`, its option `kv`). Kept
keys and values are of older weights: a logprob is then of the distribution that was sampled from, the version names the weights
that sampled, and the span names the oldest version of the keys and values. A request that begins after a load uses no keys and
values from before it, and a refused policy leaves nothing behind.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np

from infra.policies.policy import Policy
from infra.store.images import Pixels
from schemas import Span

KvMode = Literal["rebuild", "keep"]
LEAST_TEMPERATURE = 0.01  # vLLM's; logits over much less are infinite


class Shaping(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of the policy's distribution, as vLLM defines them; the defaults change nothing.

    frequency_penalty, presence_penalty: subtracted from the logit of a sampled token, for each occurrence or once.
    repetition_penalty: divides positive logits of tokens of the prompt and the answer, and multiplies negative logits.
    logit_bias: added to logits, by token id. top_k: number of likeliest tokens to keep, 0 for all. min_p: least probability of
    a kept token, as a share of the likeliest token's.
    """

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_k: int = 0
    min_p: float = 0.0


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a request.

    temperature: 0 is greedy; greedy spans have ratio False. A temperature between 0 and 0.01 becomes 0.01, as in vLLM.
    max_tokens: maximum new tokens. stop: token ids that end the sequence; the id is kept as its last token. seed: seed of the
    draw, None for a random one. top_p: nucleus sampling below 1; such spans have ratio False, because a truncated distribution
    is not the policy's own. json_schema: JSON schema, as JSON, that the text must match unless max_tokens cuts it; it needs
    stop tokens. Its recorded logprobs are of the policy restricted to allowed tokens, so such spans have ratio False. shaping:
    further changes of the distribution by the client; such spans have ratio False.
    """

    max_tokens: int
    temperature: float = 1.0
    stop: tuple[int, ...] = ()
    seed: int | None = None
    top_p: float = 1.0
    json_schema: str = ""
    shaping: Shaping | None = None

    def __post_init__(self) -> None:
        if 0 < self.temperature < LEAST_TEMPERATURE:
            msgspec.structs.force_setattr(self, "temperature", LEAST_TEMPERATURE)

    @property
    def has_ratio(self) -> bool:
        """True if tokens are drawn from the policy's own distribution, so that their logprobs are behaviour probabilities."""
        return self.temperature > 0 and self.top_p == 1.0 and not self.json_schema and self.shaping is None


class Chunk(msgspec.Struct, frozen=True):
    """Tokens of a request, sampled by one version.

    tokens: token ids in order. logprobs: logprob of each token. version: policy version. kv: as in Span.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    kv: int = -1


OnChunk = Callable[[Chunk], None]


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens with their logprobs and versions.

    tokens: new token ids. logprobs: logprob of each token. spans: spans, counted from the first new token. stopped: True if a
    stop token ended the sequence, False at max_tokens.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    stopped: bool


class LoadReport(msgspec.Struct, frozen=True):
    """Cost of a hot reload.

    pause_ms: milliseconds without sampling. probe_abs_max: largest difference of a probe's logprob, in nats.
    """

    pause_ms: float
    probe_abs_max: float


class EngineStopped(RuntimeError):
    """The engine was closed or its model process is gone. All requests fail, so the role must exit."""


class ContextFull(ValueError):
    """Prompt and max_tokens together exceed the engine's sequence length."""


class SchemaRefused(ValueError):
    """The engine cannot enforce this JSON schema: it has unknown parts, or the vocabulary cannot spell it."""


class SchemaNotTried(SchemaRefused):
    """The engine did not try the schema; a later request with it may pass."""


class Engine(Protocol):
    """One model being sampled. Every engine is built by `Name(model=<folder>, seed=<int>, **its own options)`.

    `version` changes exactly once per accepted `load`, before it returns; loads are made one at a time (a second one
    waits). Errors of the model process reach every caller; none is swallowed.
    """

    @property
    def version(self) -> int:
        """Policy version that samples new tokens."""

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence, including the prompt. Known after the start."""

    @property
    def num_running(self) -> int:
        """Number of running requests."""

    async def start(self) -> None:
        """Load the model folder as version 0 and warm up."""

    async def close(self) -> None:
        """Stop; running requests are cancelled."""

    async def prepare(self, json_schema: str) -> None:
        """Compile a schema off the event loop; `generate` also does it. Raises SchemaRefused."""

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_chunk: OnChunk | None = None,
        images: Sequence[Pixels] = (),
    ) -> Completion:
        """Sample one continuation. Cancelling the call frees the request.

        images: pixels for the image tokens of the prompt, in order. Raises ValueError if their number differs, or the
        model or the engine takes no images.
        on_chunk: called in the caller's event loop with the tokens sampled since its last call, in order and before the
        completion returns; together the chunks are the completion. Its errors propagate.
        """

    async def load(self, policy: Policy) -> LoadReport:
        """Switch to `policy` while requests run; they continue in a new span. After PolicyRefused the old policy stays."""

    async def score_tokens(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Logprob (temperature 1) of every token but the first under the policy that samples now; at image tokens are
        the made-up pictures of `infra.model.vision`, as they do in a policy's probe."""


def shaped_logits(
    logits_V: np.ndarray, sampling: Sampling, prompt: Sequence[int], sampled: Sequence[int]
) -> np.ndarray:
    """Logits over the temperature, float64; bias and penalties come before it, top_k and min_p after it, as in vLLM."""
    logits_V, shaping = logits_V.astype(np.float64), sampling.shaping
    if shaping is None:
        return logits_V / (sampling.temperature or 1.0)
    for token, bias in shaping.logit_bias:
        logits_V[token] += bias
    seen = np.unique(np.asarray([*prompt, *sampled]))
    logits_V[seen] *= np.where(logits_V[seen] > 0, 1 / shaping.repetition_penalty, shaping.repetition_penalty)
    if sampled:
        tokens, counts = np.unique(np.asarray(sampled), return_counts=True)
        logits_V[tokens] -= counts * shaping.frequency_penalty + shaping.presence_penalty
    logits_V /= sampling.temperature or 1.0
    if shaping.min_p:
        logits_V[logits_V < logits_V.max() + np.log(shaping.min_p)] = -np.inf
    if 0 < shaping.top_k < len(logits_V):
        logits_V[logits_V < np.partition(logits_V, -shaping.top_k)[-shaping.top_k]] = -np.inf
    return logits_V


def nucleus(logprobs_V: np.ndarray, top_p: float) -> np.ndarray:
    """Logprobs of the smallest set with `top_p` of the mass, normalized; the rest is -inf."""
    if top_p == 1.0:
        return logprobs_V
    order = np.argsort(-logprobs_V)
    sorted_V = np.exp(logprobs_V[order])
    kept = order[np.cumsum(sorted_V) - sorted_V < top_p]
    cut_V = np.full_like(logprobs_V, -np.inf)
    cut_V[kept] = logprobs_V[kept]
    return log_softmax(cut_V)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    normalized: np.ndarray = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return normalized
