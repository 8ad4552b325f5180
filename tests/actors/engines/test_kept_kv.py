"""Keys and values that vLLM keeps over a load: which requests share them, and what their spans say, without vLLM."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engines.engine import Chunk, Sampling
from actors.engines.trace import RequestImages
from actors.engines.vllm.adapters import Attempts
from actors.engines.vllm.engine import Swap
from actors.engines.vllm.requests import Requests, stream
from schemas import Span
from schemas.errors import PolicyRefused
from tests.actors.engines.test_vllm_parts import FakeVllm, answered

NOTHING = Path("none"), [["part"], ["another"]]


class FakeCore(FakeVllm):
    """Stands in for AsyncLLM: keeps what is sent to its core, in the order of sending. reason: why the worker refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        self.output_processor = SimpleNamespace(request_states={})
        self.reason = ""
        self.engine_core = SimpleNamespace(pause_scheduler_async=self.pause)
        self.scheduler_config = SimpleNamespace(async_scheduling=False)

    async def pause(self, mode: str, clear_cache: bool) -> None:
        await self.utility("pause")

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[tuple[Any, Any]]:
        """Two workers answer."""
        name = method.removeprefix("headrace_")
        await self.utility(name)
        if name == "begin":
            return [(True, 2), (True, 1)]
        return [(1.0, ""), (2.0, self.reason if name == "compare" else "")]

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        await self.utility("forget")

    async def update_weight_version(self, label: str) -> None:
        await self.utility("label")

    async def resume_generation(self) -> None:
        await self.utility("resume")

    async def utility(self, name: str) -> None:
        self.sent.append(name)
        for _ in range(20):
            await asyncio.sleep(0)  # its answer takes a while, and others send meanwhile

    async def add_request(self, request_id: str, prompt: Any, *args: Any, **named: Any) -> Any:
        self.sent.append(prompt.get("cache_salt", ""))
        return await super().add_request(request_id, prompt, *args, **named)


def keeping(llm: FakeVllm, attempts: Attempts) -> Requests:
    return Requests(llm, attempts, group_max_tokens=64, sampling_params=lambda sampling, num: (sampling, num))


async def sent_around_a_load(keep: bool) -> tuple[list[str], str, str]:
    """What reaches vLLM while requests arrive in every turn of the loop: all of it, and the labels before and after."""
    llm, attempts = FakeCore(), Attempts("keep" if keep else "rebuild")
    requests = keeping(llm, attempts)
    requests.born = old = attempts.begin(3, proved=True)
    new = attempts.begin(4)
    swap = Swap(llm, requests, sees=False)
    await swap.begin()
    calls: list[asyncio.Task[Any]] = []
    loading: asyncio.Task[Any] | None = None
    while loading is None or not loading.done():
        calls.append(asyncio.create_task(requests.generate((5,), Sampling(max_tokens=1, seed=len(calls)))))
        await asyncio.sleep(0)
        if len(calls) == 10:
            loading = asyncio.create_task(swap.put(*NOTHING, new, None, keep=keep))
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    return llm.sent, old, new


def test_no_request_has_a_salt_before_the_pause_that_ends_older_weights() -> None:
    sent, old, new = asyncio.run(sent_around_a_load(keep=True))
    orders = [one for one in sent if one not in (old, new)]
    assert orders == ["begin", "stage", "stage", "stage", "pause", "apply", "label", "resume", "compare", "compare"]
    assert new not in sent[: sent.index("pause")] and old in sent
    assert sent.count(new) > sent[sent.index("pause") :].count(old), "one that was being sent counts as old"


def test_where_all_is_computed_again_no_request_has_a_salt() -> None:
    sent, _, _ = asyncio.run(sent_around_a_load(keep=False))
    orders = [one for one in sent if one]
    assert orders[3:] == ["stage", "pause", "apply", "forget", "label", "resume", "compare", "compare"]


def test_a_load_that_vllm_holds_otherwise_leaves_new_requests_the_salt_of_its_attempt() -> None:
    async def check() -> None:
        llm, attempts = FakeCore(), Attempts("keep")
        requests = keeping(llm, attempts)
        requests.born, llm.reason = attempts.begin(3, proved=True), "it holds other values in model.norm"
        swap, bad = Swap(llm, requests, sees=False), attempts.begin(4)
        await swap.begin()
        with pytest.raises(PolicyRefused, match=r"it holds other values in model\.norm"):
            await swap.put(*NOTHING, bad, None, keep=True)
        assert requests.born == bad, "what it computes is not found by those after it is undone"
        llm.reason = ""
        await swap.put(*NOTHING, undone := attempts.begin(3, proved=True), None, keep=False)
        assert requests.born == undone and llm.sent[-6:-2] == ["apply", "forget", "label", "resume"]

    asyncio.run(check())


def test_spans_say_from_which_version_on_keys_and_values_are() -> None:
    async def check() -> None:
        llm, attempts = FakeVllm(), Attempts("keep")
        requests = keeping(llm, attempts)
        labels = [attempts.begin(version, proved=version == 3) for version in (3, 4, 5)]
        for label in labels[1:]:
            attempts.decide(label, True)
        requests.born = labels[0]
        call = asyncio.create_task(requests.generate((5,), Sampling(max_tokens=4)))
        _, _, queue = await llm.next()
        requests.born = labels[2]
        queue.answer.set_result(answered(([1, 2, 3, 4], [(labels[0], 0, 1), (labels[1], 1, 3), (labels[2], 3, 4)])))
        assert (await call).spans == (Span(0, 1, 3), Span(1, 3, 4, kv=3), Span(3, 4, 5, kv=3))
        call = asyncio.create_task(requests.generate((5,), Sampling(max_tokens=1)))
        _, _, queue = await llm.next()
        queue.answer.set_result(answered(([1], [(labels[2], 0, 1)])))
        assert (await call).spans == (Span(0, 1, 5),)

    asyncio.run(check())


def test_a_stream_says_it_with_every_chunk() -> None:
    async def check() -> None:
        llm, attempts = FakeCore(), Attempts("keep")
        requests = Requests(llm, attempts, group_max_tokens=64, streamed_params=lambda sampling: sampling)
        requests.born = old = attempts.begin(3, proved=True)
        new = attempts.begin(4)
        attempts.decide(new, True)
        chunks: list[Chunk] = []
        call = asyncio.create_task(stream(requests, (5,), Sampling(max_tokens=3), chunks.append, RequestImages()))
        _, _, queue = await llm.next()
        answer = answered(([1, 2, 3], [(old, 0, 1), (new, 1, 3)]))
        answer.finished = True
        queue.answer.set_result(answer)
        assert (await call).spans == (Span(0, 1, 3), Span(1, 3, 4, kv=3))
        assert [(len(one.tokens), one.version, one.kv) for one in chunks] == [(1, 3, -1), (2, 4, 3)]

    asyncio.run(check())


def test_after_a_refused_attempt_keys_and_values_are_those_of_the_served_version() -> None:
    async def check() -> None:
        attempts = Attempts("keep")
        first, second = attempts.begin(3, proved=True), attempts.begin(4)
        refused = attempts.begin(5)
        undone = attempts.begin(4, proved=True)
        attempts.decide(refused, False)
        later = attempts.begin(6)
        of = {label: attempts.kv_of(label, first) for label in (first, second, undone, later)}
        assert of == {first: 3, second: 3, undone: 4, later: 4}
        assert attempts.kv_of(undone, refused) == 4, "what was read of its prompt under the refused one is read again"
        assert attempts.kv_of(later, second) == 4

    asyncio.run(check())
