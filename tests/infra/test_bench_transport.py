"""The benchmark of transports: every reader holds what was sent, and a peer that is missing is named."""

import asyncio
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from infra.cli.bench.peers.wire import digest
from infra.cli.bench.records import transport
from infra.cli.bench.records.transport import (
    ReaderProcess,
    TransportPlan,
    expected_digest,
    measured,
    ray_readings,
    redis_readings,
    written_answers,
)
from infra.cli.bench.records.transport_ours import publish, taken
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas.topics import BUFFER


def test_our_reader_holds_the_arrays_that_were_sent(tmp_path: Path) -> None:
    answers = written_answers(tmp_path / "answers.json", 1)
    assert (
        len(answers) == 16 and json.loads((tmp_path / "answers.json").read_text())[0]["tokens"] == answers[0]["tokens"]
    )

    async def through() -> list[tuple[str, Any, Any]]:
        log = Log(MemoryBus(), "transport")
        await log.create_topics(partitions=1, keep_ms=-1)
        reader = await log.assigned(BUFFER, "end")
        await publish(log, answers, 40)
        return await taken(log, reader, 40)

    held = asyncio.run(through())
    assert len(held) == 40 and digest(held) == expected_digest(answers, 40)


def test_a_digest_tells_other_arrays_and_not_another_order() -> None:
    held = [(name, np.arange(3, dtype=np.uint32), np.zeros(2, np.float32)) for name in ("a", "b")]
    other = [held[0], ("b", np.arange(1, 4, dtype=np.uint32), np.zeros(2, np.float32))]
    assert digest(held) == digest(held[::-1]) != digest(other)
    with pytest.raises(AssertionError):
        digest([("a", np.arange(3, dtype=np.int64), np.zeros(2, np.float32))])


class FakeReading(ReaderProcess):
    """A contestant of this process, which says what it is told to say."""

    told: dict[str, Any] = {}
    asked: list[str] = []

    def ask(self, what: str, number: int) -> dict[str, Any]:
        self.asked.append(what)
        return self.told

    def spent_s(self) -> float:
        return 0.001 * len(self.asked)


def _fake(name: str, told: dict[str, Any]) -> FakeReading:
    return FakeReading(name, None, Path(), (), told=told, asked=[])


def test_rounds_are_taken_in_turn_and_a_reader_of_other_arrays_is_not_timed(tmp_path: Path) -> None:
    answers = written_answers(tmp_path / "answers.json", 1)
    plan = TransportPlan(answers=4, groups=1, rounds=3, idle_s=0.0)
    right = {"answers": 4, "digest": expected_digest(answers, 4), "wall_s": 0.25}
    ours, peer = _fake("headrace", right), _fake("Ray Queue, one a call", right)
    found = measured([ours, peer], answers, plan, lambda line: None)
    assert ours.asked == peer.asked == ["check", "go", "go", "go"]
    assert [one.name for one in found] == ["headrace", "Ray Queue, one a call"] and found[1].target == 2.0
    assert found[0].wall_us == (62_500.0, 62_500.0) and found[0].cpu_us == pytest.approx((250.0, 250.0))
    wrong = _fake("Ray Queue, one a call", msgspec.structs.asdict(peer)["told"] | {"digest": "other"})
    with pytest.raises(RuntimeError, match="Ray Queue, one a call reads other arrays"):
        measured([_fake("headrace", right), wrong], answers, plan, lambda line: None)


def test_a_peer_that_is_missing_is_named_in_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    with ExitStack() as ending:
        for peers in (redis_readings, ray_readings):
            assert not peers(tmp_path, ending, said.append, tmp_path / "bench" / "bin" / "python")
            assert not peers(tmp_path, ending, said.append, Path(sys.executable))
    assert ["Redis" in line for line in said] == [True, True, False, False]
    assert ["Ray" in line for line in said] == [False, False, True, True]
    assert all("make bench-deps" in line for line in said)


@pytest.mark.full
def test_ours_is_measured_through_a_real_broker() -> None:
    said: list[str] = []
    plan = TransportPlan(answers=32, groups=1, rounds=1, idle_s=0.1)
    found = transport.run(plan, said.append)
    assert found[0].name == "headrace" and found[0].cpu_us[0] > 0 and found[0].wall_us[0] > 0
    assert all(one.times is not None for one in found[1:]), "a peer that is missing has no row"
