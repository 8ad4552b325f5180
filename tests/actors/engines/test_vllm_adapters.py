"""Adapters side by side in vLLM: who may live, who leaves, and what becomes of their requests. Without vLLM."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engines.engine import Sampling
from actors.engines.vllm.adapters import Adapters, Attempts, LoadedAdapter
from actors.engines.vllm.requests import Requests
from schemas import Span
from schemas.errors import PolicyRefused
from tests.actors.engines.test_vllm_parts import FakeVllm, Queue


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
        for one in [request_ids] if isinstance(request_ids, str) else request_ids:
            self.aborted.append(one)
            if not self.queues[one].answer.done():
                self.queues[one].answer.set_result(ended(range(self.had), "abort"))


def ended(tokens: Sequence[int], reason: str = "length") -> Any:
    output = SimpleNamespace(
        token_ids=list(tokens),
        logprobs=SimpleNamespace(logprobs=[-1.0] * len(tokens)) if len(tokens) else None,
        finish_reason=reason,
        weight_versions=None,
    )
    return SimpleNamespace(outputs=[output])


class Rig:
    def __init__(self, slots: int) -> None:
        self.llm, self.attempts = AdaptingVllm(), Attempts()
        self.adapters = Adapters(self.llm, slots=slots, base=self.attempts.begin(0, proved=True))
        self.requests = Requests(
            self.llm,  # type: ignore[arg-type]
            self.attempts,
            group_max_tokens=0,
            adapters=self.adapters,
            sampling_params=lambda sampling, num: sampling,
        )

    async def load(self, version: int) -> LoadedAdapter:
        await self.adapters.make_room()
        one, took_ms = await self.adapters.add(self.attempts.begin(version, proved=True), "/nowhere")
        assert took_ms == 0.5
        self.adapters.serve(one)
        return one

    def begin(self, tokens: int = 4) -> asyncio.Task[Any]:
        return asyncio.create_task(self.requests.generate((5,), Sampling(max_tokens=tokens)))


def test_a_request_ends_under_the_version_it_began_with_which_then_leaves() -> None:
    async def check() -> None:
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
        assert list(rig.llm.names.values()) == ["2.3"] and rig.adapters.num_loaded == 1
        other.answer.set_result(ended([7, 8, 9, 10]))
        assert (await later).spans == (Span(0, 4, 2),)
        assert not rig.llm.aborted and list(rig.llm.names.values()) == ["2.3"]

    asyncio.run(check())


def test_where_no_slot_is_free_the_oldest_requests_go_on_under_the_version_that_serves() -> None:
    async def check() -> None:
        rig = Rig(slots=2)
        rig.llm.had = 3
        old = rig.begin()
        await rig.llm.next()  # under the base
        await rig.load(1)
        assert rig.adapters.num_loaded == 2
        loading = asyncio.create_task(rig.load(2))
        prompt, sampling, queue = await rig.llm.next()
        assert (prompt, sampling.max_tokens, rig.llm.under[queue.request_id]) == ([5, 0, 1, 2], 1, "1.2")
        await loading
        queue.answer.set_result(ended([9]))
        completion = await old
        assert completion.tokens == (0, 1, 2, 9)
        assert completion.spans == (Span(0, 3, 0), Span(3, 4, 1))
        await rig.adapters.close()
        assert list(rig.llm.names.values()) == ["2.3"] and rig.adapters.num_loaded == 1

    asyncio.run(check())


def test_a_request_that_is_only_being_sent_when_its_version_must_leave_is_sent_again() -> None:
    async def check() -> None:
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

    asyncio.run(check())


def test_a_refused_version_leaves_and_the_one_before_serves_on() -> None:
    async def check() -> None:
        rig = Rig(slots=2)
        served = await rig.load(1)
        await rig.adapters.make_room()
        one, _ = await rig.adapters.add(rig.attempts.begin(2, proved=True), "/nowhere")
        with rig.adapters.used(one):
            pass  # the probe
        assert rig.adapters.num_loaded == 2, "it stays until the verdict"
        rig.adapters.retire(one)
        await rig.adapters.close()
        assert rig.adapters.serving is served and list(rig.llm.names.values()) == ["1.2"]

    asyncio.run(check())


def test_a_version_that_vllm_does_not_hold_as_it_was_sent_is_refused_and_leaves() -> None:
    async def check() -> None:
        rig = Rig(slots=2)
        await rig.load(1)
        rig.llm.reason = "after the load vLLM holds other values in model.layers.1"
        with pytest.raises(PolicyRefused, match=f"policy 2.3: {rig.llm.reason}"):
            await rig.load(2)
        await rig.adapters.close()
        assert list(rig.llm.names.values()) == ["1.2"] and rig.adapters.serving.label == "1.2"

    asyncio.run(check())


def test_a_request_that_is_cancelled_while_it_is_sent_is_aborted_before_its_version_may_leave() -> None:
    async def check() -> None:
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
        while rig.adapters.num_loaded > 1:  # noqa: ASYNC110  the request's end makes it true
            await asyncio.sleep(0)
        await rig.adapters.close()
        assert rig.llm.aborted == ["1"] and list(rig.llm.names.values()) == ["2.3"]

    asyncio.run(check())
