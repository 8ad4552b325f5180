"""Records of served answers: none without consent, and no secret in any."""

import asyncio
import logging
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from actors.gateway.config import RedactRules
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.store.seal import Keys
from schemas import Block, Feedback, decode
from schemas.topics import ALL, EXPERIENCES, VERIFIED
from streams.config import StreamsConfig
from streams.sources.event import EventSource
from streams.sources.received import rating, run_received
from tests.actors.gateway.gateway_rig import AwayBus, ByteTokenizer, RunningGateway, engine, says, serving
from tests.actors.rig import running, until
from tests.streams.memory_worker import settled, working

RATED = EventSource(name="user", function=rating, webhook="/v1/feedback")


def chat(content: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


async def stored(served: RunningGateway) -> bytes:
    """Every byte in the log, in the spool, in the store and in the streams' databases, packed sections unpacked."""
    assert isinstance(served.bus, MemoryBus)
    found = b""
    for topic in ALL:
        for index in await served.bus.partitions(served.log.name(topic)):
            for record in served.bus.log(Partition(served.log.name(topic), index)).records:
                found += record.key + record.value + repr(record.headers).encode()
                found += unpacked(served.log.decode(record).value)
    spooled = await asyncio.to_thread(
        lambda: b"".join(path.read_bytes() for path in served.folder.rglob("*") if path.is_file())
    )
    found += b"".join(in_database(path) for path in databases(served.folder))
    return found + spooled + b"".join(served.store.get(name) for name in served.store.keys(""))


def unpacked(record: object) -> bytes:
    """The contents of the packed sections of a record: texts, and the text of its tokens."""
    found = b""
    for one in record.experiences if isinstance(record, Block) else ():
        texts = [part.content for part in one.messages] + [ByteTokenizer().decode(one.tokens.tolist())]
        found += " ".join(texts).encode() + msgspec.json.encode(one.meta)
    return found


def databases(folder: Path) -> list[Path]:
    return list(folder.rglob("*.sqlite"))


def in_database(path: Path) -> bytes:
    """Every value of every table, frames unpacked."""
    found = b""
    with closing(sqlite3.connect(path)) as connection:
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for row in connection.execute(f'SELECT * FROM "{table}"'):
                for value in row:
                    data = value if isinstance(value, bytes) else str(value).encode()
                    found += data + (unpacked(decode(data)) if data[:2] == b"HR" else b"")
    return found


async def collected(served: RunningGateway, num_said: int) -> None:
    """Let the streams fold all that was written and said into their databases."""
    log = served.log
    hearing = asyncio.create_task(run_received((RATED,), log, Metrics("process")))
    async with running(hearing), working(log, StreamsConfig(), served.folder / "state"), asyncio.timeout(120):
        heard = 0
        async for message in log.tail(VERIFIED, "beginning"):
            heard += isinstance(message.value, Feedback)
            if heard == num_said:
                break
        await settled(log)


@pytest.mark.parametrize(
    ("train_on", "train", "store", "recorded"),
    [
        ("nothing", "yes", None, False),
        ("consented", "yes", None, True),
        ("consented", "unset", None, False),
        ("consented", "no", None, False),
        ("all", "unset", None, True),
        ("all", "no", None, False),
        ("all", "yes", False, False),
        ("all", "yes", True, True),
    ],
)
async def test_content_is_written_only_with_consent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, train_on: str, train: Any, store: bool | None, recorded: bool
) -> None:
    with caplog.at_level(logging.DEBUG, logger="actors"):
        async with serving(tmp_path, engine(says("SALTED ANSWER")), train_on=train_on, report_s=0.05) as served:
            key = await served.new_key(train=train)
            more = {} if store is None else {"store": store}
            async with served.http(key) as http:
                answer = await http.post("/v1/chat/completions", json=chat("PEPPERED QUESTION", user="u1", **more))
                assert answer.status_code == 200
                said = {"answer_id": answer.json()["id"], "correction": "SUGARED CORRECTION"}
                told = await http.post("/v1/feedback", json=said)
            assert told.json()["recorded"] == (recorded or (store is False and train == "yes"))
            if recorded:
                await served.recorded(1)
                assert (await served.received(1))[0].body
            else:
                await until(lambda: served.count("not_recorded") == 1)
                if store is None:
                    assert await served.received() == []
            found = await stored(served)
            for words in (b"SALTED", b"PEPPERED"):
                assert (words in found) == recorded
            if not recorded and store is None:
                assert b"SUGARED" not in found
    for words in ("SALTED", "PEPPERED", "SUGARED"):
        assert words not in caplog.text


def seeded(count: int) -> list[str]:
    """Secrets of every kind, all different."""
    random_ = random.Random(7)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    found = []
    for index in range(count):
        word = "".join(random_.choices(letters, k=20))
        digits = [str(random_.randrange(10)) for _ in range(15)]
        total = sum(int(d) * 2 - 9 * (int(d) > 4) if at % 2 == 0 else int(d) for at, d in enumerate(digits))
        card = "".join(digits) + str(-total % 10)
        kinds = (f"{word}@mail.example", f"sk-{word}", card, f"+49 30 {random_.randrange(10**8, 10**9)}")
        found.append(kinds[index % 4])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("action", ["mask", "drop"])
async def test_no_seeded_secret_is_found_anywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, action: Any
) -> None:
    secrets = seeded(1000)
    questions, answers, arguments, said = secrets[:300], secrets[300:600], secrets[600:800], secrets[800:]

    script = says(*(f"It is {secret}, I think." for secret in answers))
    bus = AwayBus()
    rules = RedactRules(action=action)
    caplog.set_level(logging.DEBUG, logger="streams")
    with caplog.at_level(logging.DEBUG, logger="actors"):
        async with serving(tmp_path, engine(script), bus=bus, redact=rules) as served:
            async with served.http(await served.new_key()) as http:

                async def ask(index: int) -> httpx.Response:
                    secret, argument = questions[index], arguments[index % 200]
                    call = {"name": "f", "arguments": f'{{"x": "{argument}"}}'}
                    messages = [
                        {"role": "user", "content": f"My secret is {secret} !", "name": "n"},
                        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
                        {"role": "tool", "tool_call_id": "1", "content": f"got {argument} there"},
                    ]
                    asked = {"model": secret, "messages": messages, "user": secret, "metadata": {"m": secret}}
                    return await http.post("/v1/chat/completions", json=asked)

                for first in range(0, len(questions), 10):
                    bus.away = first % 20 == 10  # half of it goes by way of the disk
                    given = await asyncio.gather(*(ask(index) for index in range(first, first + 10)))
                    assert {answer.status_code for answer in given} == {200}

                async def say(secret: str) -> int:
                    body = {"answer_id": given[-1].json()["id"], "correction": f"no, {secret} it is", "id": secret}
                    return (await http.post("/v1/feedback", json=body)).status_code

                assert set(await asyncio.gather(*map(say, said))) == {202}
            bus.away = False
            await until(lambda: not list(tmp_path.glob("spool/*/*.spool")), seconds=60)
            if action == "mask":
                assert len(await served.recorded(300)) == 300
            else:
                assert served.metrics.counters()["not_recorded{reason=personal data}"] == 300
            await collected(served, len(said))
            assert databases(tmp_path), "collect keeps what waits for feedback in a database"
            found = await stored(served)
            left = [secret for secret in secrets if secret.encode() in found]
            assert not left, left[:5]
            assert len(await served.received(len(said))) == len(said)
    assert not [secret for secret in secrets if secret in caplog.text]


async def test_masked_answers_are_other_tokens_without_a_ratio_and_clean_ones_keep_theirs(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(says("Fine.", "Write to ada@lovelace.example", "Fine."))) as served:
        async with served.http(await served.new_key()) as http:
            for content in ("I am x@y.example", "who?", "plain"):
                await http.post("/v1/chat/completions", json=chat(content))
        asked, answered, plain = await served.recorded(3)
        assert asked.messages[0].content == "I am [email]" and answered.response == "Write to [email]"
        for one in (asked, answered, plain):
            spelled = ByteTokenizer().decode(one.tokens.tolist())
            assert spelled == f"<user>{one.messages[0].content}<assistant>{one.response}"
        assert [one.spans[0].ratio for one in (asked, answered, plain)] == [False, False, True]
        assert asked.tokens[asked.num_prompt :].tolist() == plain.tokens[plain.num_prompt :].tolist()


@pytest.mark.parametrize("away", [False, True], ids=["in the log", "in the spool"])
async def test_what_a_named_user_says_is_readable_nowhere_without_their_key(tmp_path: Path, away: bool) -> None:
    bus = AwayBus()
    async with serving(tmp_path, engine(says("SALTED ANSWER")), bus=bus, train_on="all") as served:
        key = await served.new_key()
        bus.away = away
        async with served.http(key) as http:
            for user in ("ann@example.org", "bob@example.org"):
                asked = await http.post("/v1/chat/completions", json=chat("PEPPERED QUESTION", user=user))
                assert asked.status_code == 200
        await until(lambda: served.count("recorded") == 2)
        files = list(served.folder.rglob("*"))
        written = b"".join([path.read_bytes() for path in files if path.is_file() and "keys" not in path.parts])
        assert b"SALTED" not in written and b"PEPPERED" not in written
        bus.away = False
        ann, bob = await served.recorded(2)
        assert ann.key_id != bob.key_id and ann.response == bob.response == "SALTED ANSWER"
        for message in [one async for one in served.log.scan(EXPERIENCES)]:
            assert b"SALTED" not in message.record.value and b"PEPPERED" not in message.record.value
        Keys(served.store).destroy(ann.subject)
        later = Log(bus, "test", store=served.store)
        blocks = [one.value async for one in later.scan(EXPERIENCES)]
        lost = {one.subject: one.lost for block in blocks for one in getattr(block, "experiences", ())}
        assert lost == {ann.subject: "forgotten", bob.subject: ""}
