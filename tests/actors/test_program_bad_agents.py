"""Agents that misbehave: each fails with a typed cause, and an episode beside it on the same server goes on as if alone."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from actors.engines.engine import Sampling
from actors.engines.scripted import ScriptedEngine
from actors.program.workflow import Program
from actors.rollout.session import CachedTokenizer, Session
from actors.rollout.workflow import EpisodeFailed
from schemas import Experience, Score
from tests.actors.gateway.gateway_rig import EOS, VOCABULARY, says
from tests.actors.rig import until
from tests.actors.test_program import AGENTS, PROMPT, TASK, ChatBytes

GOOD = [*PROMPT, *b"Hello.", EOS, *b"<user>and?", EOS, *b"<assistant>", *b"Hello.", EOS]
BAD = {
    "asks_nothing": ("agent", "ended without an answer of the policy"),
    "raises": ("agent", "LookupError"),
    "invents_a_key": ("agent", "no running episode has this key"),
    "asks_too_often": ("agent", "has used its 8 requests"),
    "leaves_in_mid_stream": ("agent", "ended without an answer of the policy"),
    "sends_no_json": ("agent", "ended without an answer of the policy"),
    "steals_a_key": ("agent", "ended without an answer of the policy"),
    "not_a_number": ("reward", "got nan, expected a finite number"),
}


def beside(name: str) -> tuple[EpisodeFailed, tuple[Score, ...], list[Experience]]:
    """How a bad episode failed, and what was recorded of the good one that ran meanwhile."""

    async def run() -> tuple[EpisodeFailed, tuple[Score, ...], list[Experience]]:
        engine = ScriptedEngine(num_vocabulary=VOCABULARY, max_model_len=4096, script=says("Hello."), token_s=0.002)
        await engine.start()
        program = Program(use=f"{AGENTS}:good_or_bad", requests=8)

        async def play(meta: dict[str, Any]) -> tuple[tuple[Score, ...], list[Experience]]:
            session = Session(engine, CachedTokenizer(ChatBytes()), Sampling(max_tokens=64, stop=(EOS,)))
            scores = await program(replace(TASK, meta=meta), session)
            return scores, session.experiences(group="t.0", attempt=0, episode=0)

        bad = asyncio.create_task(play({"bad": name}))
        scores, found = await play({})
        (failed,) = await asyncio.gather(bad, return_exceptions=True)
        await until(lambda: not engine.num_running)
        await engine.close()
        assert isinstance(failed, EpisodeFailed), failed
        return failed, scores, found

    return asyncio.run(run())


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_agent_fails_with_a_typed_cause_and_costs_no_other_episode_anything(name: str) -> None:
    failed, scores, found = beside(name)
    cause, message = BAD[name]
    assert failed.cause == cause and message in str(failed)
    assert scores == (Score(name="program", value=1.0),)
    sequences = [one.tokens.tolist() for one in found]
    assert [tokens for tokens in sequences if tokens[: len(PROMPT)] == PROMPT] == [GOOD]
    assert len(found) == (2 if name == "steals_a_key" else 1), "what was asked with its key is a part of its own"


def test_a_bad_agent_s_requests_end_with_its_episode() -> None:
    """One that is cut off while it floods leaves nothing running."""

    async def run() -> None:
        engine = ScriptedEngine(num_vocabulary=VOCABULARY, max_model_len=4096, script=says("a" * 60), token_s=0.05)
        await engine.start()
        session = Session(engine, CachedTokenizer(ChatBytes()), Sampling(max_tokens=64, stop=(EOS,)))
        playing = asyncio.create_task(Program(use=f"{AGENTS}:floods")(TASK, session))
        await until(lambda: engine.num_running > 4)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await until(lambda: not engine.num_running)
        assert not session.num_sampled
        await engine.close()

    asyncio.run(run())
