"""The vLLM engine: continuous batching with exact hot reload.

    write tensors ── pause · apply · reset caches · label ── probe enters ── resume ── probe's scores ── verdict
                     \\__________ no token is sampled _________________/     \\____ completions are held ____/

Guarantees: vLLM labels every token with the weights that sampled it, and each load attempt has a label of its own, so
spans are exact; keys and values of running requests are rebuilt under the new weights; a completion with tokens of an
attempt not yet proved waits for the verdict, and one with tokens of a refused attempt is cut before them and goes on. An
answer held to a schema cannot go on (vLLM's grammars begin with the answer), so it begins again.
The tensors go through this host's memory, so the workers must run on it.
"""

import asyncio
import gc
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.engines.checks import (
    ProbeGate,
    changed_names,
    check_images,
    check_probe_sequences,
    check_request,
    check_tensors,
)
from actors.engines.engine import Completion, EngineStopped, LoadReport, OnChunk, Sampling
from actors.engines.judge import SchemaCompiler
from actors.engines.once_per_schema import OncePerSchema
from actors.engines.request_images import RequestImages
from actors.engines.token_spellings import TokenSpellings, folder_vocabulary
from actors.engines.vllm.attempts import Attempts
from actors.engines.vllm.exchange import Exchange
from actors.engines.vllm.layers import names_to_send
from actors.engines.vllm.requests import Requests
from actors.engines.vllm.routing import layers_that_route, routing_options
from actors.engines.vllm.settings import GRAMMARS, cached_byte_code, engine_arguments, environment
from actors.engines.vllm.streaming import stream, whole
from infra.model.model import folder_tensors, load_model, model_tensors
from infra.model.vision import load_vision
from infra.policies.policy import Policy, Probe
from infra.policies.tensors import Tensor
from infra.store.images import Pixels
from schemas.errors import ConfigError, PolicyRefused


class VllmEngine:
    """model: a folder. options: vLLM's engine arguments. group_max_tokens: longest calls that become one request. routing:
    record the experts of each token, for `trainer.routing = "replay"`; on a GPU only, and not for answers that are streamed.
    """

    def __init__(
        self, *, model: str, seed: int = 0, group_max_tokens: int = 64, routing: bool = False, **options: object
    ) -> None:
        self._folder = Path(model)
        self._seed = seed
        self._group_max_tokens = group_max_tokens
        self._options = options
        self._records_routing = routing
        self._llm: Any = None
        self._requests: Requests | None = None
        self._schemas = OncePerSchema(self._check_schema)
        self._vocabulary: TokenSpellings | None = None
        self._judge: SchemaCompiler | None = None
        self._attempts = Attempts()
        self._exchange = Exchange()
        self._version = 0
        self._held: Mapping[str, Tensor] = {}
        self._loads: set[asyncio.Task[LoadReport]] = set()
        self._loading = asyncio.Lock()

    @property
    def version(self) -> int:
        """Policy version that samples now."""
        return self._version

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return self._max_model_len

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return self._requests.num_running if self._requests else 0

    async def start(self) -> None:
        """Start vLLM and let it answer once: the first step of each kind is slow."""
        self._vision = await asyncio.to_thread(load_vision, self._folder)
        self._held = await asyncio.to_thread(self._folder_tensors)
        await asyncio.to_thread(self._build)
        config = self._llm.model_config
        self._num_vocabulary = int(config.get_vocab_size())
        self._max_model_len = int(config.max_model_len)
        self._gate = ProbeGate(str(config.dtype).removeprefix("torch."))
        self._is_overlapped = bool(self._llm.scheduler_config.async_scheduling)
        await self._llm.update_weight_version(self._attempts.begin(0, proved=True))
        self._requests = Requests(
            self._llm,
            self._attempts,
            group_max_tokens=self._group_max_tokens,
            vision=self._vision,
            routed_layers=layers_that_route(self._held) if self._records_routing else (),
        )
        await asyncio.gather(*(self.generate((0,), Sampling(max_tokens=3)) for _ in range(4)))
        seen = (self._vision.token,) * self._vision.num_places if self._vision else ()
        await self.score_tokens((*seen, 0, 0))

    async def close(self) -> None:
        """Stop vLLM; running requests are cancelled."""
        requests, self._requests = self._requests, None
        if requests is not None:
            await asyncio.gather(*self._loads, return_exceptions=True)
            await requests.close()
        self._schemas.close()
        if self._judge is not None:
            self._judge.close()
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
            self._llm = requests = None
            gc.collect()  # it is part of cycles, and would shut down again, noisily, when the interpreter ends
            self._exchange.close()

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_chunk: OnChunk | None = None,
        images: Sequence[Pixels] = (),
    ) -> Completion:
        """Sample one continuation."""
        check_request(prompt, sampling, self._num_vocabulary, self._max_model_len)
        requests = self._running()
        check_images(self._vision, prompt, images)
        pictures = RequestImages(images)
        if sampling.json_schema:
            await self.prepare(sampling.json_schema)
            return await whole(requests, prompt, sampling, on_chunk, pictures)
        if on_chunk is not None:
            return await stream(requests, prompt, sampling, on_chunk, pictures)
        return await requests.generate(prompt, sampling, pictures)

    async def prepare(self, json_schema: str) -> None:
        """Check the schema, also that it compiles in time. Raises SchemaRefused.

        vLLM compiles it once more, in its own process and in threads that sample nothing: whoever waits for that has a schema
        that took no longer than the deadline on one thread here. Schemas arrive there one after the other, as they pass here,
        so they do not pile up; what vLLM let go of is compiled again, within the same time.
        """
        await self._schemas.of(json_schema)

    def _check_schema(self, json_schema: str) -> None:
        if self._vocabulary is None or self._judge is None:
            self._vocabulary = folder_vocabulary(str(self._folder), self._num_vocabulary)
            self._running().special = self._vocabulary.special
            self._judge = SchemaCompiler(self._vocabulary.spellings)
        self._vocabulary.check(json_schema)
        self._judge.check(json_schema)

    async def load(self, policy: Policy) -> LoadReport:
        """Swap the weights while requests run. A cancelled call still finishes its swap."""
        self._running()
        task = asyncio.create_task(self._load(policy))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        return await asyncio.shield(task)

    async def score_tokens(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Logprob of every token but the first; waits for a load that is under way."""
        async with self._loading:
            scores: tuple[float, ...] = await (await self._running().submit_score(tokens))()
            return scores

    async def core_memory_mb(self) -> float:
        """Resident memory of the process that holds the model."""
        return float((await self._llm.collective_rpc("headrace_memory"))[0]["rss_mb"])

    def _running(self) -> Requests:
        if self._requests is None:
            raise EngineStopped("the engine is not running")
        return self._requests

    def _folder_tensors(self) -> Mapping[str, Tensor]:
        """By the names that policies have: a folder with a vision tower is saved under others."""
        if self._vision is None:
            return folder_tensors(self._folder)
        return model_tensors(load_model(self._folder))

    def _build(self) -> None:
        with cached_byte_code():
            from vllm.config import StructuredOutputsConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM
        if not hasattr(AsyncLLM, "update_weight_version"):
            raise ConfigError("vllm: this release does not say which weights sampled a token; install 0.32 or later")
        on_cpu = bool(current_platform.is_cpu())
        known = frozenset(AsyncEngineArgs.__dataclass_fields__)
        routing = routing_options(self._records_routing, on_cpu=on_cpu, known=known)
        arguments = engine_arguments(
            model=str(self._folder),
            seed=self._seed,
            options={**self._options, **routing},
            on_cpu=on_cpu,
            known=known,
            vision=self._vision,
        )
        arguments["structured_outputs_config"] = StructuredOutputsConfig(**GRAMMARS)
        with environment(on_cpu=on_cpu), cached_byte_code():
            config = AsyncEngineArgs(**arguments).create_engine_config()
            if on_cpu:
                _check_on_cpu(self._folder, config.model_config)
            # Not returned: the thread's future would keep it alive after `close`.
            self._llm = AsyncLLM.from_vllm_config(config, disable_log_stats=bool(arguments["disable_log_stats"]))

    async def _load(self, policy: Policy) -> LoadReport:
        async with self._loading:
            names = await asyncio.to_thread(self._check, policy)
            path = await asyncio.to_thread(self._exchange.write, {name: policy.tensors[name] for name in names})
            label = self._attempts.begin(policy.version)
            try:
                try:
                    pause_ms, scores = await self._swap(path, label, policy.probe)
                    difference = self._gate.check(policy, scores)
                except PolicyRefused:
                    await self._undo(names)
                    self._attempts.decide(label, False)
                    raise
            except PolicyRefused:
                raise
            except Exception as error:
                stopped = EngineStopped(f"a reload failed and could not be undone: {error}")
                self._attempts.fail(label, stopped)
                raise stopped from error
            self._held, self._version = policy.tensors, policy.version
            self._attempts.decide(label, True)
            return LoadReport(pause_ms, difference)

    async def _undo(self, names: Sequence[str]) -> None:
        """Put the served tensors back. Raises EngineStopped where that cannot be done: then nothing it would say is true."""
        try:
            path = await asyncio.to_thread(self._exchange.write, {name: self._held[name] for name in names})
            await self._swap(path, self._attempts.begin(self._version, proved=True), None)
        except PolicyRefused as error:
            raise EngineStopped(str(error)) from error

    def _check(self, policy: Policy) -> list[str]:
        check_tensors(policy, {name: tuple(tensor.shape) for name, tensor in self._held.items()})
        check_probe_sequences(policy.probe, self._num_vocabulary, self._max_model_len - 1)
        return names_to_send(changed_names(self._held, policy.tensors), policy.tensors)

    async def _swap(self, path: Path, label: str, probe: Probe | None) -> tuple[float, list[tuple[float, ...]]]:
        """Put the tensors of a file in place between two steps, and remove it; (milliseconds without sampling, the probe's
        scores).
        """
        core, requests = self._llm.engine_core, self._running()
        begin = time.perf_counter()
        try:
            if self._is_overlapped:
                await core.pause_scheduler_async(mode="keep", clear_cache=False)
            # A core whose steps do not overlap takes these one after the other between two steps: no need to wait for
            # each answer while this loop is busy with others.
            results = await asyncio.gather(
                core.pause_scheduler_async(mode="keep", clear_cache=False),
                self._llm.collective_rpc("headrace_apply", args=(str(path),)),
                self._llm.reset_prefix_cache(reset_running_requests=True),
                self._llm.update_weight_version(label),
                *([self._llm.reset_encoder_cache()] if self._vision else []),
                return_exceptions=True,
            )
        finally:
            self._exchange.discard(path)
        for result in results:
            if isinstance(result, BaseException):
                if self._llm.errored:
                    raise result
                raise PolicyRefused(f"policy {label}: vLLM could not load it: {result}") from result
        scores = [await requests.submit_score(tokens) for tokens in (probe.sequences if probe else ())]
        await self._llm.resume_generation()
        pause_ms = (time.perf_counter() - begin) * 1e3
        return pause_ms, [await score() for score in scores]


def _check_on_cpu(folder: Path, config: Any) -> None:
    """Raise ConfigError for a model that vLLM cannot serve on a CPU. config: vLLM's of the model."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if config.hf_config.tie_word_embeddings:
        raise ConfigError(
            f"model: {folder} ties its embeddings, and vLLM on a CPU keeps a stale output matrix after a "
            "reload; save it with tie_word_embeddings=false and its own lm_head.weight, or use the torch engine"
        )
    size, known = config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
    if size not in known:
        raise ConfigError(
            f"model: {folder} has attention heads of {size}, expected one of {', '.join(map(str, known))}, which vLLM "
            "has on a CPU; change head_dim, or use the torch engine"
        )
