"""The traffic demo's users: what they say follows their habits, all of it reaches the log, and a failure is counted."""

import asyncio
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.engines.scripted import TENSOR
from actors.gateway.access.keys import create_key
from actors.tasksets.instructions import TOPICS
from infra.cli.demo.users import EDITS, HABITS, MISTAKEN, Seen, ask, opinion, until_promoted
from infra.policies.policy import Policy
from infra.policies.tensors import from_numpy
from infra.store.memory import MemoryStore
from schemas import Received
from tests.actors.gateway.gateway_rig import VOCABULARY, engine, says, serving

ANSWER = f"About {' '.join(TOPICS.split()[::4])}."


@pytest.mark.parametrize("edits", [EDITS, 0.62])
def test_users_keep_their_habits_and_seldom_err(edits: float) -> None:
    random = Random(5)
    for is_liked in (True, False):
        said = [opinion(is_liked, "edited", random, edits) for _ in range(20_000)]
        shares = {habit: count / len(said) for habit, count in Counter(habit for habit, _ in said).items()}
        expected = {habit: share * (1 - edits) / (1 - EDITS) for habit, share in HABITS.items()} | {"corrects": edits}
        if is_liked:  # nobody corrects what they like
            expected["rates"] += expected.pop("corrects")
        assert shares == pytest.approx(expected, abs=0.01)
        rated = [words[0]["value"] for habit, words in said if habit in ("rates", "rates late")]
        wrong = sum(value != float(is_liked) for value in rated) / len(rated)
        assert wrong == pytest.approx(MISTAKEN, abs=0.006)
        assert all(words[0]["value"] != float(is_liked) for habit, words in said if habit == "withdraws"), "a mistake"
    assert {words[1]["correction"] for habit, words in said if habit == "corrects"} == {"edited"}


async def users_at(
    folder: Path, number: int, *, failed: bool = False, spams: bool = False
) -> tuple[list[Seen], list[Received]]:
    """Users at a gateway that always gives ANSWER, until they noted so many answers, or failures of an unknown key; what they
    noted, and what the log has.
    """
    noted, store = list[Seen](), MemoryStore()
    _, key = create_key(store, tenant="demo", scopes=("serve", "feedback"), train="yes", rpm=0, tpm=0)

    def is_over() -> bool:
        return sum(bool(seen.error) == failed for seen in noted) >= number

    times: dict[str, Any] = {"think_s": 0.001, "late_s": (0.0, 0.01)}
    async with serving(folder, engine(says(ANSWER)), store=store) as served:
        client = served.client("hr-nobody-knows" if failed else key)
        async with client, asyncio.timeout(60), asyncio.TaskGroup() as users:
            for user in range(4):
                users.create_task(ask(client, f"user-{user}", noted.append, is_over, spams=spams, **times))
        return noted, await served.received()


def test_every_answer_is_noted_and_everything_said_reaches_the_log(tmp_path: Path) -> None:
    seen, received = asyncio.run(users_at(tmp_path, 100))
    assert all(not noted.error and noted.version == 0 for noted in seen)
    assert 0 < sum(noted.liked for noted in seen) < len(seen), "it names a quarter of the topics"
    said = Counter(msgspec.json.decode(record.body)["kind"] for record in received)
    habits = Counter(noted.habit for noted in seen)
    assert said["value"] == len(seen) - habits["silent"] and said["retraction"] == habits["withdraws"]


def test_a_spammer_likes_each_answer(tmp_path: Path) -> None:
    seen, received = asyncio.run(users_at(tmp_path, 20, spams=True))
    assert {noted.habit for noted in seen} == {"spams"} and {noted.liked for noted in seen} == {True, False}
    assert {msgspec.json.decode(record.body)["value"] for record in received} == {1.0} and len(received) == len(seen)


def test_a_request_that_fails_is_counted_and_not_tried_again(tmp_path: Path) -> None:
    seen, received = asyncio.run(users_at(tmp_path, 5, failed=True))
    assert len(seen) >= 5 and all("401" in noted.error for noted in seen) and not received


async def test_users_wait_until_the_gateway_serves_what_was_trained(tmp_path: Path) -> None:
    made = engine(says(ANSWER))
    async with serving(tmp_path, made) as served:
        waiting = asyncio.create_task(until_promoted(f"{served.url}/v1", every_s=0.01))
        async with served.http() as client:
            for _ in range(5):
                await client.get("/healthz")
        assert not waiting.done()
        table = np.zeros((VOCABULARY, VOCABULARY), np.float32)
        await made.load(Policy(version=1, tensors={TENSOR: from_numpy(table)}))
        await asyncio.wait_for(waiting, 30)
