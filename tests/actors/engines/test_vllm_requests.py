"""Requests to vLLM without vLLM: keys and values that are kept over a load, and adapters side by side."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engines.engine import Sampling, Shaping
from actors.engines.vllm.adapters import Adapters, Attempts, LoadedAdapter
from actors.engines.vllm.engine import Swap
from actors.engines.vllm.requests import Requests
from schemas import Span
from schemas.errors import PolicyRefused
from tests.actors.engines.test_vllm_parts import FakeVllm, Queue, answered, requests_to

NOTHING = Path("none"), [["part"], ["another"]]


class FakeCore(FakeVllm):
    """Stands in for AsyncLLM: keeps what is sent to its core, in the order of sending. reason: why the worker refuses.
    forgets: whether it gives up its prefix cache.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        self.reason, self.forgets = "", True
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

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        await self.utility("forget")
        return self.forgets

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


async def sent_around_a_load(keep: bool) -> tuple[list[str], str, str]:
    """The calls that reach vLLM while requests arrive in every turn of the loop, and the labels before and after."""
    llm, attempts = FakeCore(), Attempts("keep" if keep else "rebuild")
    requests = requests_to(llm, attempts)
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
    orders = [label for label in sent if label not in (old, new)]
    assert orders == ["begin", "stage", "stage", "stage", "pause", "apply", "label", "resume", "compare", "compare"]
    assert new not in sent[: sent.index("pause")] and old in sent
    assert sent.count(new) > sent[sent.index("pause") :].count(old), "one that was being sent counts as old"


async def test_a_version_is_refused_where_vllm_keeps_what_older_weights_cached() -> None:
    llm, attempts = FakeCore(), Attempts()
    llm.forgets = False
    swap = Swap(llm, requests_to(llm, attempts), sees=False)
    with pytest.raises(PolicyRefused, match="prefix cache still holds"):
        await swap.put(*NOTHING, attempts.begin(4), None, keep=False)


async def test_a_load_that_vllm_holds_otherwise_leaves_new_requests_the_salt_of_its_attempt() -> None:
    llm, attempts = FakeCore(), Attempts("keep")
    requests = requests_to(llm, attempts)
    requests.born, llm.reason = attempts.begin(3, proved=True), "it holds other values in model.norm"
    swap, bad = Swap(llm, requests, sees=False), attempts.begin(4)
    await swap.begin()
    with pytest.raises(PolicyRefused, match=r"it holds other values in model\.norm"):
        await swap.put(*NOTHING, bad, None, keep=True)
    assert requests.born == bad, "what it computes is not found by those after it is undone"
    llm.reason = ""
    await swap.put(*NOTHING, undone := attempts.begin(3, proved=True), None, keep=False)
    assert requests.born == undone and llm.sent[-6:-2] == ["apply", "forget", "label", "resume"]


async def test_spans_say_from_which_version_on_keys_and_values_are() -> None:
    llm, attempts = FakeVllm(), Attempts("keep")
    requests = requests_to(llm, attempts)
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


async def test_after_a_refused_attempt_keys_and_values_are_those_of_the_served_version() -> None:
    attempts = Attempts("keep")
    first, second = attempts.begin(3, proved=True), attempts.begin(4)
    refused = attempts.begin(5)
    undone = attempts.begin(4, proved=True)
    attempts.decide(refused, False)
    later = attempts.begin(6)
    of = {label: attempts.kv_version(label, first) for label in (first, second, undone, later)}
    assert of == {first: 3, second: 3, undone: 4, later: 4}
    assert attempts.kv_version(undone, refused) == 4, "what was read of its prompt under the refused one is read again"
    assert attempts.kv_version(later, second) == 4


class AdaptingVllm(FakeVllm):
    """Also keeps adapters; a request that is aborted answers with what it had: as many tokens as `had` says."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.under: dict[str, str] = {}
        self.queues: dict[str, Queue] = {}
        self.had = 0
        self.reason = ""

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        assert method == "headrace_add_adapter"
        for _ in range(20):
            await asyncio.sleep(0)  # its answer takes a while
        self.names[args[0]] = args[1]
        return [(0.5, ""), (0.25, self.reason)]

    async def remove_lora(self, number: int) -> None:
        del self.names[number]

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, priority: int = 0, lora_request: Any = None
    ) -> Queue:
        queue = await super().add_request(request_id, prompt, params, priority)
        self.queues[request_id] = queue
        self.under[request_id] = lora_request.lora_name if lora_request else ""
        return queue

    async def abort(self, request_ids: str | Sequence[str], internal: bool) -> None:
        for item in [request_ids] if isinstance(request_ids, str) else request_ids:
            self.aborted.append(item)
            if not self.queues[item].answer.done():
                self.queues[item].answer.set_result(ended(range(self.had), "abort"))


def ended(tokens: Sequence[int], reason: str = "length") -> Any:
    return answered((tokens, ()), reason=reason)


class Rig:
    def __init__(self, slots: int) -> None:
        self.llm, self.attempts = AdaptingVllm(), Attempts()
        self.adapters = Adapters(self.llm, slots=slots, base=self.attempts.begin(0, proved=True))
        self.requests = Requests(
            self.llm,  # type: ignore[arg-type]
            self.attempts,
            adapters=self.adapters,
            params=lambda sampling, streamed: sampling,
        )

    async def load(self, version: int) -> LoadedAdapter:
        await self.adapters.make_room()
        one, took_ms = await self.adapters.add(self.attempts.begin(version, proved=True), "/nowhere")
        assert took_ms == 0.5
        self.adapters.serve(one)
        return one

    def begin(self, tokens: int = 4) -> asyncio.Task[Any]:
        return asyncio.create_task(self.requests.generate((5,), Sampling(max_tokens=tokens)))


async def test_a_request_ends_under_the_version_it_began_with_which_then_leaves() -> None:
    rig = Rig(slots=3)
    await rig.load(1)
    call = rig.begin()
    _, _, queue = await rig.llm.next()
    await rig.load(2)
    assert list(rig.llm.names.values()) == ["1.2", "2.3"]
    later = rig.begin()
    _, _, other = await rig.llm.next()
    assert list(rig.llm.under.values()) == ["1.2", "2.3"]
    queue.answer.set_result(ended([7, 8, 9, 10]))
    assert (await call).spans == (Span(0, 4, 1),)
    await rig.adapters.close()
    assert list(rig.llm.names.values()) == ["2.3"] and len(rig.adapters._loaded) == 1
    other.answer.set_result(ended([7, 8, 9, 10]))
    assert (await later).spans == (Span(0, 4, 2),)
    assert not rig.llm.aborted and list(rig.llm.names.values()) == ["2.3"]


async def test_where_no_slot_is_free_the_oldest_requests_go_on_under_the_version_that_serves() -> None:
    rig = Rig(slots=2)
    rig.llm.had = 3
    old = rig.begin()
    await rig.llm.next()  # under the base
    await rig.load(1)
    assert len(rig.adapters._loaded) == 2
    loading = asyncio.create_task(rig.load(2))
    prompt, sampling, queue = await rig.llm.next()
    assert (prompt, sampling.max_tokens, rig.llm.under[queue.request_id]) == ([5, 0, 1, 2], 1, "1.2")
    await loading
    queue.answer.set_result(ended([9]))
    completion = await old
    assert completion.tokens == (0, 1, 2, 9)
    assert completion.spans == (Span(0, 3, 0), Span(3, 4, 1))
    await rig.adapters.close()
    assert list(rig.llm.names.values()) == ["2.3"] and len(rig.adapters._loaded) == 1


async def test_a_request_that_is_only_being_sent_when_its_version_must_leave_is_sent_again() -> None:
    rig = Rig(slots=2)
    await rig.load(1)
    one = rig.adapters.serving
    with rig.adapters.used(one):  # it was picked, and vLLM does not have it yet
        await rig.load(2)
        loading = asyncio.create_task(rig.load(3))
        while not one.is_leaving:  # noqa: ASYNC110  the load makes it true
            await asyncio.sleep(0)
        assert not loading.done()
        queue = await rig.llm.add_request("x", {"prompt_token_ids": [5]}, None)
        await rig.adapters.began(one, "x")
        assert rig.llm.aborted == ["x"] and queue.answer.done()
    await loading
    await rig.adapters.close()
    assert list(rig.llm.names.values()) == ["3.4"]


async def test_a_refused_version_leaves_and_the_one_before_serves_on() -> None:
    rig = Rig(slots=2)
    served = await rig.load(1)
    await rig.adapters.make_room()
    one, _ = await rig.adapters.add(rig.attempts.begin(2, proved=True), "/nowhere")
    with rig.adapters.used(one):
        pass  # the probe
    assert len(rig.adapters._loaded) == 2, "it stays until the verdict"
    rig.adapters.retire(one)
    await rig.adapters.close()
    assert rig.adapters.serving is served and list(rig.llm.names.values()) == ["1.2"]


async def test_a_request_that_is_cancelled_while_it_is_sent_is_aborted_before_its_version_may_leave() -> None:
    rig = Rig(slots=3)
    await rig.load(1)
    sent, add_request = asyncio.Event(), rig.llm.add_request

    async def slow(request_id: str, prompt: Any, params: Any, **named: Any) -> Queue:
        await sent.wait()
        return await add_request(request_id, prompt, params, **named)

    rig.llm.add_request = slow  # type: ignore[method-assign]
    call = rig.begin()
    await rig.load(2)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert list(rig.llm.names.values()) == ["1.2", "2.3"], "vLLM may have the request by now"
    sent.set()
    while len(rig.adapters._loaded) > 1:  # noqa: ASYNC110  the request's end makes it true
        await asyncio.sleep(0)
    await rig.adapters.close()
    assert rig.llm.aborted == ["1"] and list(rig.llm.names.values()) == ["2.3"]


@pytest.mark.slow  # imports vLLM
async def test_the_biases_of_a_client_and_of_a_schema_are_together_as_many_as_vllm_takes() -> None:
    requests = Requests(llm := FakeVllm(), Attempts())
    requests.special = frozenset(range(2000, 2100))
    shaping = Shaping(logit_bias=tuple((token, 1.0) for token in range(1000)))
    held = Sampling(max_tokens=1, json_schema="{}", stop=(2000,), shaping=shaping)
    call = asyncio.create_task(requests.generate((5,), held))
    _, params, _ = await llm.next()
    assert len(params.logit_bias) == 1024 and params.logit_bias.keys() >= {*range(1000), *range(2001, 2025)}
    call.cancel()
    await requests.close()
