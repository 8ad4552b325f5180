"""Reprocess and redelivery."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from infra.log.log import Log
from schemas import Block, DeadLetter, DropMarker, encode
from schemas.errors import ConfigError
from schemas.topics import ALL, BUFFER, DEAD_LETTERS, EXPERIENCES, VERIFIED
from streams.config import CollectConfig, FilterConfig, ProcessorConfig, RewardConfig, ScoreConfig, Switch, VerifyConfig
from streams.reprocess.letters import MARK, redeliver
from streams.reprocess.ranges import find_ranges
from tests.streams.collect.collecting import answer, block
from tests.streams.deliveries import values
from tests.streams.memory_worker import settled, working
from tests.streams.reprocess.recorded_run import ASKED, CONFIG, MODULE, changes, recorded_log, run

pytestmark = pytest.mark.virtual


async def sizes(log: Log) -> dict[str, int]:
    return {topic.name: sum((await log.bus.end_offsets(log.name(topic))).values()) for topic in ALL}


async def test_the_same_configuration_and_versions_give_what_is_recorded(tmp_path: Path) -> None:
    log = await recorded_log(tmp_path)
    before = await sizes(log)
    ASKED.clear()
    for stage in ("verify", "collect"):
        report, counted = await run(log, stage), await run(log, stage, diff=False)
        assert report.is_same, report.changes
        assert (counted.kept, counted.dropped) == (report.kept, report.dropped)
        assert report.compared > 15 and report.unrecorded == report.behind == 0, report
        assert report.dropped and report.kept
    assert not ASKED, "a verdict that is on record was asked for again"
    assert await sizes(log) == before, "the app that is read was written to"


async def test_any_part_of_the_log_gives_what_is_recorded_of_it(tmp_path: Path) -> None:
    log = await recorded_log(tmp_path)
    for stage, start, stop in (
        ("verify", "10", "20"),
        ("verify", "1:5", "end"),
        ("collect", "10", "end"),
        ("collect", "0:0,2:7", "0:9,2:30"),
    ):
        report = await run(log, stage, start=start, stop=stop)
        assert report.is_same and report.unrecorded == 0, (stage, start, report.changes)
        assert report.records > 0


async def test_scores_are_asked_for_again_when_told_to_or_when_their_options_changed(tmp_path: Path) -> None:
    log = await recorded_log(tmp_path)
    ASKED.clear()
    same = await run(log, "verify", rescore=True)
    assert same.is_same and len(ASKED) > 50 and same.reused_scores == 0
    stricter = ScoreConfig(name="judge", use=f"{MODULE}:judge", options={"strict": 0.25})
    ASKED.clear()
    found = await run(log, "verify", msgspec.structs.replace(CONFIG, score=(stricter,)))
    assert len(ASKED) > 50
    assert set(changes(found)) == {("re-scored", "judge")}
    example = found.changes[0].examples[0]
    assert float(example.new) == float(example.old) / 2 > 0


async def test_a_processor_more_or_less_shows_what_it_drops_by_reason(tmp_path: Path) -> None:
    log = await recorded_log(tmp_path)
    stubs = [
        record for record in await values(log, VERIFIED) if isinstance(record, DropMarker) and record.reason == "third"
    ]
    without = await run(log, "verify", msgspec.structs.replace(CONFIG, processor=()))
    evals = 1  # of group 18, whose third answer was counted as failed
    assert changes(without) == {("no longer dropped", "third"): len({item.id for item in stubs}) + evals}
    filtered = msgspec.structs.replace(CONFIG, verify=VerifyConfig(filter=FilterConfig(min_tokens=3)))
    shorter = await run(log, "verify", filtered)
    ((kind, reason), count), *others = changes(shorter).items()
    assert (kind, reason) == ("newly dropped", "too short") and count > 50
    assert others == [(("dropped for another reason", "score failed"), 1)]
    assert shorter.changes[0].examples[0].old == "kept"


async def test_another_reward_shows_who_would_be_rewarded_and_left_out_otherwise(tmp_path: Path) -> None:
    log = await recorded_log(tmp_path)
    favoured = ProcessorConfig(use=f"{MODULE}:favour", stage="collect")
    found = await run(log, "collect", msgspec.structs.replace(CONFIG, processor=(*CONFIG.processor, favoured)))
    assert set(changes(found)) == {("re-prioritized", "")}
    other = await run(log, "collect", msgspec.structs.replace(CONFIG, reward=RewardConfig(blend={"exact": 1.0})))
    kinds = {kind for kind, _ in changes(other)}
    assert "re-rewarded" in kinds and "other ending" in kinds
    required = RewardConfig(blend={"judge": 1.0}, require=("csat",))
    none = await run(log, "collect", msgspec.structs.replace(CONFIG, reward=required))
    assert changes(none)["newly dropped", "unlabelled"] > 50
    equal = CollectConfig(deadline_s=3600, difficulty=Switch(on=False))
    more = await run(log, "collect", msgspec.structs.replace(CONFIG, collect=equal))
    assert "no longer made" in {kind for kind, _ in changes(more)}


async def test_what_the_workers_have_not_reached_is_left_out_and_counted(tmp_path: Path) -> None:
    log = await recorded_log(tmp_path)
    later = [record for record in await values(log, EXPERIENCES) if isinstance(record, Block)][:3]
    for item in later:
        await log.publish(EXPERIENCES, item)
    report = await run(log, "verify")
    assert report.is_same and report.behind == 3


async def test_a_tampered_record_is_found(tmp_path: Path) -> None:
    log = await recorded_log(tmp_path)
    (name,) = [at for at in await log.bus.end_offsets(log.name(BUFFER))]
    stored = log.bus.log(name).records  # type: ignore[attr-defined]
    block = (await values(log, BUFFER))[3]
    assert isinstance(block, Block)
    forged = Block(tuple(msgspec.structs.replace(member, advantage=9.0) for member in block.experiences))
    stored[3] = msgspec.structs.replace(stored[3], value=encode(forged))
    report = await run(log, "collect")
    assert changes(report) == {("other advantage", ""): len(block.experiences)}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"start": "yesterday"}, "--from: got 'yesterday'"),
        ({"start": "7:0"}, "no partition 7"),
        ({"start": "100000"}, "has no offset 100000"),
        ({"topic": "buffer"}, "--topic: got 'buffer'"),
    ],
)
async def test_an_order_that_cannot_hold_is_one_clear_line(tmp_path: Path, fields: dict[str, str], words: str) -> None:
    log = await recorded_log(tmp_path, groups=4)
    with pytest.raises(ConfigError, match=words):
        await run(log, "verify", **fields)


async def whole(log: Log) -> list:  # type: ignore[type-arg]
    return await find_ranges(log, DEAD_LETTERS)


def letter(value: bytes, topic: str = "experiences", stage: str = "verify", key: bytes = b"t.0") -> DeadLetter:
    return DeadLetter(topic=topic, partition=0, offset=0, stage=stage, reason="stage failed", value=value, key=key)


async def test_letters_that_decode_go_back_once_and_others_stay(tmp_path: Path) -> None:
    log = await recorded_log(tmp_path, groups=4)
    good = encode(block(answer("new.0", 0, size=1)))
    before = len(await values(log, EXPERIENCES))
    known = len([record for record in await values(log, DEAD_LETTERS) if isinstance(record, DeadLetter)])
    for word in (
        letter(good),
        letter(b"HR\x01\x00garbage"),
        letter(b'{"csat": 4}', topic="nowhere", stage="feedback csat"),
        letter(good, topic="no.such"),
    ):
        await log.publish(DEAD_LETTERS, word)
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
    assert "new.0" in {record.group for record in await values(log, BUFFER) if isinstance(record, Block)}


async def test_of_two_that_deliver_at_one_time_each_letter_goes_once_and_says_who_and_why(tmp_path: Path) -> None:
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
    assert sum(item.delivered.get("experiences", 0) for item in reports) == 8
    said = {
        record.error
        for record in await values(log, DEAD_LETTERS)
        if isinstance(record, DeadLetter) and record.stage == MARK
    }
    assert said and said <= {"ann: mended", "ben: mended", "eve: mended"}


async def test_a_letter_that_was_cut_is_taken_from_the_log_while_it_is_kept(tmp_path: Path) -> None:
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
    assert any("was cut" in item for item in again.examples)


async def test_a_redelivered_record_is_no_duplicate_of_its_failed_self(tmp_path: Path) -> None:
    log = await recorded_log(tmp_path, groups=4)
    sent = next(record for record in await values(log, EXPERIENCES) if isinstance(record, Block))
    await log.publish(DEAD_LETTERS, letter(encode(sent), key=sent.group.encode()))
    before = len(await values(log, VERIFIED))
    async with working(log, CONFIG, tmp_path / "state"):
        await log.publish(EXPERIENCES, sent)
        await settled(log)
        assert len(await values(log, VERIFIED)) == before, "a plain repetition is a duplicate"
        await redeliver(log, await whole(log), lambda count: None)
        await settled(log)
    assert len(await values(log, VERIFIED)) > before
