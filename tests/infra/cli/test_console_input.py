"""What people and their browsers send the console: any address, id, number and form is answered, and never with a page that
is not headed.
"""

import asyncio
import sqlite3
from collections import deque
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from infra.cli.console.app import HEADERS, MAX_FIELDS
from infra.cli.console.keeping import FILE
from infra.cli.console.reading import beat
from infra.cli.settings import Settings
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from schemas import Block, Message, Span, make_experience, topics
from tests.infra.cli.console_rig import fill, looking, looking_at


async def filled() -> Log:
    log = Log(MemoryBus(), "t", store=MemoryStore())
    await fill(log)
    return log


@pytest.mark.parametrize("address", ["10.0.0.7:8400", "Train-Box:8400", "[fd00::7]:8400"])
def test_the_pages_answer_at_the_address_they_were_bound_to_and_at_no_other(tmp_path: Path, address: str) -> None:
    """Whatever `[console] listen` says: `--listen` may have said another."""

    async def main() -> None:
        settings = Settings(app="t", folder=tmp_path)
        async with looking_at(settings, await filled(), tmp_path / "state", address=address) as (client, _):
            assert (await client.get("/versions")).status_code == 200
            assert (await client.get("/versions", headers={"host": "elsewhere.example:8400"})).status_code == 400

    asyncio.run(main())


def test_an_answer_of_a_task_whose_id_has_a_slash_has_its_page(tmp_path: Path) -> None:
    async def main() -> None:
        log = await filled()
        one = make_experience(
            id="HumanEval/0.0.0-0-0", group="HumanEval/0.0", episode=0, group_size=1, spans=(Span(2, 4, 0),),
            tokens=[1, 2, 3, 4], logprobs=[-0.5, -0.5],
            messages=(Message(role="user", content="write it"), Message(role="assistant", content="written")),
        )  # fmt: skip
        await log.publish(topics.EXPERIENCES, Block((one,)))
        async with looking(tmp_path, log) as (client, _):
            page = await client.get("/answers/HumanEval%2F0.0.0-0-0")
            assert page.status_code == 200 and "write it" in page.text
            found = await client.get("/answers", params={"text": "HumanEval/0.0.0-0-0"}, follow_redirects=True)
            assert found.status_code == 200 and "written" in found.text

    asyncio.run(main())


def test_a_page_that_broke_says_so_under_the_same_headers_as_every_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with looking(tmp_path, await filled()) as (client, _):
            with closing(sqlite3.connect(tmp_path / "state" / FILE)) as database, database:
                database.execute("UPDATE answers SET time_ms = 'then'")
            page = await client.get("/answers")
            assert page.status_code == 500 and "This page broke" in page.text
            assert {name: page.headers.get(name) for name in HEADERS} == HEADERS

    asyncio.run(main())


@pytest.mark.parametrize("before", ["99999999999999999999", "\u00b2", "-1", "1e3", "\u0663"])
def test_any_number_may_be_asked_for(tmp_path: Path, before: str) -> None:
    async def main() -> None:
        async with looking(tmp_path, await filled()) as (client, _):
            for path in ("/data", "/answers", "/versions"):
                assert (await client.get(path, params={"before": before})).status_code == 200

    asyncio.run(main())


def test_a_form_of_too_many_fields_is_refused_in_words(tmp_path: Path) -> None:
    async def main() -> None:
        async with looking(tmp_path, await filled()) as (client, _):
            here = {"origin": "http://127.0.0.1:1"}
            body = "&".join(f"a{at}=1" for at in range(MAX_FIELDS + 1))
            for path in ("/enter", "/actions/pause"):
                page: httpx.Response = await client.post(path, content=body, headers=here)
                assert page.status_code == 403 and f"more than {MAX_FIELDS} fields" in page.text

    asyncio.run(main())


def test_an_opened_answer_is_listed_however_many_users_were_forgotten_after_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with looking(tmp_path, await filled()) as (client, _):
            with closing(sqlite3.connect(tmp_path / "state" / FILE)) as database, database:
                database.execute("DELETE FROM orders")
                rows = [("open", "the-opened-one"), *[("forget", f"subject-{at}") for at in range(150)]]
                columns = [row[1] for row in database.execute("PRAGMA table_info(orders)")]
                for at, (word, about) in enumerate(rows):
                    values: dict[str, object] = dict.fromkeys(columns, "")
                    values |= {
                        "n": at,
                        "offset": at,
                        "time_ms": at,
                        "word": word,
                        "about": about,
                        "owner": "ops",
                    }
                    database.execute(f"INSERT INTO orders VALUES ({', '.join('?' * len(columns))})", [*values.values()])
            page = (await client.get("/privacy")).text
            assert "the-opened-one" in page and "150 times a user was forgotten; 1 times" in page

    asyncio.run(main())


def test_a_rate_is_that_of_all_roles_of_a_kind_together() -> None:
    pulse: dict[str, deque[float]] = {}
    roles = [
        {"role": "explore", "silent": False, "state": "serving", "rates": {"answers": rate}} for rate in (3.0, 4.0)
    ]
    beat(pulse, [*roles, {"role": "explore", "silent": True, "state": "serving", "rates": {"answers": 100.0}}])
    assert [*pulse["explore/answers"]] == [7.0]
