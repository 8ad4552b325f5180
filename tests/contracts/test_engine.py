"""Guarantees of every engine; the reference is a forward that shares no code with the engine."""

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from actors.engines.engine import Chunk, Completion, Sampling, SchemaRefused, Shaping
from infra.policies.policy import Policy
from infra.policies.tensors import from_numpy, to_numpy
from schemas.errors import PolicyRefused
from tests.contracts.engine_case import Case, Tensors, scripted, torch_case, vllm_case

# Short in every case, so that no answer is cut.
SCHEMA = {
    "type": "object",
    "properties": {
        "tried": {"type": "array", "items": {"type": "boolean"}, "minItems": 8, "maxItems": 12},
        "operator": {"enum": ["+", "-", 17, None]},
    },
    "required": ["tried", "operator"],
    "additionalProperties": False,
}


ENGINES = {
    "scripted": scripted,
    "torch": torch_case,
    "torch-keep": partial(torch_case, kv="keep"),
    "vllm": vllm_case,
    "vllm-keep": partial(vllm_case, kv="keep"),
}
MARKS = {"vllm": pytest.mark.slow, "vllm-keep": pytest.mark.full}
PARAMS = [pytest.param(make, id=name, marks=MARKS.get(name, ())) for name, make in ENGINES.items()]


@pytest.fixture(scope="module", params=PARAMS)
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


def test_a_temperature_near_zero_is_that_of_its_span_and_the_engine_serves_on(case: Case) -> None:
    async def check(case: Case) -> None:
        for temperature, used in ((1e-40, 0.01), (1.0, 1.0)):
            answer = await case.engine.generate((1, 22, 33), Sampling(max_tokens=4, temperature=temperature))
            assert [(span.temperature, span.ratio) for span in answer.spans] == [(used, True)]

    case.run(check)


def test_a_seed_repeats_its_tokens(case: Case) -> None:
    async def check(case: Case) -> None:
        sampling = Sampling(max_tokens=12, seed=11)
        first = await case.engine.generate((1, 22, 33), sampling)
        await case.engine.generate((1, 22, 33), Sampling(max_tokens=3))
        second = await case.engine.generate((1, 22, 33), sampling)
        assert first.tokens == second.tokens

    case.run(check)


def test_seeded_requests_whose_prompts_come_in_parts_are_answered(case: Case) -> None:
    async def check(case: Case) -> None:
        prompts = [
            (1, index % 120, index % 7, *range(20, 60)) for index in range(128)
        ]  # more tokens than vLLM takes in a step
        sampling = [Sampling(max_tokens=3, seed=index) for index in range(128)]
        completions = await asyncio.gather(*map(case.engine.generate, prompts, sampling))
        for prompt, completion in zip(prompts[::16], completions[::16], strict=True):
            case.assert_reproduced(prompt, completion, 1.0)

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
            assert tuple(logprob for chunk in chunks[index] for logprob in chunk.logprobs) == completion.logprobs
            case.assert_reproduced((1, 20, 30 + index), completion, 1.0)

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


def test_what_a_client_shapes_is_drawn_as_it_says_and_has_no_ratio(case: Case) -> None:
    async def check(case: Case) -> None:
        def asked(**shaping: Any) -> Any:
            return case.engine.generate((1, 22, 33), Sampling(max_tokens=8, shaping=Shaping(**shaping)))

        free = case.engine.generate((1, 22, 33), Sampling(max_tokens=8))
        greedy = case.engine.generate((1, 22, 33), Sampling(max_tokens=8, temperature=0.0))
        biased = [asked(logit_bias=((token, 100.0),)) for token in (40, 41)]
        likeliest, near = asked(top_k=1), asked(min_p=1.0)
        punished = asked(logit_bias=((40, 30.0), (41, 30.0)), frequency_penalty=2.0)
        found = await asyncio.gather(free, greedy, *biased, likeliest, near, punished)
        assert [set(answer.tokens) for answer in found[2:4]] == [{40}, {41}]
        assert found[1].tokens == found[4].tokens == found[5].tokens
        assert set(found[6].tokens) == {40, 41}
        assert not any(span.ratio for answer in found[1:] for span in answer.spans)
        case.assert_reproduced((1, 22, 33), found[0], 1.0)

    case.run(check)


def test_an_answer_held_to_a_schema_is_an_instance_of_it_beside_free_ones_and_through_reloads(case: Case) -> None:
    async def check(case: Case) -> None:
        pieces: list[list[Chunk]] = [[] for _ in range(4)]
        held = Sampling(max_tokens=200, stop=(2,), json_schema=json.dumps(SCHEMA))
        await case.engine.prepare(held.json_schema)
        requests = [case.engine.generate((1, 20, 30 + index % 2), held) for index in range(8)]
        requests += [case.engine.generate((1, 20), held, on_chunk=told.append) for told in pieces]
        requests.append(case.engine.generate((1, 20), msgspec.structs.replace(held, temperature=0.0, top_p=0.9)))
        free = [asyncio.create_task(case.engine.generate((1, 20), Sampling(max_tokens=200))) for _ in range(4)]
        running = [asyncio.create_task(request) for request in requests]
        while case.engine.num_running < 17 and not any(running_task.done() for running_task in running):  # noqa: ASYNC110  the engine ends it
            await asyncio.sleep(0)
        await case.load(case.next_policy())
        wrong, right = case.next_policy(scale=1.5), case.next_policy()
        with pytest.raises(PolicyRefused, match="probe"):
            await case.engine.load(Policy(version=wrong.version, tensors=wrong.tensors, probe=right.probe))
        answers = await asyncio.gather(*running)
        for answer in answers:
            assert answer.stopped and not any(span.ratio for span in answer.spans)
            jsonschema.validate(json.loads(case.text(answer.tokens[:-1])), SCHEMA)
        assert len({answer.tokens for answer in answers}) > 3, "the policy still chooses"
        for told, answer in zip(pieces, answers[8:], strict=False):
            assert tuple(token for piece in told for token in piece.tokens) == answer.tokens
        for completion in await asyncio.gather(*free):
            assert all(span.ratio for span in completion.spans)
            case.assert_reproduced((1, 20), completion, 1.0)
        await case.load(right)

    case.run(check)


@pytest.mark.parametrize("schema", ["no JSON", '{"type": "word"}', '{"enum": ["\u2603"]}'])
def test_a_schema_that_answers_cannot_be_held_to_is_the_callers_mistake(case: Case, schema: str) -> None:
    async def check(case: Case) -> None:
        with pytest.raises(SchemaRefused):
            await case.engine.prepare(schema)
        with pytest.raises(SchemaRefused):
            await case.engine.generate((1, 20), Sampling(max_tokens=9, stop=(2,), json_schema=schema))
        with pytest.raises(ValueError, match="stop"):
            await case.engine.generate((1, 20), Sampling(max_tokens=9, json_schema="{}"))
        assert case.engine.num_running == 0
        assert len((await case.engine.generate((1, 20), Sampling(max_tokens=9))).tokens) == 9

    case.run(check)


def test_scores_are_the_forward_at_temperature_one(case: Case) -> None:
    async def check(case: Case) -> None:
        tokens = [1, *range(20, 60)]
        for _ in range(2):  # the second finds its tokens in a prefix cache, where there is one
            np.testing.assert_allclose(
                await case.engine.score_tokens(tokens), case.reference(case.tensors, tokens, 1.0), atol=1e-4, rtol=0
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
        before = await case.engine.score_tokens(tokens)
        good = case.next_policy()
        bad = Policy(version=good.version, tensors=spoil(case.tensors), probe=good.probe)
        with pytest.raises(PolicyRefused):
            await case.engine.load(bad)
        assert case.engine.version == version
        assert await case.engine.score_tokens(tokens) == before

    case.run(check)


def test_a_policy_the_engine_does_not_reproduce_is_refused_and_none_of_its_tokens_leave(case: Case) -> None:
    async def check(case: Case) -> None:
        version, tokens = case.engine.version, [1, *range(30, 50)]
        before = await case.engine.score_tokens(tokens)
        prompts = [(1, 20 + index, 30) for index in range(8)]
        sampling = Sampling(max_tokens=120)
        requests = [asyncio.create_task(case.engine.generate(prompt, sampling)) for prompt in prompts]
        await asyncio.sleep(0)
        short = asyncio.create_task(short_requests(case, 60))
        left: list[Chunk] = []
        requests.append(asyncio.create_task(case.engine.generate(prompts[0], sampling, on_chunk=left.append)))
        wrong, right = case.next_policy(scale=1.5), case.next_policy(scale=1.02)
        with pytest.raises(PolicyRefused, match="probe"):
            await case.engine.load(Policy(version=wrong.version, tensors=wrong.tensors, probe=right.probe))
        assert case.engine.version == version
        np.testing.assert_allclose(await case.engine.score_tokens(tokens), before, atol=1e-6, rtol=0)
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


def test_cancelling_frees_the_request_also_in_the_middle_of_a_stream(case: Case) -> None:
    async def check(case: Case) -> None:
        came, long = asyncio.Event(), Sampling(max_tokens=400)
        requests = [asyncio.create_task(case.engine.generate(prompt, long)) for prompt in ((1, 20), (1, 21))]
        streamed = case.engine.generate((1, 20), long, on_chunk=lambda _: came.set())
        requests.append(asyncio.create_task(streamed))
        await came.wait()
        for request in requests:
            request.cancel()
        ended = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended) and case.engine.num_running == 0
        completion = await case.engine.generate((1, 20), Sampling(max_tokens=3))
        case.assert_reproduced((1, 20), completion, 1.0)

    case.run(check)


@pytest.mark.parametrize(("prompt", "max_tokens"), [((), 5), ((1, 128), 5), ((1, -1), 5), ((1, 2), 0), ((1, 2), 511)])
def test_a_request_that_cannot_be_served_is_the_callers_mistake(
    case: Case, prompt: tuple[int, ...], max_tokens: int
) -> None:
    with pytest.raises(ValueError, match=r"prompt|max_tokens"):
        case.run(lambda case: case.engine.generate(prompt, Sampling(max_tokens=max_tokens)))
