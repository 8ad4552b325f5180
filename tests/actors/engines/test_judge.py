"""A schema that compiles too long is ended with the process that compiles it, and nobody else notices."""

import asyncio
import json
import threading

import pytest

from actors.engines.engine import SchemaRefused
from actors.engines.grammar import Grammars
from actors.engines.judge import SHORT_CHARS, SchemaCompiler
from actors.engines.token_spellings import byte_vocabulary

pytestmark = pytest.mark.slow  # the process takes seconds to start


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


def test_what_takes_longer_than_the_deadline_is_refused_and_the_next_schema_finds_a_process() -> None:
    vocabulary = byte_vocabulary(260)
    judge = SchemaCompiler(vocabulary.spellings)
    judge.check('{"type": "string"}')
    assert judge._process is None, "a short one needs none"
    judge.check(large(0))
    first = judge._process
    judge.check(large(1))
    assert judge._process is first
    judge._deadline_s = 0.001
    with pytest.raises(SchemaRefused, match=r"takes longer than 0\.001 s"):
        judge.check(slow(2))
    assert first is not None and first.poll() is not None, "it was ended"
    judge._deadline_s = 60.0
    judge.check(large(2))
    judge._process.kill()
    judge.check(large(3))
    judge.close()
    with pytest.raises(SchemaRefused, match="no process"):
        judge.check(large(4))


def test_grammars_are_refused_by_the_deadline_and_compiled_within_it() -> None:
    async def check() -> None:
        strict = Grammars(lambda: byte_vocabulary(260), deadline_s=0.001)
        with pytest.raises(SchemaRefused, match="takes longer"):
            await strict.compiled(slow(0))
        assert await strict.compiled('{"type": "string"}') is not None
        strict.close()
        usual = Grammars(lambda: byte_vocabulary(260), deadline_s=60.0)
        assert await usual.compiled(large(0)) is not None
        with pytest.raises(SchemaRefused, match="not a schema"):
            await usual.compiled(large(0).replace("string", "strong"))
        usual.close()

    asyncio.run(check())


def test_closing_lets_go_of_whoever_waits() -> None:
    judge, told = SchemaCompiler(byte_vocabulary(260).spellings), threading.Event()

    def wait() -> None:
        with pytest.raises(SchemaRefused):
            judge.check(large(0))
        told.set()

    thread = threading.Thread(target=wait)
    thread.start()
    while judge._process is None:
        thread.join(0.01)
    judge.close()
    thread.join(60)
    assert told.is_set()
