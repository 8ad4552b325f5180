"""Versions of an adapter side by side in vLLM: new requests begin under the newest, running ones end under their own.

    load v8:   make room ── add v8 (no request has it) ── probe under v8 ── serve v8 ── v7 leaves when its last request ends

Guarantees: an adapter stays loaded while a request uses it; at most `slots` are loaded, including the base. If a load finds no
free slot, the requests of the oldest adapter continue under the serving version, in a new span. A request keeps its version
over at most `slots` - 1 loads, and a load never waits for requests to end.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.engines.engine import EngineStopped, KvMode
from schemas.errors import ConfigError, PolicyRefused


class Attempts:
    """Labels of load attempts. Tokens of an undecided attempt are held; tokens of a refused attempt never leave.

    kv: treatment of the keys and values of running requests at a load. If they are kept, a request's are at most as old as the
    label it began under, and as the last attempt that rebuilt them (the undoing of a refused attempt rebuilds them).
    """

    def __init__(self, kv: KvMode = "rebuild") -> None:
        self.keeps = kv == "keep"
        self._rebuilt: list[str] = []  # one for each refused attempt
        self._count = 0
        self._undecided: dict[str, asyncio.Future[bool]] = {}
        self._refused: set[str] = set()

    def begin(self, version: int, *, proved: bool = False) -> str:
        """The label of a new attempt to serve `version`. proved: its weights were served before, and nothing that was computed
        since is kept.
        """
        self._count += 1
        label = f"{version}.{self._count}"
        if proved and self.keeps:
            self._rebuilt.append(label)
        if not proved:
            self._undecided[label] = asyncio.get_running_loop().create_future()
        return label

    def decide(self, label: str, accepted: bool) -> None:
        """Give the verdict; all that wait for it continue."""
        if not accepted:
            self._refused.add(label)
        self._undecided.pop(label).set_result(accepted)

    def fail(self, label: str, error: Exception) -> None:
        """There will be no verdict: all that wait for it get the error."""
        verdict = self._undecided[label]  # stays, so that later waiters get it too
        verdict.set_exception(error)
        verdict.exception()  # perhaps no caller waits any more

    async def accepted(self, label: str) -> bool:
        """The verdict, once there is one: True if tokens of this attempt may leave."""
        verdict = self._undecided.get(label)
        return label not in self._refused if verdict is None else await asyncio.shield(verdict)

    def kv_version(self, label: str, born: str) -> int:
        """Oldest version of the keys and values of a request that began under `born`, where it samples under `label`."""
        if not self.keeps or born == label:
            return self.label_version(label)
        rebuilt = (other for other in reversed(self._rebuilt) if _number(other) <= _number(label))
        return self.label_version(max(born, next(rebuilt, born), key=_number))

    @staticmethod
    def label_version(label: str) -> int:
        """The policy version an attempt was to serve."""
        return int(label.partition(".")[0])


def _number(label: str) -> int:
    return int(label.partition(".")[2])


_log = logging.getLogger(__name__)
MIN_SLOTS = 2  # the serving adapter, and the adapter under test


class LoadedAdapter:
    """One version in vLLM. label: of its load attempt. lora: the LoRARequest in vLLM's requests, None for the base."""

    def __init__(self, label: str, lora: Any = None) -> None:
        self.label = label
        self.lora = lora
        self.running: set[str] = set()  # vLLM's own ids
        self.users = 0
        self.is_retired = False  # no request begins under it any more
        self.is_leaving = False  # its requests are to go on elsewhere
        self.unused = asyncio.Event()


class Adapters:
    """Adapters of one AsyncLLM. slots: maximum that live at once. base: label of the weights without an adapter."""

    def __init__(self, llm: Any, *, slots: int, base: str) -> None:
        self._llm = llm
        self._slots = slots
        self._loaded = [LoadedAdapter(base)]
        self._removals: set[asyncio.Task[None]] = set()
        self._count = 0
        self.serving = self._loaded[0]

    @contextmanager
    def used(self, adapter: LoadedAdapter | None = None) -> Iterator[LoadedAdapter]:
        """Keep an adapter loaded inside the `with`: `adapter`, or the serving adapter."""
        adapter = adapter or self.serving
        adapter.users += 1
        try:
            yield adapter
        finally:
            adapter.users -= 1
            self._leave_if_unused(adapter)

    async def began(self, adapter: LoadedAdapter, request_id: str) -> None:
        """A request runs under an adapter; if that is to leave, the request stops at once."""
        adapter.running.add(request_id)
        if adapter.is_leaving:
            await self._llm.abort(request_id, internal=True)

    async def make_room(self) -> None:
        """Wait until one more may live."""
        while len(self._loaded) >= self._slots:
            oldest = next(adapter for adapter in self._loaded if adapter is not self.serving)
            _log.info("adapter_left version=%d requests=%d", Attempts.label_version(oldest.label), oldest.users)
            oldest.is_leaving = True
            if oldest.running:
                await self._llm.abort(sorted(oldest.running), internal=True)
            await oldest.unused.wait()
        await self.close()

    async def close(self) -> None:
        """Wait for the adapters that are being removed."""
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

    def serve(self, adapter: LoadedAdapter) -> None:
        """New requests begin under it."""
        before, self.serving = self.serving, adapter
        self.retire(before)

    def retire(self, adapter: LoadedAdapter) -> None:
        """No request begins under it any more: it leaves with the last that runs."""
        adapter.is_retired = True
        self._leave_if_unused(adapter)

    def _leave_if_unused(self, adapter: LoadedAdapter) -> None:
        if not adapter.is_retired or adapter.users:
            return
        self._loaded.remove(adapter)
        adapter.unused.set()
        if adapter.lora is not None:
            task = asyncio.get_running_loop().create_task(self._remove(adapter))
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)

    async def _remove(self, adapter: LoadedAdapter) -> None:
        try:
            await self._llm.remove_lora(adapter.lora.lora_int_id)
        except Exception:  # vLLM ends or has ended: the owner of a request learns it from the request
            _log.warning("adapter_not_removed version=%d", Attempts.label_version(adapter.label), exc_info=True)


async def check_adapted(llm: Any, names: Sequence[str], folder: Path) -> None:
    """Raise ConfigError where no worker has a place for one of an adapter's tensors. names: as peft writes them."""
    without = await llm.collective_rpc("headrace_not_adapted", args=(list(names),))
    if odd := sorted(set.intersection(*map(set, without))):  # a worker need not have every layer
        raise ConfigError(
            f"trainer.lora.targets: vLLM cannot adapt {odd[0]} of {folder}; leave it out, or use the torch engine"
        )
