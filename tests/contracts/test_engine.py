"""What every engine guarantees; the reference is a forward that shares no code with the engine."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.engine import Chunk, Completion, Engine, Sampling
from actors.engines.scripted import TENSOR, ScriptedEngine
from infra.weights.policy import Policy, Probe
from infra.weights.tensors import Tensor, from_numpy, to_numpy
from schemas.errors import PolicyRefused

Tensors = dict[str, Tensor]
Reference = Callable[[Tensors, Sequence[int], float], list[float]]


class Case:
    """An engine under test, the tensors it serves, and an independent way to compute logprobs from tensors."""

    def __init__(self, engine: Engine, tensors: Tensors, reference: Reference) -> None:
        self.engine = engine
        self.reference = reference
        self.by_version = {0: tensors}
        self.newest = 0  # a refused version is not used again

    def run(self, call: Callable[["Case"], Any]) -> Any:
        return self.runner.run(asyncio.wait_for(call(self), 120))

    def __enter__(self) -> "Case":
        self.runner = asyncio.Runner()
        self.runner.run(self.engine.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.run(self.engine.close())
        self.runner.close()

    @property
    def tensors(self) -> Tensors:
        return self.by_version[self.engine.version]

    def next_policy(self, *, scale: float = 1.02, only: str = "", probe: bool = True) -> Policy:
        """The served policy with every matrix (or those whose name holds `only`) scaled."""
        tensors = {
            name: from_numpy(to_numpy(tensor) * np.float32(scale)) if only in name and len(tensor.shape) > 1 else tensor
            for name, tensor in self.tensors.items()
        }
        return self.policy(tensors, probe=probe)

    def policy(self, tensors: Tensors, *, probe: bool = True) -> Policy:
        self.newest += 1
        sequences = ((1, 20, 30, 40, 50), (1, 7, 9))
        made = Probe(sequences, tuple(tuple(self.reference(tensors, tokens, 1.0)) for tokens in sequences))
        return Policy(version=self.newest, tensors=tensors, touched=frozenset(tensors), probe=made if probe else None)

    async def load(self, policy: Policy) -> None:
        await self.engine.load(policy)
        self.by_version[policy.version] = dict(policy.tensors)

    def assert_reproduced(self, prompt: Sequence[int], completion: Completion, temperature: float) -> None:
        """Every span's logprobs are its own version's, given the whole prefix."""
        tokens = [*prompt, *completion.tokens]
        stop = 0
        for span in completion.spans:
            assert span.start == stop
            stop = span.stop
            expected = self.reference(self.by_version[span.version], tokens, temperature)
            at = len(prompt) - 1
            np.testing.assert_allclose(
                completion.logprobs[span.start : span.stop],
                expected[at + span.start : at + span.stop],
                atol=1e-4,
                rtol=0,
            )
        assert stop == len(completion.tokens) == len(completion.logprobs)


def scripted(_: Path) -> Case:
    engine = ScriptedEngine(seed=3, num_vocabulary=128, max_model_len=512)
    random = np.random.default_rng(3)
    tensors = {TENSOR: from_numpy(random.normal(size=(128, 128)).astype(np.float32))}

    def reference(tensors: Tensors, tokens: Sequence[int], temperature: float) -> list[float]:
        table = np.exp(to_numpy(tensors[TENSOR]).astype(np.float64) / temperature)
        return [float(np.log(table[a, b] / table[a].sum())) for a, b in itertools.pairwise(tokens)]

    return Case(engine, tensors, reference)


def char_model(folder: Path) -> tuple[Path, Tensors, Reference]:
    """The demo's model, widened so that its distributions are far from uniform, and a transformers forward over it."""
    import torch

    from infra.demo.char_model import build_char_model
    from infra.model import load_into, load_model, model_tensors
    from infra.weights.tensors import save_tensors

    build_char_model(folder, seed=5)
    model = load_model(str(folder))
    tensors = {
        name: from_numpy(to_numpy(tensor) * np.float32(4)) if len(tensor.shape) > 1 else tensor
        for name, tensor in model_tensors(model).items()
    }
    (folder / "model.safetensors").write_bytes(save_tensors(tensors, {"format": "pt"}))

    def reference(tensors: Tensors, tokens: Sequence[int], temperature: float) -> list[float]:
        load_into(model, tensors)
        ids = torch.tensor([list(tokens)])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0] / temperature, -1)
        return [float(logprob) for logprob in logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]]

    return folder, tensors, reference


def torch_case(folder: Path) -> Case:
    from actors.engines.torch import TorchEngine

    model, tensors, reference = char_model(folder)
    return Case(TorchEngine(model=str(model), seed=3), tensors, reference)


def vllm_case(folder: Path) -> Case:
    from actors.engines.vllm.engine import VllmEngine

    model, tensors, reference = char_model(folder)
    return Case(VllmEngine(model=str(model), seed=3, max_num_seqs=64), tensors, reference)


ENGINES = [scripted, torch_case, pytest.param(vllm_case, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=ENGINES, ids=["scripted", "torch", "vllm"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    with request.param(tmp_path_factory.mktemp("engine") / "model") as made:
        yield made


def test_recorded_logprobs_are_the_policys_own(case: Case) -> None:
    async def check(case: Case) -> None:
        prompts = [(1, 20 + index, 30) for index in range(4)] * 4
        for temperature in (1.0, 0.7):
            sampling = Sampling(max_tokens=20, temperature=temperature)
            completions = await asyncio.gather(*(case.engine.generate(prompt, sampling) for prompt in prompts))
            for prompt, completion in zip(prompts, completions, strict=True):
                assert len(completion.tokens) == 20
                assert [span.version for span in completion.spans] == [case.engine.version]
                assert completion.spans[0].temperature == temperature and completion.spans[0].ratio
                case.assert_reproduced(prompt, completion, temperature)
            assert len({completion.tokens for completion in completions}) > 4

    case.run(check)


def test_requests_of_different_lengths_share_the_engine_exactly(case: Case) -> None:
    async def check(case: Case) -> None:
        requests = [((1, *range(20, 20 + index)), 1 + 7 * index % 40) for index in range(1, 25)]
        completions = await asyncio.gather(
            *(case.engine.generate(prompt, Sampling(max_tokens=length)) for prompt, length in requests)
        )
        for (prompt, length), completion in zip(requests, completions, strict=True):
            assert len(completion.tokens) == length
            case.assert_reproduced(prompt, completion, 1.0)

    case.run(check)


def test_greedy_is_deterministic_and_has_no_ratio(case: Case) -> None:
    async def check(case: Case) -> None:
        sampling = Sampling(max_tokens=12, temperature=0.0)
        first, second = await asyncio.gather(*(case.engine.generate((1, 22, 33), sampling) for _ in range(2)))
        assert first.tokens == second.tokens
        assert not any(span.ratio for span in first.spans)
        case.assert_reproduced((1, 22, 33), first, 1.0)

    case.run(check)


def test_a_seed_repeats_its_tokens(case: Case) -> None:
    async def check(case: Case) -> None:
        sampling = Sampling(max_tokens=12, seed=11)
        first = await case.engine.generate((1, 22, 33), sampling)
        await case.engine.generate((1, 22, 33), Sampling(max_tokens=3))
        second = await case.engine.generate((1, 22, 33), sampling)
        assert first.tokens == second.tokens

    case.run(check)


def test_a_stop_token_is_kept_as_the_last_token(case: Case) -> None:
    async def check(case: Case) -> None:
        free = await case.engine.generate((1, 25), Sampling(max_tokens=30, seed=4))
        assert not free.stopped
        stop = free.tokens[9]
        cut = await case.engine.generate((1, 25), Sampling(max_tokens=30, seed=4, stop=(stop, 127)))
        assert cut.stopped
        assert cut.tokens == free.tokens[: free.tokens.index(stop) + 1]
        case.assert_reproduced((1, 25), cut, 1.0)

    case.run(check)


def test_chunks_are_the_completion_as_it_is_sampled(case: Case) -> None:
    async def check(case: Case) -> None:
        chunks: list[list[Chunk]] = [[] for _ in range(4)]
        requests = [
            case.engine.generate((1, 20, 30 + index), Sampling(max_tokens=40), on_chunk=chunks[index].append)
            for index in range(4)
        ]
        for index, completion in enumerate(await asyncio.gather(*requests)):
            assert len(chunks[index]) > 1, "some tokens come before the last one"
            assert tuple(token for chunk in chunks[index] for token in chunk.tokens) == completion.tokens
            assert tuple(one for chunk in chunks[index] for one in chunk.logprobs) == completion.logprobs
            case.assert_reproduced((1, 20, 30 + index), completion, 1.0)

    case.run(check)


def test_a_streamed_request_can_be_cancelled_in_the_middle(case: Case) -> None:
    async def check(case: Case) -> None:
        came = asyncio.Event()
        request = asyncio.create_task(
            case.engine.generate((1, 20), Sampling(max_tokens=400), on_chunk=lambda _: came.set())
        )
        await came.wait()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        assert request.cancelled() and case.engine.num_running == 0

    case.run(check)


def test_what_a_listener_raises_reaches_its_caller_alone(case: Case) -> None:
    def broken(_: Chunk) -> None:
        raise KeyError("mine")

    async def check(case: Case) -> None:
        bad = case.engine.generate((1, 20), Sampling(max_tokens=5), on_chunk=broken)
        good = case.engine.generate((1, 21), Sampling(max_tokens=5))
        results = await asyncio.gather(bad, good, return_exceptions=True)
        assert isinstance(results[0], KeyError) and isinstance(results[1], Completion)

    case.run(check)


def test_a_nucleus_keeps_the_likeliest_tokens_only_and_has_no_ratio(case: Case) -> None:
    async def check(case: Case) -> None:
        narrow = await case.engine.generate((1, 22, 33), Sampling(max_tokens=12, top_p=1e-6))
        greedy = await case.engine.generate((1, 22, 33), Sampling(max_tokens=12, temperature=0.0))
        assert narrow.tokens == greedy.tokens
        assert not any(span.ratio for span in narrow.spans)
        np.testing.assert_allclose(narrow.logprobs, 0.0, atol=1e-6)

    case.run(check)


def test_scores_are_the_forward_at_temperature_one(case: Case) -> None:
    async def check(case: Case) -> None:
        tokens = [1, *range(20, 60)]
        for _ in range(2):  # the second finds its tokens in a prefix cache, where there is one
            np.testing.assert_allclose(
                await case.engine.score(tokens), case.reference(case.tensors, tokens, 1.0), atol=1e-4, rtol=0
            )

    case.run(check)


def test_a_hot_reload_loses_nothing_and_each_span_is_its_own_versions(case: Case) -> None:
    async def check(case: Case) -> None:
        prompts = [(1, 20 + index, 30) for index in range(8)]
        sampling = Sampling(max_tokens=300, temperature=0.9)
        requests = [asyncio.create_task(case.engine.generate(prompt, sampling)) for prompt in prompts]
        requests += [asyncio.create_task(case.engine.generate(prompts[0], sampling)) for _ in range(2)]
        streamed: list[Chunk] = []
        listening = case.engine.generate(prompts[0], sampling, on_chunk=streamed.append)
        requests += [asyncio.create_task(listening), asyncio.create_task(case.engine.generate(prompts[0], sampling))]
        await asyncio.sleep(0)
        for index in range(4):
            policy = case.next_policy(only=("", "layers.1.", "mlp", "lm_head")[index] if len(case.tensors) > 1 else "")
            before = case.engine.version
            report = await case.engine.load(policy)
            assert (before, case.engine.version) == (policy.version - 1, policy.version)
            assert report.probe_abs_max <= 1e-4 and report.pause_ms >= 0
            case.by_version[policy.version] = dict(policy.tensors)
            short = await case.engine.generate((1, 44), Sampling(max_tokens=2))
            assert [span.version for span in short.spans] == [policy.version]
        completions = await asyncio.gather(*requests)
        for prompt, completion in zip(prompts + [prompts[0]] * 4, completions, strict=True):
            assert len(completion.tokens) == 300
            case.assert_reproduced(prompt, completion, 0.9)
        assert max(len(completion.spans) for completion in completions) > 1
        assert tuple(token for chunk in streamed for token in chunk.tokens) == completions[-2].tokens
        versions = [chunk.version for chunk in streamed for _ in chunk.tokens]
        assert versions == [s.version for s in completions[-2].spans for _ in range(s.start, s.stop)]

    case.run(check)


def nan(tensors: Tensors) -> Tensors:
    name = max(tensors, key=lambda name: len(tensors[name].shape))
    values = to_numpy(tensors[name]).copy()
    values.flat[0] = np.nan
    return {**tensors, name: from_numpy(values)}


def reshaped(tensors: Tensors) -> Tensors:
    name = max(tensors, key=lambda name: len(tensors[name].shape))
    return {**tensors, name: from_numpy(to_numpy(tensors[name])[:-1])}


def missing(tensors: Tensors) -> Tensors:
    return dict(list(tensors.items())[1:])


@pytest.mark.parametrize("spoil", [nan, reshaped, missing])
def test_a_bad_policy_is_refused_and_the_old_one_keeps_serving(case: Case, spoil: Callable[[Tensors], Tensors]) -> None:
    async def check(case: Case) -> None:
        version, tokens = case.engine.version, [1, *range(30, 50)]
        before = await case.engine.score(tokens)
        good = case.next_policy()
        bad = Policy(version=good.version, tensors=spoil(case.tensors), touched=good.touched, probe=good.probe)
        with pytest.raises(PolicyRefused):
            await case.engine.load(bad)
        assert case.engine.version == version
        assert await case.engine.score(tokens) == before

    case.run(check)


def test_a_policy_the_engine_does_not_reproduce_is_refused_and_none_of_its_tokens_leave(case: Case) -> None:
    async def check(case: Case) -> None:
        version, tokens = case.engine.version, [1, *range(30, 50)]
        before = await case.engine.score(tokens)
        prompts = [(1, 20 + index, 30) for index in range(8)]
        sampling = Sampling(max_tokens=120)
        requests = [asyncio.create_task(case.engine.generate(prompt, sampling)) for prompt in prompts]
        await asyncio.sleep(0)
        short = asyncio.create_task(short_requests(case, 60))
        left: list[Chunk] = []
        requests.append(asyncio.create_task(case.engine.generate(prompts[0], sampling, on_chunk=left.append)))
        wrong, right = case.next_policy(scale=1.5), case.next_policy(scale=1.02)
        with pytest.raises(PolicyRefused, match="probe"):
            await case.engine.load(
                Policy(version=wrong.version, tensors=wrong.tensors, touched=wrong.touched, probe=right.probe)
            )
        assert case.engine.version == version
        np.testing.assert_allclose(await case.engine.score(tokens), before, atol=1e-6, rtol=0)
        for prompt, completion in zip([*prompts, prompts[0]], await asyncio.gather(*requests), strict=True):
            assert {span.version for span in completion.spans} == {version}
            assert len(completion.tokens) == 120
            case.assert_reproduced(prompt, completion, 1.0)
        assert {chunk.version for chunk in left} == {version}
        for completion in await short:
            assert {span.version for span in completion.spans} == {version}
            case.assert_reproduced((1, 44), completion, 1.0)
        await case.load(right)
        assert case.engine.version == right.version
        case.assert_reproduced((1, 60), await case.engine.generate((1, 60), Sampling(max_tokens=5)), 1.0)

    case.run(check)


async def short_requests(case: Case, count: int) -> list[Completion]:
    """Requests that end all the time, so that some end between a swap and its verdict."""
    return [await case.engine.generate((1, 44), Sampling(max_tokens=1)) for _ in range(count)]


def test_cancelling_frees_the_request(case: Case) -> None:
    async def check(case: Case) -> None:
        prompts = [(1, 20), (1, 20), (1, 21)]
        requests = [asyncio.create_task(case.engine.generate(p, Sampling(max_tokens=400))) for p in prompts]
        while case.engine.num_running < len(prompts):  # noqa: ASYNC110  the engine makes it true
            await asyncio.sleep(0)
        for request in requests:
            request.cancel()
        assert all(
            isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*requests, return_exceptions=True)
        )
        assert case.engine.num_running == 0
        completion = await case.engine.generate((1, 20), Sampling(max_tokens=3))
        case.assert_reproduced((1, 20), completion, 1.0)

    case.run(check)


@pytest.mark.parametrize(("prompt", "max_tokens"), [((), 5), ((1, 128), 5), ((1, -1), 5), ((1, 2), 0), ((1, 2), 511)])
def test_a_request_that_cannot_be_served_is_the_callers_mistake(
    case: Case, prompt: tuple[int, ...], max_tokens: int
) -> None:
    with pytest.raises(ValueError, match=r"prompt|max_tokens"):
        case.run(lambda case: case.engine.generate(prompt, Sampling(max_tokens=max_tokens)))
