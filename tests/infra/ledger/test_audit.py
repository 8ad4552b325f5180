"""`audit` over a log: what is on its way shows as pending, and what is trimmed is nobody's fault."""

import asyncio
import itertools
from contextlib import closing

import pytest

from infra.ledger.account import Ledger
from infra.ledger.audit import audit
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import topics
from schemas.errors import ConfigError
from tests.infra.ledger.ledger_records import RUN, batch, block, closure, message


async def log_of_a_run() -> Log:
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=2, keep_ms=-1)
    for group in ("a.0", "b.0", "c.0"):
        await log.publish(topics.EXPERIENCES, block(group))
    await log.publish(topics.BUFFER, block("a.0"))
    await log.publish(topics.PROGRESS, closure("a.0", "buffered"))
    await log.publish(topics.PROGRESS, closure("b.0", "dropped", reason="all rewards equal"))
    await log.publish(topics.BATCHES, batch(0, "a.0.0-0-0", "a.0.0-1-0"))
    return log


def test_the_account_of_a_log() -> None:
    async def main() -> None:
        log = await log_of_a_run()
        read: list[str] = []
        found = await audit(log, RUN, lambda topic, left: read.append(topic))
        assert (found.trained, found.dropped, found.pending) == (2, {"all rewards equal": 2}, 2)
        assert found.is_clean and read[0] == "batches" and [one for one in read if one][-1] == "experts"

    asyncio.run(main())


def test_an_audit_tells_how_many_records_are_left() -> None:
    async def main() -> None:
        log, left = Log(MemoryBus(), "t"), dict[str, list[int]]()
        await log.create_topics(partitions=2, keep_ms=-1)
        for number in range(600):
            await log.publish(topics.EXPERIENCES, block(f"task-{number}.0"))
        await audit(log, RUN, lambda topic, count: left.setdefault(topic, []).append(count))
        assert left["experiences"][0] == 600 and left["experiences"][-1] == 0 and len(left["experiences"]) > 2
        assert list(left)[-1] == "", "then it adds up"

    asyncio.run(main())


def test_a_full_disk_is_an_error_that_names_the_folder_of_temporary_files() -> None:
    with closing(Ledger(RUN)) as ledger:
        ledger.database.execute("PRAGMA max_page_count = 20")
        for number in range(2000):
            ledger.fold("experiences", message("experiences", block(f"task-{number}.0")))
        with pytest.raises(ConfigError, match="TMPDIR: the disk of temporary files is full"):
            ledger.account()


def test_a_record_that_comes_during_the_audit_is_pending_at_most() -> None:
    async def main() -> None:
        log = await log_of_a_run()

        def publish_all_of_a_group(topic: str, left: int) -> None:
            if topic == "dead-letters":  # batches, progress and buffer are read by now
                tasks.append(asyncio.ensure_future(pass_through()))

        async def pass_through() -> None:
            await log.publish(topics.EXPERIENCES, block("late.0"))
            await log.publish(topics.BUFFER, block("late.0"))
            await log.publish(topics.BATCHES, batch(1, "late.0.0-0-0"))

        tasks: list[asyncio.Future[None]] = []
        found = await audit(log, RUN, publish_all_of_a_group)
        await asyncio.gather(*tasks)
        assert found.is_clean and found.pending in (2, 4)

    asyncio.run(main())


def test_what_was_trained_from_below_the_kept_buffer_is_not_called_unknown() -> None:
    async def main() -> None:
        log = await log_of_a_run()
        for _ in range(7):
            await log.publish(topics.BUFFER, block("b.0"))
        await log.publish(topics.BATCHES, batch(1, "gone.0.0-0-0"))
        assert (await audit(log, RUN)).unknown == ("gone.0.0-0-0",)
        await log.bus.delete_records(Partition(log.name(topics.BUFFER), 0), 8)
        assert (await audit(log, RUN)).is_clean

    asyncio.run(main())


def test_what_was_published_before_the_kept_journal_is_left_out_and_never_called_pending() -> None:
    async def main() -> None:
        tick = itertools.count(step=1000)
        log = Log(MemoryBus(lambda: next(tick)), "t")
        await log.create_topics(partitions=2, keep_ms=-1)
        await log.publish(topics.EXPERTS, block("old.0"))
        await log.publish(topics.BATCHES, batch(0, "old.0.0-0-0", "old.0.0-1-0"))
        await log.publish(topics.BATCHES, batch(1))
        await log.publish(topics.EXPERIENCES, block("new.0"))
        await log.publish(topics.BATCHES, batch(2, "new.0.0-0-0", "new.0.0-1-0"))
        whole = await audit(log, RUN)
        assert (whole.published, whole.trained, whole.pending) == (4, 4, 0)
        await log.bus.delete_records(Partition(log.name(topics.BATCHES), 0), 1)
        kept = await audit(log, RUN)
        assert (kept.published, kept.trained, kept.pending) == (2, 2, 0)

    asyncio.run(main())
