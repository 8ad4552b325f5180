"""Any request is answered: fields that change nothing are named in a header, others are served and not trained."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.engines.engine import Sampling, Shaping, shaped_logits
from tests.actors.gateway.gateway_rig import ByteTokenizer, engine, says, serving

ASK = [{"role": "user", "content": "Hi"}]
INERT = {"service_tier": "auto", "reasoning_effort": "low", "colour": 1}
CHAT = {"messages": ASK, "modalities": ["text"], "store": True, "user": "ann", "metadata": {"a": "b"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
HEADER = "service_tier, reasoning_effort, colour"
BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT | INERT, f"metadata, {HEADER}"),
    ("/v1/completions", {"prompt": "Hi", "echo": True, "suffix": "x", "best_of": 2}, "echo, suffix, best_of"),
    ("/v1/responses", {"input": "Hi", "background": True} | INERT, f"background, {HEADER}"),
    ("/v1/messages", {"messages": ASK, "max_tokens": 9} | INERT, HEADER),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "ignored"), BODIES, ids=[path for path, _, _ in BODIES])
async def test_fields_that_change_nothing_are_named_in_a_header_and_counted(
    tmp_path: Path, path: str, body: dict[str, Any], ignored: str, stream: bool
) -> None:
    async with serving(tmp_path) as served, served.http(await served.new_key()) as http:
        answer = await http.post(path, json={"model": "m", **body, "stream": stream})
        assert (answer.status_code, answer.headers["x-headrace-ignored"]) == (200, ignored), answer.text
        assert "x-headrace-trained" not in answer.headers
        assert served.count("fields_ignored") == len(ignored.split(", "))
        plain = await http.post("/v1/chat/completions", json={"model": "m", "messages": ASK})
        assert "x-headrace-ignored" not in plain.headers


@pytest.mark.parametrize(("field", "value", "why"), [("colour", 1, "ignores"), ("top_k", 5, "serves")])
async def test_a_strict_gateway_refuses_what_others_ignore_or_serve_and_answers_the_rest(
    tmp_path: Path, field: str, value: int, why: str
) -> None:
    async with serving(tmp_path, strict=True) as served, served.http(await served.new_key()) as http:
        ask = {"model": "m", "messages": ASK}
        refused = await http.post("/v1/chat/completions", json=ask | {field: value})
        assert refused.status_code == 400 and f"gateway.strict = false the gateway {why} it" in refused.text
        assert (await http.post("/v1/chat/completions", json=ask)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/chat/completions", {"messages": ASK, "frequency_penalty": 1.0}, "shaping"),
        ("/v1/completions", {"prompt": "Hi", "logit_bias": {"65": 100}}, "shaping"),
        ("/v1/messages", {"messages": ASK, "max_tokens": 9, "top_k": 1}, "shaping"),
        ("/v1/responses", {"input": "Hi", "top_p": 0.5}, "top_p"),
        ("/v1/chat/completions", {"messages": ASK, "temperature": 0}, "temperature"),
    ],
)
async def test_an_answer_that_is_not_the_policys_own_draw_is_served_and_marked(
    tmp_path: Path, path: str, body: dict[str, Any], reason: str
) -> None:
    async with serving(tmp_path, engine(seed=1)) as served:
        async with served.http(await served.new_key()) as http:
            answer = await http.post(path, json={"model": "m", **body, "max_tokens": 5, "max_output_tokens": 5})
            assert (answer.status_code, answer.headers["x-headrace-trained"]) == (200, "no")
        (experience,) = await served.recorded(1)
        assert not any(span.ratio for span in experience.spans)
        assert served.metrics.counters()[f"recorded_without_ratio{{reason={reason}}}"] == 1


def test_shaped_logits_follow_the_definitions_of_vllm() -> None:
    logits = np.array([2.0, -1.0, 0.5, 0.0], np.float32)

    def shaped(sampled: tuple[int, ...] = (), temperature: float = 1.0, **shaping: Any) -> list[float]:
        sampling = Sampling(max_tokens=1, temperature=temperature, shaping=Shaping(**shaping))
        return [round(float(value), 4) for value in shaped_logits(logits, sampling, (0, 1), sampled)]

    inf = float("-inf")
    assert shaped(temperature=0.5) == [4, -2, 1, 0]
    assert shaped(logit_bias=((3, 5.0),)) == [2, -1, 0.5, 5]
    assert shaped(repetition_penalty=2.0, sampled=(2,)) == [1, -2, 0.25, 0]
    assert shaped(frequency_penalty=0.5, sampled=(2, 2, 3)) == [2, -1, -0.5, -0.5]
    assert shaped(presence_penalty=0.5, sampled=(2, 2, 3)) == [2, -1, 0, -0.5]
    assert shaped(top_k=2) == [2, inf, 0.5, inf]
    assert shaped(min_p=0.2) == [2, inf, 0.5, inf]
    assert shaped(min_p=0.2, temperature=0.5) == [4, inf, inf, inf]
    assert logits.tolist() == [2.0, -1.0, 0.5, 0.0]


class Bare(ByteTokenizer):
    """A model whose chat template knows no tools."""

    takes_tools = False

    def encode_request(self, conversation: Any, tools: Any = ()) -> list[int]:
        assert all(message["role"] != "tool" and "tool_calls" not in message for message in conversation)
        return super().encode_request(conversation)


async def test_tools_of_a_model_whose_template_knows_none_are_put_into_a_system_message(
    tmp_path: Path,
) -> None:
    script = says(CALL, "Rain.")
    async with serving(tmp_path, engine(script), tokenizer=Bare()) as served:
        async with served.http(await served.new_key()) as http:
            ask = {"model": "m", "messages": [{"role": "system", "content": "Be brief."}, *ASK], "tools": [TOOL]}
            first = await http.post("/v1/chat/completions", json=ask)
            message = first.json()["choices"][0]["message"]
            (call,) = message["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}
            result = {"role": "tool", "content": "12 mm", "tool_call_id": call["id"]}
            ask["messages"] += [message, result]
            assert (await http.post("/v1/chat/completions", json=ask)).json()["choices"][0]["message"][
                "content"
            ] == "Rain."
        _, second = await served.recorded(2)
        prompt = ByteTokenizer().decode(second.tokens.tolist())
        assert "Be brief." in prompt and '"name": "weather"' in prompt and "<tool_response>\n12 mm" in prompt
