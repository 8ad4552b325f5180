"""Limits on the share of a gateway that a client takes from the others: bodies, quotas, slots, and forgotten answers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.gateway.config import GatewayLimits, Webhook
from infra.ledger.forget import tell
from infra.store.seal import app_secret
from tests.actors.gateway.gateway_rig import ASK, RunningGateway, engine, says, serving
from tests.actors.rig import until

WEBHOOK = Webhook(path="/hook", secret=b"shared", header="x-signature")
BODY = b"x" * 1000


async def unfinished(
    served: RunningGateway, path: str, header: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request whose body lacks its last byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{header}\r\ncontent-length: {len(BODY) + 1}\r\n\r\n"
    writer.write(head.encode() + BODY)
    return reader, writer


@pytest.mark.parametrize("header", ["x-api-key: hr-nobody-x", "authorization: Bearer hr-nobody-x", "x-other: 1"])
@pytest.mark.parametrize("path", ["/v1/feedback", "/v1/chat/completions", "/v1/messages/count_tokens"])
async def test_who_asks_is_known_before_a_body_is_read(tmp_path: Path, path: str, header: str) -> None:
    async with serving(tmp_path) as served, asyncio.timeout(20):
        reader, writer = await unfinished(served, path, header)
        assert b" 401 " in await reader.readline()
        writer.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/feedback", "/hook"])
async def test_unfinished_bodies_of_a_key_or_an_address_are_bounded_and_others_are_served(
    tmp_path: Path, path: str
) -> None:
    limits = GatewayLimits(body_bytes=2 * len(BODY))
    async with serving(tmp_path, limits=limits, webhooks=(WEBHOOK,)) as served, asyncio.timeout(20):
        greedy, other = await served.new_key(), await served.new_key()
        held = [await unfinished(served, path, f"authorization: Bearer {greedy}") for _ in range(17)]
        await until(lambda: served.count("refused") == 1)
        answer = await served.client(other).chat.completions.create(model="m", messages=ASK)
        assert answer.choices[0].message.content == "Hello."
        for _, writer in held:
            writer.close()

        async def is_given_back() -> bool:
            async with served.http(greedy) as http:
                return (await http.post(path, content=BODY)).status_code != 429

        while not await is_given_back():  # noqa: ASYNC110 (a client can only ask again)
            await asyncio.sleep(0.01)


async def test_a_request_for_n_answers_counts_n(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.http(await served.new_key(rpm=8)) as http:
        asked = {"model": "m", "messages": ASK, "n": 4}
        statuses = [(await http.post("/v1/chat/completions", json=asked)).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]


async def test_what_was_forgotten_does_not_come_back_from_the_memory_of_a_gateway(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(says("It passes."))) as served:
        key = await served.new_key()
        client = served.client(key)
        given: dict[str, Any] = {}
        for user in ("bob", "ann"):
            said: Any = {"model": "m", "input": f"I am {user}.", "user": user}
            given[user] = await client.responses.create(**said, extra_headers={"x-session-id": f"of {user}"})
        await tell(served.log, "acme", "bob", secret=app_secret(served.store), owner="test")

        async def status(user: str) -> int:
            async with served.http(key) as http:
                asked = {"model": "m", "input": "And now?", "previous_response_id": given[user].id}
                return (await http.post("/v1/responses", json=asked)).status_code

        async with asyncio.timeout(20):
            while await status("bob") != 404:  # noqa: ASYNC110 (a client can only ask again)
                await asyncio.sleep(0.02)
        assert await status("ann") == 200


@pytest.mark.parametrize("choice", [1, 1000])
async def test_a_choice_that_a_request_did_not_have_is_refused(tmp_path: Path, choice: int) -> None:
    async with serving(tmp_path) as served, served.http(await served.new_key()) as http:
        answer = (await http.post("/v1/chat/completions", json={"model": "m", "messages": ASK})).json()["id"]
        said = {"answer_id": answer, "value": 1}
        told = await http.post("/v1/feedback", json={**said, "choice": choice})
        assert (told.status_code, told.json()["error"]["param"]) == (400, "choice")
        assert (await http.post("/v1/feedback", json=said)).status_code == 202
