"""The traffic demo's users: what they say follows their habits, all of it reaches the log, and a failure is counted."""

import asyncio
import io
from collections import Counter
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from actors.engines.scripted import TENSOR
from actors.gateway.access.keys import create_key
from infra.cli.demo.users import HABITS, MISTAKEN, Crowd, Seen, opinion, right_answer, until_promoted
from infra.policies.policy import Policy
from infra.policies.tensors import from_numpy
from infra.store.memory import MemoryStore
from schemas import Received
from tests.actors.gateway.gateway_rig import VOCABULARY, engine, says, serving
from tests.actors.rig import until

PAIR = (37, 45)


def test_users_keep_their_habits_and_seldom_err() -> None:
    random = Random(5)
    for text in ("280", "111"):
        said = [opinion(text, PAIR, random) for _ in range(20_000)]
        shares = {habit: count / len(said) for habit, count in Counter(one.habit for one in said).items()}
        for habit, share in HABITS:
            if habit == "corrects" and text == "280":
                assert habit not in shares, "nobody corrects what is right"
            else:
                assert shares[habit] == pytest.approx(share, abs=0.01)
        rated = [one.value for one in said if one.habit in ("rates", "rates late")]
        wrong = sum(value != float(text == "280") for value in rated) / len(rated)
        assert wrong == pytest.approx(MISTAKEN, abs=0.006)
    assert {one.correction for one in said if one.habit == "corrects"} == {right_answer(PAIR)}


def test_what_is_withdrawn_was_said_by_mistake() -> None:
    random = Random(6)
    said = [one for one in (opinion("280", PAIR, random) for _ in range(2_000)) if one.withdrawn]
    assert said and all(one.value == 0.0 for one in said)


async def crowd_at(folder: Path, wanted: str, number: int, *, known: bool = True) -> tuple[list[Seen], list[Received]]:
    """Users at a gateway that answers 280, until so many answers were `wanted`; what they noted, and what the log has."""
    out, store = io.BytesIO(), MemoryStore()
    _, key = create_key(store, tenant="demo", scopes=("serve", "feedback"), train="yes", rpm=0, tpm=0)
    async with serving(folder, engine(says("280")), store=store) as served:
        async with served.client(key if known else "hr-nobody-knows") as client:
            crowd = Crowd(client, [PAIR], out, seed=3, think_s=0.001, late_s=(0.0, 0.01))
            async with asyncio.timeout(60), asyncio.TaskGroup() as users:
                users.create_task(crowd.run(4, until_s=float("inf")))
                await until(lambda: crowd.counts[wanted] >= number, seconds=60)
                crowd.leave()
        seen = [msgspec.json.decode(line, type=Seen) for line in out.getvalue().splitlines()]
        return seen, await served.received()


def test_every_answer_is_noted_and_everything_said_reaches_the_log(tmp_path: Path) -> None:
    seen, received = asyncio.run(crowd_at(tmp_path, "answered", 100))
    assert all(one.right and not one.failed and one.version == 0 for one in seen)
    said = Counter(msgspec.json.decode(one.body)["kind"] for one in received)
    habits = Counter(one.habit for one in seen)
    assert said["value"] == len(seen) - habits["silent"] and said["retraction"] == habits["withdraws"]


def test_a_request_that_fails_is_counted_and_not_tried_again(tmp_path: Path) -> None:
    seen, received = asyncio.run(crowd_at(tmp_path, "failed", 5, known=False))
    assert len(seen) >= 5 and all(one.failed == 1 and "401" in one.error for one in seen) and not received


def test_users_wait_until_the_gateway_serves_what_was_trained(tmp_path: Path) -> None:
    async def run() -> tuple[bool, bool]:
        made = engine(says("280"))
        async with serving(tmp_path, made) as served:
            waiting = asyncio.create_task(until_promoted(f"{served.url}/v1", every_s=0.01))
            async with served.http() as client:
                for _ in range(5):
                    await client.get("/healthz")
            early = waiting.done()
            table = np.zeros((VOCABULARY, VOCABULARY), np.float32)
            await made.load(Policy(version=1, tensors={TENSOR: from_numpy(table)}, touched=frozenset({TENSOR})))
            await asyncio.wait_for(waiting, 30)
            return early, waiting.done()

    assert asyncio.run(run()) == (False, True)
