"""Pages of the console, asked for in one process: what each says, also when the log, the index or a neighbour is away."""

import asyncio
import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from infra.cli.console.app import HEADERS, MAX_FIELDS
from infra.cli.console.pages import BEING_READ
from infra.cli.console.reading import IndexState, NotReadYet
from infra.cli.settings import Settings
from infra.ledger.index import FILE, PAGED
from infra.log.bus import Partition, Reader
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from infra.store.seal import seal_text
from schemas import Block, Feedback, Message, Span, make_experience, topics
from schemas.errors import BrokerUnavailable
from schemas.ids import answer_id
from schemas.topics import topic_name
from tests.actors.rig import until
from tests.infra.cli.console_rig import (
    ANN,
    BOB,
    OFTEN_S,
    SESSION,
    TOML,
    browser,
    console,
    fill,
    filled,
    is_read,
    live,
    look,
    looking,
    looking_at,
    noted,
    page_text,
    suite_answer,
)
from tests.names import subject_name

FIRST = f"/answers/{SESSION}.1-0.0-0-0"
PAGES = (
    "/", "/learning", "/answers", FIRST, "/versions", "/versions/5", "/data", "/privacy",
)  # fmt: skip
OF_THE_INDEX = ("/learning", "/answers", "/answers?text=refunds", "/data", "/privacy")


class FarLog(MemoryBus):
    """A broker that tells at once how long a log is, and whose records come only when `here` is set; and that may be away."""

    def __init__(self) -> None:
        super().__init__()
        self.here = asyncio.Event()
        self.here.set()
        self.is_away = False

    async def assigned(
        self, starts: Mapping[Partition, int], *, group: str | None = None, fetch_bytes: int = 0
    ) -> Reader:
        """See Bus."""
        await self.here.wait()
        return await super().assigned(starts, group=group, fetch_bytes=fetch_bytes)

    async def end_offsets(self, topic: str) -> dict[Partition, int]:
        """See Bus."""
        if self.is_away:
            raise BrokerUnavailable("the broker is away")
        return await super().end_offsets(topic)


async def far_log() -> tuple[Log, FarLog]:
    bus = FarLog()
    log = Log(bus, "t", store=MemoryStore())
    await fill(log)
    return log, bus


async def test_every_page_answers_before_anything_is_read_and_says_how_much_there_is_to_read(tmp_path: Path) -> None:
    log, bus = await far_log()
    bus.here.clear()
    held = sum([sum((await bus.end_offsets(topic_name("t", topic))).values()) for topic in PAGED])
    async with looking_at(Settings(app="t", folder=tmp_path), log, tmp_path, is_built=False) as (client, reading):
        said = f"The index is being built: 0 of {held:,} records are read."
        for path in ("/", "/flow", *OF_THE_INDEX):
            page = await client.get(path)
            assert page.status_code == 200 and said in page.text, path
            assert (BEING_READ in page.text) is (path in ("/", "/flow"))
        page = await client.get(FIRST)
        assert page.status_code == 503 and "Not read yet: the index is behind the log by" in page_text(page)
        bus.here.set()
        await until(lambda: is_read(reading))
        for path in ("/", *OF_THE_INDEX, FIRST):
            page = await client.get(path)
            assert page.status_code == 200 and "is being built" not in page.text, path


async def test_while_the_broker_is_away_every_page_shows_what_was_known_or_says_why_not(tmp_path: Path) -> None:
    log, bus = await far_log()
    async with looking(tmp_path, log) as (client, reading):
        for path in PAGES:
            assert (await client.get(path)).status_code == 200
        bus.is_away = True
        for path in PAGES:
            page = await client.get(path)
            assert page.status_code == 200 or (page.status_code == 503 and "the broker is away" in page_text(page))
            assert "The log cannot be read now. The pages show the last values." in page_text(page), path
        assert "question 0 about refunds" in page_text(await client.get("/answers?text=refunds"))
        bus.is_away = False
        await until(lambda: not noted(reading, "fault"))
        assert "cannot be read" not in page_text(await client.get(FIRST))


async def test_a_page_does_not_take_what_is_unread_for_what_is_not_there(tmp_path: Path) -> None:
    log = await filled()
    async with looking(tmp_path, log), looking(tmp_path, log) as (client, reading):  # the first keeps the index up
        with closing(sqlite3.connect(tmp_path / "state" / FILE)) as database, database:
            database.execute("DELETE FROM answers")
            database.execute("DELETE FROM evals")
        assert "The retained log has none of them." in page_text(await client.get("/versions/5"))
        reading._held["index"] = (float("inf"), IndexState(left={"batches": 3}, is_whole=True))
        page = page_text(await client.get("/versions/5"))
        assert "Not read yet: the index is behind the log by 3 of batches." in page
        assert "The retained log has none of them." not in page and "not evaluated" not in page
        found = page_text(await client.get("/answers?text=refunds"))
        assert "No matches in the index so far. Not read yet: the index is behind" in found
        with pytest.raises(NotReadYet, match="Look again in a moment"):
            await reading.answer(live(99, "", "").id)


async def test_an_answer_is_looked_for_in_the_index_that_was_made_anew_after_it_was_removed(tmp_path: Path) -> None:
    log, later = await filled(), live(80, "a later wish", "granted")
    async with looking(tmp_path, log) as (client, _), asyncio.timeout(30):
        for file in (tmp_path / "state").glob(f"{FILE}*"):
            file.unlink()
        await log.publish(topics.EXPERIENCES, Block((later,)))
        while (page := await client.get(f"/answers/{later.id}")).status_code != 200:  # noqa: ASYNC110 (it is made by a task)
            await asyncio.sleep(OFTEN_S)
        assert "a later wish" in page_text(page)


async def test_an_index_that_is_not_there_and_a_page_that_broke_say_so_under_the_same_headers(tmp_path: Path) -> None:
    log = await filled()
    async with looking(tmp_path, log) as (client, _):
        for change, status, said in (
            ("UPDATE answers SET time_ms = 'then'", 500, "The page failed"),
            ("DROP TABLE answers", 503, "The index is being rebuilt"),
        ):
            with closing(sqlite3.connect(tmp_path / "state" / FILE)) as database, database:
                database.execute(change)
            page = await client.get("/answers")
            assert page.status_code == status and said in page_text(page)
            assert {name: page.headers.get(name) for name in HEADERS} == HEADERS


def test_a_log_whose_beginning_was_removed_shows_what_is_left_and_says_what_is_gone(tmp_path: Path) -> None:
    async def remove(log: Log) -> None:
        for topic in (topics.EXPERIENCES, topics.VERIFIED, topics.BUFFER, topics.BATCHES):
            for at, end in (await log.bus.end_offsets(log.name(topic))).items():
                await log.bus.delete_records(at, end)

    for path, page in zip(PAGES, look(tmp_path, *PAGES, more=remove), strict=True):
        assert page.status_code == (404 if path == FIRST else 200) and len(page_text(page)) > 20, path
        assert path != "/versions/5" or "Held back by gate" in page_text(page)


def test_who_was_forgotten_is_gone_from_every_page_and_no_key_opens_them(tmp_path: Path) -> None:
    async def forget(log: Log) -> None:
        assert log.keys is not None
        await asyncio.to_thread(log.keys.destroy, subject_name("acme", "bob"))

    bob, ann, *others = look(
        tmp_path, f"/answers/{BOB}", f"/answers/{ANN}", *PAGES, "/answers?text=Theodor", more=forget
    )
    assert "Forgotten Its user was forgotten, so nobody can read it." in page_text(bob) and "Sealed" in page_text(ann)
    assert not [page for page in (bob, *others) if "Theodor" in page_text(page).replace('value="Theodor"', "")]


def test_a_run_of_which_nothing_is_there_says_so_on_every_page(tmp_path: Path) -> None:
    log = Log(MemoryBus(), "t", store=MemoryStore())
    told = {
        "/": "No role has reported yet.", "/learning": "No measurements yet.", "/answers": "No matches.",
        "/versions": "No version was published yet.", "/data": "None: every record was processed.", "/privacy": "no openings",
    }  # fmt: skip
    pages = look(tmp_path, *told, log=log, more=lambda empty: empty.create_topics(partitions=1, keep_ms=-1))
    for page, (path, words) in zip(pages, told.items(), strict=True):
        assert page.status_code == 200 and words in page_text(page), path


def test_an_answer_of_a_task_whose_id_has_a_slash_has_its_page(tmp_path: Path) -> None:
    slashed = make_experience(
        id="HumanEval/0.0.0-0-0", group="HumanEval/0.0", episode=0, group_size=1, spans=(Span(2, 4, 0),),
        tokens=[1, 2, 3, 4], logprobs=[-0.5, -0.5],
        messages=(Message(role="user", content="write it"), Message(role="assistant", content="written")),
    )  # fmt: skip
    page, found = look(
        tmp_path, "/answers/HumanEval%2F0.0.0-0-0", "/answers?text=HumanEval/0.0.0-0-0",
        more=lambda log: log.publish(topics.EXPERIENCES, Block((slashed,))),
    )  # fmt: skip
    assert page.status_code == 200 and "write it" in page.text
    assert found.status_code == 303 and found.headers["location"] == "/answers/HumanEval/0.0.0-0-0"


async def test_any_number_may_be_asked_for_and_a_form_of_too_many_fields_is_refused_in_words(tmp_path: Path) -> None:
    async with looking(tmp_path, await filled()) as (client, _):
        for before in ("99999999999999999999", "\u00b2", "-1", "1e3", "\u0663"):
            for path in ("/data", "/answers", "/versions"):
                assert (await client.get(path, params={"before": before})).status_code == 200
        body = "&".join(f"a{at}=1" for at in range(MAX_FIELDS + 1))
        for path in ("/enter", "/open"):
            page = await client.post(path, content=body, headers={"origin": "http://127.0.0.1:1"})
            assert page.status_code == 403 and f"more than {MAX_FIELDS} fields" in page.text


def test_one_answers_page_has_its_whole_life(tmp_path: Path) -> None:
    (page,) = look(tmp_path, FIRST)
    text = page_text(page)
    assert "question 0 about refunds" in text and "answer 0" in text
    assert page.text.count('class="tok l') > 6 and ' odd"' in page.text, "tokens by chance, and by version"
    assert "exact 1 the whole answer version 1" in text and "Processors: validate@1 → exact@1." in text
    said = text.partition("Feedback")[2].partition("History")[0]
    assert re.findall(r"user (?:\w+ )?([01])", said) == ["0", "1"], "feedback as it came and as it was revised"
    assert "buffered 1 +0.5" in text and "trained, step 9 – +0.5 1 lane live, on version 4" in text
    assert "First trained into version 5" in text
    assert "Neighbouring turns of its session." in text and "question 1 about refunds" in text
    assert "Nothing else has happened" not in text


def test_an_answer_that_waits_and_one_to_a_suite_say_so(tmp_path: Path) -> None:
    waits, listed, evaluated = look(
        tmp_path, f"/answers/{live(4, '', '').id}", "/answers?suite=dev", f"/answers/{suite_answer(3, 2).id}"
    )
    way = page_text(waits).partition("History")[2].partition("Its session")[0]
    assert "No events after the answer yet." in way
    rows = page_text(listed).rpartition("became")[2]
    assert rows.count("evaluated") == 48 and "pending" not in rows
    assert "Not trained: it is part of an evaluation." in page_text(evaluated)


def test_what_was_written_of_an_answer_is_shown_where_it_is_of_nobody_and_else_stays_sealed(tmp_path: Path) -> None:
    nobodys = live(90, "sum", "it is 4", id="sum-7.0-0-0", group="sum-7", lane="usual", turn=-1)

    async def write(log: Log) -> None:
        assert log.keys is not None
        await log.publish(topics.EXPERIENCES, Block((nobodys,)))
        for name in (nobodys.id, live(0, "", "").id):
            said = await asyncio.to_thread(seal_text, "a fine answer", log.keys, name)
            await log.publish(
                topics.VERIFIED, Feedback(ref=answer_id(name), id="w", source="user", rater="r", text=said)
            )

    shown, shut = map(page_text, look(tmp_path, f"/answers/{nobodys.id}", FIRST, more=write))
    assert "a fine answer" in shown and "a fine answer" not in shut and "text sealed" in shut


@pytest.mark.parametrize("has_gate", [False, True])
def test_a_version_that_nobody_decided_says_why_which_version_customers_get_and_the_command(has_gate: bool) -> None:
    gate = '[[master.evals]]\nsuite = "dev"\n[master.gate.suites.dev]\nat_least = 0.5\n' if has_gate else ""
    with console(TOML + gate) as here, browser(here, "look") as client:
        text = page_text(client.get("/versions/6"))
        assert ("No gate is configured ( [master.gate] with suites of [[master.evals]] )" in text) is not has_gate
        assert ("There is no decision about it." in text) is has_gate
        assert "Customers get version 2 ." in text
        assert re.search(r"headrace promote 6 --config \S+headrace.toml", text)
        assert "Customers get this version." in page_text(client.get("/versions/2"))
        held = page_text(client.get("/versions/5"))
        assert "Held back by gate: dev: 0.500, expected at least 0.600. Customers get version 2 ." in held
        assert client.get("/versions/99").status_code == client.get("/versions/x").status_code == 404
