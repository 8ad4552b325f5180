"""The benchmark of hops compares like with like: peers and headrace make the same of the same answers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from infra.cli.bench.peers.plain import FORMS, StageName, stage_of
from infra.cli.bench.records.hop import PEERS, HopPlan, run
from infra.cli.bench.records.hop_data import (
    GroupOfAnswers,
    HopOutcome,
    ToSend,
    blocks,
    groups,
    records,
    verdicts_of_block,
    verdicts_of_record,
)
from infra.cli.bench.records.hop_worker import CONFIG
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from schemas.topics import BUFFER, EXPERIENCES, VERIFIED, Topic
from streams.collect.collector import Collector, CollectSettings
from streams.collect.rules import Rules
from streams.stages.chain_builder import build_collect, build_verify
from streams.stages.stage import publish_all
from streams.stages.verify import Verifier

SHAPE = (4, 20, 80)


async def _headrace(stage: StageName, given: Sequence[ToSend], folder: Path) -> dict[str, HopOutcome]:
    """What headrace's stage makes of its input, on a log in memory."""
    log = Log(MemoryBus(), "hop")
    await log.create_topics(partitions=1, keep_ms=-1)
    source, sink = (EXPERIENCES, VERIFIED) if stage == "verify" else (VERIFIED, BUFFER)
    for one in given:
        await log.bus.send(log.name(source), one.value, key=one.key)
    if stage == "verify":
        verifier = Verifier(build_verify(CONFIG))
        async for message in log.read_all(source):
            handled = await verifier.handle(message)
            await publish_all(log, [*handled.first, *handled.then], 1.0)
    else:
        rules = Rules(deadline_ms=10_000, keep_ms=10_000)
        collector = Collector(log, Metrics("process"), 0, CollectSettings(folder, rules, build_collect(CONFIG)))
        await collector.recover(0, lambda: False)
        await collector.take([message.record async for message in log.read_all(source)])
        collector.close()
    return await _verdicts(log, sink)


async def _verdicts(log: Log, sink: Topic) -> dict[str, HopOutcome]:
    found: dict[str, HopOutcome] = {}
    async for message in log.read_all(sink):
        found |= verdicts_of_block(message.record.value)
    return found


def _peer(stage: StageName, form: str, given: Sequence[GroupOfAnswers]) -> dict[str, HopOutcome]:
    work, found = stage_of(stage), dict[str, HopOutcome]()
    for one in records(stage, form, given, 0):
        for out in work.take(FORMS[form].decode(one.value)):
            found |= verdicts_of_record(form, FORMS[form].encode(out))
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stage", ["verify", "collect"])
def test_a_peer_makes_the_same_of_the_same_answers(stage: StageName, form: str, tmp_path: Path) -> None:
    given = groups(5, SHAPE)
    ours = asyncio.run(_headrace(stage, blocks(stage, given, 0), tmp_path))
    assert _peer(stage, form, given) == ours and len(ours) == 20
    if stage == "verify":
        assert [one.reason for one in ours.values()].count("repetition") == 2, "of the first group and of the fifth"
    else:
        assert {numbers[1] for _, numbers, _ in ours.values()} == {0.0, 1.0}


@pytest.mark.parametrize("form", FORMS)
def test_a_peer_verifies_lone_answers_alike(form: str, tmp_path: Path) -> None:
    given = groups(5, (1, 20, 80))
    ours = asyncio.run(_headrace("verify", blocks("verify", given, 0), tmp_path))
    assert _peer("verify", form, given) == ours and len(ours) == 5


def test_an_answer_comes_once_and_rounds_are_of_other_answers() -> None:
    given, work = groups(1, SHAPE), stage_of("verify")
    first, second = (records("verify", "lists", given, round) for round in (0, 1))
    taken = [work.take(FORMS["lists"].decode(one.value)) for one in (*first, *second, *first)]
    assert [len(one) for one in taken] == [1, 1, 1, 1] * 2 + [0] * 4


def test_other_content_is_another_verdict() -> None:
    given = groups(1, SHAPE)
    one, *_ = records("verify", "lists", given, 0)
    plain = FORMS["lists"].decode(one.value)
    same = verdicts_of_record("lists", one.value)
    other = msgspec.structs.replace(plain, tokens=[plain.tokens[0] + 1, *plain.tokens[1:]])
    assert verdicts_of_record("lists", FORMS["lists"].encode(other)) != same


@pytest.mark.full
def test_every_contestant_sends_the_same_through_a_real_broker() -> None:
    said: list[str] = []
    plan = HopPlan(shapes={"4 x (20 + 80)": SHAPE}, groups=5, rounds=1, idle_s=0.2)
    found = run(plan, said.append)
    assert [one.name for one in found] == ["headrace", *PEERS] * 2
    assert all(one.cpu_us[0] > 0 for one in found if one.name == "headrace")
    assert sum("send the same answers" in line for line in said) == 2
