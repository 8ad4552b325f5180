"""Reading back what the journal names: everything or an error that names the offset."""

import asyncio
import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.lookup import MAX_HOLE, runs
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from schemas import Block, decode, topics
from schemas.errors import BadFrame, OffsetOutOfRange
from tests.trainer.buffered_blocks import block
from trainer.buffer.buffer import Stored, read_blocks


async def filled(num_blocks: int) -> Log:
    log = Log(MemoryBus(), "t", store=MemoryStore())
    await log.create_topics(partitions=2, keep_ms=-1)
    for number in range(num_blocks):
        await log.publish(topics.BUFFER, block(f"g{number}.0"))
    return log


def read(num_blocks: int, offsets: Iterable[int]) -> dict[int, Stored]:
    async def main() -> dict[int, Stored]:
        return await read_blocks(await filled(num_blocks), offsets)

    return asyncio.run(main())


@given(st.sets(st.integers(0, 10_000), max_size=60), st.integers(1, 100))
def test_runs_cover_every_offset_once_and_read_no_hole_of_max_hole(offsets: set[int], max_hole: int) -> None:
    found = runs(offsets, max_hole)
    covered = [offset for start, stop in found for offset in range(start, stop)]
    assert offsets <= set(covered) and len(covered) == len(set(covered))
    assert all(start in offsets and stop - 1 in offsets for start, stop in found)
    assert all(later[0] - earlier[1] >= max_hole for earlier, later in itertools.pairwise(found))
    assert sum(1 for offset in covered if offset not in offsets) <= max_hole * len(offsets)


def test_the_named_offsets_come_back_and_no_others() -> None:
    far = 3 * MAX_HOLE
    found = read(far + 1, [far, 0, 2, 2])
    assert sorted(found) == [0, 2, far]
    assert [found[offset].block.group for offset in (0, 2, far)] == ["g0.0", "g2.0", f"g{far}.0"]
    frame, one = found[far].frame, found[far].block
    again = decode(frame)
    assert isinstance(again, Block) and again.experiences[1].tokens.tolist() == one.experiences[1].tokens.tolist()


def test_nothing_asked_is_nothing_read() -> None:
    assert read(1, []) == {}


@pytest.mark.parametrize("offsets", [[3], [1, 900]])
def test_an_offset_past_the_end_is_an_error_that_names_it(offsets: list[int]) -> None:
    with pytest.raises(OffsetOutOfRange, match=f"offset {offsets[-1]} is not kept, and the journal names it"):
        read(3, offsets)


def test_an_offset_that_retention_took_is_an_error_and_never_a_gap() -> None:
    async def main() -> None:
        log = await filled(6)
        await log.bus.delete_records(Partition(log.name(topics.BUFFER), 0), 4)
        assert sorted(await read_blocks(log, [4, 5])) == [4, 5]
        with pytest.raises(OffsetOutOfRange):
            await read_blocks(log, [2, 5])

    asyncio.run(main())


def test_a_record_that_is_no_block_is_an_error_that_names_its_offset() -> None:
    async def main() -> None:
        log = await filled(1)
        await log.bus.send(log.name(topics.BUFFER), b"no frame", key=b"k")
        assert sorted(await read_blocks(log, [0])) == [0]
        with pytest.raises(BadFrame, match="buffer offset 1"):
            await read_blocks(log, [0, 1])

    asyncio.run(main())


def test_a_block_in_the_object_store_comes_back_as_a_frame_of_its_own() -> None:
    async def main() -> None:
        log = await filled(0)
        large = block("large.0", num_members=64, meta={"trace": "".join(chr(33 + at % 90) for at in range(20_000))})
        await log.publish(topics.BUFFER, large)
        (found,) = (await read_blocks(log, [0])).values()
        frame, one = found.frame, found.block
        again = decode(frame)
        assert isinstance(again, Block) and one.group == again.group == "large.0"
        assert len(frame) > 768 * 1024, "the claim check was redeemed"

    asyncio.run(main())
