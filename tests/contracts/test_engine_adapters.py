"""Guarantees of every engine about versions that are adapters; the reference merges them into the base by hand."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.engines.engine import Chunk, Completion, Engine, Sampling
from infra.model.model import load_tokenizer
from infra.policies.policy import Policy
from infra.policies.tensors import from_numpy, to_numpy
from schemas.errors import PolicyRefused
from tests.contracts.engine_case import Case, Tensors, char_model
from tests.contracts.test_engine import SCHEMA

pytestmark = pytest.mark.slow
RANK, ALPHA = 3, 6
SLOTS = 4  # of the vLLM engine
LONG = Sampling(max_tokens=440, temperature=0.9)
TEXT = [1, *range(20, 99), *range(20, 99), *range(20, 99)]  # longer than a block of a prefix cache


def torch_engine(folder: str) -> Engine:
    from actors.engines.torch import TorchEngine

    return TorchEngine(model=folder, seed=3)


def vllm_engine(folder: str) -> Engine:
    from actors.engines.vllm.engine import VllmEngine

    lora = {"rank": RANK, "alpha": ALPHA, "targets": ("all-linear",)}
    return VllmEngine(model=folder, seed=3, max_num_seqs=64, max_loras=SLOTS, lora=lora)


class AdaptedCase(Case):
    """A case whose versions are adapters of the model in a folder."""

    def __init__(self, folder: Path, use: Any) -> None:
        from infra.model.adapter import adapter_shapes, find_adapter
        from infra.model.model import meta_model

        model, base, forward, _ = char_model(folder)
        self.adapter = find_adapter(model, rank=RANK, alpha=ALPHA, targets=("all-linear",))
        self.shapes = adapter_shapes(meta_model(model), self.adapter)
        self.random = np.random.default_rng(5)

        def reference(tensors: Tensors, tokens: Sequence[int], temperature: float) -> list[float]:
            return forward({**base, **merged(base, tensors)}, tokens, temperature)

        super().__init__(use(str(model)), {}, reference, load_tokenizer(model).decode)

    def next_policy(self, *, scale: float = 1.0, only: str = "", probe: bool = True) -> Policy:
        """A random adapter that moves every logprob. only: part of the names of its matrices that are not zero."""
        tensors = {
            name: from_numpy(
                (self.random.normal(size=shape) * (0.3 * scale / np.sqrt(shape[1])) * (only in name)).astype(np.float32)
            )
            for name, shape in self.shapes.items()
        }
        return self.policy(tensors, probe=probe)

    def policy(self, tensors: Tensors, *, probe: bool = True) -> Policy:
        return msgspec.structs.replace(super().policy(tensors, probe=probe), adapter=self.adapter)


def merged(base: Tensors, tensors: Tensors) -> Tensors:
    """W + alpha / rank B A of each adapted matrix."""
    found = {}
    for name in tensors:
        module, cut, _ = name.removeprefix("base_model.model.").partition(".lora_A.weight")
        if cut:
            a, b = (to_numpy(tensors[name.replace(".lora_A.", f".lora_{item}.")]) for item in "AB")
            weight = to_numpy(base[f"{module}.weight"])
            found[f"{module}.weight"] = from_numpy(weight + np.float32(ALPHA / RANK) * (b @ a))
    return found


@pytest.fixture(scope="module", params=[torch_engine, vllm_engine], ids=["torch", "vllm"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdaptedCase]:
    with AdaptedCase(tmp_path_factory.mktemp("adapted") / "model", request.param) as made:
        yield made


def is_vllm(case: AdaptedCase) -> bool:
    return type(case.engine).__name__ == "VllmEngine"


async def settled(case: AdaptedCase) -> None:
    """In vLLM live the version that serves and no other."""
    if not is_vllm(case):
        return
    engine: Any = case.engine
    while len(engine._adapters._loaded) > 1 or len(await engine._llm.list_loras()) > 1:  # noqa: ASYNC110  vLLM ends it
        await asyncio.sleep(0.01)


def test_requests_run_through_three_reloads_and_each_span_is_its_own_versions(case: AdaptedCase) -> None:
    async def check(case: AdaptedCase) -> None:
        if not case.engine.version:
            first = await case.engine.generate((1, 22, 33), Sampling(max_tokens=20))
            assert [span.version for span in first.spans] == [0], "the base serves until an adapter comes"
            case.assert_reproduced((1, 22, 33), first, 1.0)
        await case.load(case.next_policy())
        began = case.engine.version
        prompts = [(1, 20 + index, 30) for index in range(3)]
        streamed: list[Chunk] = []
        requests = [asyncio.create_task(case.engine.generate(prompt, LONG)) for prompt in prompts]
        requests += [asyncio.create_task(case.engine.generate(prompts[0], LONG, on_chunk=streamed.append))]
        while not streamed:  # noqa: ASYNC110  the engine makes it true
            await asyncio.sleep(0)
        for _ in range(3):
            policy = case.next_policy(only=".mlp." if case.newest % 2 else "")
            report = await case.engine.load(policy)
            assert report.probe_abs_max <= 1e-4 and report.pause_ms >= 0
            case.by_version[policy.version] = dict(policy.tensors)
            short = await asyncio.gather(*(case.engine.generate((1, 44), Sampling(max_tokens=2)) for _ in range(3)))
            assert [span.version for item in short for span in item.spans] == [policy.version] * 3
            case.assert_reproduced((1, 44), short[0], 1.0)
        assert not any(request.done() for request in requests), "they run through all three"
        completions = await asyncio.gather(*requests)
        for prompt, completion in zip([*prompts, prompts[0]], completions, strict=True):
            assert len(completion.tokens) == 440
            case.assert_reproduced(prompt, completion, 0.9)
        assert tuple(token for chunk in streamed for token in chunk.tokens) == completions[-1].tokens
        if is_vllm(case):
            assert {span.version for completion in completions for span in completion.spans} == {began}, (
                "they end under their own"
            )
        await settled(case)

    case.run(check)


def test_what_one_version_cached_of_a_prompt_is_not_read_by_another(case: AdaptedCase) -> None:
    async def check(case: AdaptedCase) -> None:
        for _ in range(2):
            await case.load(case.next_policy())
            expected = case.reference(case.tensors, TEXT, 1.0)
            np.testing.assert_allclose(await case.engine.score_tokens(TEXT), expected, atol=1e-4, rtol=0)
            for _ in range(2):  # the second finds the prompt in a prefix cache, where there is one
                completion = await case.engine.generate(TEXT, Sampling(max_tokens=4))
                case.assert_reproduced(TEXT, completion, 1.0)
        await settled(case)

    case.run(check)


def test_where_more_versions_come_than_may_live_the_oldest_requests_go_on_under_a_newer_one(case: AdaptedCase) -> None:
    async def check(case: AdaptedCase) -> None:
        held = Sampling(max_tokens=400, stop=(2,), json_schema=json.dumps(SCHEMA))
        streamed: list[Chunk] = []
        requests = [asyncio.create_task(case.engine.generate((1, 20), LONG, on_chunk=streamed.append))]
        while not streamed:  # noqa: ASYNC110  the engine makes it true
            await asyncio.sleep(0)
        began = case.engine.version
        answers = []
        for _ in range(SLOTS + 2):
            requests.append(asyncio.create_task(case.engine.generate((1, 20), LONG)))
            answers.append(asyncio.create_task(case.engine.generate((1, 20, 30), held)))
            await asyncio.sleep(0)
            await case.load(case.next_policy())
            if is_vllm(case):
                engine: Any = case.engine
                assert len(await engine._llm.list_loras()) <= len(engine._adapters._loaded) <= SLOTS
        completions: list[Completion] = await asyncio.gather(*requests)
        for completion in completions:
            assert len(completion.tokens) == 440
            case.assert_reproduced((1, 20), completion, 0.9)
        assert tuple(token for chunk in streamed for token in chunk.tokens) == completions[0].tokens
        first, *later = [span.version for span in completions[0].spans]
        assert first == began and later, "it was sampled on"
        for answer in await asyncio.gather(*answers):
            assert answer.stopped and json.loads(case.text(answer.tokens[:-1]))
        await settled(case)

    case.run(check)


def test_an_adapter_that_is_not_reproduced_is_refused_and_no_request_gets_it(case: AdaptedCase) -> None:
    async def check(case: AdaptedCase) -> None:
        version, tokens = case.engine.version, [1, *range(30, 50)]
        before = await case.engine.score_tokens(tokens)
        running = asyncio.create_task(case.engine.generate((1, 20), Sampling(max_tokens=100)))
        await asyncio.sleep(0)
        wrong, right = case.next_policy(), case.next_policy()
        short = asyncio.create_task(case.engine.generate((1, 44), Sampling(max_tokens=1)))
        with pytest.raises(PolicyRefused, match="probe"):
            await case.engine.load(msgspec.structs.replace(wrong, probe=right.probe))
        assert case.engine.version == version
        assert await case.engine.score_tokens(tokens) == pytest.approx(before, abs=1e-5)
        for prompt, completion in (((1, 20), await running), ((1, 44), await short)):
            assert {span.version for span in completion.spans} == {version}
            case.assert_reproduced(prompt, completion, 1.0)
        await case.load(right)
        assert case.engine.version == right.version
        await settled(case)

    case.run(check)


def test_what_does_not_fit_is_refused_by_name_and_the_old_one_serves(case: AdaptedCase) -> None:
    async def check(case: AdaptedCase) -> None:
        await case.load(case.next_policy())
        version, good = case.engine.version, case.next_policy()
        name = sorted(good.tensors)[0]
        nan = from_numpy(np.full(good.tensors[name].shape, np.nan, np.float32))
        for tensors in ({**good.tensors, name: nan}, {name: good.tensors[name]}):
            with pytest.raises(PolicyRefused, match="tensor base_model"):
                await case.engine.load(msgspec.structs.replace(good, tensors=tensors))
        other = msgspec.structs.replace(case.adapter, base="0" * 64)
        with pytest.raises(PolicyRefused, match="base 000000000000"):
            await case.engine.load(msgspec.structs.replace(good, adapter=other))
        with pytest.raises(PolicyRefused, match="full weights"):
            await case.engine.load(msgspec.structs.replace(good, adapter=None))
        assert case.engine.version == version
        case.assert_reproduced((1, 44), await case.engine.generate((1, 44), Sampling(max_tokens=9)), 1.0)
        await settled(case)

    case.run(check)
