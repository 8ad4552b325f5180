"""Pictures that programs show to the policy: recorded by reference, sampled and trained as those of rollouts are."""

import asyncio
from typing import Any

import openai

from actors.engines.engine import Engine, Sampling
from actors.program.workflow import Program
from actors.rollout.session import CachedTokenizer, Session
from infra.store.images import ImageReader, deposit_image
from infra.store.memory import MemoryStore
from infra.store.store import BLOBS
from schemas import Experience, Message, Score, Task
from tests.actors.gateway.gateway_rig import EOS
from tests.actors.gateway.test_gateway_images import ONE, OTHER, Eyes, asked, looks, url

TASK = Task(id="t", messages=(Message(role="user", content="count", images=(ONE.image,)),), answer="1", split="train")


class ChatEyes(Eyes):
    """One that a session can use too."""

    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode_request([{"role": message.role, "content": message.content} for message in messages])


async def counts(task: dict[str, Any], base_url: str, key: str) -> float:
    """Two turns over one picture, which the task shows."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        messages = task["messages"]
        first = await client.chat.completions.create(model="m", messages=messages)
        said: list[Any] = [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "count"},
        ]
        await client.chat.completions.create(model="m", messages=[*messages, *said])
        return 1.0


def play(
    engine: Engine, tokenizer: Any, store: MemoryStore, sampling: Sampling, program: str = counts.__name__
) -> tuple[Experience, ...]:
    deposit_image(store, ONE.image, ONE.picture)

    async def run() -> tuple[tuple[Score, ...], tuple[Experience, ...]]:
        await engine.start()
        try:
            session = Session(engine, CachedTokenizer(tokenizer), sampling, ImageReader(store))
            scores = await Program(use=f"{__name__}:{program}")(TASK, session)
            return scores, tuple(session.experiences(group="t.0", attempt=0, episode=0))
        finally:
            await engine.close()

    scores, found = asyncio.run(run())
    assert scores == (Score(name="program", value=1.0),)
    return found


def test_a_program_is_told_the_tasks_picture_and_what_it_asks_of_it_is_one_sequence() -> None:
    store, looking = MemoryStore(), looks("One.", "Two.")
    (experience,) = play(looking, ChatEyes(), store, Sampling(max_tokens=64, stop=(EOS,)))
    assert [len(shown) for shown in looking.seen] == [1, 1]
    assert [message.images for message in experience.messages] == [(ONE.image,), (), (), ()]


async def shows_another(base_url: str, key: str) -> float:
    """A picture of its own."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        await client.chat.completions.create(model="m", messages=asked(url(OTHER.picture)))
        return 1.0


def test_a_picture_that_a_program_shows_lies_where_the_trainer_looks() -> None:
    store = MemoryStore()
    (experience,) = play(looks(), ChatEyes(), store, Sampling(max_tokens=64, stop=(EOS,)), shows_another.__name__)
    assert experience.messages[0].images == (OTHER.image,)
    assert store.get(BLOBS + OTHER.image.sha256) == OTHER.picture
