"""Seeded words of a named user are nowhere in plain text while they are learned from, and nowhere at all after `forget`."""

import asyncio
import hashlib
import hmac
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from actors.gateway.access.keys import create_key
from actors.gateway.config import Webhook
from infra.ledger.forget import ForgetReport, complete, destroy, tell
from infra.ledger.index import LogIndex
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.store.directory import DirectoryStore
from infra.store.seal import Keys, open_event, open_text
from schemas import Block, DeadLetter, Feedback, Received
from schemas.errors import BadFrame
from schemas.ids import ANSWER_PREFIX
from schemas.topics import ALL, BUFFER, FEEDBACK
from streams.sources.source import build_sources, run_sources
from tests.actors.gateway.gateway_rig import ByteTokenizer, engine, says, serving
from tests.e2e.test_live_answer_is_trained import OTHERS, WINDOW_MS, Clock, other, settings_in, trained
from tests.role import role_of
from tests.streams.deliveries import until_stored
from tests.streams.memory_worker import settled, working
from trainer.learners.scripted import ScriptedLearner
from trainer.loop.report import Board, TrainerReport
from trainer.train import run_trainer

pytestmark = pytest.mark.slow

HOOK = Webhook("/zendesk", b"s3cret", "x-signature")
# What each of them types, is answered, says later, and is called by the application.
SAID = ("QUESTION", "FOLLOWUP", "CORRECTION", "LABEL", "TICKET")
CALLED = ("user", "session", "rater", "feedback-id")


def words_of(user: str) -> list[str]:
    return [f"{word}OF{user.upper()}" for word in SAID]


def names_of(user: str) -> dict[str, str]:
    return {what: f"{what}-of-{user}@example.org" for what in CALLED}


async def talked(http: httpx.AsyncClient, user: str) -> str:
    """A conversation of two turns, of which the second does not name its user, and all that can be said of it."""
    names, (question, followup, correction, label, ticket) = names_of(user), words_of(user)
    headers = {"x-session-id": names["session"]}
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": question}], "user": names["user"]}
    first = (await http.post("/v1/chat/completions", json=asked, headers=headers)).json()
    turns = [*asked["messages"], first["choices"][0]["message"], {"role": "user", "content": followup}]
    second = (await http.post("/v1/chat/completions", json={"model": "m", "messages": turns}, headers=headers)).json()
    about = {"answer_id": second["id"], "rater": names["rater"]}
    for number, said in enumerate(({"correction": correction}, {"label": label}, {"value": 1})):
        body = {**about, **said, "id": f"{number}-{names['feedback-id']}"}
        assert (await http.post("/v1/feedback", json=body)).status_code == 202
    event = msgspec.json.encode({"about": second["id"], "said": ticket})
    signature = hmac.new(HOOK.secret, event, hashlib.sha256).hexdigest()
    assert (await http.post(HOOK.path, content=event, headers={HOOK.header: signature})).status_code == 202
    return str(second["id"]).removeprefix(ANSWER_PREFIX)


async def raw(log: Log) -> bytes:
    """Every byte in the broker, as it lies there."""
    assert isinstance(log.bus, MemoryBus)
    found = b""
    for topic in ALL:
        for index in await log.bus.partitions(log.name(topic)):
            for record in log.bus.log(Partition(log.name(topic), index)).records:
                found += record.key + record.value + repr(record.headers).encode()
    return found


async def opened(log: Log) -> bytes:
    """What somebody with this log's keys can read in the broker."""
    keys, found = log.keys, b""
    for topic in ALL:
        async for message in log.read_all(topic):
            record = message.value
            for item in record.experiences if isinstance(record, Block) else ():
                try:
                    texts = [part.content for part in item.messages] + [ByteTokenizer().decode(item.tokens.tolist())]
                except BadFrame:
                    continue
                found += " ".join(texts).encode() + msgspec.json.encode(item.meta)
            if isinstance(record, Feedback) and record.text:
                found += unless_shut(
                    lambda r=record: open_text(r.text, keys, r.ref.removeprefix(ANSWER_PREFIX)).encode()
                )
            if isinstance(record, DeadLetter | Received):
                body = record.body if isinstance(record, Received) else record.value
                found += unless_shut(lambda b=body: open_event(b, keys))
                if isinstance(record, Received) and record.ref:
                    table, answer = msgspec.json.decode(body), record.ref.removeprefix(ANSWER_PREFIX)
                    for text in (value for value in table.values() if isinstance(value, str)):
                        found += unless_shut(lambda t=text, a=answer: open_text(t, keys, a).encode())
    return found


def unless_shut(read: Any) -> bytes:
    try:
        return bytes(read())
    except BadFrame:
        return b""


def on_disk(folder: Path) -> bytes:
    """Every byte of every file: store, state, spool, index, TensorBoard; and every value of every database."""
    found = b""
    for path in folder.rglob("*"):
        if path.is_file():
            found += path.read_bytes() + path.name.encode()
        if path.suffix == ".sqlite":
            with closing(sqlite3.connect(path)) as database:
                for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                    found += repr(database.execute(f'SELECT * FROM "{table}"').fetchall()).encode()
    return found


def found_in(data: bytes, words: list[str]) -> set[str]:
    return {word for word in words if word.encode() in data}


async def forgotten(log: Log, folder: Path, user: str) -> ForgetReport:
    assert log.store is not None
    keys = Keys(log.store)
    key_ids = destroy(keys, "acme", names_of(user)["user"])
    about = await tell(log, "acme", names_of(user)["user"], secret=keys.app_secret(), owner="ops")
    index = LogIndex(folder / "state" / "trace.sqlite", run="test", policy="main")
    try:
        return await complete(log, index, keys, about, key_ids)
    finally:
        index.close()


async def test_seeded_words_are_nowhere_in_plain_text_and_after_forget_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    # One step takes both users' answers and the others': alone, the first answers ever have an advantage of 0.
    settings, clock, stop = settings_in(tmp_path / "app", least=OTHERS + 2), Clock(), asyncio.Event()
    bus, store = MemoryBus(clock), DirectoryStore(tmp_path / "store")
    _, key = create_key(store, tenant="acme", scopes=("serve", "feedback"), train="yes", rpm=0, tpm=0)
    hers, his = words_of("ann"), words_of("bob")
    names = [name for user in ("ann", "bob") for name in names_of(user).values()]

    async def everything(log: Log) -> bytes:
        return await raw(log) + on_disk(tmp_path) + caplog.text.encode()

    async with serving(tmp_path, engine(says("It is 82.")), bus=bus, store=store, webhooks=(HOOK,)) as served:
        log, board = served.log, Board(tmp_path / "board")
        floor = msgspec.structs.replace(settings, folder=tmp_path)
        role = role_of("train", floor, log, store, stop=stop)
        training = asyncio.create_task(
            run_trainer(role, settings.trainer, ScriptedLearner(), report=TrainerReport(role.metrics, board=board))
        )
        sources = build_sources(settings.feedback, settings.folder)
        listening = asyncio.create_task(run_sources(sources, log, Metrics("process"), tmp_path / "state"))
        async with working(log, settings.streams(), tmp_path / "state"), served.http(key) as http:
            answers = [await talked(http, user) for user in ("ann", "bob")]
            assert len(await served.recorded(4)) == 4
            await until_stored(log, FEEDBACK, 8)
            await settled(log)
            plain = Log(bus, "test")  # one that has no keys
            assert not found_in(await everything(log) + await opened_without_keys(plain), [*hers, *his, *names])
            clock.now_ms += WINDOW_MS + 1
            for number in range(OTHERS):
                await log.publish(BUFFER, other(number))
            for answer in answers:
                await trained(log, answer)
            assert found_in(await opened(log), [*hers, *his]) == {*hers, *his}, "whoever has the keys reads it all"
            report = await forgotten(log, tmp_path, "ann")
            assert len(report.keys) == 1 and report.steps and report.texts == 1
            stop.set()
            listening.cancel()
            await training
        board.close()
    later = Log(bus, "test", store=store)
    assert not found_in(await everything(later), [*hers, *his, *names])
    assert found_in(await opened(later), [*hers, *his]) == set(his), "hers is gone, his is as it was"


async def opened_without_keys(log: Log) -> bytes:
    """What somebody can read in the broker who has no keys, packed sections unpacked."""
    found = b""
    for topic in ALL:
        async for message in log.read_all(topic):
            for item in message.value.experiences if isinstance(message.value, Block) else ():
                found += unless_shut(lambda o=item: " ".join(part.content for part in o.messages).encode())
                found += unless_shut(lambda o=item: ByteTokenizer().decode(o.tokens.tolist()).encode())
    return found
