"""`headrace eval`: a request in the log, the result printed; what cannot be answered is refused at once."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from actors.config import EvalSuite
from actors.engines.scripted import ScriptedEngine
from infra.cli.govern.evaluate import check_suite, request, wait_for_result
from schemas import Directive, EvalResult, PolicyEvent
from schemas.errors import ConfigError
from schemas.topics import EVALS, POLICIES
from tests.actors.rig import MASTER, explorer, folder_store, load, master, memory_log, running, streams
from tests.actors.test_explorer import announce

SUITES = (EvalSuite(suite="dev", every=1000, tasks=4),)


def published(version: int) -> PolicyEvent:
    return PolicyEvent(event="published", policy="main", version=version, manifest="m")


def result(version: int, correct: int = 3) -> EvalResult:
    return EvalResult(policy="main", version=version, suite="dev", num_tasks=4, num_correct=correct, request="")


async def test_master_and_explorer_answer_a_request_beside_the_schedule(tmp_path: Path) -> None:
    store = folder_store(tmp_path)
    log = await memory_log(store=store)
    await load(log, dev=4)
    await announce(log, store, 3)  # the schedule has nothing for it
    config = replace(MASTER, evals=SUITES, eval_lead=0)
    async with running(master(log, config), explorer(log, store, ScriptedEngine()), asyncio.create_task(streams(log))):
        wanted = await request(log, "main", "dev", None)
        async with asyncio.timeout(60):
            found = await wait_for_result(log, "main", "dev", wanted)
    assert (found.suite, found.version, found.num_tasks, found.num_correct) == ("dev", 3, 4, 4)


def test_a_version_that_passed_is_refused_unless_its_result_is_there() -> None:
    async def run() -> list[object]:
        log = await memory_log()
        for version in (3, 7):
            await log.publish(POLICIES, published(version))
        await log.publish(EVALS, result(3))
        assert await request(log, "main", "dev", 3) == 3
        assert (await wait_for_result(log, "main", "dev", 3)).num_correct == 3
        with pytest.raises(ConfigError, match="got 5, expected 7 or more"):
            await request(log, "main", "dev", 5)
        assert await request(log, "main", "dev", 9) == 9
        return [message.value async for message in log.read_all(POLICIES)]

    asked = [record for record in asyncio.run(run()) if isinstance(record, Directive)]
    assert [(item.order, item.suite, item.version) for item in asked] == [("eval", "dev", 9)]


def test_where_explorers_passed_the_version_the_later_one_is_the_answer() -> None:
    async def run() -> EvalResult:
        log = await memory_log()
        waiting = asyncio.create_task(wait_for_result(log, "main", "dev", 7))
        await log.publish(EVALS, result(4))
        await log.publish(EVALS, result(8, correct=1))
        async with asyncio.timeout(20):
            return await waiting

    assert asyncio.run(run()).version == 8


def test_a_suite_the_master_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"got .def., expected one of .*: dev"):
        check_suite("def", SUITES)
