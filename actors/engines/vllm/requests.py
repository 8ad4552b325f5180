"""Requests to vLLM: tokens in; tokens, logprobs and exact versions out."""

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from actors.engines.engine import Chunk, Completion, EngineStopped, OnChunk, Sampling, Shaping
from actors.engines.trace import RequestImages, Start, Trace, begin, spans
from actors.engines.vllm.adapters import Adapters, Attempts, LoadedAdapter
from infra.model.vision import Prepared, Vision

Input = dict[str, Any]  # as vLLM's `add_request` takes it, past its own renderer
Label = tuple[str, int]  # of a load attempt, and the index of its first token
# vLLM's output, where each attempt's tokens begin in it, and the label it began under.
Sampled = tuple[Any, list[Label], str]
PROBE_PRIORITY = -1  # before every other request
NO_IMAGES = RequestImages()
NEVER = -100.0  # the lowest logit bias there is
MAX_BIASED = 1024  # tokens of a request that vLLM takes a bias for

_LAYER = re.compile(r"^(.*?\.\d+)\.")

_log = logging.getLogger(__name__)


class Requests:
    """Serves callers from one AsyncLLM. adapters: where versions are adapters. vision: of a model that sees."""

    def __init__(
        self,
        llm: Any,
        attempts: Attempts,
        *,
        adapters: Adapters | None = None,
        vision: Vision | None = None,
        sampling_params: Callable[[Sampling], Any] | None = None,
        streamed_params: Callable[[Sampling], Any] | None = None,
    ) -> None:
        self._llm = llm
        self.attempts = attempts
        self.born = ""  # the label that requests which are sent now begin under
        self._adapters = adapters
        self._vision = vision
        self._loop = asyncio.get_running_loop()
        self._num_requests = 0
        self._tasks: set[asyncio.Task[Completion]] = set()
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
        task = self._loop.create_task(self._completion(prompt, pictures, sampling))  # that `close` may cancel
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with self.counted():
            try:
                return await task
            except Exception as error:  # vLLM's own kinds
                failure = self.failure(error)
                if failure is error:
                    raise
                raise failure from error

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
        with self._weights() as adapter:
            queue = await self._submit(seen, self._streamed_params(sampling), adapter)
            state = self._llm.output_processor.request_states.get(queue.request_id)
            try:
                yield queue, adapter, state, born
            finally:
                try:
                    if queue.request_id in self._llm.output_processor.request_states:
                        await self._llm.abort(queue.request_id, internal=True)
                finally:
                    queue.close()
                    if adapter is not None:
                        adapter.running.discard(queue.request_id)

    def failure(self, error: Exception) -> Exception:
        """The error for a caller: EngineStopped where vLLM's process is gone, else the error itself."""
        return EngineStopped(f"vLLM's process is gone: {error}") if self._llm.errored else error

    async def submit_score(self, tokens: Sequence[int], adapter: LoadedAdapter | None = None) -> Callable[[], Any]:
        """Send tokens to be scored before every other request; the result's call awaits the logprobs. adapter: the adapter,
        which stays meanwhile, None for none.
        """
        seen = probe_input(tokens, self._vision, self._salt(self.born))
        queue = await self._submit(seen, _score_params(), adapter, priority=PROBE_PRIORITY)

        async def scores() -> tuple[float, ...]:
            flat = (await self._answer(queue, adapter)).prompt_logprobs
            if len(flat.logprobs) != len(tokens) - 1:
                raise RuntimeError(f"vLLM scored {len(flat.logprobs)} tokens, expected {len(tokens) - 1}")
            return tuple(flat.logprobs)

        return scores

    async def _completion(self, prompt: Sequence[int], pictures: RequestImages, sampling: Sampling) -> Completion:
        """The completion, once all its tokens are a proved policy's.

        Tokens of a refused policy and all later tokens are cut off, and sampling continues from there, as after the removal of
        an adapter. An answer under a schema starts again, since vLLM's grammar would treat the kept tokens as the prompt.
        """
        tokens: list[int] = []
        logprobs: list[float] = []
        starts: list[Start] = []
        while True:
            left = replace(sampling, max_tokens=sampling.max_tokens - len(tokens))
            output, labels, born = await self._sample((*prompt, *tokens), pictures, left)
            kept = len(output.token_ids)
            for label, start in labels:
                if not self.attempts.is_proved(label) and not await self.attempts.accepted(label):
                    kept = start
                    break
                kv = self.attempts.kv_version(label, born)
                begin(starts, self.attempts.label_version(label), len(tokens) + start, kv)
            found = list(output.logprobs.logprobs) if output.logprobs else []
            if len(found) != len(output.token_ids):
                raise RuntimeError("vLLM returned a different number of tokens and logprobs")
            tokens += output.token_ids[:kept]
            logprobs += found[:kept]
            stopped = bool(tokens) and tokens[-1] in sampling.stop
            if stopped or len(tokens) >= sampling.max_tokens:
                return Completion(
                    tokens=tuple(tokens),
                    logprobs=tuple(logprobs),
                    spans=spans(starts, len(tokens), sampling),
                    stopped=stopped,
                )
            if sampling.json_schema:
                _log.warning("answer_begun_again reason=schema tokens=%d", len(output.token_ids))
                tokens, logprobs, starts = [], [], []

    def _sampling_params(self, sampling: Sampling) -> Any:
        return _sampling_params(sampling, self.special)

    async def _sample(self, prompt: Sequence[int], pictures: RequestImages, sampling: Sampling) -> Sampled:
        born = self.born
        seen = await self._input(prompt, pictures, born)
        with self._weights() as adapter:
            queue = await self._submit(seen, self._params(sampling), adapter)
            (output,) = (await self._answer(queue, adapter)).outputs
            check_end(output, adapter)
            return output, attempt_labels(output, adapter), born

    def _weights(self) -> AbstractContextManager[LoadedAdapter | None]:
        """The adapter of a request, which stays meanwhile; None where vLLM labels each token instead."""
        return nullcontext() if self._adapters is None else self._adapters.used()

    async def _input(self, prompt: Sequence[int], pictures: RequestImages, born: str) -> Input:
        salt = self._salt(born)
        if not pictures.images:
            return prompt_input(prompt, pictures, None, salt)
        return await asyncio.to_thread(prompt_input, prompt, pictures, self._vision, salt)

    def _salt(self, born: str) -> str:
        return born if self.attempts.keeps else ""

    async def _submit(self, prompt: Input, params: Any, adapter: LoadedAdapter | None, *, priority: int = 0) -> Any:
        """Send a request. One that is cancelled meanwhile is aborted: vLLM must not have a request without its adapter."""
        sending = asyncio.ensure_future(self._send(prompt, params, adapter, priority))
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            queue = await sending
            await self._llm.abort(queue.request_id, internal=True)
            queue.close()
            if adapter is not None:
                adapter.running.discard(queue.request_id)
            raise

    async def _send(self, prompt: Input, params: Any, adapter: LoadedAdapter | None, priority: int) -> Any:
        self._num_requests += 1
        named = {} if adapter is None else {"lora_request": adapter.lora}
        queue = await self._llm.add_request(str(self._num_requests), prompt, params, priority=priority, **named)
        if self._adapters is not None and adapter is not None:
            await self._adapters.began(adapter, queue.request_id)
        return queue

    async def _answer(self, queue: Any, adapter: LoadedAdapter | None) -> Any:
        """The one output of a request; cancelling aborts it."""
        try:
            return await queue.get()
        except asyncio.CancelledError:
            await self._llm.abort(queue.request_id, internal=True)
            raise
        finally:
            queue.close()
            if adapter is not None:
                adapter.running.discard(queue.request_id)


def attempt_labels(output: Any, adapter: LoadedAdapter | None, state: Any = None) -> list[Label]:
    """Labels of load attempts, each with the index of its first token. state: vLLM's account of a running request."""
    if adapter is not None:
        return [(adapter.label, 0)]
    if output.weight_versions is not None:
        return [(span.version, span.start) for span in output.weight_versions]
    return list(state.weight_version_starts) if state is not None else []


def check_end(output: Any, adapter: LoadedAdapter | None) -> None:
    """Raise RuntimeError for a request that vLLM ended before its time, unless its adapter had to leave."""
    if output.finish_reason not in ("stop", "length") and not (adapter is not None and adapter.is_leaving):
        raise RuntimeError(f"vLLM ended a request with {output.finish_reason!r}, expected 'stop' or 'length'")


def _sampling_params(sampling: Sampling, special: frozenset[int] = frozenset()) -> Any:
    """special: tokens without text, which vLLM's grammars take for the text of their names."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    held, shaping = bool(sampling.json_schema), sampling.shaping or Shaping()
    never = sorted(special.difference(sampling.stop))[:MAX_BIASED]
    return SamplingParams(
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

    params = _sampling_params(sampling)
    params.output_kind = RequestOutputKind.DELTA
    return params


def _score_params() -> Any:
    params = _sampling_params(Sampling(max_tokens=1))
    params.prompt_logprobs = 0
    return params


def layer_name(name: str) -> str:
    """Name of the layer of a tensor, or of its module outside the layers.

    >>> layer_name("model.layers.3.self_attn.q_proj.weight")
    'model.layers.3'
    >>> layer_name("model.multi_modal_projector.linear_1.bias")
    'model.multi_modal_projector.linear_1'
    """
    found = _LAYER.match(name)
    return found[1] if found else name.rpartition(".")[0]


def prompt_input(tokens: Sequence[int], pictures: RequestImages, vision: Vision | None, salt: str = "") -> Input:
    """A prompt with its pictures. Prepares them, so call it from a thread if there are any. salt: salt of a prompt without
    pictures.
    """
    if vision is None or not pictures.images:
        return _text_input(tokens, salt)
    places = vision.places(tokens, len(pictures.images))
    return _seen_input(tokens, places, pictures.prepared(vision), vision.num_places)


def probe_input(tokens: Sequence[int], vision: Vision | None, salt: str = "") -> Input:
    """A sequence that is scored without its images, see `Vision.probe`."""
    if vision is None:
        return _text_input(tokens, salt)
    places, pictures = vision.probe(tokens)
    return _seen_input(tokens, places, pictures, vision.num_places) if len(pictures) else _text_input(tokens, salt)


def _text_input(tokens: Sequence[int], salt: str) -> Input:
    return {"type": "token", "prompt_token_ids": list(tokens), **({"cache_salt": salt} if salt else {})}


def _seen_input(
    tokens: Sequence[int], places: npt.NDArray[np.int64], pictures: Sequence[Prepared] | Prepared, num_places: int
) -> Input:
    """places: as `Vision.places` gives them, picture after picture."""
    from vllm.multimodal.inputs import PlaceholderRange

    starts = [int(start) for start in places[::num_places]]
    return {
        "type": "multimodal",
        "prompt_token_ids": list(tokens),
        "mm_kwargs": {"image": [_item(picture) for picture in pictures]},
        "mm_hashes": {"image": [_name(picture) for picture in pictures]},
        "mm_placeholders": {"image": [PlaceholderRange(offset=start, length=num_places) for start in starts]},
    }


def _item(picture: Prepared) -> Any:
    import torch
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

    def element(data: torch.Tensor, *, keep_on_cpu: bool = False) -> MultiModalFieldElem:
        return MultiModalFieldElem(data=data, field=MultiModalBatchedField(keep_on_cpu=keep_on_cpu))

    return MultiModalKwargsItem(
        pixel_values=element(torch.from_numpy(picture)),
        num_image_patches=element(torch.tensor(1), keep_on_cpu=True),
    )


def _name(picture: Prepared) -> str:
    return hashlib.blake2b(repr(picture.shape).encode() + picture.tobytes(), digest_size=16).hexdigest()


async def stream(
    requests: Requests, prompt: Sequence[int], sampling: Sampling, on_chunk: OnChunk, pictures: RequestImages
) -> Completion:
    """Sample one continuation, calling `on_chunk` with proved tokens."""
    trace = Trace(sampling)
    with requests.counted():
        while True:
            left = replace(sampling, max_tokens=sampling.max_tokens - len(trace.tokens))
            try:
                async with requests.opened((*prompt, *trace.tokens), left, pictures) as opened:
                    if await _follow(requests, opened, trace, on_chunk):
                        return trace.completion()
            except Exception as error:
                failure = requests.failure(error)
                if failure is error:
                    raise
                raise failure from error


async def whole(
    requests: Requests, prompt: Sequence[int], sampling: Sampling, on_chunk: OnChunk | None, pictures: RequestImages
) -> Completion:
    """Sample one continuation that may have to begin again, so nothing of it is handed over before its end."""
    completion = await requests.generate(prompt, sampling, pictures)
    if on_chunk is not None:
        for span in completion.spans:
            cut = slice(span.start, span.stop)
            on_chunk(Chunk(completion.tokens[cut], completion.logprobs[cut], span.version, span.kv))
    return completion


async def _follow(
    requests: Requests, opened: tuple[Any, LoadedAdapter | None, Any, str], trace: Trace, on_chunk: OnChunk
) -> bool:
    """Take outputs until the request ends (True), shows tokens of a refused policy or is to go on elsewhere (False)."""
    queue, adapter, state, born = opened
    num_taken = 0
    while True:
        answer = await queue.get()
        (output,) = answer.outputs
        tokens, logprobs = list(output.token_ids), list(output.logprobs.logprobs) if output.logprobs else []
        if len(tokens) != len(logprobs):
            raise RuntimeError("vLLM returned a different number of tokens and logprobs")
        runs = _runs(attempt_labels(output, adapter, state), num_taken, num_taken + len(tokens))
        for label, start, stop in runs:
            if not requests.attempts.is_proved(label) and not await requests.attempts.accepted(label):
                return False
            version, kv = requests.attempts.label_version(label), requests.attempts.kv_version(label, born)
            cut = slice(start - num_taken, stop - num_taken)
            for token, logprob in zip(tokens[cut], logprobs[cut], strict=True):
                trace.add(token, logprob, version, kv)
            on_chunk(Chunk(tuple(tokens[cut]), tuple(logprobs[cut]), version, -1 if kv == version else kv))
        num_taken += len(tokens)
        if answer.finished:
            check_end(output, adapter)
            return output.finish_reason in ("stop", "length")


def _runs(labels: Sequence[Label], start: int, stop: int) -> list[tuple[str, int, int]]:
    """Runs of one label each within start to stop.

    >>> _runs([("3.1", 0), ("4.2", 5)], 3, 7)
    [('3.1', 3, 5), ('4.2', 5, 7)]
    """
    ends = [begin for _, begin in labels[1:]] + [stop]
    runs = [(label, max(begin, start), min(end, stop)) for (label, begin), end in zip(labels, ends, strict=True)]
    found = [run for run in runs if run[1] < run[2]]
    if sum(end - begin for _, begin, end in found) != stop - start:
        raise EngineStopped("vLLM does not say which weights sampled a streamed token")
    return found
