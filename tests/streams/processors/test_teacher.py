"""The teacher: log-probabilities of the sampled tokens from an endpoint, or a drop with a reason; never a guess."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra.chain.chain import ChainResult, Context, make_step, run_chain
from infra.chain.processor import Drop
from infra.cli.demo.char_model import CHARACTERS_ALONE, Size, build_char_model, save_tokenizer
from infra.local.broker import choose_address
from infra.model.model import load_model
from infra.settings.config import decode
from schemas import Block, Experience, Image, Message, Span, encode, make_experience
from schemas import decode as decode_frame
from schemas.errors import ConfigError
from schemas.wire.teacher import teacher_logprobs
from streams.config import StreamsConfig
from streams.processors.teacher import Teacher
from streams.stages.chain_builder import build_verify
from tests.actors.rig import serving_child
from tests.http_endpoint import Reply, http_endpoint

TOKENS = [1, 20, 40, 50, 2]
Answer = Callable[[dict[str, Any]], Reply | None]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    save_tokenizer(folder, CHARACTERS_ALONE)
    return folder


def sampled(
    *, temperature: float = 1.0, ratio: bool = True, images: tuple[Image, ...] = (), **header: Any
) -> Experience:
    messages = (Message(role="user", content="q", images=images), Message(role="assistant", content="E"))
    return make_experience(
        tokens=TOKENS, logprobs=[-0.5, -0.25, -2.0], messages=messages, id="t.0.0-0-0", group="t.0", episode=0, group_size=1,
        spans=(Span(2, 4, 3, temperature, ratio), Span(4, 5, 4, temperature, ratio)), **header,
    )  # fmt: skip


def entries(tokens: list[int], texts: list[str | None] | None = None) -> list[Any]:
    """Log-probability -t/10 of token t, as vLLM spells it."""
    told = texts or [None] * len(tokens)
    spelled = [
        {str(token): {"logprob": -token / 10, "rank": 1, "decoded_token": text}}
        for token, text in zip(tokens, told, strict=True)
    ]
    return [None, *spelled[1:]]


def reply(found: list[Any], **more: Any) -> Reply:
    return 200, json.dumps({"choices": [{"text": "", "prompt_logprobs": found}], **more}).encode()


def right(body: dict[str, Any]) -> Reply:
    return reply(entries(body["prompt"]), system_fingerprint="vllm-0.32.0-ab12")


def taught(policy: Path, answer: Answer, *experiences: Experience, **options: Any) -> tuple[ChainResult, list[Any]]:
    asked: list[Any] = []

    def endpoint(path: str, headers: Mapping[str, str], data: bytes) -> Reply | None:
        asked.append(json.loads(data) | {"path": path})
        return answer(json.loads(data))

    async def run(url: str) -> ChainResult:
        settings = {"deadline_s": 60.0, "attempts": 2, **options}
        teacher = Teacher(url=f"{url}/v1", model="big", policy=str(policy), **settings)
        step = make_step("teacher", teacher, timeout_s=100)
        try:
            return await run_chain([step], experiences or (sampled(),), Context())
        finally:
            await teacher.aclose()

    with http_endpoint(endpoint) as url:
        return asyncio.run(run(url)), asked


def test_each_sampled_token_gets_the_teachers_logprob_and_the_log_names_the_teacher(policy: Path) -> None:
    outcome, (asked,) = taught(policy, right)
    (kept,) = outcome.kept
    (again,) = decode_frame(encode(Block((kept,)))).experiences
    found = teacher_logprobs(again)
    assert found is not None
    np.testing.assert_allclose(found, [-4.0, -5.0, -0.2], rtol=1e-6)
    (score,) = again.scores
    assert (score.name, score.version) == ("teacher", "1+big@vllm-0.32.0-ab12")
    assert score.value == pytest.approx((-3.5 - 4.75 + 1.8) / 3)
    assert (asked["path"], asked["prompt"], asked["prompt_logprobs"], asked["max_tokens"]) == (
        "/v1/completions", TOKENS, 0, 1,
    )  # fmt: skip
    assert asked["temperature"] == 1.0 and asked["store"] is False


def others(body: dict[str, Any]) -> Reply:
    return reply(entries([token + 1 for token in body["prompt"]]))


BAD: dict[str, tuple[Answer, str, int]] = {
    "slow": (lambda body: threading.Event().wait(30) and None, "teacher unavailable", 1),
    "down": (lambda body: (503, b""), "teacher unavailable", 2),
    "without the model": (lambda body: (404, b"{}"), "teacher refused", 1),
    "no JSON": (lambda body: (200, b"<html>"), "teacher reply unreadable", 1),
    "ignores prompt_logprobs": (lambda body: (200, b'{"choices": [{"text": "x"}]}'), "teacher reply unreadable", 1),
    "above 0": (lambda body: reply([None, *({"20": {"logprob": 2.0}},) * 4]), "teacher reply unreadable", 1),
    "endless": (lambda body: (200, b" " * 200_000), "teacher reply unreadable", 1),
    "short": (lambda body: reply(entries(body["prompt"])[:-1]), "teacher answered for other tokens", 1),
    "other tokens": (others, "teacher answered for other tokens", 1),
    "other tokenizer": (
        lambda body: reply(entries(body["prompt"], ["<s>", "the", "cat", "sat", "</s>"])), "teacher has another tokenizer", 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_teacher_that_does_not_answer_rightly_costs_the_experience_with_a_reason(policy: Path, name: str) -> None:
    answer, reason, times = BAD[name]
    outcome, asked = taught(policy, answer, deadline_s=0.8 if name == "slow" else 60.0)  # the fake never answers
    (gone,) = outcome.dropped
    assert (gone.reason, gone.processor) == (reason, "teacher@1") and gone.detail
    assert not outcome.kept and len(asked) == times


def test_texts_of_the_policys_own_tokenizer_pass(policy: Path) -> None:
    own = [None, "1", "E", "O", "<eos>"]
    outcome, _ = taught(policy, lambda body: reply(entries(body["prompt"], own)))
    assert outcome.kept, outcome.dropped


@pytest.mark.parametrize(
    ("experience", "reason"),
    [
        (sampled(suite="dev"), ""),
        (sampled(lane="expert", ratio=False), ""),
        (sampled(temperature=0.0, ratio=False), ""),
        (sampled(temperature=0.7), "sampled at another temperature than 1"),
        (sampled(images=(Image(sha256="a" * 64, size=9),)), "teacher reads text alone"),
    ],
    ids=("eval", "demonstration", "greedy", "temperature", "image"),
)
def test_what_a_teacher_cannot_judge_is_not_asked(policy: Path, experience: Experience, reason: str) -> None:
    outcome, asked = taught(policy, right, experience)
    assert not asked and [drop.reason for drop in outcome.dropped] == ([reason] if reason else [])
    assert outcome.kept == (() if reason else outcome.kept)


def test_the_teacher_is_asked_last_and_needs_the_policys_tokenizer(policy: Path) -> None:
    tables = {
        "verify": {"teacher": {"url": "http://t/v1", "model": "m"}},
        "score": [{"name": "exact", "use": "streams.scores.exact:exact"}],
        "processor": [{"use": "tests.streams.test_chain_builder:first"}],
    }
    config = decode(tables, StreamsConfig, "x")
    names = [step.name for step in build_verify(config, str(policy))]
    assert names == ["validate", "dedupe", "filter", "first", "exact", "teacher"]
    with pytest.raises(ConfigError, match=r"needs policy\.model"):
        build_verify(config)


@pytest.mark.slow
def test_vllms_own_server_is_a_teacher(tmp_path: Path, policy: Path) -> None:
    model = build_char_model(tmp_path / "model", 9, size=Size(hidden=128, layers=1))
    port = choose_address().port
    server = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        "--served-model-name",
        "big",
    ]
    options = ["--port", str(port), "--max-model-len", "64", "--enforce-eager", "--gpu-memory-utilization", "0.2"]

    async def ask() -> list[Experience | Drop]:
        teacher = Teacher(url=f"http://127.0.0.1:{port}/v1", model="big", policy=str(policy))
        long = sampled().with_bulk(tokens=[1] * 80, logprobs=[-1.0] * 10, spans=(Span(70, 80, 1),))
        found = [await teacher(experience) for experience in (sampled(), long)]
        await teacher.aclose()
        return found

    with serving_child([*server, *options], port, patience_s=240.0):
        taught, refused = asyncio.run(ask())
    assert isinstance(taught, Experience) and taught.scores[0].version.startswith("1+big@vllm-")
    logits = load_model(model)(torch.tensor([TOKENS])).logits[0]
    expected = torch.log_softmax(logits, -1)[[1, 2, 3], TOKENS[2:]]
    np.testing.assert_allclose(teacher_logprobs(taught), expected.detach(), atol=0.02)  # vLLM computes in bfloat16
    assert isinstance(refused, Drop) and refused.reason == "teacher refused"
