"""Engine for tests and examples: a bigram table in numpy.

It keeps the whole engine contract: recorded logprobs are the table's, a load takes effect between two tokens, and the same seed
gives the same tokens. `script` replaces the sampled tokens; their logprobs stay the table's. For a JSON schema its tokens are
bytes, and it follows a script as far as the schema allows. A bigram has no KV cache; a cache "kept" over a load is only the
number of the version under which a request began.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from actors.engines.checks import ProbeGate, check_images, check_probe_sequences, check_request, check_tensors
from actors.engines.engine import Completion, KvMode, LoadReport, OnChunk, Sampling, log_softmax, nucleus, shaped_logits
from actors.engines.grammar import STUCK, Grammars, Matcher, byte_vocabulary
from actors.engines.trace import Trace
from infra.policies.policy import Policy
from infra.policies.tensors import Tensor, from_numpy, load_tensors, to_numpy
from infra.store.images import Pixels

TENSOR = "bigram.weight"
Script = Callable[[tuple[int, ...]], Sequence[int]]


class ScriptedEngine:
    """Engine for tests: samples token t+1 from softmax(bigram[t] / temperature).

    model: Folder whose model.safetensors holds `bigram.weight` [V, V] float32. "" draws a table from the seed. script: Function
    from a prompt to the tokens of its answer, cut to max_tokens and at the first stop token. token_s: Seconds between two
    tokens, counted from the request on; a late token delays no other. num_vocabulary: Number of token ids, V, of a drawn table.
    max_model_len: Maximum tokens of prompt and answer. kv: Whether spans report keys and values kept over a reload.
    """

    def __init__(
        self,
        *,
        model: str = "",
        seed: int = 0,
        num_vocabulary: int = 128,
        max_model_len: int = 4096,
        script: Script | None = None,
        token_s: float = 0.0,
        kv: KvMode = "rebuild",
    ) -> None:
        self._kv = kv
        self._model = model
        self._seed = seed
        self._num_vocabulary = num_vocabulary
        self.max_model_len = max_model_len
        self._script = script
        self._token_s = token_s
        self._table = np.zeros((0, 0), np.float32)
        self.version = 0
        self._gate = ProbeGate("float32")
        self._num_requests = 0
        self._running: set[asyncio.Task[Completion]] = set()
        self._loading = asyncio.Lock()
        self._grammars = Grammars(lambda: byte_vocabulary(self._num_vocabulary))

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The policy that samples now."""
        return {TENSOR: from_numpy(self._table)}

    async def start(self) -> None:
        """Read or draw the table; it is version 0."""
        if self._model:
            data = await asyncio.to_thread((Path(self._model) / "model.safetensors").read_bytes)
            self._table = to_numpy(load_tensors(data)[TENSOR])
        else:
            random = np.random.default_rng(self._seed)
            self._table = random.normal(size=(self._num_vocabulary, self._num_vocabulary)).astype(np.float32)
        self._num_vocabulary = len(self._table)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._grammars.close()

    async def prepare(self, json_schema: str) -> None:
        await self._grammars.compiled(json_schema)

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_chunk: OnChunk | None = None,
        images: Sequence[Pixels] = (),
    ) -> Completion:
        check_images(None, prompt, images)
        check_request(prompt, sampling, self._num_vocabulary, self.max_model_len)
        task = asyncio.ensure_future(self._sample(tuple(prompt), sampling, on_chunk))
        self._running.add(task)
        try:
            return await task
        finally:
            self._running.discard(task)
            task.cancel()

    async def _sample(self, prompt: tuple[int, ...], sampling: Sampling, on_chunk: OnChunk | None) -> Completion:
        seed = (self._seed, self._num_requests) if sampling.seed is None else (sampling.seed,)
        self._num_requests += 1
        random = np.random.default_rng(seed)
        script = list(self._script(prompt)) if self._script else None
        trace = Trace(sampling)
        matcher = await self._grammars.matcher(sampling)
        last, done = prompt[-1], False
        began = self.version
        clock = asyncio.get_running_loop().time
        begin_s = clock()
        while not done:
            due_s = begin_s + (len(trace.tokens) + 1) * self._token_s
            await asyncio.sleep(max(0.0, due_s - clock()) if self._token_s else 0.0)
            row = self._row(last, matcher, prompt, trace)
            if script is not None and row[script[len(trace.tokens)]] == -np.inf:
                script = None
            if script is not None:
                last = script[len(trace.tokens)]
            elif sampling.temperature == 0:
                last = int(row.argmax())
            else:
                last = min(int(np.exp(row).cumsum().searchsorted(random.random())), len(row) - 1)
            done = trace.add(last, float(row[last]), self.version, began if self._kv == "keep" else -1)
            if matcher is not None:
                matcher.take(last)
                if matcher.stuck:
                    raise RuntimeError(STUCK)
            done = done or (script is not None and len(trace.tokens) == len(script))
            if on_chunk is not None:
                for chunk in trace.take_chunks():
                    on_chunk(chunk)
        return trace.completion()

    def _row(self, last: int, matcher: Matcher | None, prompt: tuple[int, ...], trace: Trace) -> np.ndarray:
        """Log probabilities of the tokens that may follow `last`."""
        logits = shaped_logits(self._table[last], trace.sampling, prompt, trace.tokens)
        if matcher is not None:
            logits = np.where(matcher.allowed(), logits, -np.inf)
        return nucleus(log_softmax(logits), trace.sampling.top_p)

    async def load(self, policy: Policy) -> LoadReport:
        async with self._loading:
            check_tensors(policy, {TENSOR: self._table.shape})
            check_probe_sequences(policy.probe, self._num_vocabulary, self.max_model_len)
            begin = time.perf_counter()
            table = to_numpy(policy.tensors[TENSOR])
            scores = [bigram_logprobs(table, tokens) for tokens in policy.probe.sequences] if policy.probe else []
            difference = self._gate.check(policy, scores)
            self._table, self.version = table, policy.version
            return LoadReport((time.perf_counter() - begin) * 1e3, difference)

    async def score_tokens(self, tokens: Sequence[int]) -> tuple[float, ...]:
        return bigram_logprobs(self._table, tokens)


def bigram_logprobs(table: np.ndarray, tokens: Sequence[int]) -> tuple[float, ...]:
    """Logprob of every token but the first under a table of bigrams, [V, V]."""
    rows = log_softmax(table[np.asarray(tokens[:-1], np.int64)])
    return tuple(float(row[token]) for row, token in zip(rows, tokens[1:], strict=True))
