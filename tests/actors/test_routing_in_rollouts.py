"""The experts of an episode's tokens, turn by turn, and within their bound."""

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

from actors.config import ExploreConfig
from actors.engines.engine import Completion
from actors.rollout.parts import TOO_LARGE, with_recorded
from actors.rollout.session import Session
from infra.settings.config import decode
from schemas import Message
from schemas.bulk.sections import MAX_SECTION_BYTES
from schemas.errors import ConfigError
from schemas.wire.routing import ABSENT, routing
from tests.actors.test_session import END, SAMPLING, Answers, Spelled, answer, spell, user


def routed(completion: Completion, num_prompt: int, turn: int) -> Completion:
    """With rows that say which turn recorded them, and of which token."""
    num = num_prompt + len(completion.tokens) - 1
    rows = np.stack([np.full(num, turn), np.arange(num)], 1).astype(np.uint8)
    return replace(completion, routing=rows[:, None])


def two_turns(*, first: bool = True, second: bool = True) -> Session:
    """One token sequence of two turns. first, second: whether the engine records in it."""
    asked, said, then = (user("1"),), spell("ab"), user("2")
    turns = [answer(*said, END), answer(*spell("c"), END)]
    num_first = len(Spelled().encode_chat(asked))
    conversation = (*asked, Message(role="assistant", content="ab"), then)
    num_second = len(Spelled().encode_chat(conversation))
    given = [
        routed(turns[0], num_first, 1) if first else turns[0],
        routed(turns[1], num_second, 2) if second else turns[1],
    ]
    session = Session(Answers(*given), Spelled(), SAMPLING)  # type: ignore[arg-type]

    async def run() -> None:
        reply = await session.reply(asked)
        await session.reply((*asked, reply, then))

    asyncio.run(run())
    assert session.num_parts == 1
    return session


def test_a_token_keeps_the_experts_it_first_went_to_and_what_was_observed_has_the_next_turns() -> None:
    session = two_turns()
    (experience,) = session.experiences(group="t.0", attempt=0, episode=0)
    (rows,) = session.routing
    made, reason = with_recorded(experience, rows, 1000)
    found = routing(made)
    assert reason == "" and found[:, 0, 1].tolist() == [*range(experience.num_tokens - 1), ABSENT]
    read_first = experience.spans[0].stop - 1  # the last token of the first turn was read in the second
    assert found[:, 0, 0].tolist() == [1] * read_first + [2] * (experience.num_tokens - 1 - read_first) + [ABSENT]


@pytest.mark.parametrize("given", [{"first": False}, {"second": False}, {"first": False, "second": False}])
def test_an_episode_with_a_turn_that_was_not_recorded_has_no_routing(given) -> None:
    session = two_turns(**given)
    (experience,) = session.experiences(group="t.0", attempt=0, episode=0)
    assert session.routing == (None,)
    assert with_recorded(experience, session.routing[0], 1000) == (experience, "")


def test_a_routing_above_its_bound_is_left_out_and_says_why() -> None:
    session = two_turns()
    (experience,) = session.experiences(group="t.0", attempt=0, episode=0)
    (rows,) = session.routing
    assert with_recorded(experience, rows, rows.nbytes)[1] == ""
    made, reason = with_recorded(experience, rows, rows.nbytes - 1)
    assert reason == TOO_LARGE and routing(made) is None


def test_the_bound_is_one_that_a_block_can_hold() -> None:
    with pytest.raises(ConfigError, match=r"max_routing_bytes: got 16777216 .* 15728640"):
        decode({"max_routing_bytes": MAX_SECTION_BYTES}, ExploreConfig, "explore")
