"""Pages of the console, asked for in one process: what each says, also when the log, the index or a neighbour is away."""

import asyncio
import re
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.cli.console.alarms import alarms_of
from infra.cli.console.fold import Folder
from infra.cli.console.index import ConsoleIndex
from infra.cli.console.keeping import FILE, IndexState
from infra.cli.console.learning import charts_of
from infra.cli.console.pages_look import HELP, HOWTO
from infra.cli.console.search import Query, search
from infra.cli.console.serve import command_of
from infra.cli.look.console_bounds import read_only
from infra.cli.settings import ConsoleConfig
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from schemas import Batch, BatchItem, Block, PolicyEvent, Rollback, Skip, topics
from schemas.errors import BrokerUnavailable, ConfigError
from schemas.ids import subject_of
from tests.infra.cli.console_rig import ANN, BOB, SESSION, fill, live, looking, until

PAGES = (
    "/", "/learning", "/learning?over=time", "/answers", f"/answers/{SESSION}.1-0.0-0-0", "/versions", "/versions/5",
    "/versions/compare?a=0&b=5", "/data", "/privacy",
)  # fmt: skip
FIRST = f"/answers/{SESSION}.1-0.0-0-0"
Main = Callable[[], Coroutine[Any, Any, None]]


def text_of(page: httpx.Response) -> str:
    """What a person reads of a page, tags left out."""
    main = page.text.partition('<main id="main"')[2]
    return " ".join(re.sub(r"<[^>]+>", " ", main).split())


async def filled() -> Log:
    log = Log(MemoryBus(), "t", store=MemoryStore())
    await fill(log)
    return log


def test_a_version_names_every_answer_it_learned_from_though_later_ones_did_too(tmp_path: Path) -> None:
    log = Log(MemoryBus(), "t", store=MemoryStore())
    index = ConsoleIndex(tmp_path / "console.sqlite")
    answers = [live(number, f"question {number}", "said") for number in range(4)]

    def learned(version: int) -> list[str]:
        database = read_only(index.path)
        rows = search(database, Query(learned=version)).rows
        database.close()
        return sorted(row["asked"] for row in rows)

    async def main() -> None:
        await log.create_topics(partitions=1, keep_ms=-1)
        for one in answers:
            await log.publish(topics.EXPERIENCES, Block((one,)))
        for step, chosen in ((1, answers[:3]), (2, answers[1:]), (3, answers[:2])):
            items = tuple(
                BatchItem(id=one.id, partition=0, offset=0, index=0, lane="live", advantage=0.5, min_version=3)
                for one in chosen
            )
            await log.publish(topics.BATCHES, Batch(run="t", token=1, step=step, version=step - 1, items=items))
            event = PolicyEvent(event="published", policy="main", version=step, parent=step - 1, step=step)
            await log.publish(topics.POLICIES, event)
        folder = Folder(index, run="t", policy="main")
        await folder.refresh(log)
        assert learned(1) == ["question 0", "question 1", "question 2"]
        assert learned(2) == ["question 1", "question 2", "question 3"]
        await log.publish(topics.BATCHES, Skip(run="t", token=1, step=3, reason="not finite"))
        await log.publish(
            topics.BATCHES,
            Rollback(run="t", token=1, from_step=2, to_step=2, restored_version=1, version=2, reason="spike"),
        )
        await folder.refresh(log)
        assert learned(3) == learned(2) == []
        assert len(learned(1)) == 3
        fates = index.database.execute("SELECT fate FROM answers ORDER BY n").fetchall()
        assert [fate for (fate,) in fates] == ["trained", "trained", "trained", "rolled back"]
        index.close()

    asyncio.run(main())


def test_runs_are_drawn_over_one_another_each_by_its_name(tmp_path: Path) -> None:
    """Two other runs beside this one, each with suites and curves of its own."""
    for name in ("last-week", "last-month"):
        asyncio.run(_fold(tmp_path / name / "state"))

    async def main() -> None:
        console = ConsoleConfig(beside=("../last-week", "../last-month"))
        async with looking(tmp_path / "now", await filled(), console) as (client, _):
            page = await client.get("/learning")
            suite = page.text.partition("Suite dev")[2].partition("</figure>")[0]
            assert suite.count("<polyline") == 3 and suite.count('<polyline class="line s1 dashed"') == 1
            assert [name for name in ("last-week", "last-month") if f"</i>{name}" in suite] == [
                "last-week",
                "last-month",
            ]
            (told,) = [one for one in re.findall("<title>([^<]*)", suite) if "v5:" in one]
            assert told.splitlines() == [
                f"{run} v5: 66.7% (20.0% to 90.0%), 4 of 6" for run in ("t", "last-week", "last-month")
            ]
            entropy = page.text.partition("<figcaption>Entropy")[2].partition("</figure>")[0]
            assert entropy.count("<polyline") == 3 and "last-week live/entropy v3: 0.25" in entropy

    asyncio.run(main())


async def _fold(state: Path) -> None:
    index = ConsoleIndex(state / "console.sqlite")
    await Folder(index, run="t", policy="main").refresh(await filled())
    index.close()


def test_a_run_that_was_never_looked_at_cannot_lie_beside_another_and_says_what_to_do(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="run `headrace console` on that run once"):
            async with looking(tmp_path / "now", await filled(), ConsoleConfig(beside=("../nowhere",))):
                pass

    asyncio.run(main())


def test_whatever_a_pointer_meets_on_a_chart_names_its_version(tmp_path: Path) -> None:
    async def main() -> None:
        async with looking(tmp_path, await filled()) as (client, reading):
            for chart in [one for _, _, one in await reading.ask(lambda it: charts_of([("t", it)], by_time=True))]:
                told = re.findall("<title>([^<]*)", chart)
                assert told and all(re.match(r"v\d+\b(?!\.)|.* v\d+: ", one) for one in told), told
            page = (await client.get("/learning")).text
            areas = page.partition("<figcaption>What became of answers")[2].partition("</figure>")[0]
            titles = [one.splitlines() for one in re.findall("<g>.*?<title>([^<]*)", areas, re.DOTALL)]
            assert titles == [["v3", "pending 6", "too short 1"], ["v4", "trained 1", "pending 7"]]

    asyncio.run(main())


class AwayBroker(MemoryBus):
    """A broker that goes, and comes back."""

    is_away = False

    async def end_offsets(self, topic: str) -> dict[Partition, int]:
        if self.is_away:
            raise BrokerUnavailable("the broker is away")
        return await super().end_offsets(topic)


def test_while_the_broker_is_away_every_page_shows_what_was_known_or_says_why_not(tmp_path: Path) -> None:
    async def main() -> None:
        bus = AwayBroker()
        log = Log(bus, "t", store=MemoryStore())
        await fill(log)
        async with looking(tmp_path, log) as (client, reading):
            for path in PAGES:
                assert (await client.get(path)).status_code == 200
            bus.is_away, kept = True, reading.kept
            await until(lambda: "away" in reading.kept.fault)
            reading.forget_fresh()
            for path in PAGES:
                page = await client.get(path)
                assert page.status_code == 200 or (page.status_code == 503 and "the broker is away" in text_of(page))
                assert "The log cannot be read now. The pages show what was read before." in text_of(page), path
            assert "question 0 about refunds" in text_of(await client.get("/answers?text=refunds"))
            counted = IndexState(left={"experiences": 9000}, held={"experiences": 21_000, "batches": 9}, is_traced=True)
            reading.kept = counted
            said = "The index is being built: 12,009 of 21,009 records are read; to be read: 9,000 of experiences."
            assert said in text_of(await client.get("/"))
            reading.kept = kept
            bus.is_away = False
            await until(lambda: not reading.kept.fault)
            assert "cannot be read" not in text_of(await client.get(FIRST))

    asyncio.run(main())


def test_a_page_asked_while_the_index_is_made_anew_finds_all_of_it_or_none(tmp_path: Path) -> None:
    async def main() -> None:
        index = ConsoleIndex(tmp_path / "console.sqlite")
        log = await filled()
        await Folder(index, run="t", policy="main").refresh(log)
        database = read_only(index.path)
        counts: set[int] = set()

        def ask() -> None:
            while len(counts) < 2:
                search(database, Query(text="refunds"))
                counts.add(database.execute("SELECT count(*) FROM answers").fetchone()[0])

        async with asyncio.timeout(30):
            asking = asyncio.create_task(asyncio.to_thread(ask))
            while not counts:  # noqa: ASYNC110 (a thread asks)
                await asyncio.sleep(0)
            await asyncio.to_thread(index.begin_anew)
            await asking
        assert 0 in counts
        database.close()
        index.close()

    asyncio.run(main())


def test_an_index_that_is_not_there_yet_is_said(tmp_path: Path) -> None:
    async def main() -> None:
        async with looking(tmp_path, await filled()) as (client, _):
            with closing(sqlite3.connect(tmp_path / "state" / FILE)) as database:
                database.execute("DROP TABLE answers")
            page = await client.get("/answers")
            assert page.status_code == 503 and "The index is being built anew" in text_of(page)

    asyncio.run(main())


def test_a_page_of_a_version_does_not_take_what_is_unread_for_what_is_not_there(tmp_path: Path) -> None:
    async def main() -> None:
        log = await filled()
        async with looking(tmp_path, log), looking(tmp_path, log) as (client, reading):  # the first keeps the index up
            with closing(sqlite3.connect(tmp_path / "state" / FILE)) as database, database:
                database.execute("DELETE FROM answers")
                database.execute("DELETE FROM evals")
            assert "None of them is in the kept log." in text_of(await client.get("/versions/5"))
            reading.kept = IndexState(left={"batches": 3}, is_caught_up=True, is_traced=True)
            page = text_of(await client.get("/versions/5"))
            assert "Not read yet: the index is behind the log by 3 of batches." in page
            assert "None of them is in the kept log." not in page and "answered no suite" not in page
            found = text_of(await client.get("/answers?text=refunds"))
            assert "Nothing fits what was read. Not read yet: the index is behind" in found

    asyncio.run(main())


def test_of_two_consoles_over_one_run_both_show_it_and_one_goes_on_when_the_other_ends(tmp_path: Path) -> None:
    async def main() -> None:
        log = await filled()
        async with looking(tmp_path, log) as (other, _), looking(tmp_path, log) as (client, reading):
            for path in PAGES:
                assert text_of(await client.get(path)) and (await other.get(path)).status_code == 200
            assert "question 3 about refunds" in text_of(await client.get("/answers?text=question"))
        async with looking(tmp_path, log) as (client, reading):
            await log.publish(topics.EXPERIENCES, Block((live(30, "a later wish", "granted"),)))
            await until(lambda: reading.kept.left.get("experiences") == 0)
            async with asyncio.timeout(30):
                while "a later wish" not in text_of(await client.get("/answers?text=wish")):  # noqa: ASYNC110 (a page tells no one)
                    await asyncio.sleep(0.05)

    asyncio.run(main())


def test_a_log_whose_beginning_was_removed_shows_what_is_left_and_says_what_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        log = await filled()
        for topic in (topics.EXPERIENCES, topics.VERIFIED, topics.BUFFER, topics.BATCHES):
            for at, end in (await log.bus.end_offsets(log.name(topic))).items():
                await log.bus.delete_records(at, end)
        async with looking(tmp_path, log) as (client, _):
            for path in PAGES:
                page = await client.get(path)
                assert page.status_code == (404 if path == FIRST else 200), path
                assert len(text_of(page)) > 20
            assert "Held back by gate" in text_of(await client.get("/versions/5"))

    asyncio.run(main())


def test_who_was_forgotten_is_gone_from_every_page_and_no_key_opens_them(tmp_path: Path) -> None:
    async def main() -> None:
        log = await filled()
        assert log.keys is not None
        await asyncio.to_thread(log.keys.destroy, subject_of("acme", "bob"))
        async with looking(tmp_path, log) as (client, _):
            text = text_of(await client.get(f"/answers/{BOB}"))
            assert "Forgotten Its user was forgotten: nobody can read it." in text
            assert "Sealed" in text_of(await client.get(f"/answers/{ANN}"))
            for path in (*PAGES, "/answers?text=Theodor", f"/answers/{BOB}"):
                assert "Theodor" not in text_of(await client.get(path)).replace('value="Theodor"', "")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("alarm", "section"),
    [
        ("train/1: alarms{alarm=live/chi2} +2 in the last minute", "runbook#a-value-of-a-step-is-unhealthy"),
        ("serve/1 has been silent for 90 s", "runbook#a-role-is-silent"),
        ("what a plugin of yours says", "runbook"),
    ],
)
def test_an_alarm_leads_to_the_section_of_the_runbook_that_says_what_to_do(
    tmp_path: Path, alarm: str, section: str
) -> None:
    (shown,) = alarms_of({"roles": [], "alarms": [alarm]}, {})
    assert (shown.about, shown.page) == (alarm, section)
    page, _, name = section.partition("#")

    async def main() -> None:
        async with looking(tmp_path, await filled()) as (client, _):
            assert (f'id="{name}"' in (await client.get(f"/help/{page}")).text) is bool(name)

    asyncio.run(main())
    assert page in HELP and all((HOWTO / f"{name}.md").is_file() for name in HELP)


def test_a_command_beside_the_console_reads_the_run_with_the_same_settings(tmp_path: Path) -> None:
    (tmp_path / "run.headrace").touch()
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "headrace.toml"
    wanted = ("--config", str(file), "--set", "app=b")
    assert command_of(file, ["app=b"]) == command_of(file.parent, ["app=b"]) == wanted
    assert command_of(tmp_path / "run.headrace", []) == ()
