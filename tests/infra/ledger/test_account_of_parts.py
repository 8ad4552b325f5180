"""A long log's account is that of a short one: facts on a disk, part by part, add up to what all of them in memory say."""

import asyncio
import tempfile
import tracemalloc
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.ledger.account import Ledger
from infra.ledger.audit import DiskSpace, audit
from infra.ledger.spool import PARTS, ScratchSpool
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import Batch, BatchItem, Block, Control, Drawn, Fence, Rollback, Skip, topics
from schemas.errors import ConfigError
from schemas.fields import ENOUGH, GROUP_OVER
from tests.infra.ledger.ledger_records import RUN, batch, block, closure, dead_letter, message, stub
from tests.infra.ledger.plain_account import PlainLedger, fold_all

GROUPS = ("a.0", "hr-b.0", "c.0", "d.7-1")
groups = st.sampled_from(GROUPS)
names = st.tuples(groups, st.integers(0, 1), st.integers(0, 3)).map(lambda one: f"{one[0]}.{one[1]}-{one[2]}-0")
tokens, steps = st.integers(0, 2), st.integers(0, 4)
reasons = st.sampled_from(["odd", "too short", ENOUGH, GROUP_OVER])
members = st.lists(st.integers(0, 3), min_size=1, unique=True)
items = st.lists(
    st.builds(
        BatchItem, id=names, partition=st.just(0), offset=st.integers(0, 9), index=st.just(0),
        lane=st.sampled_from(["usual", "expert"]), use=st.integers(0, 1), revision=st.integers(0, 1),
    ),
    max_size=3,
).map(tuple)  # fmt: skip
BATCHES = st.builds(
    Batch, run=st.sampled_from([RUN, RUN, "other"]), token=tokens, step=steps, version=steps, items=items, dropped=items,
    dropped_because=st.lists(reasons, max_size=3).map(tuple), masked=st.integers(0, 9),
)  # fmt: skip
BLOCKS = st.builds(block, groups, members, attempt=st.integers(0, 1))
RECORDS: Mapping[str, st.SearchStrategy[Control | Block]] = {
    "experiences": BLOCKS | st.builds(block, groups, members, suite=st.sampled_from(["", "held"])),
    "experts": st.builds(block, groups, members, held_out=st.booleans()),
    "verified": st.builds(stub, groups, st.integers(0, 3), reasons),
    "buffer": BLOCKS | st.builds(block, groups, members, lane=st.sampled_from(["expert", "human"])),
    "progress": st.builds(
        closure, groups, st.sampled_from(["buffered", "dropped", "superseded"]), attempt=st.integers(0, 1),
        reason=st.sampled_from(["", "all rewards equal"]), odd=st.integers(0, 2), too_short=st.integers(0, 2),
    )
    | st.builds(
        lambda found: Drawn(token=1, step=0, version=0, groups=(), dropped=dict.fromkeys(found, "stale")),
        st.lists(groups),
    ),
    "batches": BATCHES
    | st.builds(Fence, run=st.just(RUN), token=tokens)
    | st.builds(Skip, run=st.just(RUN), token=tokens, step=steps, reason=st.just("not finite"))
    | st.builds(
        Rollback, run=st.just(RUN), token=tokens, from_step=steps, to_step=steps, restored_version=st.just(0),
        version=st.just(9), reason=st.just("alarm"),
    ),
    "dead-letters": st.builds(dead_letter, BLOCKS, st.sampled_from(["too large", "bad reward"])),
}  # fmt: skip


@given(
    st.fixed_dictionaries({topic: st.lists(records, max_size=6) for topic, records in RECORDS.items()}),
    st.integers(0, 9),
)
def test_parts_on_a_disk_add_up_to_the_account_of_all_in_memory(
    log: Mapping[str, Sequence[Control | Block]], buffer_begins: int
) -> None:
    plain = PlainLedger(RUN, buffer_begins)
    with closing(Ledger(RUN, buffer_begins, ScratchSpool(parts=3, at_once=2))) as ledger:
        for topic, records in log.items():
            found = [message(topic, record, offset) for offset, record in enumerate(records)]
            fold_all(plain, topic, found)
            for one in found:
                ledger.fold(topic, one)
        assert ledger.account() == plain.account()


def held_by(ledger: Ledger, num_groups: int) -> int:
    """Peak of what Python holds while so many groups are folded and accounted for."""
    tracemalloc.start()
    try:
        for step in range(num_groups):
            one = block(f"task-{step}.0")
            for topic in ("experiences", "buffer"):
                ledger.fold(topic, message(topic, one))
            ledger.fold("batches", message("batches", batch(step, *(member.id for member in one.experiences))))
        assert ledger.account().trained == 2 * num_groups
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_an_account_holds_does_not_grow_with_the_log() -> None:
    few, many = (Ledger(RUN, spool=ScratchSpool(parts=512, at_once=8)) for _ in range(2))
    with closing(few), closing(many):
        assert held_by(many, 4000) < 2 * held_by(few, 1000)
        assert many.spool.num_bytes > 4 * few.spool.num_bytes > 0


def test_nothing_of_a_spool_has_a_name_that_could_be_left_behind() -> None:
    before = set(Path(tempfile.gettempdir()).iterdir())
    with closing(Ledger(RUN, spool=ScratchSpool(parts=1, at_once=1))) as ledger:
        ledger.fold("experiences", message("experiences", block("a.0")))
        assert ledger.spool.num_bytes > 0
        assert not {one for one in set(Path(tempfile.gettempdir()).iterdir()) - before if one.name.startswith("tmp")}


async def a_log(num_groups: int) -> Log:
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=2, keep_ms=-1)
    for number in range(num_groups):
        await log.publish(topics.EXPERIENCES, block(f"task-{number}.0"))
    return log


def test_what_an_audit_needs_of_the_disk_is_said_before_it_reads_and_too_little_is_an_error() -> None:
    async def main() -> None:
        log, said = await a_log(2000), list[DiskSpace | str]()
        asked = dict(on_reading=lambda topic, left: said.append(topic), on_room=said.append, many=2000)
        await audit(log, RUN, **asked, free=lambda folder: 10**9)
        room = said[0]
        assert isinstance(room, DiskSpace) and room.folder == Path(tempfile.gettempdir())
        with closing(Ledger(RUN, spool=ScratchSpool(parts=1, at_once=512))) as ledger:
            async for one in log.read_all(topics.EXPERIENCES):
                ledger.fold("experiences", one)
            assert 0.7 * ledger.spool.num_bytes < room.needed < 2.0 * ledger.spool.num_bytes
        with pytest.raises(ConfigError, match=r"TMPDIR: the disk is too small for an audit in .*0\.0 GB is free"):
            await audit(log, RUN, **asked, free=lambda folder: 0)
        said.clear()
        await audit(log, RUN, **asked | {"many": 2001})
        assert said[0] == "batches"

    asyncio.run(main())


def test_an_audit_says_how_many_records_and_then_how_many_parts_are_left() -> None:
    async def main() -> None:
        left: dict[str, list[int]] = {}
        await audit(await a_log(1200), RUN, lambda topic, count: left.setdefault(topic, []).append(count))
        assert left["experiences"][0] == 1200 and left["experiences"][-1] == 0 and len(left["experiences"]) > 2
        assert left[""] == [*range(PARTS - 1, -1, -1)]

    asyncio.run(main())


def test_an_interrupted_audit_ends_at_once_and_gives_its_disk_back() -> None:
    async def main() -> None:
        reached = asyncio.Event()
        running = asyncio.create_task(audit(await a_log(1200), RUN, lambda topic, left: topic or reached.set()))
        await reached.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
