"""What the pages list is found, though the process that keeps the index of `trace` has not come to it yet."""

import asyncio
import fcntl
from pathlib import Path

import pytest

from infra.cli.console.fold import Folder
from infra.cli.console.index import ConsoleIndex
from infra.cli.console.keeping import FILE, TRACE_FILE, IndexState
from infra.cli.console.reading import Reading
from infra.cli.settings import Settings
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from schemas import Block, topics
from schemas.errors import NotInLog
from tests.infra.cli.console_rig import fill, live


def test_an_answer_that_is_listed_and_not_traced_yet_is_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        log, new = Log(MemoryBus(), "t", store=MemoryStore()), live(99, "a new question", "a new answer")
        await fill(log)
        index = ConsoleIndex(tmp_path / FILE)
        reading = Reading(
            Settings(app="t", folder=tmp_path), log, tmp_path, IndexState(is_traced=True), asyncio.Event()
        )
        with pytest.raises(NotInLog):
            await reading.answer(new.id)  # and the index of `trace` has the rest now
        with (tmp_path / TRACE_FILE).with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # as another process that reads the log into it
            await log.publish(topics.EXPERIENCES, Block((new,)))
            await Folder(index, run="t", policy="main").refresh(log)
            trace = asyncio.create_task(reading.answer(new.id))
            done, _ = await asyncio.wait([trace], timeout=1)
            assert not done, "it is not said to be missing while it is listed"
        found = (await trace).published
        assert found is not None and found.messages[-1].content == "a new answer"
        await reading.close()
        index.close()

    asyncio.run(main())
