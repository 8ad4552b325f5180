"""The vLLM engine: continuous batching with exact hot reload.

Guarantees: vLLM labels every token with the weights that sampled it, and each load attempt has its own label, so spans are
exact. A load rebuilds keys and values of running requests under the new weights, or keeps them and records their age (`kv`);
then later requests find only keys and values of the new weights in vLLM's caches. A completion with tokens of an undecided
attempt waits for the verdict. After a refusal it is cut before the tokens of that attempt and continues; an answer under a
schema starts again, since vLLM's grammars begin with the answer. After a refused attempt keys and values are always rebuilt.
The tensors go through this host's memory, so the workers must run on it.

    stage ── pause ── salt ── apply ── caches ── label ── resume, and the probe enters ── probe's scores ── compare
    (between steps)   keep: new requests begin with another salt                                  (between steps)
                      rebuild: running requests are preempted, and caches are emptied

No request has a salt before vLLM's last step under older weights: the pause is in vLLM's queue before all later requests, and
no request is sent between the pause and the change of the salt.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, cast

from actors.engines.checks import ProbeGate, check_images, check_probe_sequences, check_request, check_tensors
from actors.engines.engine import Completion, EngineStopped, KvMode, LoadReport, OnChunk, Sampling
from actors.engines.grammar import Grammars, folder_vocabulary
from actors.engines.trace import RequestImages
from actors.engines.vllm.adapters import Adapters, Attempts, check_adapted
from actors.engines.vllm.requests import Requests, layer_name
from actors.engines.vllm.settings import (
    GRAMMARS,
    argument_names,
    check_release,
    engine_arguments,
    environment,
    give_cache,
)
from infra.model.adapter import adapter_shapes, find_adapter, write_adapter_folder
from infra.model.model import folder_tensors, load_model, meta_model, model_folder, model_tensors
from infra.model.vision import load_vision
from infra.policies.manifest import HashedTensors, sha256_hex
from infra.policies.policy import Adapter, Policy, Probe, described
from infra.policies.tensors import Tensor, chunks
from infra.policies.version_files import FileTensors, Put, VersionFiles
from infra.store.images import Pixels
from schemas.errors import ConfigError, PolicyRefused

log = logging.getLogger(__name__)
Scores = list[tuple[float, ...]]
Loaded = tuple[float, str]  # of a worker, see `actors.engines.vllm.worker`
PART_BYTES = 32 * 2**20  # loaded between two steps on a CPU, some tens of milliseconds; one layer or module at least


class Swap:
    """Puts versions in place in one AsyncLLM, between two steps, while requests wait. sees: its model takes pictures."""

    def __init__(self, llm: Any, requests: Requests, *, sees: bool) -> None:
        self._llm = llm
        self._requests = requests
        self._sees = sees
        self._is_overlapped = bool(llm.scheduler_config.async_scheduling)
        self._is_staged = False
        self._num_groups = 0

    async def begin(self) -> None:
        """Have the workers take checksums of the model; once, before the first `put`."""
        begun = await self._llm.collective_rpc("headrace_begin")
        self._is_staged = all(is_staged for is_staged, _ in begun)
        self._num_groups = max(num_groups for _, num_groups in begun)

    async def put(
        self,
        path: Path,
        parts: Sequence[list[str]],
        label: str,
        probe: Probe | None,
        *,
        keep: bool,
        clears: bool = False,
    ) -> tuple[float, Scores]:
        """Put tensors of a safetensors file in place.

        Returns the longest time without a step in milliseconds, and the probe's scores. parts: names of tensors, see
        `reload_parts`. label: of the attempt. keep: running requests keep their keys and values. clears: overwrite all keys and
        values with zeros. Raises PolicyRefused if vLLM does not take the tensors, or holds other values afterwards.
        """
        core = self._llm.engine_core
        longest_ms = 0.0
        for index, names in enumerate([[], *parts] if self._is_staged else ()):
            longest_ms = max(longest_ms, await self._ask(label, "headrace_stage", str(path), names, index == 0))
        if self._is_overlapped:
            await core.pause_scheduler_async(mode="keep", clear_cache=False)
        # A core whose steps do not overlap takes these one after the other between two steps: no need to wait for
        # each answer while this loop is busy with others.
        results = await asyncio.gather(
            core.pause_scheduler_async(mode="keep", clear_cache=False),
            self._change(label),
            self._llm.collective_rpc(
                "headrace_apply", args=(str(path), [name for part in parts for name in part], clears)
            ),
            *([] if keep else self._forgetting()),
            self._llm.update_weight_version(label),
            return_exceptions=True,
        )
        if error := next((result for result in results if isinstance(result, BaseException)), None):
            self._refuse(label, error)
        began_s = min(self._loaded(label, cast(list[Loaded], results[2])))
        if not keep and results[3] is not True:
            self._refuse(label, RuntimeError("its prefix cache still holds blocks of older weights"))
        sequences = probe.sequences if probe else ()
        ended_s, *scores = await asyncio.gather(self._resumed(), *map(self._requests.submit_score, sequences))
        scored = [await score() for score in scores]
        compared_ms = [await self._ask(label, "headrace_compare", group) for group in range(self._num_groups)]
        return max(longest_ms, (ended_s - began_s) * 1e3, *compared_ms), scored

    async def _ask(self, label: str, method: str, *arguments: Any) -> float:
        """Have every worker do something between two steps; the most milliseconds that one took."""
        try:
            answers = await self._llm.collective_rpc(method, args=arguments)
        except Exception as error:
            self._refuse(label, error)
        return max(self._loaded(label, answers))

    def _refuse(self, label: str, error: BaseException) -> NoReturn:
        if self._llm.errored:
            raise error
        raise PolicyRefused(f"policy {label}: vLLM could not load it: {error}") from error

    def _loaded(self, label: str, answers: Sequence[Loaded]) -> list[float]:
        """The times of workers that loaded a version. Raises PolicyRefused where one did not."""
        if reason := next((reason for _, reason in answers if reason), ""):
            raise PolicyRefused(f"policy {label}: {reason}")
        return [at for at, _ in answers]

    async def _resumed(self) -> float:
        """Let vLLM go on; when it did."""
        await self._llm.resume_generation()
        return time.perf_counter()

    async def _change(self, label: str) -> None:
        self._requests.born = label

    def _forgetting(self) -> list[Any]:
        pictures = [self._llm.reset_encoder_cache()] if self._sees else []
        return [self._llm.reset_prefix_cache(reset_running_requests=True), *pictures]


def reload_parts(tensors: Mapping[str, Tensor], part_bytes: int = PART_BYTES) -> list[list[str]]:
    """Names of the tensors of vLLM's model in parts of about `part_bytes`; a layer is in a single part, since vLLM rebuilds a
    module from all its sources.
    """
    by_layer: dict[str, list[str]] = {}
    for name in tensors:
        by_layer.setdefault(layer_name(name), []).append(name)
    parts: list[list[str]] = []
    room = 0
    for names in by_layer.values():
        size = sum(tensors[name].num_bytes for name in names)
        if not parts or size > room:
            parts.append([])
            room = part_bytes
        parts[-1] += names
        room -= size
    return parts


class VllmEngine:
    """Serves a model with vLLM.

    model: folder, or name in the local Hugging Face cache. options: vLLM's engine arguments. lora: rank, alpha and targets
    where versions are adapters of the model; `max_loras` of them live at once. kv: treatment of the keys and values of running
    requests at a reload; a request under an adapter keeps its version, and them with it.

    On a CPU `kv_cache_memory_bytes`, memory for keys and values, is by default enough for `max_num_seqs` requests of
    `max_model_len` tokens, at most 1 GiB where one request does not need more, and at most half of the free memory. Without
    the option `max_model_len` it is at most 1 GiB, and a request is at most as long as it holds.
    """

    def __init__(
        self,
        *,
        model: str,
        seed: int = 0,
        lora: Mapping[str, Any] | None = None,
        kv: KvMode = "rebuild",
        **options: object,
    ) -> None:
        self._keeps = kv == "keep" and lora is None
        self._model = model
        self._lora = lora
        self._seed = seed
        self._options = options
        self._llm: Any = None
        self._requests: Requests | None = None
        self._swap: Swap | None = None
        self._grammars = Grammars(lambda: folder_vocabulary(str(self._folder), self._num_vocabulary), keeps=False)
        self._attempts = Attempts("keep" if self._keeps else "rebuild")
        self.version_files = VersionFiles()
        self.version = 0
        self._held: Mapping[str, Tensor] = {}
        self._adapter: Adapter | None = None
        self._adapters: Adapters | None = None
        self._loads: set[asyncio.Task[LoadReport]] = set()
        self._loading = asyncio.Lock()

    @staticmethod
    def check_options(options: Mapping[str, object]) -> bool:
        """Compare engine arguments with vLLM's, not importing it; False where it is not installed. Raises ConfigError."""
        known = argument_names()
        if known is not None:
            engine_arguments(model="", seed=0, options=options, on_cpu=False, known=known)
        return known is not None

    @property
    def num_running(self) -> int:
        return self._requests.num_running if self._requests else 0

    async def start(self) -> None:
        """Start vLLM and let it answer once: the first step of each kind is slow. vLLM's processes log why they do not
        start.
        """
        self._folder = await asyncio.to_thread(model_folder, self._model)
        self._vision = await asyncio.to_thread(load_vision, self._folder)
        if self._keeps and self._vision is not None:
            raise ConfigError(
                f'reload.kv: got "keep" with {self._folder}, which takes pictures: at a load vLLM forgets those that prompts '
                'are still being read with; expected "rebuild", or the torch engine'
            )
        await asyncio.to_thread(self._read_folder)
        await asyncio.to_thread(self._build)
        config = self._llm.model_config
        self._num_vocabulary = int(config.get_vocab_size())
        self.max_model_len = int(config.max_model_len)
        self._gate = ProbeGate(str(config.dtype).removeprefix("torch."))
        label = self._attempts.begin(0, proved=True)
        await self._llm.update_weight_version(label)
        await self._llm.collective_rpc("headrace_leave_out_amx")
        await self._llm.collective_rpc("headrace_keep_seeds")
        if self._adapter is not None:
            await check_adapted(self._llm, sorted(self._shapes), self._folder)
            self._adapters = Adapters(self._llm, slots=int(self._llm.vllm_config.lora_config.max_loras), base=label)
        self._requests = Requests(self._llm, self._attempts, adapters=self._adapters, vision=self._vision)
        self._requests.born = label
        self._swap = Swap(self._llm, self._requests, sees=self._vision is not None)
        if self._adapter is None:
            await self._swap.begin()
        await asyncio.gather(*(self.generate((0,), Sampling(max_tokens=3)) for _ in range(4)))
        seen = (self._vision.token,) * self._vision.num_places if self._vision else ()
        await self.score_tokens((*seen, 0, 0))

    async def close(self) -> None:
        requests, self._requests = self._requests, None
        if requests is not None:
            await asyncio.gather(*self._loads, return_exceptions=True)
            await requests.close()
        if self._adapters is not None:
            await self._adapters.close()
        self._grammars.close()
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
            self._llm = requests = self._swap = None
            gc.collect()  # it is part of cycles, and would shut down again, noisily, when the interpreter ends

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_chunk: OnChunk | None = None,
        images: Sequence[Pixels] = (),
    ) -> Completion:
        check_request(prompt, sampling, self._num_vocabulary, self.max_model_len)
        requests = self._running()
        check_images(self._vision, prompt, images)
        if sampling.json_schema:
            await self.prepare(sampling.json_schema)
        return await requests.generate(prompt, sampling, on_chunk, RequestImages(images))

    async def prepare(self, json_schema: str) -> None:
        """Check the schema, also that it compiles in time. Raises SchemaRefused.

        vLLM compiles it again in its own process, in threads that sample nothing. Only schemas that compiled here within the
        deadline arrive there, in sequence, so they do not pile up. vLLM recompiles evicted schemas within the same time.
        """
        await self._grammars.compiled(json_schema)
        self._running().special = self._grammars.vocabulary.special

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
            requests = self._running()
            with nullcontext() if self._adapters is None else self._adapters.used() as adapter:
                scores: tuple[float, ...] = await (await requests.submit_score(tokens, adapter))()
            return scores

    def _running(self) -> Requests:
        if self._requests is None:
            raise EngineStopped("the engine is not running")
        return self._requests

    def _read_folder(self) -> None:
        """Read the tensors to compare policies with. Raises ConfigError for an adapter that does not fit the folder's model."""
        if self._lora is not None:
            rank, alpha, targets = (self._lora[name] for name in ("rank", "alpha", "targets"))
            self._adapter = find_adapter(self._folder, rank=rank, alpha=alpha, targets=tuple(targets))
            self._shapes = adapter_shapes(meta_model(self._folder), self._adapter)
            return
        # One with a vision tower is saved under other names than policies have.
        self._held = folder_tensors(self._folder) if self._vision is None else model_tensors(load_model(self._folder))
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._held.items()}

    def _build(self) -> None:
        from vllm import __version__

        check_release(__version__)
        from vllm.config import StructuredOutputsConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        on_cpu = bool(current_platform.is_cpu())
        known = frozenset(AsyncEngineArgs.__dataclass_fields__)
        arguments = engine_arguments(
            model=str(self._folder),
            seed=self._seed,
            options=self._options,
            on_cpu=on_cpu,
            known=known,
            vision=self._vision,
            adapter=self._adapter,
        )
        arguments["structured_outputs_config"] = StructuredOutputsConfig(**GRAMMARS)
        with environment(on_cpu=on_cpu):
            config = AsyncEngineArgs(**arguments).create_engine_config()
            if on_cpu:
                _check_on_cpu(self._folder, config.model_config)
                give_cache(config)
            length = config.model_config.max_model_len
            # Not returned: the thread's future would keep it alive after `close`.
            self._llm = AsyncLLM.from_vllm_config(config, disable_log_stats=bool(arguments["disable_log_stats"]))
        if (fits := self._llm.model_config.max_model_len) < length:
            log.warning(
                "the memory for keys and values holds %d of %d tokens; set engine.options.max_model_len", fits, length
            )

    async def _load(self, policy: Policy) -> LoadReport:
        async with self._loading:
            if policy.adapter != self._adapter:
                got, expected = described(policy.adapter), described(self._adapter)
                raise PolicyRefused(
                    f"policy {policy.version}: got {got}, expected {expected}, with which vLLM was started"
                )
            if self._adapters is not None and policy.adapter is not None:
                return await self._load_adapter(policy, policy.adapter, self._adapters)
            assert self._swap is not None  # a load is of a running engine, and `close` waits for it
            await asyncio.to_thread(self._check, policy)
            parts = reload_parts(policy.tensors)
            file = await asyncio.to_thread(in_a_file, self.version_files, policy.tensors)
            label = self._attempts.begin(policy.version)
            try:
                try:
                    pause_ms, scores = await self._swap.put(file.path, parts, label, policy.probe, keep=self._keeps)
                    difference = self._gate.check(policy, scores)
                except PolicyRefused:
                    await self._undo(self._swap)
                    self._attempts.decide(label, False)
                    raise
            except PolicyRefused:
                raise
            except Exception as error:
                stopped = EngineStopped(f"a reload failed and could not be undone: {error}")
                self._attempts.fail(label, stopped)
                raise stopped from error
            self._held, self.version = policy.tensors, policy.version
            self._attempts.decide(label, True)
            return LoadReport(pause_ms, difference)

    async def _load_adapter(self, policy: Policy, adapter: Adapter, adapters: Adapters) -> LoadReport:
        await asyncio.to_thread(self._check, policy)
        await adapters.make_room()
        label = self._attempts.begin(policy.version, proved=True)  # no request has it before the verdict
        with ExitStack() as files:
            folder = await asyncio.to_thread(in_a_folder, files, adapter, policy.tensors)
            loaded, took_ms = await adapters.add(label, folder)
        try:
            with adapters.used(loaded):
                sequences = policy.probe.sequences if policy.probe else ()
                pending = [await self._running().submit_score(tokens, loaded) for tokens in sequences]
                difference = self._gate.check(policy, [await scores() for scores in pending])
        except BaseException:
            adapters.retire(loaded)
            raise
        adapters.serve(loaded)
        self.version = policy.version
        return LoadReport(took_ms, difference)

    async def _undo(self, swap: Swap) -> None:
        """Put all served tensors back: other modules than were sent may differ. Raises EngineStopped where that fails."""
        try:
            file = await asyncio.to_thread(in_a_file, self.version_files, self._held)
            label = self._attempts.begin(self.version, proved=True)
            await swap.put(file.path, reload_parts(self._held), label, None, keep=False, clears=True)
        except PolicyRefused as error:
            raise EngineStopped(str(error)) from error

    def _check(self, policy: Policy) -> None:
        check_tensors(policy, self._shapes)
        check_probe_sequences(policy.probe, self._num_vocabulary, self.max_model_len - 1)


def in_a_file(files: VersionFiles, tensors: Mapping[str, Tensor]) -> FileTensors:
    """The tensors where vLLM's workers can read them, as long as the result is held. Blocks. Raises PolicyRefused where there
    is no room.
    """
    if isinstance(tensors, FileTensors):
        return tensors

    def fill(put: Put) -> None:
        for name, tensor in tensors.items():
            put(name, tensor, chunks(tensor))

    entries = HashedTensors(tensors).entries
    placed = files.place(sha256_hex(repr(entries).encode()), entries, fill, lambda found: None)
    if placed is None:
        num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
        raise PolicyRefused(
            f"a reload needs {num_bytes:,} bytes to pass the weights to vLLM, more than is free in /dev/shm and in the "
            "folder for temporary files; give the container a larger /dev/shm, or set TMPDIR to a folder with room"
        )
    return placed


def in_a_folder(files: ExitStack, adapter: Adapter, tensors: Mapping[str, Tensor]) -> str:
    """A folder with an adapter as peft writes it, until `files` closes. Blocks. Raises PolicyRefused where there is no room."""
    try:
        folder = files.enter_context(TemporaryDirectory(prefix="headrace-adapter-"))
        write_adapter_folder(Path(folder), adapter, tensors)
    except OSError as error:
        raise PolicyRefused(f"its files for vLLM: {error}; set TMPDIR to a folder with room") from error
    return folder


def _check_on_cpu(folder: Path, config: Any) -> None:
    """Raise ConfigError for a model that vLLM cannot serve on a CPU. config: vLLM's of the model."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size, known = config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
    if size not in known:
        raise ConfigError(
            f"model: {folder} has attention heads of {size}, expected one of {', '.join(map(str, known))}, which vLLM "
            "has on a CPU; change head_dim, or use the torch engine"
        )
