"""Measures the console over an index of a million experiences: its first page, searches, and its memory.

The index is folded here from encoded records, as a console does from a log. Then a console starts in a process of its own, over
that index and an empty log, and is asked as browsers ask. Last one starts on a log of as many experiences without an index
(`console_first`).
"""

import asyncio
import http.client
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

from infra.cli.bench.looking.console_first import LINK, LOOKS, first_start, keeper
from infra.cli.bench.looking.console_load import cpu_of
from infra.cli.console.access import ConsoleAccess
from infra.cli.console.fold import Folder, held_in
from infra.cli.console.index import ConsoleIndex
from infra.log.bus import Record
from schemas import Block, Control, Feedback, Message, PolicyEvent, Score, Span, encode, make_experience, topics
from schemas.ids import experience_id, request_group, session_name

CHUNK = 2000
WORDS = [
    "where", "is", "my", "order", "refund", "late", "parcel", "broken", "screen", "cancel", "invoice", "address", "change",
    "thanks", "wrong", "size", "blue", "red",
]  # fmt: skip
SEARCHES = 400
VERSIONS = 500
VIEWS = ("/", "/?fragment=1", "/learning", "/answers", "/versions", "/data", "/privacy")
ROUNDS = 10  # of all views


def run(*, experiences: int = 1_000_000, seed: int = 0, looks: int = LOOKS) -> dict[str, float]:
    """Seconds to fold and to the first page, milliseconds of a search, MB of the console's process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began_s = time.perf_counter()
        fill(folder, experiences, seed)
        figures = {"experiences": float(experiences), "build_s": time.perf_counter() - began_s}
        path = folder / "state" / "console.sqlite"
        figures["index_mb"] = path.stat().st_size / 2**20
        began_s = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-m", "infra.cli.bench.looking.console", str(folder), "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None
            port = int(child.stdout.readline())
            figures["started_s"] = time.perf_counter() - began_s
            figures |= asked(port, child.pid, random.Random(seed))
            status = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii")
            figures["memory_mb"] = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        finally:
            child.terminate()
            child.wait(timeout=30)
        return figures | first_start(folder / "old", experiences, looks)


def fill(folder: Path, experiences: int, seed: int) -> None:
    """The index of so many answers of production."""
    drawn = random.Random(seed)
    index = ConsoleIndex(folder / "state" / "console.sqlite")
    folder_of = Folder(index, run="bench", policy="main")
    for start in range(0, experiences, CHUNK):
        numbers = range(start, min(experiences, start + CHUNK))
        blocks = [_record(topics.EXPERIENCES.name, number, _block(number, experiences, drawn)) for number in numbers]
        for topic in (topics.EXPERIENCES, topics.VERIFIED):
            folder_of.fold(topic, _opened(blocks), {})
        said = [
            _record(
                "verified",
                number,
                Feedback(ref=_name(number), id="f", value=float(drawn.random() < 0.5), source="user"),
            )
            for number in numbers
            if drawn.random() < 0.2
        ]
        folder_of.fold(topics.VERIFIED, _opened(said), {})
    events = [
        _record("policies", at, PolicyEvent(event="published", policy="main", version=at, parent=at - 1, step=at))
        for at in range(VERSIONS)
    ]
    folder_of.fold(topics.POLICIES, _opened(events), {})
    index.close()


def asked(port: int, pid: int, drawn: random.Random) -> dict[str, float]:
    """First page and searches, over one connection that has signed in; and processor time a page of process `pid`."""
    client = http.client.HTTPConnection("127.0.0.1", port)
    client.request("GET", f"/enter?link={LINK}")
    answer = client.getresponse()
    answer.read()
    cookie = str(answer.headers["set-cookie"]).partition(";")[0]

    def get(path: str) -> float:
        began_s = time.perf_counter()
        client.request("GET", path, headers={"cookie": cookie})
        page = client.getresponse()
        page.read()
        assert page.status == 200, f"{path}: {page.status}"
        return time.perf_counter() - began_s

    figures = {"first_page_s": get("/"), "first_answers_s": get("/answers")}
    took_ms = sorted(1000 * get(f"/answers?{urlencode(_query(drawn))}") for _ in range(SEARCHES))
    figures |= {"search_ms_p50": took_ms[len(took_ms) // 2], "search_ms_p95": took_ms[len(took_ms) * 95 // 100]}
    figures["search_ms_max"] = took_ms[-1]
    figures["learning_page_s"] = get("/learning")
    figures["data_page_s"] = get("/data")
    before_s = cpu_of(pid)
    for path in ROUNDS * VIEWS:
        get(path)
    return figures | {"page_cpu_ms": 1000 * (cpu_of(pid) - before_s) / (ROUNDS * len(VIEWS))}


def _query(drawn: random.Random) -> dict[str, str]:
    """What a person may look for: one to three conditions, some of which nothing fits."""
    every = {
        "text": " ".join(drawn.sample(WORDS, drawn.randint(1, 3))), "version": str(drawn.randrange(VERSIONS)),
        "tenant": drawn.choice(("acme", "globex", "absent")), "said": drawn.choice(("yes", "no")), "lane": "live",
        "low": "0.5", "fate": drawn.choice(("pending", "too short")),
        "session": session_name("bench", str(drawn.randrange(10**5))),
    }  # fmt: skip
    return {name: every[name] for name in drawn.sample(sorted(every), drawn.randint(1, 3))}


def _name(number: int) -> str:
    return experience_id(request_group(session_name("bench", str(number // 4)), 7, number), 0, 0)


def _record(topic: str, number: int, value: Block | Feedback | PolicyEvent) -> Record:
    return Record(f"bench.{topic}", 0, number, 1_763_715_600_000 + 100 * number, b"", encode(value))


def _opened(records: Sequence[Record]) -> list[tuple[Record, Control | Block | None]]:
    return list(zip(records, held_in(records, [None] * len(records)), strict=True))


def _block(number: int, experiences: int, drawn: random.Random) -> Block:
    version = number * VERSIONS // experiences
    one = make_experience(
        id=_name(number), group=_name(number).rpartition(".")[0], episode=0, group_size=1, lane="live",
        task=f"t-{number % 5000}",
        tenant="acme" if number % 3 else "globex", spans=(Span(6, 11, version),), tokens=list(range(11)), logprobs=[-0.5] * 5,
        messages=(
            Message(role="user", content=" ".join(drawn.choices(WORDS, k=12)) + f" {number}"),
            Message(role="assistant", content=" ".join(drawn.choices(WORDS, k=20))),
        ),
        scores=(Score("exact", float(number % 2), None, "1"),),
    )  # fmt: skip
    return Block((one,))


async def serve(folder: Path, experiences: int) -> None:
    """A console over the index in `folder` and a log of so many experiences, until a signal ends it."""
    from infra.cli.bench.common.made_log import APP, MadeBus
    from infra.cli.console import serve as serving
    from infra.cli.console.leaving import Leaving
    from infra.cli.settings import Settings
    from infra.log.log import Log
    from infra.store.memory import MemoryStore

    leaving, store = Leaving(), MemoryStore()
    log = Log(MadeBus(experiences), APP, store=store)
    sock = serving.bound("127.0.0.1:0")
    port = sock.getsockname()[1]
    address = f"127.0.0.1:{port}"
    settings = Settings(app=APP, folder=folder)
    apart = partial(keeper, experiences=experiences) if experiences else None
    run = serving.made(
        settings, log, folder / "state", access=ConsoleAccess(store, LINK), command=(), address=address, keeper=apart
    )  # fmt: skip
    async with run as (app, _):
        sock.listen()
        print(port, flush=True)
        await serving.serve(app, sock, leaving)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
