"""Why a client is not let in: asked once for all that wait, for a bounded time, and a plugin that fails is named."""

import asyncio
from typing import Any

import pytest

from infra.log.access import Access, TokenFailed, TokenProvider
from infra.log.refusal import KEPT_S, Refusals
from schemas.errors import ConfigError


async def silent(connections: list[object]) -> asyncio.Server:
    """A server that takes connections and never says a word."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.read()
        writer.close()

    return await asyncio.start_server(take, "127.0.0.1", 0)


def test_a_thousand_sends_that_fail_at_once_ask_one_question_and_its_answer_is_kept_for_a_while() -> None:
    connections: list[object] = []
    now_s = [0.0]

    async def main() -> None:
        async with await silent(connections) as server:
            port = server.sockets[0].getsockname()[1]
            access = Access(protocol="SASL_PLAINTEXT", username="u", password="p")
            refusals = Refusals(f"127.0.0.1:{port}", access, ask_s=0.2, clock=lambda: now_s[0])
            assert await asyncio.gather(*(refusals.lately() for _ in range(1024))) == [None] * 1024
            assert len(connections) == 1
            now_s[0] = KEPT_S - 1
            await refusals.lately()
            assert len(connections) == 1
            now_s[0] = KEPT_S
            await refusals.lately()
            assert len(connections) == 2

    asyncio.run(main())


class Vault:
    """A plugin that is an object."""

    def __init__(self, given: Any) -> None:
        self._given = given

    async def __call__(self) -> Any:
        if isinstance(self._given, Exception):
            raise self._given
        return self._given


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (OSError("s3cret"), "raised OSError in test_refusal.py, line "),
        (TimeoutError("s3cret"), "raised TimeoutError in test_refusal.py, line "),
        (None, "returned NoneType, expected a token as text"),
        (b"s3cret", "returned bytes, expected a token as text"),
        ("", "returned str, expected a token as text"),
    ],
)
def test_a_plugin_that_gives_no_token_is_named_and_nothing_it_said_is_shown(given: Any, said: str) -> None:
    with pytest.raises(TokenFailed) as failed:
        asyncio.run(TokenProvider(Vault(given)).token())
    assert f"kafka.sasl_token: {__name__}:Vault {said}" in str(failed.value)
    assert "s3cret" not in str(failed.value) and failed.value.retriable and not isinstance(failed.value, ConfigError)
