"""A run in memory with something on every page of the console, and the console over it on a port of its own."""

import asyncio
import math
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from actors.gateway.access.keys import Scope, create_key, revoke_key
from infra.cli.console.access import ConsoleAccess
from infra.cli.console.app import SecurityHeaders
from infra.cli.console.reading import Reading
from infra.cli.console.serve import CONSOLE_BOUNDS, made
from infra.cli.options import SettingsFile
from infra.cli.settings import Settings, load_settings
from infra.ledger.index import FILE, LogIndex
from infra.local.http_server import HttpServer, bound, make_server
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from infra.store.seal import sealed
from schemas import (
    Batch,
    BatchItem,
    Block,
    Closure,
    DeadLetter,
    Directive,
    DropMarker,
    EvalResult,
    Experience,
    Feedback,
    Fence,
    Message,
    PolicyEvent,
    Progress,
    Score,
    Span,
    make_experience,
    topics,
)
from schemas.ids import answer_id
from tests.actors.rig import until
from tests.names import subject_name

SESSION = "m" * 64
HOSTILE = {
    "markup": "<script>document.title='taken'</script><img src=x onerror=alert(1)><b>bold</b>",
    "control": "a\x1b]0;taken\x07b\x00c\u202edesrever\u2066",
    "turned": "שלום עולם, مرحبا بالعالم",
    "emoji": "👩‍👩‍👧‍👦 🇩🇪 ✅",
}
ANN, BOB, MADE = (f"{SESSION}.1-{number}.0-0-0" for number in (22, 23, 24))
SECRET = "my sister is called Wilhelmina"  # nothing of it is written otherwise in a page
LINK = "the-link-of-this-test"
OFTEN_S = 0.05  # between two readings of the log
TOML = 'app = "t"\n[policy]\nmodel = "model"\n[store]\nurl = "store"\n'


def live(number: int, asked: str, said: str, *, version: int = 3, **more: object) -> Experience:
    """One answer of production, on two versions where `number` is even."""
    group = f"{SESSION}.1-{number}"
    spans = (Span(2, 4, version), Span(4, 6, version + 1)) if number % 2 == 0 else (Span(2, 6, version),)
    header: dict[str, object] = {
        "id": f"{group}.0-0-0", "group": group, "episode": 0, "group_size": 1, "spans": spans, "lane": "live",
        "tenant": "acme", "turn": 0,
    }  # fmt: skip
    return make_experience(
        tokens=[1, 2, 3, 4, 5, 6], logprobs=[-0.01, -0.7, -1.5, -4.0],
        messages=(Message(role="user", content=asked), Message(role="assistant", content=said)),
        **(header | more),  # type: ignore[arg-type]
    )  # fmt: skip


def suite_answer(version: int, task: int) -> Experience:
    """Answer of a version to a task of the suite dev."""
    group, right = f"eval-dev-{version}.{task}", (task + version) % 3 > 0
    return make_experience(
        id=f"{group}.0-0-0", group=group, episode=0, group_size=1, spans=(Span(2, 3, version, 0.0, False),), suite="dev",
        task=f"add-{task}", answer="7", held_out=True, tokens=[1, 2, 3], logprobs=[-0.5],
        messages=(
            Message(role="user", content=f"what is {task} and {version % 2}?"),
            Message(role="assistant", content=f"it is {task} and so on" if right else f"it is not {task} and so on"),
        ),
        scores=(Score("exact", float(right), None, "1"),),
    )  # fmt: skip


async def fill(log: Log) -> None:
    """Versions with decisions, answers with all that can become of them, letters, and roles."""
    await log.create_topics(partitions=2, keep_ms=-1)
    publish = log.publish
    await publish(topics.BATCHES, Fence(run="t", token=1))
    for version in range(8):
        stats = {"bytes": 1e6, "loss": 0.3 - 0.01 * version}
        event = PolicyEvent(
            event="published", policy="main", version=version, parent=version - 1, step=version * 2, stats=stats
        )
        await publish(topics.POLICIES, event)
        report = Progress(
            role="train", instance="train/1", version=version, state="learning", counters={"steps": 2.0 * version},
            gauges={"reward_mean": 0.1 * version, "live/entropy": 1.0 / (version + 1), "live/k3": 0.02, "grad_norm": 2.0},
        )  # fmt: skip
        await publish(topics.REPORTS, report)
        for task in range(6):
            block = Block((suite_answer(version, task),))
            await publish(topics.EXPERIENCES, block)
            await publish(topics.VERIFIED, block)
        right = sum((task + version) % 3 > 0 for task in range(6))
        result = EvalResult(
            policy="main", version=version, suite="dev", num_tasks=6, num_correct=right, interval=(0.2, 0.9)
        )
        await publish(topics.EVALS, result)
    await publish(
        topics.POLICIES, PolicyEvent(event="promoted", policy="main", version=2, channel="stable", owner="ann")
    )
    held = PolicyEvent(
        event="held", policy="main", version=5, channel="stable", owner="gate", token=1,
        reason="dev: 0.500, expected at least 0.600", stats={"dev": 0.5, "stable/dev": 0.667},
    )  # fmt: skip
    await publish(topics.POLICIES, held)
    await answers(log)
    letter = DeadLetter(
        topic="experiences", partition=0, offset=9, stage="verify", reason="bad frame", value=b"HR", key=b"k"
    )
    await publish(topics.DEAD_LETTERS, letter)


async def answers(log: Log) -> None:
    """Twelve of production: trained, dropped, pending, sealed, hostile, long, many turns."""
    assert log.keys is not None
    texts = list(HOSTILE.items())
    made_of = [live(number, f"question {number} about refunds", f"answer {number}") for number in range(6)]
    made_of += [live(10 + at, f"{name} {text}", f"said {text}") for at, (name, text) in enumerate(texts)]
    for each in made_of:
        await log.publish(topics.EXPERIENCES, Block((each,)))
        scored = msgspec.structs.replace(
            each, stamps=("validate@1", "exact@1"), scores=(Score("exact", 1.0, None, "1"),)
        )
        await log.publish(topics.VERIFIED, Block((scored,)))
    turns = tuple(Message(role="user" if at % 2 == 0 else "assistant", content=f"turn {at}") for at in range(40))
    many = live(20, "", "").with_bulk(messages=turns)
    await log.publish(topics.EXPERIENCES, Block((many,)))
    await log.publish(topics.EXPERIENCES, Block((live(21, "long", "ten megabytes " * 750_000),)))
    shut = live(22, SECRET, "a fine name", subject=subject_name("acme", "ann"))
    await log.publish(topics.EXPERIENCES, sealed(Block((shut,)), log.keys, subject_name("acme", "ann")))
    other = live(23, "call me Theodor", "gladly", subject=subject_name("acme", "bob"))
    await log.publish(topics.EXPERIENCES, sealed(Block((other,)), log.keys, subject_name("acme", "bob")))
    await log.publish(topics.EXPERIENCES, Block((live(24, "made from question 0", "made", parent=made_of[0].id),)))
    dropped = made_of[1]
    marker = DropMarker(
        id=dropped.id, group=dropped.group, episode=0, group_size=1, reason="too short", stage="verify", processor="mine@1"
    )  # fmt: skip
    await log.publish(topics.VERIFIED, marker)
    for value in (0.0, 1.0):
        said = Feedback(ref=answer_id(made_of[0].id), id=f"f{value}", value=value, source="user", rater="r")
        await log.publish(topics.VERIFIED, said)
    item = BatchItem(id=made_of[0].id, partition=0, offset=0, index=0, lane="live", advantage=0.5, min_version=3)
    await log.publish(topics.BUFFER, Block((msgspec.structs.replace(made_of[0], reward=1.0, advantage=0.5),)))
    closed = Closure(group=made_of[0].group, outcome="buffered", lane="live", mean_reward=1.0, experiences=1)
    await log.publish(topics.PROGRESS, closed)
    await log.publish(topics.BATCHES, Batch(run="t", token=1, step=9, version=4, items=(item,)))


class Console:
    """A console over the log of `fill` that serves in a thread of its own."""

    def __init__(self) -> None:
        self.url = ""
        self.store = MemoryStore()
        self.keys: dict[str, str] = {}
        self.ahead_s = 0.0  # how far the clock of its doors is ahead; only grows
        self.log: Log
        self.routes: Sequence[BaseRoute]
        self.ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._server: HttpServer

    def run(self, settings: Settings, config: Path) -> None:
        """Serve until `stop`."""
        try:
            asyncio.run(self._serve(settings, config))
        finally:
            self.ready.set()

    async def _serve(self, settings: Settings, config: Path) -> None:
        self._loop, self.log = asyncio.get_running_loop(), Log(MemoryBus(), "t", store=self.store)
        await fill(self.log)
        scopes: dict[str, Scope] = {
            "look": "look",
            "unseal": "unseal",
            "serve": "serve",
            "revoked": "unseal",
            "expired": "unseal",
        }
        for name, scope in scopes.items():
            lives_s = -1.0 if name == "expired" else 0.0
            made_key, self.keys[name] = create_key(
                self.store, tenant="acme", scopes=(scope,), train="no", rpm=0, tpm=0, lives_s=lives_s
            )
            if name == "revoked":
                revoke_key(self.store, made_key.id)
        sock = bound("127.0.0.1:0")
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        access = ConsoleAccess(self.store, LINK, lambda: time.time() + self.ahead_s)
        command, state = SettingsFile(config).arguments, settings.folder / "state"
        run = made(settings, self.log, state, access=access, command=command, address=address, every_s=OFTEN_S)
        async with run as (app, reading):
            assert isinstance(app, SecurityHeaders) and isinstance(app.app, Starlette)
            self.url, self.routes = f"http://{address}", app.app.routes
            self._server = make_server(app, 2.0, CONSOLE_BOUNDS)
            serving = asyncio.create_task(self._server.serve(sockets=[sock]))
            await until(lambda: self._server.started and is_read(reading))
            self.ready.set()
            await serving

    def newest_order(self) -> Directive:
        """The newest order in the log."""

        async def read() -> Directive:
            return [message.value async for message in self.log.scan(topics.POLICIES)][-1]  # type: ignore[return-value]

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result(timeout=20)

    def stop(self) -> None:
        """End it."""
        self._loop.call_soon_threadsafe(self._server.leave)


def is_read(reading: Reading) -> bool:
    """True once the index has read the log to its end."""
    return noted(reading, "whole") == 1


def noted(reading: Reading, name: str) -> object:
    """A fact about its index, None for none."""
    with closing(LogIndex(reading._path, run="t", policy="main")) as index:
        return index.note(name)


def page_text(page: httpx.Response) -> str:
    """Visible text of a page, without tags."""
    main = page.text.partition('<main id="main"')[2]
    return " ".join(re.sub(r"<[^>]+>", " ", main).split())


async def filled() -> Log:
    """A log of `fill`."""
    log = Log(MemoryBus(), "t", store=MemoryStore())
    await fill(log)
    return log


def look(
    folder: Path, *paths: str, more: Callable[[Log], Awaitable[object]] | None = None, log: Log | None = None
) -> list[httpx.Response]:
    """The pages at these addresses, of a console over a log. log: that of `fill` by default. more: publishes more first."""

    async def main() -> list[httpx.Response]:
        read = log or await filled()
        if more is not None:
            await more(read)
        async with looking(folder, read) as (client, _):
            return [await client.get(path) for path in paths]

    return asyncio.run(main())


def folded(folder: Path, *makes: Callable[[Log], Awaitable[object]], keep_ms: float = math.inf) -> LogIndex:
    """The index with pages of a new log, read again after each of `makes`."""
    index = LogIndex(folder / FILE, run="t", policy="main", keep_ms=keep_ms)

    async def main() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await log.create_topics(partitions=2, keep_ms=-1)
        for make in makes:
            await make(log)
            await index.refresh(log)

    asyncio.run(main())
    index.database.row_factory = sqlite3.Row
    return index


@contextmanager
def browser(here: Console, key: str = "") -> Iterator[httpx.Client]:
    """A browser that has signed in with a key, if that opens."""
    # It speaks without TLS: certificates that are not read cost no time.
    with httpx.Client(base_url=here.url, headers={"origin": here.url}, verify=False) as client:
        if key:
            client.post("/enter", data={"key": here.keys.get(key, key)})
        yield client


def form_token(client: httpx.Client, path: str = "/versions") -> str:
    """The token that a form of a page carries, of the one to leave or another."""
    return client.get(path).text.partition('name="token" value="')[2].partition('"')[0]


@asynccontextmanager
async def looking(folder: Path, log: Log) -> AsyncIterator[tuple[httpx.AsyncClient, Reading]]:
    """A viewer of a console over a log, in this process. folder: of the run."""
    async with looking_at(Settings(app="t", folder=folder), log, folder / "state") as found:
        yield found


@asynccontextmanager
async def looking_at(
    settings: Settings, log: Log, state: Path, *, is_built: bool = True
) -> AsyncIterator[tuple[httpx.AsyncClient, Reading]]:
    """A viewer of a console with these settings; is_built: once it has read the log."""
    access, address = ConsoleAccess(MemoryStore(), LINK), "127.0.0.1:1"
    run = made(settings, log, state, access=access, command=(), address=address, every_s=OFTEN_S)
    async with run as (app, reading):
        reading.held_s = 0.0
        if is_built:
            await until(lambda: is_read(reading))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{address}") as client:
            await client.get("/enter", params={"link": LINK})
            yield client, reading


@contextmanager
def console(toml: str = TOML) -> Iterator[Console]:
    """A console that serves."""
    with tempfile.TemporaryDirectory() as name:
        config, here = Path(name) / "headrace.toml", Console()
        config.write_text(toml)
        thread = threading.Thread(target=here.run, args=(load_settings(config), config), daemon=True)
        thread.start()
        here.ready.wait(timeout=60)
        assert here.url, "it did not start: see the error of its thread"
        try:
            yield here
        finally:
            here.stop()
            thread.join(timeout=20)
