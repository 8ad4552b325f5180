"""Grammars over vocabularies: compiled once and away from the loop, bounded, and never more than text allows."""

import asyncio
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from actors.engines.engine import Sampling, SchemaNotTried, SchemaRefused
from actors.engines.grammar import Grammars
from actors.engines.once_per_schema import MAX_KEPT, OncePerSchema
from actors.engines.token_spellings import TokenSpellings, byte_vocabulary, folder_vocabulary
from infra.cli.demo.char_model import SPECIAL_TOKENS, VOCABULARY_SIZE, build_char_model

STOP = 256
TEXT = '{"type": "string"}'


def asks(json_schema: str) -> Sampling:
    return Sampling(max_tokens=9, stop=(STOP,), json_schema=json_schema)


def spelled(vocabulary: TokenSpellings, allowed: np.ndarray) -> set[bytes]:
    return {vocabulary.spellings[token] for token in np.flatnonzero(allowed)}


def test_a_schema_is_compiled_once_while_the_event_loop_runs_on() -> None:
    async def check() -> None:
        go, reads = threading.Event(), []

        def read() -> TokenSpellings:
            reads.append(threading.current_thread())
            go.wait(60)
            return byte_vocabulary(260)

        grammars = Grammars(read)
        gone = asyncio.create_task(grammars.compiled(TEXT))
        calls = [asyncio.create_task(grammars.compiled(TEXT)) for _ in range(3)]
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait((gone,))  # the loop runs, and one caller's going takes nothing from the others
        assert not any(call.done() for call in calls)
        go.set()
        first, *others = await asyncio.gather(*calls)
        assert all(one is first for one in others) and first is await grammars.compiled(TEXT)
        assert len(reads) == 1 and reads[0] is not threading.main_thread()
        grammars.close()

    asyncio.run(check())


def test_no_more_than_so_many_are_kept() -> None:
    async def check() -> None:
        grammars = Grammars(lambda: byte_vocabulary(260))
        first = await grammars.compiled(json.dumps({"const": 0}))
        for value in range(1, MAX_KEPT):
            await grammars.compiled(json.dumps({"const": value}))
        assert await grammars.compiled(json.dumps({"const": 0})) is first
        await grammars.compiled(json.dumps({"const": MAX_KEPT}))
        assert await grammars.compiled(json.dumps({"const": 0})) is first, "it was asked for a moment ago"
        for value in range(MAX_KEPT + 1, 2 * MAX_KEPT + 1):
            await grammars.compiled(json.dumps({"const": value}))
        assert await grammars.compiled(json.dumps({"const": 0})) is not first
        grammars.close()

    asyncio.run(check())


def test_a_schema_that_is_refused_is_looked_at_once_and_holds_no_thread_that_others_share() -> None:
    async def check() -> None:
        go, looked_at = threading.Event(), []

        def make(json_schema: str) -> str:
            looked_at.append(json_schema)
            go.wait(60)
            raise SchemaRefused("it takes too long")

        schemas = OncePerSchema(make)
        asked = [asyncio.create_task(schemas.of(str(number % 10))) for number in range(1000)]
        await asyncio.sleep(0)
        assert await asyncio.to_thread(lambda: "free") == "free"
        go.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(one, SchemaRefused) for one in found)
        with pytest.raises(SchemaRefused, match="takes too long"):
            await schemas.of("0")
        assert sorted(looked_at) == [str(number) for number in range(10)]
        schemas.close()

    asyncio.run(check())


@pytest.mark.parametrize("error", [SchemaNotTried("the process has ended"), OSError("no such folder")])
def test_what_failed_for_other_reasons_than_its_schema_is_tried_again(error: Exception) -> None:
    async def check() -> None:
        errors = [error]

        def make(json_schema: str) -> str:
            if errors:
                raise errors.pop()
            return json_schema

        schemas = OncePerSchema(make)
        with pytest.raises(type(error)):
            await schemas.of(TEXT)
        assert await schemas.of(TEXT) == TEXT
        schemas.close()

    asyncio.run(check())


def test_a_matcher_ends_only_where_the_text_is_whole() -> None:
    async def check() -> None:
        grammars, vocabulary = Grammars(lambda: byte_vocabulary(260)), byte_vocabulary(260)
        matcher = await grammars.matcher(asks('{"enum": ["ab", "aü"]}'))
        assert matcher is not None
        for want in (b'"', b"a"):
            assert spelled(vocabulary, matcher.allowed()) == {want}
            matcher.take(want[0])
        assert spelled(vocabulary, matcher.allowed()) == {b"b", "ü".encode()[:1]}
        for byte in 'ü"'.encode():
            assert not matcher.allowed()[STOP]
            matcher.take(byte)
        assert np.flatnonzero(matcher.allowed()).tolist() == [STOP]
        assert not matcher.stuck
        matcher.take(ord("x"))
        assert matcher.stuck, "what left its grammar says so"
        grammars.close()

    asyncio.run(check())


def test_special_tokens_are_no_text_and_neither_are_ids_without_a_token(tmp_path: Path) -> None:
    vocabulary = folder_vocabulary(str(build_char_model(tmp_path / "model", seed=1)), VOCABULARY_SIZE)
    assert len(vocabulary.spellings) == VOCABULARY_SIZE and vocabulary.special == set(range(len(SPECIAL_TOKENS)))
    assert {one for one in vocabulary.spellings if one} == {bytes([code]) for code in (*range(32, 127), 10)}

    async def check() -> None:
        grammars = Grammars(lambda: vocabulary)
        matcher = await grammars.matcher(Sampling(max_tokens=9, stop=(2,), json_schema=TEXT))
        assert matcher is not None
        matcher.take(vocabulary.spellings.index(b'"'))
        assert b"" not in spelled(vocabulary, matcher.allowed()), "inside a string too"
        grammars.close()

    asyncio.run(check())


@pytest.mark.parametrize("missing", ["{", "n", "~"])
def test_a_vocabulary_that_lacks_what_json_may_need_is_refused(missing: str) -> None:
    vocabulary = TokenSpellings([bytes([code]) for code in range(32, 127) if chr(code) != missing])
    with pytest.raises(SchemaRefused, match="cannot spell it"):
        vocabulary.check(TEXT)
