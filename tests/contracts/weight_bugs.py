"""A museum of public bugs in weight synchronisation, each planted in headrace's own path on a tiny model.

    learner ── publish ──> store ── fetch ──> engine: load ── read back, probe ──> serves
                  └──────────┴── a bug is planted in one of these ──┘

With the checks on, such a version is refused while requests run. With the checks off, the learner scores sampled answers.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from actors.engines.engine import Completion, Engine, EngineStopped, Sampling
from actors.engines.torch import TorchEngine
from actors.engines.vllm.engine import VllmEngine
from infra.policies.chain import read_manifest
from infra.policies.fetch import PolicyFetcher
from infra.policies.manifest import HashedTensors
from infra.policies.policy import Policy
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor
from infra.store.memory import MemoryStore
from schemas import PolicyEvent
from schemas.errors import PolicyRefused
from tests.contracts.test_learner import batch, opened
from tests.infra.tiny_families import build_family
from tests.variables import variables
from trainer.config import LoraConfig

Tensors = Mapping[str, Tensor]
PROBE = tuple((1, *(20 + (at * step) % 70 for at in range(63))) for step in (1, 3, 11, 17))  # as long as a version's
LONG = (1, *(20 + at % 70 for at in range(300)))  # of blocks enough for vLLM to cache
PROMPTS = [(*LONG, 20 + number) for number in range(8)]
LATER = [(1, *range(20, 20 + 3 * number)) for number in range(1, 25)]  # after the refusal
NUM_TOKENS = 48
CLIP = 0.2  # of the losses that clip
NEAR = {"float32": 1e-3, "bfloat16": 0.5}  # of two readings of one token under one version, nats
MATRIX = "model.layers.1.self_attn.o_proj.weight"
LEARNING_RATE = 1e-2  # so that one step of a random model matters
SHARD_BYTES = 2**15  # so that a version lies in several objects
LORA = LoraConfig(rank=3, alpha=7)
KEEPERS = {  # check → words of its refusal
    "hash": "with digest",
    "finite check": "not finite",
    "read-back": "after the load",
    "cache check": "prefix cache",
    "loader's error": "could not load it",
    "probe": ": probe",
}


class Bug(NamedTuple):
    """A public bug. source: its public report. keeper: the check that refuses it. plant: publishes the next version, with the
    bug on its way. held: tensors that the engine would sample with, where the bug does not reach the engine by itself.
    """

    name: str
    source: str
    keeper: str
    plant: "Callable[[Room], Awaitable[PolicyEvent]]"
    held: "Callable[[Room], Tensors] | None" = None


class Shown(NamedTuple):
    """A bug as it went. said: by the engine. after_ms: until the version before served alone again. lost: requests that it
    did not answer. apart: mean distance of the recorded from the learner's logprobs without the checks, nats;
    outside: share of the tokens whose ratio is no number, or outside 1 ± CLIP. None where no request gets an answer.
    """

    bug: Bug
    said: str
    after_ms: float
    lost: int
    apart: float | None
    outside: float | None

    @property
    def keeper(self) -> str:
        return next((keeper for keeper, words in KEEPERS.items() if words in self.said), self.said)


class ExchangingStore(MemoryStore):
    """Gives one object in the place of another. instead: key that is asked for, and key that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.instead: dict[str, str] = {}

    def get(self, key: str) -> bytes:
        return super().get(self.instead.get(key, key))


class ResumingEngine(TorchEngine):
    """believes: that it holds the next version already, so that a load copies nothing."""

    believes = False

    def _check(self, policy: Policy) -> frozenset[str]:
        changed, believes = super()._check(policy), self.believes
        self.believes = False
        return frozenset() if believes else changed


class Room:
    """An engine, fed by a learner through a store. lora: where versions are adapters."""

    def __init__(self, engine: Engine, folder: str, dtype: str, lora: LoraConfig | None = None) -> None:
        self.engine = engine
        self.near = NEAR[dtype]
        self.store = ExchangingStore()
        self.learner = opened(folder, lora=lora, dtype=dtype)
        self.number = 0
        self.is_checked = True
        self.first = self.before = self.learner.tensors()
        self._fetcher = PolicyFetcher(self.store, "main", getattr(engine, "version_files", None))

    def publish(self, change: Callable[[Tensors], Tensors] = lambda tensors: tensors) -> PolicyEvent:
        """Train a step and publish its weights. change: applied to the tensors before they are published."""
        self.number += 1
        self.before = self.learner.tensors()
        self.learner.step(batch(self.number), learning_rate=LEARNING_RATE, seed=self.number)
        new = NewVersion(policy="main", token=1, version=self.number, parent=self.number - 1, step=self.number,
                         adapter=self.learner.adapter)  # fmt: skip
        tensors, probe = change(self.learner.tensors()), self.learner.probe(PROBE)
        return publish(self.store, new, tensors, previous=None, probe=probe, shard_bytes=SHARD_BYTES)

    async def load(self, event: PolicyEvent) -> None:
        policy = await asyncio.to_thread(self._fetcher.fetch, event)
        await self.engine.load(policy)

    async def busy(self) -> list[asyncio.Task[Completion]]:
        """Requests that run."""
        began = asyncio.Event()
        sampling = Sampling(max_tokens=NUM_TOKENS)
        calls = [self.engine.generate(prompt, sampling) for prompt in PROMPTS]
        calls.append(self.engine.generate(PROMPTS[0], sampling, on_chunk=lambda chunk: began.set()))
        running = [asyncio.create_task(call) for call in calls]
        await began.wait()
        return running

    async def is_answered(self, prompt: tuple[int, ...], answer: Completion | BaseException, version: int) -> bool:
        """True if a version sampled all of an answer, with the logprobs that the engine now gives."""
        if isinstance(answer, BaseException) or {span.version for span in answer.spans} != {version}:
            return False
        scores = (await self.engine.score_tokens((*prompt, *answer.tokens)))[len(prompt) - 1 :]
        return len(scores) == NUM_TOKENS and bool(np.allclose(answer.logprobs, scores, atol=self.near, rtol=0))

    async def drift(self) -> tuple[float | None, float]:
        """Drift of answers that are sampled now, see Shown."""
        answers = await asyncio.gather(
            *(self.engine.generate(prompt, Sampling(max_tokens=NUM_TOKENS)) for prompt in PROMPTS)
        )
        sequences = tuple((*prompt, *answer.tokens) for prompt, answer in zip(PROMPTS, answers, strict=True))
        believed = np.concatenate([scores[-NUM_TOKENS:] for scores in self.learner.probe(sequences).logprobs])
        apart = believed - np.concatenate([answer.logprobs for answer in answers])
        is_number = np.isfinite(apart)
        mean = float(np.abs(apart[is_number]).mean()) if is_number.any() else None
        return mean, float((~(np.abs(np.expm1(apart)) <= CLIP)).mean())


async def shown(room: Room, bug: Bug) -> Shown:
    await room.load(room.publish())
    served, running = room.engine.version, await room.busy()
    event, said = await bug.plant(room), "nothing: it serves"
    began_s = time.perf_counter()
    try:
        await room.load(event)
    except PolicyRefused as error:
        said = str(error)
    after_ms = (time.perf_counter() - began_s) * 1e3
    room.store.instead.clear()
    later = [room.engine.generate(prompt, Sampling(max_tokens=NUM_TOKENS)) for prompt in LATER]
    answers = await asyncio.gather(*running, *later, return_exceptions=True)
    prompts = [*PROMPTS, PROMPTS[0], *LATER]
    good = [await room.is_answered(*each, served) for each in zip(prompts, answers, strict=True)]
    apart = outside = None
    with suppress(EngineStopped, PolicyRefused):  # not even without the checks is anything sampled
        apart, outside = await unrefused(room, bug)
    return Shown(bug, said, after_ms, good.count(False), apart, outside)


async def unrefused(room: Room, bug: Bug) -> tuple[float | None, float]:
    """The experiences that are trained without the checks."""
    if bug.held is not None:
        room.publish()
        tensors = bug.held(room)
        policy = Policy(version=room.number, tensors=tensors, finite=True)
        await room.engine.load(policy)
        return await room.drift()
    async with unchecked(room):
        await asyncio.gather(*await room.busy())
        await room.load(await bug.plant(room))
        return await room.drift()


# Bugs on the way to an engine ----------------------------------------------------------------------------------------


async def one_object_is_older(room: Room) -> PolicyEvent:
    before = read_manifest(room.store, f"policies/main/1/manifests/{room.number}.json")[0].sources[0].shards
    event = room.publish()
    shards = read_manifest(room.store, event.manifest)[0].sources[0].shards
    room.store.instead = {shards[-1].key: before[-1].key}
    return event


def half(room: Room, tensors: Tensors) -> Tensors:
    """Every other tensor is still that of the step before."""
    return {name: room.before[name] if at % 2 else tensors[name] for at, name in enumerate(sorted(tensors))}


async def copied_during_a_step(room: Room) -> PolicyEvent:
    return room.publish(partial(half, room))


def spoiled(tensors: Tensors) -> HashedTensors:
    """One value is not a number, and who hashed them says that all are finite."""
    copied = HashedTensors(tensors)
    tensor = tensors[MATRIX]
    data = np.frombuffer(tensor.data, np.uint8).copy()
    data[:4] = 0xFF  # a NaN, or two
    copied[MATRIX] = Tensor(tensor.dtype, tensor.shape, data.data)
    copied.not_finite = ""
    return copied


async def not_a_number(room: Room) -> PolicyEvent:
    return room.publish(spoiled)


async def weights_of_the_beginning(room: Room) -> PolicyEvent:
    assert isinstance(room.engine, ResumingEngine)
    room.engine.believes = True
    return room.publish()


# Bugs in vLLM's load: each acts once, so that the version before can be put back -------------------------------------


def once(owner: Any, name: str, fault: Callable[..., Any], *, after: int = 0) -> None:
    """Have a later call of a function go to `fault`, which gets the function first. after: calls until then."""
    is_own, function, left = name in vars(owner), getattr(owner, name), [after]

    def called(*args: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            return function(*args, **named)
        setattr(owner, name, function) if is_own else delattr(owner, name)
        return fault(function, *args, **named)

    setattr(owner, name, called)


def in_workers(fault: Callable[[Any], None]) -> Callable[[Room], Awaitable[PolicyEvent]]:
    async def plant(room: Room) -> PolicyEvent:
        engine: Any = room.engine
        await engine._llm.collective_rpc(fault)
        return room.publish()

    return plant


def reads_experts_as_packed(worker: Any) -> None:
    """The kernel of the experts stays, and reads the new weights as if they were packed."""
    from actors.engines.vllm import loading

    once(loading, "_experts_packed_again", lambda function, model: nullcontext())


def ends_the_load_after_each_tensor(worker: Any) -> None:
    """Leave the other tensors of a module as memory was."""
    from vllm.model_executor.model_loader.reload import layerwise

    model = worker.model_runner.model

    def in_parts(load: Callable[[Any], Any], tensors: Any) -> None:
        for each in tensors:
            load([each])
            layerwise.finalize_layerwise_reload(model, worker.vllm_config.model_config)
            layerwise.initialize_layerwise_reload(model)

    once(model, "load_weights", in_parts)


def breaks_off(worker: Any, *, rank: int = 0, after: int = 0) -> None:
    """Break off, like a loader that meets a tensor in an unknown layout."""

    def broken(load: Callable[[Any], Any], tensors: Any) -> None:
        if not after:  # else it is that of the model that serves, beside which a version is loaded
            listed = list(tensors)
            load(listed[: len(listed) // 2])
        raise ValueError("shard_dim=0 is not a valid data dimension")

    if worker.rank == rank:
        once(worker.model_runner.model, "load_weights", broken, after=after)


def exchanges_two_experts(worker: Any) -> None:
    def exchanged(name: str) -> str:
        before, cut, after = name.partition(".experts.")
        number, _, rest = after.partition(".")
        return f"{before}{cut}{ {'0': '1', '1': '0'}.get(number, number) }.{rest}" if cut else name

    once(
        worker.model_runner.model,
        "load_weights",
        lambda load, tensors: load([(exchanged(name), tensor) for name, tensor in tensors]),
    )


def drops_one_tensor(worker: Any) -> None:
    once(
        worker.model_runner.model,
        "load_weights",
        lambda load, tensors: load([each for each in tensors if each[0] != MATRIX]),
    )


def wakes_without_weights(worker: Any) -> None:
    def woken(apply: Callable[..., Any], *args: Any) -> Any:
        done = apply(*args)
        for value in worker.model_runner.model.parameters():
            value.data.zero_()
        return done

    once(worker, "headrace_apply", woken)


def loads_no_numbers(worker: Any) -> None:
    """Keys and values are computed with it, and lie in memory that later requests get."""

    def spoiled_apply(apply: Callable[..., Any], *args: Any) -> Any:
        done = apply(*args)
        for value in worker.model_runner.model.parameters():
            value.data.fill_(float("nan"))
        return done

    once(worker, "headrace_apply", spoiled_apply)


def leaves_the_tied_matrix(worker: Any) -> None:
    held = worker.headrace_held

    def untied(expect: Callable[..., None], loaded: Any) -> None:
        tied, held._tied = held._tied, {}
        expect(loaded)
        held._tied = tied

    once(held, "expect", untied)


def one_worker_loads_nothing(worker: Any) -> None:
    if worker.rank == 1:
        once(
            worker.model_runner.model, "load_weights", lambda load, tensors: set(), after=1
        )  # the first brings nothing


def delivers_no_adapter(worker: Any) -> None:
    """The slot of the adapter stays empty."""
    adapters = worker.model_runner.model.lora_manager
    activate = adapters.activate_adapter

    def activated(number: int) -> bool:
        if is_new := bool(activate(number)):
            del adapters.activate_adapter
            slot = adapters.lora_index_to_id.index(number)
            for module in adapters.modules.values():
                for stacked in module.lora_b_stacked:
                    stacked[slot].zero_()
        return is_new

    adapters.activate_adapter = activated


async def no_request_names_the_adapter(room: Room) -> PolicyEvent:
    event, engine = room.publish(), room.engine
    llm: Any = engine._llm  # type: ignore[attr-defined]
    add = llm.add_request

    async def unnamed(*args: Any, lora_request: Any = None, **named: Any) -> Any:
        if lora_request is not None and lora_request.lora_name.startswith(f"{event.version}."):
            lora_request = None
        return await add(*args, lora_request=lora_request, **named)

    llm.add_request = unnamed
    return event


async def keeps_the_prefix_cache(room: Room) -> PolicyEvent:
    async def nothing(reset: Any, **named: Any) -> bool:
        return not room.is_checked

    once(room.engine._llm, "reset_prefix_cache", nothing)  # type: ignore[attr-defined]
    return room.publish()


@asynccontextmanager
async def unchecked(room: Room) -> AsyncIterator[None]:
    """Inside, vLLM's engine refuses nothing."""
    engine: Any = room.engine
    gate, engine._gate, room.is_checked = engine._gate, SimpleNamespace(check=lambda policy, scores: 0.0), False
    await engine._llm.collective_rpc(check_nothing)
    try:
        yield
    finally:
        engine._gate, room.is_checked = gate, True
        await engine._llm.collective_rpc(check_again)


def check_nothing(worker: Any) -> None:
    from actors.engines.vllm import worker as module

    def unrefused(load: Callable[[], None]) -> str:
        with suppress(module.HoldsOther):
            load()
        return ""

    worker.headrace_refused, module._refused = module._refused, unrefused


def check_again(worker: Any) -> None:
    from actors.engines.vllm import worker as module

    module._refused = worker.headrace_refused
    for cache in worker.model_runner.kv_caches:  # keys and values of an unrefused version may be NaN
        cache.zero_()


BUGS = {
    "torch": (
        Bug("one object of a version is the older one", "vLLM #52689", "hash", one_object_is_older,
            lambda room: half(room, room.learner.tensors())),
        Bug("two steps mixed in one copy", "vLLM #52689", "probe", copied_during_a_step,
            lambda room: half(room, room.learner.tensors())),
        Bug("initial weights after a resume", "open-instruct #1627", "read-back", weights_of_the_beginning,
            lambda room: room.first),
        Bug("a NaN in one tensor", "headrace", "finite check", not_a_number,
            lambda room: spoiled(room.learner.tensors())),
    ),
    "experts": (
        Bug("experts read in the layout of the kernel", "verl #7987", "probe", in_workers(reads_experts_as_packed)),
        Bug("load broken off in the middle", "verl #7978", "loader's error", in_workers(breaks_off)),
        Bug("a load ended after each part", "SkyRL #1680", "read-back", in_workers(ends_the_load_after_each_tensor)),
        Bug("two experts exchanged", "verl #7195", "probe", in_workers(exchanges_two_experts)),
        Bug("load of one tensor dropped", "prime-rl #2714", "read-back", in_workers(drops_one_tensor)),
        Bug("weights lost by sleep", "TRL #5312", "read-back", in_workers(wakes_without_weights)),
        Bug("NaN in every tensor after the load", "prime-rl #2714", "read-back", in_workers(loads_no_numbers)),
        Bug("tied output matrix left behind", "headrace", "read-back", in_workers(leaves_the_tied_matrix)),
        Bug("prefix cache of the older version", "NeMo RL #4018", "cache check", keeps_the_prefix_cache),
    ),
    "workers": (
        Bug("one worker of two not updated", "vLLM #52689", "read-back", in_workers(one_worker_loads_nothing)),
        Bug("load broken off in one worker of two", "vLLM #52689", "loader's error",
            in_workers(partial(breaks_off, rank=1, after=1))),
    ),
    "adapter": (
        Bug("adapter never delivered", "verl #7495", "read-back", in_workers(delivers_no_adapter)),
        Bug("no request names the adapter", "ms-swift #9855", "probe", no_request_names_the_adapter),
    ),
}  # fmt: skip


def exhibits(room: str, folder: Path, dtype: str = "float32") -> Iterator[Shown]:
    """The bugs of one room, one after the other. room: a key of BUGS."""
    family = "qwen3_moe" if room == "experts" else "qwen3"
    sizes = {"max_position_embeddings": 512, "moe_intermediate_size": 32, "tie_word_embeddings": room == "experts"}
    model = str(build_family(folder, family, **sizes))
    lora = LORA if room == "adapter" else None
    if room == "torch":
        engine: Engine = ResumingEngine(model=model, dtype=dtype)
    else:
        told = {} if lora is None else {"lora": {"rank": lora.rank, "alpha": lora.alpha, "targets": lora.targets}}
        workers = {"tensor_parallel_size": 2} if room == "workers" else {}
        engine = VllmEngine(model=model, dtype=dtype, max_num_seqs=16, **told, **workers)
    # So that a bug can be planted in vLLM's workers.
    with variables(VLLM_ALLOW_INSECURE_SERIALIZATION="1"), asyncio.Runner() as runner:
        runner.run(engine.start())
        try:
            made = Room(engine, model, dtype, lora)
            for _ in range(3):  # so that the probe knows how two honest programs differ
                runner.run(made.load(made.publish()))
            for bug in BUGS[room]:
                yield runner.run(asyncio.wait_for(shown(made, bug), 120))
        finally:
            runner.run(engine.close())
