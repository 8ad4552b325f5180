"""Why a client is not let in: asked once for all that wait, for a bounded time, and a plugin that fails is named."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from infra.log.access import Access, TokenFailed, TokenProvider, kafka_access
from infra.log.kafka import KafkaBus
from infra.settings.config import Floor, Kafka
from schemas.errors import ConfigError


async def silent(connections: list[object]) -> asyncio.Server:
    """A server that takes connections and never says a word."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.read()
        writer.close()

    return await asyncio.start_server(take, "127.0.0.1", 0)


async def test_callers_at_once_ask_the_brokers_one_question_and_share_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections: list[object] = []
    monkeypatch.setattr("infra.log.kafka.ASK_S", 0.2)
    async with await silent(connections) as server:
        port = server.sockets[0].getsockname()[1]
        bus = KafkaBus(f"127.0.0.1:{port}", access=Access(protocol="SASL_PLAINTEXT", username="u", password="p"))
        assert await asyncio.gather(*(bus.why_refused() for _ in range(1024))) == [None] * 1024
        assert len(connections) == 1


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


@pytest.mark.parametrize("content", [b"", b"no certificate", None])
def test_a_clients_certificate_that_cannot_be_read_is_one_line(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "client.pem"
    if content is not None:
        file.write_bytes(content)
    kafka = Kafka(bootstrap_servers="b:1", security_protocol="SSL", ssl_cert_file=str(file))
    with pytest.raises(ConfigError, match="ssl_cert_file, ssl_key_file: cannot be read: "):
        kafka_access(Floor(app="t", kafka=kafka))
