"""One request to vLLM whose tokens are handed over as they come.

vLLM says at the end which weights sampled which tokens, and a stream cannot wait for that; while a request runs, its
output processor keeps the same account, which is read here. Guarantees: as for every request: a token leaves once the
weights that sampled it are proved, and what a refused policy sampled is sampled again from before it.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from actors.engines.engine import Chunk, Completion, EngineStopped, OnChunk, Sampling
from actors.engines.request_images import RequestImages
from actors.engines.trace import Trace
from actors.engines.vllm.adapters import LoadedAdapter
from actors.engines.vllm.requests import Label, Requests, check_end, labels_of


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
    queue, one, state, born = opened
    num_taken = 0
    while True:
        answer = await queue.get()
        (output,) = answer.outputs
        tokens, logprobs = list(output.token_ids), list(output.logprobs.logprobs) if output.logprobs else []
        if len(tokens) != len(logprobs):
            raise RuntimeError("vLLM returned a different number of tokens and logprobs")
        runs = _runs(labels_of(output, one, state), num_taken, num_taken + len(tokens))
        for label, start, stop in runs:
            if not requests.attempts.is_proved(label) and not await requests.attempts.accepted(label):
                return False
            version, kv = requests.attempts.version_of(label), requests.attempts.kv_of(label, born)
            cut = slice(start - num_taken, stop - num_taken)
            for token, logprob in zip(tokens[cut], logprobs[cut], strict=True):
                trace.add(token, logprob, version, kv)
            on_chunk(Chunk(tuple(tokens[cut]), tuple(logprobs[cut]), version, -1 if kv == version else kv))
        num_taken += len(tokens)
        if answer.finished:
            check_end(output, one)
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
