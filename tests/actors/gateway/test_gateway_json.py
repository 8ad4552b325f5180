"""JSON mode as clients use it: an answer is JSON of the schema asked for, whatever the policy would have said."""

import json
from pathlib import Path
from typing import Any, Literal

import hypothesis.strategies as st
import jsonschema
import numpy as np
import openai
import pydantic
import pytest
from hypothesis import HealthCheck, example, given, settings

from actors.engines.grammar import Matcher, byte_vocabulary, make_compiler
from actors.engines.scripted import ScriptedEngine
from actors.gateway.answering.requests import read_chat
from actors.gateway.config import GatewayLimits
from actors.gateway.errors import ApiError
from tests.actors.gateway.gateway_rig import EOS, VOCABULARY, ByteTokenizer, engine, says, serving

ASK: list[Any] = [{"role": "user", "content": "How warm is it in Zürich?"}]
OBJECT: Any = {"type": "json_object"}
DECODE = ByteTokenizer().decode
COMPILE = make_compiler(byte_vocabulary(VOCABULARY).spellings)


class Weather(pydantic.BaseModel):
    sky: Literal["clear", "cloudy", "bewölkt"]
    windy: bool
    degrees: int = pydantic.Field(ge=-40, le=50)
    later: "list[Weather] | None" = pydantic.Field(max_length=2)


def held(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def assert_is_json(text: str, finish: str | None, schema: Any) -> None:
    if finish == "stop":
        jsonschema.validate(json.loads(text), schema)
    else:
        assert finish == "length"


@pytest.mark.parametrize("form", [OBJECT, held(Weather.model_json_schema())], ids=["object", "schema"])
async def test_whatever_the_policy_would_say_the_answer_is_json_unless_it_ran_out_of_tokens(
    tmp_path: Path, form: Any
) -> None:
    schema = form.get("json_schema", {}).get("schema", {"type": "object"})

    async with serving(tmp_path, engine(seed=1)) as served:
        client = await served.opened()
        ask: Any = {"model": "m", "messages": ASK, "response_format": form, "n": 8, "max_tokens": 500}
        whole = await client.chat.completions.create(**ask)
        stream: Any = await client.chat.completions.create(**ask, stream=True)
        texts, ends = [""] * 8, [""] * 8
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] = choice.finish_reason or ends[choice.index]
        told = [(c.message.content or "", str(c.finish_reason)) for c in whole.choices]
        told += list(zip(texts, ends, strict=True))
        for text, finish in told:
            assert_is_json(text, finish, schema)
        assert sum(finish == "stop" for _, finish in told) >= 4
        for one in await served.recorded(16):
            assert not any(span.ratio for span in one.spans), "what the mask let through is not the policy's own"


async def test_the_clients_typed_answers_are_parsed_and_a_policy_that_fits_is_left_alone(tmp_path: Path) -> None:
    said = '{"sky": "bewölkt", "windy": true, "degrees": -7, "later": null}'

    async with serving(tmp_path, engine(says(said))) as served:
        client = await served.opened()
        answer = await client.chat.completions.parse(model="m", messages=ASK, response_format=Weather)
        assert answer.choices[0].message.parsed == Weather(sky="bewölkt", windy=True, degrees=-7, later=None)
        assert answer.choices[0].message.content == said
        plain: Any = {"type": "text"}
        await client.chat.completions.create(model="m", messages=ASK, response_format=plain)
        assert [one.spans[0].ratio for one in await served.recorded(2)] == [False, True]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_vocabulary_that_cannot_spell_json_is_told_before_the_first_byte(tmp_path: Path, stream: bool) -> None:
    few = ScriptedEngine(num_vocabulary=100, max_model_len=4096)  # its last byte is "c"
    asked: Any = [{"role": "user", "content": "!"}]
    async with serving(tmp_path, few, tokenizer=_Few()) as served:
        client = await served.opened()
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=asked, response_format=OBJECT, stream=stream)
        assert (caught.value.param, caught.value.code) == ("response_format", "unsupported_value")
        await client.chat.completions.create(model="m", messages=asked, max_tokens=3)


class _Few(ByteTokenizer):
    eos_ids = (0,)

    def encode_request(self, conversation: Any, tools: Any = ()) -> list[int]:
        return [1, 2, 3]


REFUSED: list[tuple[Any, str]] = [
    (held({"type": "text"}), "response_format"),
    (held({"type": "array", "minItems": 3, "maxItems": 2}), "response_format"),
    (held({"type": "integer", "minimum": 3, "maximum": 2}), "response_format"),
]


async def test_a_response_format_that_cannot_be_kept_is_a_400_that_names_the_place(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        client = await served.opened()
        for form, param in REFUSED:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="m", messages=ASK, response_format=form)
            assert caught.value.param == param, caught.value.message
        assert served.count("refused") == len(REFUSED) and served.count("answers") == 0


NAMES = st.sampled_from(["a", "b", "ü", 'q"', "", "line\n", "☃\\", "type", "title"])
SCALARS = st.one_of(NAMES, st.integers(-(10**15), 10**15), st.floats(-1e9, 1e9, width=32), st.booleans(), st.none())
LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(["null", "boolean", "integer", "number", "string"]).map(lambda kind: {"type": kind}),
    st.lists(SCALARS, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value, "title": "fixed"}),
    st.tuples(st.integers(-2000, 2000), st.integers(0, 3000)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[0] + ends[1]}
    ),
    st.tuples(st.integers(-2000, 2000), st.integers(2, 3000)).map(
        lambda ends: {"type": "number", "exclusiveMinimum": ends[0], "exclusiveMaximum": ends[0] + ends[1]}
    ),
    st.sampled_from(["date", "uuid", "ipv4"]).map(lambda name: {"type": "string", "format": name}),
    st.just({"type": ["integer", "null"], "minimum": 3}),
)


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda of: {"type": "array", "items": of[0], "minItems": of[1], "maxItems": of[1] + of[2]}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda of: {"anyOf": of}),
        st.tuples(st.dictionaries(NAMES, inner, max_size=3), st.integers(0, 3), st.booleans()).map(
            lambda of: {
                "type": "object",
                "properties": of[0],
                "required": list(of[0])[: of[1]],
                "additionalProperties": of[2],
            }
        ),
    )


def titled(schema: Any) -> Any:
    return {"type": "object", "properties": {"title": schema}, "required": ["title"], "additionalProperties": True}


TITLES = {"a": titled({"type": "null"}), "b": titled({"const": "a"})}


def asked(schema: Any) -> str:
    body = {"model": "m", "messages": ASK, "response_format": held(schema)}
    return read_chat(json.dumps(body).encode(), GatewayLimits()).json_schema


@given(schema=st.recursive(LEAVES, larger, max_leaves=6), seed=st.integers(0, 2**32))
@example(schema={"type": "object", "properties": TITLES, "required": ["a", "b"], "additionalProperties": False}, seed=0)
@example(schema={"const": 0.9999899864196777}, seed=0)  # a reader of 15 digits makes another number of it
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_drawn_under_a_schema_is_an_instance_of_it(schema: Any, seed: int) -> None:
    drawn, text = np.random.default_rng(seed), list[int]()
    matcher = Matcher(COMPILE(asked(schema)), VOCABULARY, (EOS,))
    while len(text) < 1500:
        allowed = matcher.allowed()
        assert not matcher.stuck
        if allowed[EOS]:
            jsonschema.validate(json.loads(DECODE(text)), schema)
            break
        text.append(int(drawn.choice(np.flatnonzero(allowed))))
        matcher.take(text[-1])


@given(
    value=st.recursive(
        SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=12), inner), max_leaves=20
    )
)
def test_any_json_at_all_in_the_place_of_a_schema_is_taken_or_refused(value: Any) -> None:
    try:
        assert isinstance(json.loads(asked(value)), dict)
    except ApiError as error:
        assert error.status == 400 and str(error.param).startswith("response_format.json_schema")
