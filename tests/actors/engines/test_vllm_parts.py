"""The parts of the vLLM engine that decide, without vLLM."""

import asyncio
import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from actors.engines.engine import Chunk, EngineStopped, Sampling
from actors.engines.trace import RequestImages
from actors.engines.vllm.adapters import Attempts
from actors.engines.vllm.engine import VllmEngine, in_a_folder, reload_parts
from actors.engines.vllm.loading import check_copied
from actors.engines.vllm.requests import Requests, probe_input, prompt_input
from actors.engines.vllm.settings import REQUIRED, TRIED, argument_names, check_release, engine_arguments, give_cache
from infra.model.vision import load_vision
from infra.policies.policy import Adapter
from infra.policies.tensors import Tensor, from_numpy
from infra.store.images import decode_image
from schemas import Span
from schemas.errors import ConfigError, PolicyRefused
from tests.tiny_models import build_eye_model, drawings

Answer = tuple[Sequence[int], Sequence[tuple[str, int, int]]]  # tokens, and the label of each run of them


class Queue:
    def __init__(self, request_id: str, states: dict[str, Any]) -> None:
        self.request_id = request_id
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._states = states

    async def get(self) -> Any:
        answer = await self.answer
        self._states.pop(self.request_id, None)
        return answer

    def close(self) -> None: ...


class FakeVllm:
    """Stands in for AsyncLLM: keeps requests until the test answers them."""

    def __init__(self) -> None:
        self.requests: list[tuple[list[int], Any, Queue]] = []
        self.aborted: list[str] = []
        self.errored = False
        self.arrived = asyncio.Event()
        self.output_processor = SimpleNamespace(request_states={})

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, priority: int = 0, lora_request: Any = None
    ) -> Queue:
        states = self.output_processor.request_states
        states[request_id] = None
        queue = Queue(request_id, states)
        self.requests.append((prompt["prompt_token_ids"], params, queue))
        self.arrived.set()
        return queue

    async def abort(self, request_id: str, internal: bool) -> None:
        self.aborted.append(request_id)

    async def next(self) -> tuple[list[int], Any, Queue]:
        while not self.requests:
            self.arrived.clear()
            await self.arrived.wait()
        return self.requests.pop(0)


def answered(*answers: Answer, reason: str = "length") -> Any:
    outputs = [
        SimpleNamespace(
            token_ids=list(tokens),
            logprobs=SimpleNamespace(logprobs=[-1.0 - token for token in tokens]) if tokens else None,
            finish_reason=reason,
            weight_versions=[SimpleNamespace(version=v, start=a, end=b) for v, a, b in labels],
        )
        for tokens, labels in answers
    ]
    return SimpleNamespace(outputs=outputs, finished=True)


def requests_to(llm: FakeVllm, attempts: Attempts) -> Requests:
    return Requests(llm, attempts, params=lambda sampling, streamed: sampling)


async def test_a_completion_waits_for_the_verdict_on_its_policy() -> None:
    llm, attempts = FakeVllm(), Attempts()
    requests = requests_to(llm, attempts)
    old, new = attempts.begin(3, proved=True), attempts.begin(4)
    call = asyncio.create_task(requests.generate((5,), Sampling(max_tokens=4)))
    _, _, queue = await llm.next()
    queue.answer.set_result(answered(([1, 2, 3, 4], [(old, 0, 1), (new, 1, 4)])))
    await asyncio.sleep(0.01)
    assert not call.done()
    attempts.decide(new, True)
    assert (await call).spans == (Span(0, 1, 3), Span(1, 4, 4))


async def test_tokens_of_a_refused_policy_are_sampled_again_from_before_them() -> None:
    llm, attempts = FakeVllm(), Attempts()
    requests = requests_to(llm, attempts)
    old, bad = attempts.begin(3, proved=True), attempts.begin(4)
    call = asyncio.create_task(requests.generate((5, 6), Sampling(max_tokens=4)))
    _, _, queue = await llm.next()
    restored = attempts.begin(3, proved=True)
    attempts.decide(bad, False)
    queue.answer.set_result(answered(([1, 2, 3, 4], [(old, 0, 1), (bad, 1, 3), (restored, 3, 4)])))
    prompt, sampling, queue = await llm.next()
    assert (prompt, sampling.max_tokens) == ([5, 6, 1], 3)
    queue.answer.set_result(answered(([7, 8, 9], [(restored, 0, 3)])))
    completion = await call
    assert completion.tokens == (1, 7, 8, 9)
    assert completion.logprobs == (-2.0, -8.0, -9.0, -10.0)
    assert completion.spans == (Span(0, 4, 3),)


async def test_an_answer_held_to_a_schema_begins_again_after_a_refused_policy_and_nothing_of_it_leaves_before_its_end() -> (
    None
):
    llm, attempts = FakeVllm(), Attempts()
    requests = requests_to(llm, attempts)
    old, bad = attempts.begin(3, proved=True), attempts.begin(4)
    held = Sampling(max_tokens=4, stop=(9,), json_schema="{}")
    left: list[Chunk] = []
    call = asyncio.create_task(requests.generate((5, 6), held, left.append))
    _, _, queue = await llm.next()
    attempts.decide(bad, False)
    queue.answer.set_result(answered(([1, 2, 9], [(old, 0, 2), (bad, 2, 3)]), reason="stop"))
    prompt, sampling, queue = await llm.next()
    assert (prompt, sampling) == ([5, 6], held) and not left
    queue.answer.set_result(answered(([3, 9], [(old, 0, 2)]), reason="stop"))
    completion = await call
    assert completion.tokens == (3, 9) and completion.stopped
    assert completion.spans == (Span(0, 2, 3, ratio=False),)
    assert left == [Chunk((3, 9), completion.logprobs, 3)]


async def test_a_request_is_aborted_when_its_caller_is_gone() -> None:
    llm, attempts = FakeVllm(), Attempts()
    requests, label = requests_to(llm, attempts), attempts.begin(0, proved=True)
    calls = [asyncio.create_task(requests.generate((5,), Sampling(max_tokens=1))) for _ in range(2)]
    (_, _, first), (_, _, second) = await llm.next(), await llm.next()
    calls[0].cancel()
    await asyncio.gather(calls[0], return_exceptions=True)
    async with asyncio.timeout(5):
        while not llm.aborted:  # noqa: ASYNC110  the request's own task makes it true
            await asyncio.sleep(0)
    assert llm.aborted == [first.request_id] and requests.num_running == 1
    second.answer.set_result(answered(([9], [(label, 0, 1)])))
    assert (await calls[1]).tokens == (9,)


async def test_every_caller_learns_that_the_process_is_gone() -> None:
    llm = FakeVllm()
    requests = requests_to(llm, Attempts())
    calls = [asyncio.create_task(requests.generate((5,), Sampling(max_tokens=1))) for _ in range(2)]
    queues = [queue for _, _, queue in (await llm.next(), await llm.next())]
    llm.errored = True
    for queue in queues:
        queue.answer.set_exception(RuntimeError("core died"))
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, EngineStopped) and "core died" in str(result)


async def test_an_undecidable_attempt_fails_those_who_wait_and_those_who_come() -> None:
    attempts = Attempts()
    label = attempts.begin(4)
    waiting = asyncio.create_task(attempts.accepted(label))
    await asyncio.sleep(0)
    attempts.fail(label, EngineStopped("gone"))
    for call in (waiting, attempts.accepted(label)):
        with pytest.raises(EngineStopped):
            await call


def tensors(*sizes: tuple[str, int]) -> dict[str, Tensor]:
    return {name: from_numpy(np.zeros(size, np.float32)) for name, size in sizes}


def test_a_reload_sends_each_layer_in_one_part() -> None:
    model = tensors(
        ("model.embed_tokens.weight", 1000),
        ("model.layers.0.self_attn.q_proj.weight", 10),
        ("model.layers.0.self_attn.k_proj.weight", 10),
        ("model.layers.10.self_attn.q_proj.weight", 10),
        ("model.layers.1.self_attn.q_proj.weight", 10),
        ("lm_head.weight", 10),
    )
    embedding, *others = model
    assert reload_parts(model) == [list(model)]
    assert reload_parts(model, part_bytes=120) == [[embedding], others[:3], others[3:]]


def test_a_model_that_keeps_the_memory_of_the_file_is_refused_and_one_with_copies_is_not() -> None:
    sent = {"l": torch.arange(8.0), "s": torch.arange(4.0)}
    model = torch.nn.Module()
    model.register_buffer("l", sent["l"].clone())
    check_copied(sent.values(), [model])
    model.register_buffer("part", sent["s"][:2])
    with pytest.raises(RuntimeError, match="part shares the memory of the file"):
        check_copied(sent.values(), [model])


def cpu_config(*, length: int, asked: int = 0, given: int | None = None, layers: int = 30, heads: int = 3) -> Any:
    """vLLM's configuration, as far as the memory for keys and values follows from it; by default smollm2's."""
    model = SimpleNamespace(
        max_model_len=length,
        original_max_model_len=asked or length,
        dtype=SimpleNamespace(itemsize=4),
        get_num_layers=lambda parallel: layers,
        get_num_kv_heads=lambda parallel: heads,
        get_head_size=lambda: 64,
    )
    return SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=given, block_size=128),
        model_config=model,
        parallel_config=SimpleNamespace(world_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=256),
    )


GIB = 2**30


@pytest.mark.parametrize(
    ("config", "free", "expected"),
    [
        (cpu_config(length=8192), 32 * GIB, GIB),
        (cpu_config(length=65_536), 32 * GIB, 513 * 128 * 46_080),  # one request needs more
        (cpu_config(length=256, layers=2), 32 * GIB, 256 * 3 * 128 * 3072),  # all requests need less
        (cpu_config(length=65_536, asked=-1), 32 * GIB, GIB),  # no setting names the length: vLLM shortens it
        (cpu_config(length=8192), GIB, GIB // 2),
        (cpu_config(length=8192, given=400 * 2**20), GIB, 400 * 2**20),
    ],
)
def test_keys_and_values_on_a_cpu_have_room_for_the_longest_request(config: Any, free: int, expected: int) -> None:
    give_cache(config, free_bytes=lambda: free)
    assert config.cache_config.kv_cache_memory_bytes == expected


@pytest.mark.parametrize(
    ("config", "free", "said"),
    [
        (
            cpu_config(length=8192),
            GIB // 2,
            r"max_model_len: got 8192; .* take 366 MiB, and half of the free memory gives 256 MiB; .* 5632",
        ),
        (
            cpu_config(length=8192, given=256 * 2**20),
            32 * GIB,
            r"kv_cache_memory_bytes gives 256 MiB; .* at most 5632, or kv_cache_memory_bytes to at least 383385600",
        ),
    ],
)
def test_a_request_that_memory_does_not_hold_is_refused_with_the_settings_that_mend_it(
    config: Any, free: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        give_cache(config, free_bytes=lambda: free)


def test_options_reach_vllm_and_those_that_would_break_the_contract_do_not() -> None:
    def arguments(on_cpu: bool = True, **options: object) -> dict[str, object]:
        known = frozenset({"max_num_seqs", "enforce_eager", "kv_cache_memory_bytes", *REQUIRED})
        return engine_arguments(model="m", seed=5, options=options, on_cpu=on_cpu, known=known)

    assert arguments(max_num_seqs=9)["max_num_seqs"] == 9
    assert arguments()["dtype"] == "float32" and "dtype" not in arguments(on_cpu=False)
    assert "enforce_eager" not in arguments(on_cpu=False)
    with pytest.raises(ConfigError, match="max_num_sequences"):
        arguments(max_num_sequences=9)
    with pytest.raises(ConfigError, match="logprobs_mode"):
        arguments(logprobs_mode="raw_logprobs")


def test_versions_that_are_adapters_have_vllm_begin_with_room_for_them() -> None:
    def arguments(rank: int, **options: object) -> dict[str, object]:
        adapter = Adapter(rank=rank, alpha=8, targets=("q_proj", "v_proj"), base="9f")
        known = frozenset({"max_loras", "enable_lora", "max_lora_rank", *REQUIRED})
        return engine_arguments(model="m", seed=5, options=options, on_cpu=True, known=known, adapter=adapter)

    assert "enable_lora" not in REQUIRED
    found = arguments(9)
    assert (found["enable_lora"], found["max_lora_rank"], found["lora_target_modules"]) == (
        True,
        16,
        ["q_proj", "v_proj"],
    )
    assert arguments(8, max_loras=7)["max_cpu_loras"] == 7 and arguments(8)["max_loras"] == 4
    with pytest.raises(ConfigError, match=r"trainer.lora.rank: got 513, expected at most 512"):
        arguments(513)
    with pytest.raises(ConfigError, match=r"engine.options.max_loras: got 1, expected 2 or more"):
        arguments(8, max_loras=1)
    with pytest.raises(ConfigError, match=r"engine.options.max_lora_rank: got 64, headrace needs 8"):
        arguments(8, max_lora_rank=64)


def test_an_adapter_whose_files_find_no_room_is_refused_with_the_setting_that_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "away"))
    with ExitStack() as files, pytest.raises(PolicyRefused, match=r"away.*set TMPDIR"):
        in_a_folder(files, Adapter(rank=1, alpha=1, targets=("q_proj",), base="9f"), tensors(("lora_A", 10)))


@pytest.mark.parametrize("installed", ["0.31.9", "0.33.0", "0.33.0rc1+cu130", "1.0"])
def test_a_release_of_vllm_that_was_not_tried_is_refused_in_one_line(installed: str) -> None:
    check_release("0.32.0")
    check_release("0.32.4.dev3+cpu")
    with pytest.raises(
        ConfigError, match=rf"^vllm: got {re.escape(installed)}, expected 0.32 or later, below 0.33: [^\n]*$"
    ):
        check_release(installed)


def test_the_tried_releases_of_vllm_are_those_that_the_package_asks_for() -> None:
    first, last = TRIED
    assert f'"vllm>={first},<{last}"' in Path("pyproject.toml").read_text()


def test_a_family_of_models_that_sees_in_another_way_is_refused_before_vllm_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "idefics3"}')
    with pytest.raises(ConfigError, match="'idefics3' and takes pictures; expected one of llava"):
        asyncio.run(VllmEngine(model=str(tmp_path)).start())


@pytest.mark.slow  # imports vLLM
def test_what_vllm_reads_are_the_pixels_and_places_of_the_trainer(tmp_path: Path) -> None:
    vision = load_vision(build_eye_model(tmp_path / "model"))
    assert vision is not None
    first, second = (decode_image(drawing.image, drawing.picture) for drawing in drawings(2))
    picture = [vision.token] * vision.num_places
    tokens = [1, *picture, 9, *picture, vision.token]
    made = prompt_input(tokens, RequestImages([first, second]), vision)
    assert made["prompt_token_ids"] == tokens
    assert [(entry.offset, entry.length) for entry in made["mm_placeholders"]["image"]] == [(1, 4), (6, 4)]
    for item, image in zip(made["mm_kwargs"]["image"], (first, second), strict=True):
        np.testing.assert_array_equal(item["pixel_values"].data.numpy(), vision.prepare(image))
    names = made["mm_hashes"]["image"]
    assert names[0] != names[1]
    assert prompt_input(tokens, RequestImages([second, first]), vision)["mm_hashes"]["image"] == names[::-1]
    assert probe_input(tokens, vision)["mm_hashes"]["image"] not in (names, names[::-1])
    assert (
        probe_input([1, 9], vision)
        == prompt_input([1, 9], RequestImages(), vision)
        == prompt_input([1, 9], RequestImages(), None)
    )


def test_keys_and_values_of_a_model_that_sees_are_not_kept_and_nothing_starts(tmp_path: Path) -> None:
    folder = build_eye_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r'reload\.kv: got "keep" with .*takes pictures.*expected "rebuild"'):
        asyncio.run(VllmEngine(model=str(folder), kv="keep").start())


def test_the_names_read_from_the_source_are_those_that_vllm_takes() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert argument_names() == frozenset(AsyncEngineArgs.__dataclass_fields__)
