"""Dead letters are delivered again once, whole, and only if they decode."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np

from infra.log.log import Log
from schemas import Block, DeadLetter, encode
from schemas.topics import BUFFER, DEAD_LETTERS, EXPERIENCES, VERIFIED
from streams.processors.filter import dedupe_key
from streams.reprocess.letters import MARK, redeliver
from streams.reprocess.ranges import LogPlace, ranges_of
from tests.simulator.virtual_loop import run_virtual
from tests.streams.collect.collecting import answer, block
from tests.streams.deliveries import values
from tests.streams.memory_worker import settled, working
from tests.streams.reprocess.recorded_run import CONFIG, recorded_log

PLAIN = msgspec.structs.replace(CONFIG, processor=())


async def buffered(log: Log) -> dict[str, tuple[object, ...]]:
    return {
        dedupe_key(one): (one.reward, one.advantage, one.priority, one.lane, one.scores, one.tokens.tolist())
        for record in await values(log, BUFFER)
        if isinstance(record, Block)
        for one in record.experiences
    }


async def whole(log: Log) -> list:  # type: ignore[type-arg]
    return await ranges_of(log, DEAD_LETTERS, LogPlace(edge="beginning"), LogPlace(edge="end"))


def letter(value: bytes, topic: str = "experiences", stage: str = "verify", key: bytes = b"t.0") -> DeadLetter:
    return DeadLetter(topic=topic, partition=0, offset=0, stage=stage, reason="stage failed", value=value, key=key)


def test_letters_that_decode_go_back_once_and_others_stay(tmp_path: Path) -> None:
    async def main() -> None:
        log = await recorded_log(tmp_path, groups=4)
        good = encode(block(answer("new.0", 0, size=1)))
        before = len(await values(log, EXPERIENCES))
        known = len([one for one in await values(log, DEAD_LETTERS) if isinstance(one, DeadLetter)])
        for one in (
            letter(good),
            letter(b"HR\x01\x00garbage"),
            letter(b'{"csat": 4}', topic="nowhere", stage="feedback csat"),
            letter(good, topic="no.such"),
        ):
            await log.publish(DEAD_LETTERS, one)
        first = await redeliver(log, await whole(log), lambda count: None)
        assert first.letters == known + 4
        assert first.delivered["experiences"] == 1
        assert first.refused["still does not decode"] >= 1 and first.refused["no such topic"] == 2
        delivered = sum(first.delivered.values())
        second = await redeliver(log, await whole(log), lambda count: None)
        assert (second.delivered, second.done, second.letters) == ({}, delivered, first.letters)
        assert len(await values(log, EXPERIENCES)) == before + 1
        async with working(log, CONFIG, tmp_path / "state"):
            await settled(log)
        assert "new.0.0-0-0" in await buffered(log)

    run_virtual(main())


def test_of_two_that_deliver_at_one_time_each_letter_goes_once_and_says_who_and_why(tmp_path: Path) -> None:
    async def main() -> None:
        log = await recorded_log(tmp_path, groups=1)
        before = len(await values(log, EXPERIENCES))
        for number in range(8):
            good = encode(block(answer(f"new-{number}.0", 0, size=1)))
            await log.publish(DEAD_LETTERS, msgspec.structs.replace(letter(good), offset=1000 + number))
        ranges = await whole(log)
        reports = await asyncio.gather(
            *(redeliver(log, ranges, lambda count: None, by=f"{name}: mended") for name in ("ann", "ben", "eve"))
        )
        assert len(await values(log, EXPERIENCES)) == before + 8
        assert sum(one.delivered.get("experiences", 0) for one in reports) == 8
        said = {
            one.error for one in await values(log, DEAD_LETTERS) if isinstance(one, DeadLetter) and one.stage == MARK
        }
        assert said and said <= {"ann: mended", "ben: mended", "eve: mended"}

    run_virtual(main())


def test_a_letter_that_was_cut_is_taken_from_the_log_while_it_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        log = await recorded_log(tmp_path, groups=4)
        noise = np.random.default_rng(0).integers(0, 2**32, 40_000, dtype=np.uint32)
        long = answer("long.0", 0, size=1).with_bulk(tokens=noise)
        stored = await log.publish(EXPERIENCES, block(long))
        value = encode(block(long))
        assert len(value) > 64 * 1024
        cut = msgspec.structs.replace(letter(value[: 64 * 1024]), partition=stored.partition, offset=stored.offset)
        await log.publish(DEAD_LETTERS, cut)
        report = await redeliver(log, await whole(log), lambda count: None)
        assert report.delivered["experiences"] == 1
        gone = msgspec.structs.replace(cut, offset=0)
        await log.publish(DEAD_LETTERS, gone)
        again = await redeliver(log, await whole(log), lambda count: None)
        assert any("was cut" in one for one in again.examples)

    run_virtual(main())


def test_a_redelivered_record_is_no_duplicate_of_its_failed_self(tmp_path: Path) -> None:
    async def main() -> None:
        log = await recorded_log(tmp_path, groups=4)
        sent = next(one for one in await values(log, EXPERIENCES) if isinstance(one, Block))
        await log.publish(DEAD_LETTERS, letter(encode(sent), key=sent.group.encode()))
        before = len(await values(log, VERIFIED))
        async with working(log, CONFIG, tmp_path / "state"):
            await log.publish(EXPERIENCES, sent)
            await settled(log)
            assert len(await values(log, VERIFIED)) == before, "a plain repetition is a duplicate"
            await redeliver(log, await whole(log), lambda count: None)
            await settled(log)
        assert len(await values(log, VERIFIED)) > before

    run_virtual(main())
