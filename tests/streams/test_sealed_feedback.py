"""What people write about answers is sealed in every topic and file it passes, read where it is needed, and forgotten."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infra.chain.chain import make_step
from infra.chain.processor import feedback
from infra.ledger.trace import legible
from infra.log.bus import Record
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from infra.store.seal import Keys, open_event, open_text, seal_event, seal_text
from schemas import BadFrame, Block, Feedback, Received
from schemas.errors import Sealed
from schemas.ids import answer_id, experience_id, request_group
from schemas.topics import ALL, FEEDBACK, VERIFIED
from streams.collect.collector import Collector, CollectSettings
from streams.collect.feedback import FeedbackRules
from streams.collect.rules import Rules
from streams.processors.correct import Correct
from streams.sources.event import EventSource
from streams.sources.received import GROUP, rating, take_once
from tests.names import session_name
from tests.streams.collect.collecting import answer, block
from tests.streams.collect.test_corrections import Letters
from tests.streams.processors.by_default import reward

WRITTEN = "it should say WILHELMINA"
SESSION = session_name("acme", "chat-81")
ASKED = request_group(SESSION, 7, 0)
ANSWER = experience_id(ASKED, 0, 0)
OTHER = experience_id(request_group(session_name("acme", "chat-82"), 7, 0), 0, 0)
RULES = Rules(
    deadline_ms=1000, keep_ms=10**9, sources={"user": FeedbackRules(window_ms=1000, late="amend")}, corrects=True
)


def test_a_text_is_opened_by_its_sessions_key_for_its_own_answer_only_and_never_again_once_it_is_destroyed() -> None:
    keys = Keys(MemoryStore())
    shut = seal_text(WRITTEN, keys, ANSWER)
    assert "WILHELMINA" not in shut and shut != seal_text(WRITTEN, keys, ANSWER)
    assert open_text(shut, keys, ANSWER) == WRITTEN
    with pytest.raises(BadFrame):
        open_text(shut, keys, OTHER)
    keys.destroy(session_name("acme", "chat-82"))
    assert open_text(shut, keys, ANSWER) == WRITTEN
    keys.destroy(SESSION)
    with pytest.raises(Sealed):
        open_text(shut, keys, ANSWER)
    assert open_text(seal_text(WRITTEN, keys, ANSWER), keys, ANSWER) == WRITTEN, "who comes back has a new key"


def test_an_event_about_several_sessions_is_forgotten_with_the_first_of_them() -> None:
    keys = Keys(MemoryStore())
    sessions = [session_name("acme", f"chat-{number}") for number in range(3)]
    body = b'{"note": "WILHELMINA"}'
    for destroyed in sessions:
        shut = seal_event(body, keys, sessions)
        assert b"WILHELMINA" not in shut and open_event(shut, keys) == body
        keys.destroy(destroyed)
        with pytest.raises(Sealed):
            open_event(shut, keys)
    assert seal_event(body, keys, ()) == open_event(body, keys) == body, "one about nobody's answers"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_seal_that_was_cut_or_altered_is_one_error(cut: int) -> None:
    keys = Keys(MemoryStore())
    shut = seal_text(WRITTEN, keys, ANSWER)
    with pytest.raises(BadFrame):
        open_text(shut[:-cut], keys, ANSWER)


def test_what_was_never_sealed_stays_as_it_is() -> None:
    keys = Keys(MemoryStore())
    assert seal_text(WRITTEN, keys, "add-3745.2.0-7-0") == WRITTEN, "the answer of an explorer is nobody's"
    for text in (WRITTEN, "sealed:", "sealed:nokey:AAAA", "sealed: by hand"):
        assert open_text(text, keys, ANSWER) == text


def correction(keys: Keys) -> Received:
    """As the gateway writes it."""
    body = {"answer_id": answer_id(ANSWER), "id": "f-1", "kind": "correction", "rater": "ann"}
    body["correction"] = seal_text(WRITTEN, keys, ANSWER)
    return Received(path="/v1/feedback", body=msgspec.json.encode(body), id="f-1", ref=answer_id(ANSWER))


async def heard(log: Log, function: Any = rating) -> Metrics:
    metrics = Metrics("process")
    reader = await log.subscribed(FEEDBACK, group=GROUP)
    source = EventSource(name="user", function=function, webhook="/v1/feedback")
    while await take_once({"/v1/feedback": source}, reader, log, metrics, poll_s=0.01):
        pass
    await reader.close()
    return metrics


async def everything(log: Log) -> bytes:
    """All bytes of all topics."""
    return b"".join([message.record.value for topic in ALL async for message in log.read_all(topic)])


async def log_with(*, answered: bool) -> tuple[Log, Keys, MemoryStore]:
    store = MemoryStore()
    log = Log(MemoryBus(), "bot", store=store)
    await log.create_topics(partitions=1, keep_ms=3_600_000)
    if answered:
        one = answer(ASKED, 0, size=1, lane="live")
        await log.publish(VERIFIED, block(msgspec.structs.replace(one, scores=(), tenant="acme")))
    assert log.keys is not None
    await log.publish(FEEDBACK, correction(log.keys))
    return log, log.keys, store


async def collected(log: Log, folder: Path) -> tuple[list[Block], dict[str, float]]:
    metrics = Metrics("process")
    steps = (make_step("correct", Correct(speller=Letters())), make_step("reward", reward))
    collector = Collector(log, metrics, 0, CollectSettings(folder, RULES, steps))
    await collector.recover(0, lambda: False)
    records: list[Record] = [message.record async for message in log.read_all(VERIFIED)]
    folded, _ = await collector.fold(records)
    await collector.save()
    collector.close()
    return [sent for one in folded for decision in one.decisions for sent in decision.blocks], metrics.counters()


def test_an_edit_is_learned_from_and_lies_nowhere_in_the_clear(tmp_path: Path) -> None:
    async def check() -> None:
        log, keys, _ = await log_with(answered=True)
        await heard(log)
        (said,) = [m.value async for m in log.read_all(VERIFIED) if isinstance(m.value, Feedback)]
        assert said.text is not None and legible(said, keys).text == WRITTEN
        sent, _ = await collected(log, tmp_path)
        expert = [one for made in sent for one in made.experiences if one.lane == "expert"]
        assert [one.messages[-1].content for one in expert] == [WRITTEN]
        assert b"WILHELMINA" not in await everything(log)

    asyncio.run(check())
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files and not [file for file in files if b"WILHELMINA" in file.read_bytes()]


def test_an_edit_whose_key_is_destroyed_is_counted_and_teaches_nothing(tmp_path: Path) -> None:
    async def check() -> None:
        log, keys, _ = await log_with(answered=True)
        await heard(log)
        keys.destroy(SESSION)
        sent, counters = await collected(log, tmp_path)
        assert not [one for made in sent for one in made.experiences if one.lane in ("expert", "human")]
        assert counters["dropped{reason=forgotten}"] >= 1

    asyncio.run(check())


def test_feedback_that_was_forgotten_before_it_was_read_is_counted_and_goes_no_further() -> None:
    async def check() -> None:
        log, keys, _ = await log_with(answered=False)
        keys.destroy(SESSION)
        metrics = await heard(log)
        assert [m async for m in log.read_all(VERIFIED)] == []
        assert metrics.counters()["feedback_events{outcome=forgotten,source=user}"] == 1

    asyncio.run(check())


def test_a_source_of_ones_own_reads_the_text_and_a_dead_letter_holds_it_sealed() -> None:
    read = []

    @feedback(version=1)
    def careful(said: dict[str, Any]) -> Feedback | None:
        read.append(said["correction"])
        raise RuntimeError("it cannot be said")

    async def check() -> None:
        log, _, _ = await log_with(answered=False)
        metrics = await heard(log, careful)
        assert metrics.counters()["feedback_events{outcome=failed,source=user}"] == 1
        assert read == [WRITTEN] and b"WILHELMINA" not in await everything(log)

    asyncio.run(check())
