"""Grammars over vocabularies: compiled once and away from the loop, bounded, and never more than text allows."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from actors.engines.engine import Sampling, SchemaNotTried, SchemaRefused
from actors.engines.grammar import (
    SHORT_CHARS,
    CompilerProcess,
    Grammars,
    TokenSpellings,
    byte_vocabulary,
    folder_vocabulary,
)
from infra.cli.demo.char_model import SPECIAL_TOKENS, VOCABULARY_SIZE, build_char_model

STOP = 256
TEXT = '{"type": "string"}'


def spelled(vocabulary: TokenSpellings, allowed: np.ndarray) -> set[bytes]:
    return {vocabulary.spellings[token] for token in np.flatnonzero(allowed)}


async def test_a_schema_is_compiled_once_while_the_event_loop_runs_on() -> None:
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
    assert all(other is first for other in others) and first is await grammars.compiled(TEXT)
    assert len(reads) == 1 and reads[0] is not threading.main_thread()
    grammars.close()


class Checking(TokenSpellings):
    """A vocabulary whose check of a schema is the test's."""

    def __init__(self, check: Callable[[str], None]) -> None:
        super().__init__(byte_vocabulary(260).spellings)
        self.check = check  # type: ignore[method-assign]


async def test_a_schema_that_is_refused_is_looked_at_once_and_holds_no_thread_that_others_share() -> None:
    go, looked_at = threading.Event(), []

    def refuse(json_schema: str) -> None:
        looked_at.append(json_schema)
        go.wait(60)
        raise SchemaRefused("it takes too long")

    grammars = Grammars(lambda: Checking(refuse))
    asked = [asyncio.create_task(grammars.compiled(str(number % 10))) for number in range(1000)]
    await asyncio.sleep(0)
    assert await asyncio.to_thread(lambda: "free") == "free"
    go.set()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(error, SchemaRefused) for error in found)
    with pytest.raises(SchemaRefused, match="takes too long"):
        await grammars.compiled("0")
    assert sorted(looked_at) == [str(number) for number in range(10)]
    grammars.close()


@pytest.mark.parametrize("error", [SchemaNotTried("the process has ended"), OSError("no such folder")])
async def test_what_failed_for_other_reasons_than_its_schema_is_tried_again(error: Exception) -> None:
    errors = [error]

    def fail_once(json_schema: str) -> None:
        if errors:
            raise errors.pop()

    grammars = Grammars(lambda: Checking(fail_once))
    with pytest.raises(type(error)):
        await grammars.compiled(TEXT)
    assert await grammars.compiled(TEXT) is not None
    grammars.close()


async def test_a_matcher_ends_only_where_the_text_is_whole() -> None:
    grammars, vocabulary = Grammars(lambda: byte_vocabulary(260)), byte_vocabulary(260)
    matcher = await grammars.matcher(Sampling(max_tokens=9, stop=(STOP,), json_schema='{"enum": ["ab", "aü"]}'))
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


async def test_special_tokens_are_no_text_and_neither_are_ids_without_a_token(tmp_path: Path) -> None:
    vocabulary = folder_vocabulary(str(build_char_model(tmp_path / "model", seed=1)), VOCABULARY_SIZE)
    assert len(vocabulary.spellings) == VOCABULARY_SIZE and vocabulary.special == set(range(len(SPECIAL_TOKENS)))
    assert {spelling for spelling in vocabulary.spellings if spelling} == {
        bytes([code]) for code in (*range(32, 127), 10)
    }
    grammars = Grammars(lambda: vocabulary)
    matcher = await grammars.matcher(Sampling(max_tokens=9, stop=(2,), json_schema=TEXT))
    assert matcher is not None
    matcher.take(vocabulary.spellings.index(b'"'))
    assert b"" not in spelled(vocabulary, matcher.allowed()), "inside a string too"
    grammars.close()


@pytest.mark.parametrize("missing", ["{", "n", "~"])
def test_a_vocabulary_that_lacks_what_json_may_need_is_refused(missing: str) -> None:
    vocabulary = TokenSpellings([bytes([code]) for code in range(32, 127) if chr(code) != missing])
    with pytest.raises(SchemaRefused, match="cannot spell it"):
        vocabulary.check(TEXT)


def large(number: int) -> str:
    """A schema that is looked at, each another."""
    names = [f"property{index}of{number}" for index in range(40)]
    text = json.dumps({"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names})
    assert len(text) > SHORT_CHARS
    return text


def slow(number: int) -> str:
    """A schema that takes the processor for long, over any vocabulary."""
    properties = {f"property{index}of{number}": {"type": "string"} for index in range(250)}
    return json.dumps({"type": "object", "properties": properties, "required": [], "additionalProperties": True})


@pytest.mark.slow  # the process takes seconds to start
def test_what_takes_longer_than_the_deadline_is_refused_and_the_next_schema_finds_a_process() -> None:
    vocabulary = byte_vocabulary(260)
    compiler = CompilerProcess(vocabulary.spellings)
    compiler.check('{"type": "string"}')
    assert compiler._process is None, "a short one needs none"
    compiler.check(large(0))
    first = compiler._process
    compiler.check(large(1))
    assert compiler._process is first
    compiler._deadline_s = 0.001
    with pytest.raises(SchemaRefused, match=r"takes longer than 0\.001 s"):
        compiler.check(slow(2))
    assert first is not None and first.poll() is not None, "it was ended"
    compiler._deadline_s = 60.0
    compiler.check(large(2))
    compiler._process.kill()
    compiler.check(large(3))
    compiler.close()
    with pytest.raises(SchemaRefused, match="no process"):
        compiler.check(large(4))
