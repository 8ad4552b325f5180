"""The ledger of the zombie cycles sees what it is there for: weights and journal records from behind a lease."""

import asyncio
from pathlib import Path

from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import Batch, Fence, PolicyEvent, topics
from tests.e2e.zombie_cycles import OVERTAKEN, plan_cycles, stale

LOADS = """\
2026-11-21 20:33:43,535 INFO actors.engines.reload serving version=1 token=0
2026-11-21 20:33:44,101 INFO actors.engines.reload reloaded version=1 pause_ms=80.1 probe=0
2026-11-21 20:33:46,253 INFO actors.engines.reload serving version=2 token={token}
"""


def batch(token: int, step: int) -> Batch:
    return Batch(run="r", token=token, step=step, version=0, phase="train", items=(), seed=0, config_hash="")


async def overtaken_run() -> Log:
    """Trainer 0 goes on after trainer 2 has taken the lease."""
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    for event in (
        PolicyEvent(event="lease", policy="main"),
        PolicyEvent(event="published", policy="main", version=1, token=0, manifest="a"),
        PolicyEvent(event="lease", policy="main"),
        PolicyEvent(event="published", policy="main", version=2, token=0, manifest="b"),
        PolicyEvent(event="published", policy="main", version=2, token=2, manifest="c"),
    ):
        await log.publish(topics.POLICIES, event)
    for record in (Fence(run="r", token=0), batch(0, 0), Fence(run="r", token=2), batch(0, 1), batch(2, 1)):
        await log.publish(topics.BATCHES, record)
    return log


def test_a_load_of_what_an_overtaken_trainer_published_is_stale_and_its_journal_record_is_seen(tmp_path: Path) -> None:
    async def found(token: int) -> dict[str, int]:
        path = tmp_path / "explore.log"
        path.write_text(LOADS.format(token=token))
        return await stale(await overtaken_run(), "r", [path])

    expected = {"loads": 2, "stale_published": 1, "stale_records": 1, "stale_records_counted": 0}
    assert asyncio.run(found(0)) == {**expected, "stale_loads": 1}
    assert asyncio.run(found(2)) == {**expected, "stale_loads": 0}


def test_every_role_is_overtaken_once_in_three_cycles_and_the_same_seed_plans_the_same() -> None:
    planned = plan_cycles(9, 1, (0.5, 6.0))
    assert planned == plan_cycles(9, 1, (0.5, 6.0)) != plan_cycles(9, 2, (0.5, 6.0))
    assert all({role for role, _ in planned[at : at + 3]} == set(OVERTAKEN) for at in (0, 3, 6))
