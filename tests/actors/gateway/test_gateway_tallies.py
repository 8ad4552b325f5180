"""Counts of answers, failures and refusals that a gateway reports, also of answers that it may not record."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace
from openai import APIStatusError

from actors.config import REFUSALS
from actors.engines.engine import EngineStopped
from actors.gateway.recording.tallies import MAX_CLIENTS, MAX_VERSIONS, Tallies
from infra.log.memory import MemoryBus
from schemas import Answered, Client, Progress
from schemas.ids import TAG_LETTERS
from schemas.topics import REPORTS
from tests.actors.gateway.gateway_rig import ASK, engine, serving

TENANT = "its keyed name"


def of_a_tenant(answered: tuple[Answered, ...]) -> tuple[Answered, ...]:
    """A report in which each client is named as ids name a tenant."""
    assert all(len(client.client) == TAG_LETTERS for told in answered for client in told.clients)
    return tuple(
        replace(told, clients=tuple(replace(client, client=TENANT) for client in told.clients)) for told in answered
    )


def test_a_refusal_is_one_at_the_beginning_of_an_answer() -> None:
    tallies = Tallies(REFUSALS)
    for number, text in enumerate(("I'm sorry, no.", "i cannot help with that", "Sure.", "x" * 200 + " I'm sorry")):
        tallies.answered(3, -1, [text], "a", f"s{number}")
    clients = (Client(client="a", sessions=4, refused=2),)
    assert tallies.report() == (Answered(version=3, answers=4, refused=2, clients=clients),)
    without = Tallies(())
    without.answered(3, -1, ["I'm sorry"], "", "")
    assert without.report() == (Answered(version=3, answers=1, clients=(Client(client="", sessions=1),)),)


def test_of_one_session_one_answer_counts_for_its_client_and_clients_are_bounded() -> None:
    tallies = Tallies(REFUSALS)
    for _ in range(45):
        tallies.answered(3, -1, ["I'm sorry, no."], "a", "s")
    assert tallies.report()[0].refused == 45 and tallies.report()[0].clients == (
        Client(client="a", sessions=1, refused=1),
    )
    for number in range(100):
        tallies.answered(3, -1, ["Sure."], f"c{number}", "s")
    clients = tallies.report()[0].clients
    assert len(clients) == MAX_CLIENTS + 1 and clients[-1] == Client(client="", sessions=100 - MAX_CLIENTS + 1)


def test_past_the_bound_the_version_that_answered_longest_ago_is_forgotten_and_not_the_lowest() -> None:
    tallies = Tallies(())
    for version in (*range(5, 5 + MAX_VERSIONS), 5, 3, 3):
        tallies.answered(version, -1, ["Yes."], "a", "s")
    told = {answered.version: answered.answers for answered in tallies.report()}
    assert (told[5], told[3], len(told)) == (2, 2, MAX_VERSIONS) and 6 not in told


async def test_answers_that_fail_or_refuse_are_told_of_everybody_also_without_consent(tmp_path: Path) -> None:
    said = iter(["Hello.", "I'm sorry, I can't.", None, "Bye."])

    def script(prompt: tuple[int, ...]) -> list[int]:
        text = next(said)
        if text is None:
            raise RuntimeError("the kernel broke")
        return [*text.encode(), 256]

    async with serving(tmp_path, engine(script), train_on="nothing", report_s=0.05) as served:
        client = await served.opened(train="no")
        for fails in (False, False, True, False):
            asking = client.chat.completions.create(model="main", messages=ASK)
            if fails:
                with pytest.raises(APIStatusError) as error:
                    await asking
                assert error.value.status_code == 500
            else:
                await asking
        with pytest.raises(APIStatusError):
            too_long = ASK[0] | {"content": "Hi" * 3000}  # not the engine's fault
            await client.chat.completions.create(model="main", messages=[too_long])
        clients = (Client(client=TENANT, sessions=4, failed=1, refused=1),)
        wanted = (Answered(version=0, answers=4, failed=1, refused=1, clients=clients),)
        async with asyncio.timeout(60):
            async for message in served.log.tail(REPORTS, "beginning"):
                if isinstance(message.value, Progress) and of_a_tenant(message.value.answered) == wanted:
                    break


async def test_what_failed_with_an_engine_that_died_is_told_before_the_gateway_ends(tmp_path: Path) -> None:
    def script(prompt: tuple[int, ...]) -> list[int]:
        raise EngineStopped("it is gone")

    bus = MemoryBus()
    with pytest.raises(EngineStopped):
        async with serving(tmp_path, engine(script), bus=bus, report_s=60.0) as served:
            async with served.http(await served.new_key()) as http:
                answer = await http.post("/v1/chat/completions", json={"model": "main", "messages": ASK})
            assert answer.status_code == 503
    reports = [m.value async for m in served.log.scan(REPORTS) if isinstance(m.value, Progress)]
    clients = (Client(client=TENANT, sessions=1, failed=1),)
    assert of_a_tenant(reports[-1].answered) == (Answered(version=0, answers=1, failed=1, clients=clients),)
