"""Requests to vLLM: tokens in; tokens, logprobs and exact versions out."""

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from actors.engines.engine import Completion, EngineStopped, OnChunk, Sampling, Shaping
from actors.engines.trace import RequestImages, Trace
from actors.engines.vllm.adapters import Adapters, Attempts, LoadedAdapter
from infra.model.vision import Prepared, Vision

Input = dict[str, Any]  # as vLLM's `add_request` takes it, past its own renderer
Label = tuple[str, int]  # of a load attempt, and the index of its first token
PROBE_PRIORITY = -1  # before every other request
NO_IMAGES = RequestImages()
NEVER = -100.0  # the lowest logit bias there is
MAX_BIASED = 1024  # tokens of a request that vLLM takes a bias for

_LAYER = re.compile(r"^(.*?\.\d+)\.")

_log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """A request that runs: the queue of its outputs, the adapter it runs under, if any, vLLM's account of it, and the label it
    began under.
    """

    queue: Any
    adapter: LoadedAdapter | None
    state: Any
    born: str


class Requests:
    """Serves callers from one AsyncLLM. adapters: set if versions are adapters. vision: set if the model takes images."""

    def __init__(
        self,
        llm: Any,
        attempts: Attempts,
        *,
        adapters: Adapters | None = None,
        vision: Vision | None = None,
        params: Callable[[Sampling, bool], Any] | None = None,
    ) -> None:
        self._llm = llm
        self.attempts = attempts
        self.born = ""  # the label that requests which are sent now begin under
        self._adapters = adapters
        self._vision = vision
        self._loop = asyncio.get_running_loop()
        self._num_requests = 0
        self._tasks: set[asyncio.Task[Completion]] = set()
        self._params = lru_cache(64)(params or self._sampling_params)
        self.num_running = 0
        self.special: frozenset[int] = frozenset()  # tokens without text

    async def close(self) -> None:
        """Cancel the running requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        on_chunk: OnChunk | None = None,
        pictures: RequestImages = NO_IMAGES,
    ) -> Completion:
        """Sample one continuation, calling `on_chunk` with proved tokens: as they come, or at the end of an answer with a
        schema.
        """
        task = self._loop.create_task(self._sample(prompt, sampling, on_chunk, pictures))  # that `close` may cancel
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.num_running += 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()  # it ends by itself, once vLLM has the request and has let it go
            raise
        except Exception as error:  # vLLM's own kinds
            failure = self.failure(error)
            if failure is error:
                raise
            raise failure from error
        finally:
            self.num_running -= 1

    async def _sample(
        self, prompt: Sequence[int], sampling: Sampling, on_chunk: OnChunk | None, pictures: RequestImages
    ) -> Completion:
        """Tokens of a refused policy and all later tokens are cut off, and sampling continues from there, as after the removal
        of an adapter. An answer under a schema starts again, since vLLM's grammar would treat the kept tokens as the prompt.
        """
        trace, tell = Trace(sampling), None if sampling.json_schema else on_chunk
        while True:
            left = replace(sampling, max_tokens=sampling.max_tokens - len(trace.tokens))
            params = self._params(left, tell is not None)
            async with self._opened((*prompt, *trace.tokens), params, pictures) as opened:
                if await self._follow(opened, trace, tell):
                    break
            if sampling.json_schema:
                _log.warning("answer_begun_again reason=schema tokens=%d", len(trace.tokens))
                trace = Trace(sampling)
        if on_chunk is not None:
            for chunk in trace.take_chunks():
                on_chunk(chunk)
        return trace.completion()

    @asynccontextmanager
    async def _opened(self, prompt: Sequence[int], params: Any, pictures: RequestImages) -> AsyncIterator[Opened]:
        """A request inside the `with`."""
        born = self.born
        seen = await self._input(prompt, pictures, born)
        with nullcontext() if self._adapters is None else self._adapters.used() as adapter:
            queue = await self._submit(seen, params, adapter)
            state = self._llm.output_processor.request_states.get(queue.request_id)
            try:
                yield Opened(queue, adapter, state, born)
            finally:
                try:
                    if queue.request_id in self._llm.output_processor.request_states:
                        await self._llm.abort(queue.request_id, internal=True)
                finally:
                    queue.close()
                    if adapter is not None:
                        adapter.running.discard(queue.request_id)

    async def _follow(self, opened: Opened, trace: Trace, tell: OnChunk | None) -> bool:
        """Take outputs until the request ends (True), shows tokens of a refused policy or is to go on elsewhere (False)."""
        num_taken = 0
        while True:
            answer = await opened.queue.get()
            (output,) = answer.outputs
            tokens, logprobs = list(output.token_ids), list(output.logprobs.logprobs) if output.logprobs else []
            if len(tokens) != len(logprobs):
                raise RuntimeError("vLLM returned a different number of tokens and logprobs")
            runs = _runs(_labels(output, opened), num_taken, num_taken + len(tokens))
            for label, start, stop in runs:
                if not await self.attempts.accepted(label):
                    return False
                version, kv = self.attempts.label_version(label), self.attempts.kv_version(label, opened.born)
                cut = slice(start - num_taken, stop - num_taken)
                for token, logprob in zip(tokens[cut], logprobs[cut], strict=True):
                    trace.add(token, logprob, version, kv)
                if tell is not None:
                    for chunk in trace.take_chunks():
                        tell(chunk)
            num_taken += len(tokens)
            if answer.finished:
                check_end(output, opened.adapter)
                return output.finish_reason in ("stop", "length")

    def failure(self, error: Exception) -> Exception:
        """The error for a caller: EngineStopped where vLLM's process is gone, else the error itself."""
        return EngineStopped(f"vLLM's process is gone: {error}") if self._llm.errored else error

    async def submit_score(self, tokens: Sequence[int], adapter: LoadedAdapter | None = None) -> Callable[[], Any]:
        """Send tokens to be scored before every other request; the result's call awaits the logprobs. adapter: the adapter,
        which stays meanwhile, None for none.
        """
        seen = probe_input(tokens, self._vision, self._salt(self.born))
        queue = await self._submit(
            seen, _sampling_params(Sampling(max_tokens=1), prompt_logprobs=0), adapter, priority=PROBE_PRIORITY
        )

        async def scores() -> tuple[float, ...]:
            flat = (await self._answer(queue, adapter)).prompt_logprobs
            if len(flat.logprobs) != len(tokens) - 1:
                raise RuntimeError(f"vLLM scored {len(flat.logprobs)} tokens, expected {len(tokens) - 1}")
            return tuple(flat.logprobs)

        return scores

    def _sampling_params(self, sampling: Sampling, streamed: bool) -> Any:
        return _sampling_params(sampling, self.special, streamed=streamed)

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


def _labels(output: Any, opened: Opened) -> list[Label]:
    """Labels of load attempts, each with the index of its first token."""
    if opened.adapter is not None:
        return [(opened.adapter.label, 0)]
    if output.weight_versions is not None:
        return [(span.version, span.start) for span in output.weight_versions]
    return list(opened.state.weight_version_starts) if opened.state is not None else []


def check_end(output: Any, adapter: LoadedAdapter | None) -> None:
    """Raise RuntimeError for a request that vLLM ended before its time, unless its adapter had to leave."""
    if output.finish_reason not in ("stop", "length") and not (adapter is not None and adapter.is_leaving):
        raise RuntimeError(f"vLLM ended a request with {output.finish_reason!r}, expected 'stop' or 'length'")


def _sampling_params(
    sampling: Sampling,
    special: frozenset[int] = frozenset(),
    *,
    streamed: bool = False,
    prompt_logprobs: int | None = None,
) -> Any:
    """special: tokens without text, which vLLM's grammars take for the text of their names. prompt_logprobs: 0 scores the
    prompt; given later, vLLM would read keys of a prefix cache, whose tokens have no logprobs.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    held, shaping = bool(sampling.json_schema), sampling.shaping or Shaping()
    never = sorted(special.difference(sampling.stop))[: max(0, MAX_BIASED - len(shaping.logit_bias))]
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
        prompt_logprobs=prompt_logprobs,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


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
        pixel_values=element(torch.from_numpy(picture)), num_image_patches=element(torch.tensor(1), keep_on_cpu=True)
    )


def _name(picture: Prepared) -> str:
    return hashlib.blake2b(repr(picture.shape).encode() + picture.tobytes(), digest_size=16).hexdigest()


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
