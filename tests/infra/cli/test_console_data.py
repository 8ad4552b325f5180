"""The Data page: letters, tasks, and what processors made."""

import asyncio
import re
from pathlib import Path

from infra.cli.console.data import SHOWN
from schemas import DeadLetter, topics
from tests.infra.cli.console_rig import MADE, SESSION, looking
from tests.infra.cli.test_console_pages import filled, text_of


def test_the_data_page_has_tasks_with_their_success_and_what_processors_made(tmp_path: Path) -> None:
    async def main() -> None:
        async with looking(tmp_path, await filled()) as (client, _):
            text = text_of(await client.get("/data"))
            assert "add-0 8 62.5% v7" in text, "right in five of eight versions"
            assert "made from question 0" in text
            hardest = text_of(await client.get("/data?order=hardest&task=add-"))
            assert hardest.index("add-0") < hardest.index("add-5")
            assert "experiences/0@9 verify bad frame" in text
            assert "made from question 0" in text_of(await client.get("/answers?made=yes"))
            assert f"{SESSION}.1-0.0-0-0" in text_of(await client.get(f"/answers/{MADE}"))

    asyncio.run(main())


def test_every_letter_is_on_a_page_of_the_data_though_many_came_at_one_moment(tmp_path: Path) -> None:
    async def main() -> None:
        log = await filled()
        for at in range(2 * SHOWN):
            lost = DeadLetter(topic="experiences", partition=1, offset=at, stage="verify", reason="bad frame")
            await log.publish(topics.DEAD_LETTERS, lost)
        async with looking(tmp_path, log) as (client, _):
            for first in ("/data", "/data?reason=bad+frame"):
                found, path = [], first
                for _ in range(3):
                    page = (await client.get(path)).text
                    found += re.findall(r"<code>(experiences/\d+@\d+)</code>", page)
                    path = page.partition('class="more" href="')[2].partition('"')[0].replace("&amp;", "&")
                assert not path and len(found) == len(set(found)) == 2 * SHOWN + 1

    asyncio.run(main())
