"""The gateway and the turns of a session: which go on from which, why others do not, and how a client ends one."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_rig import engine, serving

from actors.gateway.answering.sessions import BRANCHED, MAX_ENDS
from actors.rollout.parts import OTHER
from schemas import Experience
from schemas.fields import HISTORY_REWRITTEN

SESSION = {"x-session-id": "s"}
Conversation = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answers(prompt: tuple[int, ...]) -> list[int]:
    """Says what it was asked last, so that no two answers are the same."""
    text = bytes(token for token in prompt if token < 256).decode()
    return [*f"to {text.rpartition('<user>')[2].partition('<')[0]}".encode(), 256]


async def asked(client: openai.AsyncOpenAI, said: Conversation, **headers: str) -> Conversation:
    """The conversation with its answer."""
    made = await client.chat.completions.create(model="m", messages=said, extra_headers=SESSION | headers)  # type: ignore[arg-type]
    return [*said, {"role": "assistant", "content": made.choices[0].message.content}]


def found(turns: list[Experience]) -> list[tuple[int, str]]:
    return [(one.carried, one.part_reason) for one in turns]


async def test_conversations_of_one_session_that_take_turns_each_go_on_from_their_own(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(answers)) as served:
        client = await served.opened()
        one = await asked(client, [{"role": "system", "content": "A."}, user("a0")])
        other = await asked(client, [{"role": "system", "content": "B."}, user("b0")])
        for number in (1, 2):
            one = await asked(client, [*one, user(f"a{number}")])
            other = await asked(client, [*other, user(f"b{number}")])
        turns = await served.recorded(6)
        assert found(turns) == [(0, ""), (0, OTHER), (1, ""), (1, ""), (2, ""), (2, "")]
        assert served.count("sessions_split") == 1


async def test_parallel_calls_go_on_from_the_same_turn_and_are_gone_on_from_each(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(answers, token_s=0.002)) as served:
        client = await served.opened()
        first = await asked(client, [user("q")])
        left, right = await asyncio.gather(asked(client, [*first, user("l")]), asked(client, [*first, user("r")]))
        for one in (left, right):
            await asked(client, [*one, user("more")])
        turns = await served.recorded(5)
        assert found(turns) == [(0, ""), (1, ""), (1, ""), (2, ""), (2, "")]
        ends = {bytes(one.tokens[one.tokens < 256].tolist()).decode() for one in turns[3:]}
        assert len(ends) == 2 and all(text.startswith("<user>q<assistant>to q<user>") for text in ends)


async def test_what_does_not_go_on_says_why(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(answers)) as served:
        client = await served.opened()
        system = {"role": "system", "content": "A."}
        one = await asked(client, [system, user("a0")])
        two = await asked(client, [*one, user("a1")])
        await asked(client, [*one, user("instead of a1")])
        await asked(client, [*two, user("a2")])
        await asked(client, [system, user("what was said before: a0, a1, a2")])
        turns = await served.recorded(5)
        assert found(turns) == [(0, ""), (1, ""), (0, BRANCHED), (2, ""), (0, HISTORY_REWRITTEN)]


async def test_as_many_conversations_of_a_session_are_held_as_are_bounded(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(answers)) as served:
        client = await served.opened()
        begun = [await asked(client, [user(f"c{number}")]) for number in range(MAX_ENDS + 1)]
        for one in (begun[-1], begun[0]):
            await asked(client, [*one, user("more")])
        turns = await served.recorded(MAX_ENDS + 3)
        assert found(turns)[-2:] == [(1, ""), (0, OTHER)]


async def test_a_client_ends_its_session_by_a_header_that_any_client_can_send(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(answers)) as served:
        client = await served.opened()
        said = await asked(client, [user("a")])
        said = await asked(client, [*said, user("b")], **{"x-session-end": "false"})
        await asked(client, [*said, user("c")], **{"x-session-end": "true"})
        await client.chat.completions.create(
            model="m",
            messages=[user("alone")],
            extra_headers={"x-session-end": "true"},  # type: ignore[list-item]
        )
        with pytest.raises(openai.BadRequestError, match="x-session-end: got 'maybe', expected"):
            await asked(client, [user("a")], **{"x-session-end": "maybe"})
        assert [one.ends_session for one in await served.recorded(4)] == [False, False, True, False]
