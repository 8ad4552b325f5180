"""An explorer whose tasks are played by programs: groups, rewards and failures as of any workflow."""

import asyncio
from pathlib import Path

from msgspec.structs import replace

from actors.engines.scripted import ScriptedEngine
from actors.master.plan import rollout
from actors.rollout.explorer import run_explorer
from infra.observe.metrics import Metrics
from schemas import Score
from schemas.topics import EXPERIENCES, TASKS
from tests.actors.gateway.gateway_rig import EOS, VOCABULARY, says
from tests.actors.rig import EXPLORE, FLOOR, MASTER, TopicArrivals, folder_store, memory_log, running, task, until
from tests.actors.test_program import AGENTS, ChatBytes
from tests.role import role_of

CONFIG = replace(
    EXPLORE, workflow="actors.workflows.program:Program", options={"use": f"{AGENTS}:two_turns"}, linger_s=5.0
)
FAILING = replace(CONFIG, options={"use": f"{AGENTS}:raises"})


def played(folder: Path, config: object) -> tuple[TopicArrivals, Metrics]:
    """What an explorer publishes of one group of three episodes."""

    async def run() -> tuple[TopicArrivals, Metrics]:
        log, metrics = await memory_log(), Metrics("explore")
        heard = TopicArrivals(log, EXPERIENCES)
        engine = ScriptedEngine(num_vocabulary=VOCABULARY, max_model_len=4096, script=says("Hello."))
        role = role_of("explore", FLOOR, log, folder_store(folder), metrics=metrics)
        explorer = asyncio.create_task(run_explorer(role, config, engine, ChatBytes(), (EOS,)))  # type: ignore[arg-type]
        issued = rollout(task("add"), MASTER, round=0, attempt=0, sequence=0, min_version=0)
        async with running(explorer, asyncio.create_task(heard.listen())):
            await log.publish(TASKS, replace(issued, issued=replace(issued.issued, max_tokens=50)))
            await until(lambda: len(heard.experiences) == 3, seconds=60.0)
        return heard, metrics

    return asyncio.run(run())


def test_a_group_of_programs_is_published_with_its_rewards(tmp_path: Path) -> None:
    heard, _ = played(tmp_path, CONFIG)
    assert len(heard.records) == 1, "one block: they finished together"
    for one in heard.experiences:
        assert (one.group, one.group_size, one.part, one.last) == ("add.0", 3, 0, True)
        assert one.num_sampled == 2 * 7 and len(one.spans) == 2
        assert Score(name="program", value=1.0) in one.scores and one.answer == "yes"


def test_what_failed_is_published_with_its_failure_and_counted_by_its_cause(tmp_path: Path) -> None:
    heard, metrics = played(tmp_path, FAILING)
    assert {(one.end, one.failure) for one in heard.experiences} == {("failed", "LookupError: the agent broke")}
    assert metrics.counters()["episodes_failed{cause=agent}"] == 3.0
