"""Putting tensors in place between two steps of vLLM, while its requests wait.

    stage ── pause ── salt ── apply ── caches ── label ── resume, and the probe enters ── probe's scores
    (between steps)   keep: new requests begin with another salt
                      rebuild: running requests are preempted, and what was cached is forgotten

Guarantee: no request has a salt before vLLM's last step under older weights. A pause is in vLLM's queue before whatever is
sent after it, and nothing is sent between its sending and the change of the salt.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from actors.engines.vllm.exchange import Exchange
from actors.engines.vllm.requests import Requests
from actors.engines.vllm.turns import Turn
from infra.policies.policy import Probe
from schemas.errors import PolicyRefused

Scores = list[tuple[float, ...]]


class Sent(NamedTuple):
    """Tensors of a safetensors file that go to the workers."""

    path: Path
    names: list[str]


class Swap:
    """Swaps of one AsyncLLM. sees: whether its model takes pictures."""

    def __init__(self, llm: Any, requests: Requests, exchange: Exchange, *, sees: bool) -> None:
        self._llm = llm
        self._requests = requests
        self._exchange = exchange
        self._sees = sees
        self._is_overlapped = bool(llm.scheduler_config.async_scheduling)

    async def put(self, sent: Sent, label: str, probe: Probe | None, *, keep: bool) -> tuple[float, Scores]:
        """Put tensors in place; (the longest time without a step in milliseconds, the probe's scores). The step that runs when
        it begins is sampling still.

        label: of the attempt. keep: leave running requests their keys and values. Raises PolicyRefused where vLLM does not
        take them, or holds something else then.
        """
        core = self._llm.engine_core
        try:
            longest_ms = await self._stage(sent, label)
            if self._is_overlapped:
                await core.pause_scheduler_async(mode="keep", clear_cache=False)
            # A core whose steps do not overlap takes these one after the other between two steps: no need to wait for
            # each answer while this loop is busy with others.
            results = await asyncio.gather(
                core.pause_scheduler_async(mode="keep", clear_cache=False),
                self._change(label),
                self._llm.collective_rpc("headrace_apply", args=(str(sent.path), sent.names)),
                *([] if keep else self._forgetting()),
                self._llm.update_weight_version(label),
                return_exceptions=True,
            )
        finally:
            self._exchange.discard(sent.path)
        began_s = self._checked(label, results)
        sequences = probe.sequences if probe else ()
        ended_s, *scores = await asyncio.gather(self._resumed(), *map(self._requests.submit_score, sequences))
        return max(longest_ms, (ended_s - began_s) * 1e3), [await score() for score in scores]

    async def _stage(self, sent: Sent, label: str) -> float:
        """Have the workers make it ready, as far as they can, in turns with their steps; milliseconds of the longest turn."""
        longest_ms = 0.0
        try:
            turns: list[Turn] = await self._llm.collective_rpc("headrace_stage", args=(str(sent.path), sent.names))
            while True:
                longest_ms = max(longest_ms, *(took_ms for _, took_ms in turns))
                if all(is_ready for is_ready, _ in turns):
                    return longest_ms
                turns = await self._llm.collective_rpc("headrace_take_turn")
        except Exception as error:
            if self._llm.errored:
                raise
            raise PolicyRefused(f"policy {label}: vLLM could not load it: {error}") from error

    async def _resumed(self) -> float:
        """Let vLLM go on; when it did."""
        await self._llm.resume_generation()
        return time.perf_counter()

    async def _change(self, label: str) -> None:
        """What is sent from now on begins under the label."""
        self._requests.born = label

    def _forgetting(self) -> list[Any]:
        """Calls after which vLLM has nothing left of what it computed."""
        pictures = [self._llm.reset_encoder_cache()] if self._sees else []
        return [self._llm.reset_prefix_cache(reset_running_requests=True), *pictures]

    def _checked(self, label: str, results: Sequence[Any]) -> float:
        """When the first worker began."""
        for result in results:
            if isinstance(result, BaseException):
                if self._llm.errored:
                    raise result
                raise PolicyRefused(f"policy {label}: vLLM could not load it: {result}") from result
        _, _, applied, *_ = results
        workers = cast(list[tuple[float, str]], applied)
        if reason := next((reason for _, reason in workers if reason), ""):
            raise PolicyRefused(f"policy {label}: {reason}")
        return min(began_s for began_s, _ in workers)
