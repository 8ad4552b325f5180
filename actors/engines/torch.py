"""The torch engine: a transformers model in this process, for machines without vLLM.

    asyncio callers ──commands──> one thread: apply commands, admit requests, one token for all, again
                    <─completions─

Guarantees: the engine loads between two tokens, and samples only after it verified the load: every tensor that it reads back
equals the published tensor bit for bit, and the probe's logprobs agree. Running sequences continue with keys and values that it
rebuilds under the new weights, or keeps and records as older (`kv`). A refused policy changes nothing. The engine applies an
adapter as the trainer does, and never merges it into the base. Requests share keys and values within one forward pass only.
"""

import asyncio
import concurrent.futures
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from actors.engines.checks import (
    ProbeGate,
    changed_names,
    check_images,
    check_probe_sequences,
    check_request,
    check_tensors,
)
from actors.engines.engine import Chunk, Completion, EngineStopped, KvMode, LoadReport, OnChunk, Sampling
from actors.engines.grammar import STUCK, Grammars, folder_vocabulary
from actors.engines.slots import RunningBatch, RunningSequence, UncachedBatch, remembers_otherwise
from actors.engines.trace import RequestImages, Trace
from infra.model.adapter import adapter_shapes, base_hash, prepare, put_adapter, remove_adapter
from infra.model.model import load_into, load_model, meta_model, model_tensors, unlike
from infra.model.vision import load_vision, probe_inputs
from infra.policies.policy import Adapter, Policy, described
from infra.policies.tensors import Tensor
from infra.store.images import Pixels
from schemas.errors import PolicyRefused

Result = TypeVar("Result")
Finished = asyncio.Future[Completion]


class TorchEngine:
    """A transformers model in this process, for machines without vLLM.

    model: Folder, or name in the local Hugging Face cache. dtype: Data type of weights and computation, by torch's name.
    max_model_len: Maximum tokens of prompt and answer. Default: the model's limit. max_sequences: Maximum sequences sampled at
    once; further sequences wait. threads: Number of torch's threads. Default: torch's. kv: KV cache of running
    sequences at a reload, as in [reload]. Layers with another kind of state are recomputed at every step.
    """

    def __init__(
        self,
        *,
        model: str,
        seed: int = 0,
        dtype: str = "float32",
        max_sequences: int = 512,
        max_model_len: int | None = None,
        threads: int | None = None,
        kv: KvMode = "rebuild",
    ) -> None:
        self._kv = kv
        self._folder = model
        self._seed = seed
        self._dtype = dtype
        self._max_sequences = max_sequences
        self.max_model_len = max_model_len or 0
        self._threads = threads
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[RunningSequence] = deque()
        self._futures: dict[RunningSequence, Finished] = {}
        self._entering: list[RunningSequence] = []
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.version = 0
        self._held: dict[str, Tensor] = {}
        self._gate = ProbeGate(dtype)
        self._base = ""  # hash of the folder's model, once it is needed
        self._adapter: Adapter | None = None
        self._is_base = True  # the weights are the folder's, with or without an adapter
        self._loading = asyncio.Lock()
        self._grammars = Grammars(lambda: folder_vocabulary(model, self._num_vocabulary))

    @property
    def num_running(self) -> int:
        return len(self._futures)

    async def start(self) -> None:
        """Load the model and start its thread."""
        if self._threads:
            torch.set_num_threads(self._threads)
        self._model: Any = await asyncio.to_thread(load_model, self._folder, dtype=self._dtype)
        self._vision = await asyncio.to_thread(load_vision, self._folder)
        self._held = model_tensors(self._model)
        self._num_vocabulary = int(self._model.config.get_text_config().vocab_size)
        longest = int(self._model.config.get_text_config().max_position_embeddings)
        self.max_model_len = min(self.max_model_len or longest, longest)
        kind = UncachedBatch if remembers_otherwise(self._model) else RunningBatch
        self._batch = kind(self._model, torch.Generator().manual_seed(self._seed), self._vision)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        if self._thread is not None:
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        self._grammars.close()
        self._error = self._error or EngineStopped("the engine was closed")
        for future in self._futures.values():
            future.cancel()

    async def prepare(self, json_schema: str) -> None:
        await self._grammars.compiled(json_schema)

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_chunk: OnChunk | None = None,
        images: Sequence[Pixels] = (),
    ) -> Completion:
        self._check_alive()
        check_request(prompt, sampling, self._num_vocabulary, self.max_model_len)
        check_images(self._vision, prompt, images)
        generator = None if sampling.seed is None else torch.Generator().manual_seed(sampling.seed)
        matcher = await self._grammars.matcher(sampling)
        self._check_alive()  # a schema takes its time to compile
        row = RunningSequence(tuple(prompt), Trace(sampling), generator, on_chunk, RequestImages(images), matcher)
        future: Finished = self._loop.create_future()
        self._futures[row] = future
        if not self._entering:  # calls of one loop turn enter together, so that a group's prompt is forwarded once
            self._loop.call_soon(self._enter)
        self._entering.append(row)
        try:
            return await future
        finally:
            self._futures.pop(row, None)
            row.cancelled = True

    async def load(self, policy: Policy) -> LoadReport:
        async with self._loading:
            changed = await asyncio.to_thread(self._check, policy)
            return await self._in_thread(lambda: self._apply(policy, changed))

    async def score_tokens(self, tokens: Sequence[int]) -> tuple[float, ...]:
        return await self._in_thread(lambda: self._score(tokens))

    def _check(self, policy: Policy) -> frozenset[str]:
        self._check_adapter(policy)
        if policy.adapter is None:
            check_tensors(policy, {name: tensor.shape for name, tensor in self._held.items()})
        check_probe_sequences(policy.probe, self._num_vocabulary, self.max_model_len)
        held = self._held if policy.adapter == self._adapter else {}
        return changed_names(held, policy.tensors)

    def _check_adapter(self, policy: Policy) -> None:
        """Raise PolicyRefused for an adapter of another base or with other tensors than it says, and for a change between
        adapters and whole models, of which an engine keeps no second copy. Blocks: the first time it reads the folder.
        """
        who, adapter, serving = f"policy {policy.version}", policy.adapter, self._adapter
        if (adapter is None and serving is not None) or (adapter is not None and not self._is_base):
            raise PolicyRefused(
                f"{who}: it is {described(adapter)}, the engine serves {described(serving)}; start the engine again to take it"
            )
        if adapter is None:
            return
        self._base = self._base or base_hash(self._folder)
        if adapter.base != self._base:
            raise PolicyRefused(
                f"{who}: its adapter belongs to base {adapter.base[:12]}, the engine's model {self._folder} is "
                f"{self._base[:12]}; expected the policy.model that the trainer has"
            )
        prepare()
        check_tensors(policy, adapter_shapes(meta_model(self._folder), adapter))

    def _apply(self, policy: Policy, changed: frozenset[str]) -> LoadReport:
        begin = time.perf_counter()
        before = self._adapter
        self._wear(policy.adapter)
        load_into(self._model, {name: policy.tensors[name] for name in changed}, partial=True)
        try:
            if odd := unlike(self._model, policy.tensors):
                raise PolicyRefused(f"policy {policy.version}: after the load the engine holds other values in {odd}")
            scores = [self._score(tokens) for tokens in policy.probe.sequences] if policy.probe else []
            difference = self._gate.check(policy, scores)
        except PolicyRefused:
            self._wear(before)
            load_into(self._model, self._held)
            raise
        self._is_base = self._is_base and policy.adapter is not None
        self._batch.remove_cancelled()
        if self._kv == "rebuild":
            self._batch.rebuild(policy.version)
        self._held = dict(policy.tensors)
        self.version = policy.version
        return LoadReport((time.perf_counter() - begin) * 1e3, difference)

    def _wear(self, adapter: Adapter | None) -> None:
        """Put this adapter, without its values, onto the base; None removes it. No change if it is on already."""
        if adapter == self._adapter:
            return
        remove_adapter(self._model)
        if adapter is not None:
            put_adapter(self._model, adapter)
        self._adapter = adapter

    def _score(self, tokens: Sequence[int]) -> tuple[float, ...]:
        ids = torch.tensor([list(tokens)])
        inputs = probe_inputs(self._model, self._vision, ids)
        logprobs = torch.log_softmax(self._model(**inputs, use_cache=False).logits[0].float(), -1)
        return tuple(logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist())

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineStopped(str(self._error)) from self._error
        if self._thread is None:
            raise EngineStopped("the engine was not started")

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        self._check_alive()
        done: concurrent.futures.Future[Result] = concurrent.futures.Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)

        self._commands.put(command)
        return await asyncio.wrap_future(done)

    def _enter(self) -> None:
        rows, self._entering = self._entering, []
        self._commands.put(lambda: self._waiting.extend(rows))

    def _run(self) -> None:
        """The thread: ends on None, or on an error, which then reaches every caller."""
        try:
            with torch.inference_mode():
                while self._take_commands():
                    self._advance()
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, error)

    def _take_commands(self) -> bool:
        idle = not self._batch.rows and not self._waiting
        while True:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            idle = False

    def _advance(self) -> None:
        self._batch.remove_cancelled()
        finished: list[RunningSequence] = []
        if self._batch.rows:
            finished += self._batch.step(self.version)
        entering: list[RunningSequence] = []
        while self._waiting and len(self._batch.rows) + len(entering) < self._max_sequences:
            row = self._waiting.popleft()
            if not row.cancelled:
                entering.append(row)
        if entering:
            finished += self._batch.admit(entering, self.version)
        streamed = [row for row in (*self._batch.rows, *finished) if row.on_chunk is not None]
        chunks = [(row, row.trace.take_chunks()) for row in streamed]
        if finished or chunks:
            completions = [(row, row.trace.completion()) for row in finished]
            self._loop.call_soon_threadsafe(self._deliver, chunks, completions)

    def _deliver(
        self, chunks: list[tuple[RunningSequence, list[Chunk]]], completions: list[tuple[RunningSequence, Completion]]
    ) -> None:
        for row, sampled in chunks:
            future = self._futures.get(row)
            if future is None or future.done() or row.on_chunk is None:
                continue
            try:
                for chunk in sampled:
                    row.on_chunk(chunk)
            except Exception as error:  # the caller's own, so the caller gets it
                future.set_exception(error)
        for row, completion in completions:
            future = self._futures.get(row)
            if future is None or future.done():
                continue
            if row.is_stuck:
                future.set_exception(RuntimeError(STUCK))
            else:
                future.set_result(completion)

    def _fail(self, error: Exception) -> None:
        self._error = error
        for future in self._futures.values():
            if not future.done():
                future.set_exception(EngineStopped(f"the engine's thread died: {error}"))
