"""Versions of an adapter side by side in vLLM: new requests begin under the newest, running ones end under their own.

    load v8:   make room ── add v8 (no request has it) ── probe under v8 ── serve v8 ── v7 leaves when its last request ends

Guarantees: an adapter lives while a request uses it; at most `slots` live at once, the base among them. Where a new one finds
them all taken, the requests of the oldest stop where they are and go on under the version that serves, in a span of its own: a
request sees `slots` - 1 loads at most under one version, and a load never waits for requests to end.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.engines.engine import EngineStopped
from actors.engines.vllm.attempts import Attempts
from schemas.errors import ConfigError, PolicyRefused

_log = logging.getLogger(__name__)
MIN_SLOTS = 2  # what serves, and what is being proved


class LoadedAdapter:
    """One version in vLLM. label: of its load attempt. lora: what vLLM's requests name it by, None for the base."""

    def __init__(self, label: str, lora: Any = None) -> None:
        self.label = label
        self.lora = lora
        self.running: set[str] = set()  # vLLM's own ids
        self.users = 0
        self.is_retired = False  # no request begins under it any more
        self.is_leaving = False  # its requests are to go on elsewhere
        self.unused = asyncio.Event()


class Adapters:
    """Those of one AsyncLLM. slots: how many may live at once. base: the label of the weights without an adapter."""

    def __init__(self, llm: Any, *, slots: int, base: str) -> None:
        self._llm = llm
        self._slots = slots
        self._loaded = [LoadedAdapter(base)]
        self._removals: set[asyncio.Task[None]] = set()
        self._count = 0
        self.serving = self._loaded[0]

    @property
    def num_loaded(self) -> int:
        """Versions that take a slot."""
        return len(self._loaded)

    @contextmanager
    def used(self, one: LoadedAdapter | None = None) -> Iterator[LoadedAdapter]:
        """An adapter stays while the `with` lasts: the one that serves, or `one`."""
        one = one or self.serving
        one.users += 1
        try:
            yield one
        finally:
            one.users -= 1
            self._leave_if_unused(one)

    async def began(self, one: LoadedAdapter, request_id: str) -> None:
        """A request runs under an adapter; if that is to leave, the request stops at once."""
        one.running.add(request_id)
        if one.is_leaving:
            await self._llm.abort(request_id, internal=True)

    async def make_room(self) -> None:
        """Wait until one more may live."""
        while len(self._loaded) >= self._slots:
            oldest = next(one for one in self._loaded if one is not self.serving)
            _log.info("adapter_left version=%d requests=%d", Attempts.version_of(oldest.label), oldest.users)
            oldest.is_leaving = True
            if oldest.running:
                await self._llm.abort(sorted(oldest.running), internal=True)
            await oldest.unused.wait()
        await self.close()

    async def close(self) -> None:
        """Wait for what is leaving."""
        await asyncio.gather(*self._removals)

    async def add(self, label: str, path: str) -> tuple[LoadedAdapter, float]:
        """Put an adapter folder into vLLM, where no request has it yet; with the milliseconds in which no step ran.

        Raises PolicyRefused where vLLM does not take it, or holds something else then.
        """
        from vllm.lora.request import LoRARequest

        self._count += 1
        adapter = LoadedAdapter(label, LoRARequest(label, self._count, path))
        try:
            placed = await self._llm.collective_rpc("headrace_add_adapter", args=(self._count, label, path))
        except Exception as error:
            if self._llm.errored:
                raise EngineStopped(f"vLLM's process is gone: {error}") from error
            placed = [(0.0, f"vLLM could not load it: {error}")]
        self._loaded.append(adapter)
        if reason := next((reason for _, reason in placed if reason), ""):
            self.retire(adapter)
            raise PolicyRefused(f"policy {label}: {reason}")
        return adapter, max(took_ms for took_ms, _ in placed)

    def serve(self, one: LoadedAdapter) -> None:
        """New requests begin under it."""
        before, self.serving = self.serving, one
        self.retire(before)

    def retire(self, one: LoadedAdapter) -> None:
        """No request begins under it any more: it leaves with the last that runs."""
        one.is_retired = True
        self._leave_if_unused(one)

    def _leave_if_unused(self, one: LoadedAdapter) -> None:
        if not one.is_retired or one.users:
            return
        self._loaded.remove(one)
        one.unused.set()
        if one.lora is not None:
            task = asyncio.get_running_loop().create_task(self._remove(one))
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)

    async def _remove(self, one: LoadedAdapter) -> None:
        try:
            await self._llm.remove_lora(one.lora.lora_int_id)
        except Exception:  # vLLM ends or has ended: the owner of a request learns it from the request
            _log.warning("adapter_not_removed version=%d", Attempts.version_of(one.label), exc_info=True)


async def check_adapted(llm: Any, names: Sequence[str], folder: Path) -> None:
    """Raise ConfigError where no worker has a place for one of an adapter's tensors. names: as peft writes them."""
    without = await llm.collective_rpc("headrace_not_adapted", args=(list(names),))
    if odd := sorted(set.intersection(*map(set, without))):  # a worker need not have every layer
        raise ConfigError(
            f"trainer.lora.targets: vLLM cannot adapt {odd[0]} of {folder}; leave it out, or use the torch engine"
        )
