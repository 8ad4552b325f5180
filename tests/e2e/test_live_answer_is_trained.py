"""Feedback is trained and forgotten: from the gateway to the weights, on a log in memory, by the settings of `init`."""

import asyncio
import hashlib
import hmac
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from actors.gateway.access.keys import create_key
from actors.gateway.config import Webhook
from infra.cli.main import app
from infra.cli.settings import Settings, load_settings
from infra.ledger.forget import ForgetReport, complete, destroy, tell
from infra.ledger.index import LogIndex
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus, wall_ms
from infra.observe.metrics import Metrics
from infra.settings.config import duration_s
from infra.settings.plugin import add_plugin_folders
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from infra.store.seal import Keys, open_event, open_text
from infra.store.store import Store
from schemas import Batch, BatchItem, Block, DeadLetter, Experience, Feedback, Received, Span, make_experience
from schemas.errors import BadFrame
from schemas.ids import ANSWER_PREFIX, experience_id
from schemas.topics import ALL, BATCHES, BUFFER, FEEDBACK, VERIFIED
from streams.sources.source import build_sources, run_sources
from tests.actors.gateway.gateway_rig import ByteTokenizer, RunningGateway, engine, says, serving
from tests.role import role_of
from tests.streams.deliveries import until_stored
from tests.streams.memory_worker import settled, working
from tests.trainer.trainer_samples import num_positions
from trainer.batch.assemble import journaled_items
from trainer.batch.batch import TrainItem, pack
from trainer.buffer.buffer import read_blocks
from trainer.learners.scripted import ScriptedLearner
from trainer.loop.report import Board, TrainerReport
from trainer.train import run_trainer

pytestmark = pytest.mark.slow

WINDOW_MS = 600_000
OTHERS = 6


class Clock:
    """The broker's clock, moved by hand. It lies in the past, so that the workers tick for every moment to come."""

    def __init__(self) -> None:
        self.now_ms = wall_ms() - 2 * WINDOW_MS

    def __call__(self) -> int:
        return self.now_ms


def settings_in(folder: Path, *, least: int = 2) -> Settings:
    done = CliRunner().invoke(app, ["init", str(folder), "--model", "model", "--engine", "torch"])
    assert done.exit_code == 0, done.output
    # A step takes two and comes at once: the first answer ever has an advantage of 0, and would teach nothing alone.
    small = [f"trainer.lanes.live.min_sequences={least}", "trainer.min_publish_interval=0s"]
    # There is no model beside it, whose tokenizer spells edits.
    settings = load_settings(folder / "headrace.toml", ["app=test", "collect.correct.on=false", *small])
    add_plugin_folders(settings.folder, settings.plugins)
    assert [duration_s(item.window) * 1000 for item in settings.feedback] == [WINDOW_MS]
    return settings


def other(number: int) -> Block:
    """An answer of somebody else, judged already: what makes versions pass."""
    group = f"other{number}.0"
    one = make_experience(
        id=experience_id(group, 0, 0), group=group, episode=0, group_size=1, lane="live", tokens=[1, 2, 3 + number],
        logprobs=[-0.5], messages=(), spans=(Span(start=2, stop=3, version=0),), reward=1.0, advantage=0.5,
    )  # fmt: skip
    return Block((one,))


async def trained(log: Log, name: str) -> tuple[Batch, BatchItem]:
    """The journal's batch that trains this experience."""
    async with asyncio.timeout(120):
        async for message in log.tail(BATCHES, "beginning"):
            if isinstance(message.value, Batch):
                for item in message.value.items:
                    if item.id == name:
                        return message.value, item
    raise AssertionError("unreachable")


@asynccontextmanager
async def live_app(
    folder: Path, settings: Settings, clock: Clock, store: Store, *texts: str, webhooks: tuple[Webhook, ...] = ()
) -> AsyncIterator[tuple[RunningGateway, httpx.AsyncClient]]:
    """A gateway that answers with these texts, with feedback sources, stream worker and trainer."""
    stop = asyncio.Event()
    _, key = create_key(store, tenant="acme", scopes=("serve", "feedback"), train="yes", rpm=0, tpm=0)
    async with serving(folder, engine(says(*texts)), bus=MemoryBus(clock), store=store, webhooks=webhooks) as served:
        role = role_of("train", msgspec.structs.replace(settings, folder=folder), served.log, store, stop=stop)
        with closing(Board(folder / "board")) as board:
            report = TrainerReport(role.metrics, board=board)
            training = asyncio.create_task(run_trainer(role, settings.trainer, ScriptedLearner(), report=report))
            sources = build_sources(settings.feedback, settings.folder)
            listening = asyncio.create_task(run_sources(sources, served.log, Metrics("process"), folder / "state"))
            async with working(served.log, settings.streams(), folder / "state"), served.http(key) as http:
                yield served, http
            stop.set()
            listening.cancel()
            await training


async def rated_at_the_end(log: Log, http: httpx.AsyncClient, answer: str, clock: Clock) -> None:
    """Say what the answer was worth, a millisecond before its window closes, and let that pass."""
    clock.now_ms += WINDOW_MS - 1
    accepted = await http.post("/v1/feedback", json={"answer_id": answer, "value": 1, "id": "f-1"})
    assert accepted.status_code == 202
    async with asyncio.timeout(60):
        async for message in log.tail(VERIFIED, "beginning"):
            if isinstance(message.value, Feedback):
                break
    clock.now_ms += 1


async def test_an_answer_rated_at_the_end_of_its_window_is_trained_under_the_settings_of_init(tmp_path: Path) -> None:
    settings, clock = settings_in(tmp_path / "support"), Clock()
    async with live_app(tmp_path, settings, clock, MemoryStore(), "It is 82.") as (served, http):
        log = served.log
        asked = {"model": "m", "messages": [{"role": "user", "content": "37+45?"}]}
        answer = (await http.post("/v1/chat/completions", json=asked)).json()["id"]
        (recorded,) = await served.recorded(1)
        for number in range(OTHERS):
            await log.publish(BUFFER, other(2 * number))
            await log.publish(BUFFER, other(2 * number + 1))
            await until_stored(log, BATCHES, 2 + number)
        await log.publish(BUFFER, other(2 * OTHERS))
        await rated_at_the_end(log, http, answer, clock)
        batch, item = await trained(log, recorded.id)
    assert recorded.lane == item.lane == "live" and item.revision == 0
    assert batch.version - recorded.min_version > settings.pacing.max_staleness, "no version limit: it is old by then"


TURNS = 20
SESSION = {"x-session-id": "chat-81"}


def check_once(items: Sequence[TrainItem], turns: Sequence[Experience]) -> None:
    """Every sampled token is trained once, and for each token of the session one position is computed."""
    whole = max(turns, key=lambda one: one.num_tokens)
    packed = pack(items, max_tokens=256)  # less than the session
    sampled = sum(turn.num_sampled for turn in turns)
    assert packed.num_tokens == sampled and sum(len(m.target_N) for m in packed.microbatches) == sampled
    assert num_positions(packed) / whole.num_tokens == pytest.approx(1.0, abs=0.01)
    alone = [
        msgspec.structs.replace(item, experience=msgspec.structs.replace(item.experience, join=None)) for item in items
    ]
    assert num_positions(pack(alone, max_tokens=256)) / whole.num_tokens >= TURNS / 2


async def test_a_session_of_20_turns_is_trained_once_from_the_gateway_to_the_batch(tmp_path: Path) -> None:
    settings, clock = settings_in(tmp_path / "support"), Clock()
    texts = [f"It is {number}." for number in range(TURNS)]
    async with live_app(tmp_path, settings, clock, MemoryStore(), *texts) as (served, http):
        said: list[dict[str, str]] = []
        for number in range(TURNS):
            said.append({"role": "user", "content": f"What is {number}?"})
            body = {"model": "m", "messages": said}
            answer = (await http.post("/v1/chat/completions", json=body, headers=SESSION)).json()
            said.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            rated = {"answer_id": answer["id"], "value": number % 2}
            assert (await http.post("/v1/feedback", json=rated)).status_code == 202
            clock.now_ms += 1000
        turns = await served.recorded(TURNS)
        await until_stored(served.log, VERIFIED, 2 * TURNS)  # the answers and their ratings
        clock.now_ms += WINDOW_MS + 1000 * int(settings.collect.session_s)
        batch, _ = await trained(served.log, turns[0].id)
        items = journaled_items(batch, await read_blocks(served.log, {item.offset for item in batch.items}))
    assert [item.id for item in batch.items] == [turn.id for turn in turns]
    assert [turn.carried for turn in turns] == list(range(TURNS))
    source = next(feedback.name for feedback in settings.feedback if feedback.from_.webhook)
    ratings = [item.experience.score(source) for item in items]
    assert ratings == [float(number % 2) for number in range(TURNS)], "each turn has its own"
    check_once(items, turns)


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
    """Contents of the broker that a reader with this log's keys can read."""
    keys, found = log.keys, b""
    for topic in ALL:
        async for message in log.scan(topic):
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


def unless_shut(read: Callable[[], bytes]) -> bytes:
    try:
        return read()
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


async def opened_without_keys(log: Log) -> bytes:
    """Contents of the broker that a reader without keys can read, packed sections unpacked."""
    found = b""
    for topic in ALL:
        async for message in log.scan(topic):
            for item in message.value.experiences if isinstance(message.value, Block) else ():
                found += unless_shut(lambda o=item: " ".join(part.content for part in o.messages).encode())
                found += unless_shut(lambda o=item: ByteTokenizer().decode(o.tokens.tolist()).encode())
    return found


async def test_seeded_words_are_nowhere_in_plain_text_and_after_forget_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    # One step takes both users' answers and the others': alone, the first answers ever have an advantage of 0.
    settings, clock = settings_in(tmp_path / "app", least=OTHERS + 2), Clock()
    store = DirectoryStore(tmp_path / "store")
    hers, his = words_of("ann"), words_of("bob")
    names = [name for user in ("ann", "bob") for name in names_of(user).values()]

    async def everything(log: Log) -> bytes:
        return await raw(log) + on_disk(tmp_path) + caplog.text.encode()

    async with live_app(tmp_path, settings, clock, store, "It is 82.", webhooks=(HOOK,)) as (served, http):
        log = served.log
        answers = [await talked(http, user) for user in ("ann", "bob")]
        assert len(await served.recorded(4)) == 4
        await until_stored(log, FEEDBACK, 8)
        await settled(log)
        plain = Log(log.bus, "test")  # without keys
        assert not found_in(await everything(log) + await opened_without_keys(plain), [*hers, *his, *names])
        clock.now_ms += WINDOW_MS + 1
        for number in range(OTHERS):
            await log.publish(BUFFER, other(number))
        for answer in answers:
            await trained(log, answer)
        assert found_in(await opened(log), [*hers, *his]) == {*hers, *his}, "whoever has the keys reads it all"
        report = await forgotten(log, tmp_path, "ann")
        assert len(report.keys) == 1 and report.steps and report.texts == 1
    later = Log(log.bus, "test", store=store)
    assert not found_in(await everything(later), [*hers, *his, *names])
    assert found_in(await opened(later), [*hers, *his]) == set(his), "hers is gone, his is as it was"
