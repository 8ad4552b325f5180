"""Requests to vLLM: tokens in; tokens, logprobs and exact versions out.

Calls of one loop turn with the same prompt, pictures and sampling (a group) become one vLLM request, which costs far
less; since it answers when its last member ends, only short ones are joined. Seeded and greedy calls are not.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import msgspec

from actors.engines.engine import Completion, EngineStopped, Sampling, Shaping
from actors.engines.request_images import RequestImages
from actors.engines.trace import Start, begin, spans
from actors.engines.vllm.adapters import Adapters, LoadedAdapter
from actors.engines.vllm.attempts import Attempts
from actors.engines.vllm.inputs import Input, probe_input, prompt_input
from actors.engines.vllm.routing import RoutedRows
from infra.model.vision import Vision

Waiting = asyncio.Future[Completion]
Label = tuple[str, int]  # of a load attempt, and the index of its first token
# vLLM's output, where each attempt's tokens begin in it, and the label it began under.
Sampled = tuple[Any, list[Label], str]
PROBE_PRIORITY = -1  # before every other request
NO_IMAGES = RequestImages()
NEVER = -100.0  # the lowest logit bias there is
MAX_BIASED = 1024  # tokens of a request that vLLM takes a bias for

_log = logging.getLogger(__name__)


class Requests:
    """Serves callers from one AsyncLLM. group_max_tokens: longest calls that are joined. adapters: where versions are adapters.
    vision: of a model that sees. routed_layers: whose experts completions have.
    """

    def __init__(
        self,
        llm: Any,
        attempts: Attempts,
        *,
        group_max_tokens: int,
        adapters: Adapters | None = None,
        vision: Vision | None = None,
        routed_layers: tuple[int, ...] = (),
        sampling_params: Callable[[Sampling, int], Any] | None = None,
        streamed_params: Callable[[Sampling], Any] | None = None,
    ) -> None:
        self._llm = llm
        self.attempts = attempts
        self.born = ""  # the label that requests which are sent now begin under
        self._adapters = adapters
        self._group_max_tokens = group_max_tokens
        self._vision = vision
        self._routed_layers = routed_layers
        self._loop = asyncio.get_running_loop()
        self._num_requests = 0
        self._entering: dict[tuple[tuple[int, ...], RequestImages, Sampling], list[Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._params = lru_cache(64)(sampling_params or self._sampling_params)
        self._streamed_params = lru_cache(64)(streamed_params or _streamed_params)
        self.num_running = 0
        self.special: frozenset[int] = frozenset()  # tokens without text

    async def close(self) -> None:
        """Cancel what runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, pictures: RequestImages = NO_IMAGES
    ) -> Completion:
        """Sample one continuation."""
        waiting: Waiting = self._loop.create_future()
        if not self._entering:
            self._loop.call_soon(self._enter)
        self._entering.setdefault((tuple(prompt), pictures, sampling), []).append(waiting)
        with self.counted():
            return await waiting

    @contextmanager
    def counted(self) -> Iterator[None]:
        """One request more runs inside the `with`."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    @asynccontextmanager
    async def opened(
        self, prompt: Sequence[int], sampling: Sampling, pictures: RequestImages
    ) -> AsyncIterator[tuple[Any, LoadedAdapter | None, Any, str]]:
        """A request of its own inside the `with`: the queue of its outputs, the adapter it runs under, if any, vLLM's
        account of it, and the label it began under.
        """
        born = self.born
        seen = await self._input(prompt, pictures, born)
        with self._weights() as one:
            queue = await self._submit(seen, self._streamed_params(sampling), one)
            state = self._llm.output_processor.request_states.get(queue.request_id)
            try:
                yield queue, one, state, born
            finally:
                try:
                    if queue.request_id in self._llm.output_processor.request_states:
                        await self._llm.abort(queue.request_id, internal=True)
                finally:
                    queue.close()
                    if one is not None:
                        one.running.discard(queue.request_id)

    def failure(self, error: Exception) -> Exception:
        """What a caller gets: EngineStopped where vLLM's process is gone."""
        return EngineStopped(f"vLLM's process is gone: {error}") if self._llm.errored else error

    async def submit_score(self, tokens: Sequence[int], one: LoadedAdapter | None = None) -> Callable[[], Any]:
        """Send tokens to be scored before every other request; the result's call awaits the logprobs. one: the adapter,
        which stays meanwhile, None for none.
        """
        seen = probe_input(tokens, self._vision, self._salt(self.born))
        queue = await self._submit(seen, _score_params(), one, priority=PROBE_PRIORITY)

        async def scores() -> tuple[float, ...]:
            flat = (await self._answer(queue, one)).prompt_logprobs
            if len(flat.logprobs) != len(tokens) - 1:
                raise RuntimeError(f"vLLM scored {len(flat.logprobs)} tokens, expected {len(tokens) - 1}")
            return tuple(flat.logprobs)

        return scores

    def _enter(self) -> None:
        entering, self._entering = self._entering, {}
        for (prompt, pictures, sampling), waiting in entering.items():
            free = sampling.seed is None and sampling.temperature > 0
            if free and sampling.max_tokens <= self._group_max_tokens:
                self._begin(prompt, pictures, sampling, waiting)
            else:
                for one in waiting:
                    self._begin(prompt, pictures, sampling, [one])

    def _begin(
        self, prompt: tuple[int, ...], pictures: RequestImages, sampling: Sampling, waiting: list[Waiting]
    ) -> None:
        waiting = [one for one in waiting if not one.done()]
        if not waiting:
            return
        task = self._loop.create_task(self._serve(prompt, pictures, sampling, waiting))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        left = len(waiting)

        def ended(_: Waiting) -> None:
            nonlocal left
            left -= 1
            if left == 0:  # all are answered, or all callers are gone
                task.cancel()

        for one in waiting:
            one.add_done_callback(ended)

    async def _serve(
        self, prompt: tuple[int, ...], pictures: RequestImages, sampling: Sampling, waiting: list[Waiting]
    ) -> None:
        try:
            sampled = await self._sample(prompt, pictures, sampling, len(waiting))
            for one, found in zip(waiting, sampled, strict=True):
                completion = await self._completion(prompt, pictures, sampling, found)
                if not one.done():
                    one.set_result(completion)
        except asyncio.CancelledError:
            for one in waiting:
                one.cancel()
            raise
        except Exception as error:  # vLLM's own kinds, all of them for the caller
            failure = self.failure(error)
            if failure is not error:
                failure.__cause__ = error
            for one in waiting:
                if not one.done():
                    one.set_exception(failure)

    async def _completion(
        self,
        prompt: Sequence[int],
        pictures: RequestImages,
        sampling: Sampling,
        sampled: Sampled,
    ) -> Completion:
        """The completion, once all its tokens are a proved policy's.

        Tokens of a refused one, and those after them, are cut off, and sampling goes on from there, as it does where an
        adapter had to leave; from the beginning where the answer is held to a schema, since vLLM's grammar takes what it is
        asked to go on from for the prompt.
        """
        tokens: list[int] = []
        logprobs: list[float] = []
        starts: list[Start] = []
        routed = RoutedRows(self._routed_layers)
        while True:
            output, labels, born = sampled
            kept = len(output.token_ids)
            for label, start in labels:
                if not self.attempts.is_proved(label) and not await self.attempts.accepted(label):
                    kept = start
                    break
                kv = self.attempts.kv_of(label, born)
                begin(starts, self.attempts.version_of(label), len(tokens) + start, kv)
            found = list(output.logprobs.logprobs) if output.logprobs else []
            if len(found) != len(output.token_ids):
                raise RuntimeError("vLLM returned a different number of tokens and logprobs")
            tokens += output.token_ids[:kept]
            logprobs += found[:kept]
            if kept:
                routed.add(getattr(output, "routed_experts", None), len(prompt) + len(tokens) - 1)
            stopped = bool(tokens) and tokens[-1] in sampling.stop
            if stopped or len(tokens) >= sampling.max_tokens:
                return Completion(
                    tokens=tuple(tokens),
                    logprobs=tuple(logprobs),
                    spans=spans(starts, len(tokens), sampling),
                    stopped=stopped,
                    routing=routed.all(),
                )
            if sampling.json_schema:
                _log.warning("answer_begun_again reason=schema tokens=%d", len(output.token_ids))
                tokens, logprobs, starts, routed = [], [], [], RoutedRows(self._routed_layers)
            left = msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - len(tokens))
            (sampled,) = await self._sample((*prompt, *tokens), pictures, left, 1)

    def _sampling_params(self, sampling: Sampling, num: int) -> Any:
        return _sampling_params(sampling, num, self.special)

    async def _sample(
        self, prompt: Sequence[int], pictures: RequestImages, sampling: Sampling, num: int
    ) -> list[Sampled]:
        born = self.born
        seen = await self._input(prompt, pictures, born)
        with self._weights() as one:
            queue = await self._submit(seen, self._params(sampling, num), one)
            answer = await self._answer(queue, one)
            for output in answer.outputs:
                check_end(output, one)
            return [(output, labels_of(output, one), born) for output in answer.outputs]

    def _weights(self) -> AbstractContextManager[LoadedAdapter | None]:
        """What a request runs under: an adapter, which stays meanwhile, or what vLLM says with each token."""
        return nullcontext() if self._adapters is None else self._adapters.used()

    async def _input(self, prompt: Sequence[int], pictures: RequestImages, born: str) -> Input:
        salt = self._salt(born)
        if not pictures.images:
            return prompt_input(prompt, pictures, None, salt)
        return await asyncio.to_thread(prompt_input, prompt, pictures, self._vision, salt)

    def _salt(self, born: str) -> str:
        return born if self.attempts.keeps else ""

    async def _submit(self, prompt: Input, params: Any, one: LoadedAdapter | None, *, priority: int = 0) -> Any:
        """Send a request. One that is cancelled meanwhile is aborted: vLLM must not have a request without its adapter."""
        sending = asyncio.ensure_future(self._send(prompt, params, one, priority))
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            queue = await sending
            await self._llm.abort(queue.request_id, internal=True)
            queue.close()
            if one is not None:
                one.running.discard(queue.request_id)
            raise

    async def _send(self, prompt: Input, params: Any, one: LoadedAdapter | None, priority: int) -> Any:
        self._num_requests += 1
        named = {} if one is None else {"lora_request": one.lora}
        queue = await self._llm.add_request(str(self._num_requests), prompt, params, priority=priority, **named)
        if self._adapters is not None and one is not None:
            await self._adapters.began(one, queue.request_id)
        return queue

    async def _answer(self, queue: Any, one: LoadedAdapter | None) -> Any:
        """The one output of a request; cancelling aborts it."""
        try:
            return await queue.get()
        except asyncio.CancelledError:
            await self._llm.abort(queue.request_id, internal=True)
            raise
        finally:
            queue.close()
            if one is not None:
                one.running.discard(queue.request_id)


def labels_of(output: Any, one: LoadedAdapter | None, state: Any = None) -> list[Label]:
    """Where the tokens of each load attempt begin. one: the adapter it ran under, if any. state: vLLM's account of a request
    that runs.
    """
    if one is not None:
        return [(one.label, 0)]
    if output.weight_versions is not None:
        return [(span.version, span.start) for span in output.weight_versions]
    return list(state.weight_version_starts) if state is not None else []


def check_end(output: Any, one: LoadedAdapter | None) -> None:
    """Raise RuntimeError for a request that vLLM ended before its time, unless its adapter had to leave."""
    if output.finish_reason not in ("stop", "length") and not (one is not None and one.is_leaving):
        raise RuntimeError(f"vLLM ended a request with {output.finish_reason!r}, expected 'stop' or 'length'")


def _sampling_params(sampling: Sampling, num: int, special: frozenset[int] = frozenset()) -> Any:
    """special: tokens without text, which vLLM's grammars take for the text of their names."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    held, shaping = bool(sampling.json_schema), sampling.shaping or Shaping()
    never = sorted(special.difference(sampling.stop))[:MAX_BIASED]
    return SamplingParams(
        n=num,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop),
        structured_outputs=StructuredOutputsParams(json=sampling.json_schema) if held else None,
        logit_bias={**dict(shaping.logit_bias), **(dict.fromkeys(never, NEVER) if held else {})} or None,
        frequency_penalty=shaping.frequency_penalty,
        presence_penalty=shaping.presence_penalty,
        repetition_penalty=shaping.repetition_penalty,
        top_k=shaping.top_k,
        min_p=shaping.min_p,
        ignore_eos=True,  # `stop` alone says where a sequence ends
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _streamed_params(sampling: Sampling) -> Any:
    from vllm.sampling_params import RequestOutputKind

    params = _sampling_params(sampling, 1)
    params.output_kind = RequestOutputKind.DELTA
    return params


def _score_params() -> Any:
    params = _sampling_params(Sampling(max_tokens=1), 1)
    params.prompt_logprobs = 0
    return params
