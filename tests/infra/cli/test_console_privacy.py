"""What the Privacy page says of what was opened and forgotten."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

from infra.cli.console.keeping import FILE
from infra.cli.look.console_bounds import NEWEST, trim
from tests.infra.cli.console_rig import looking
from tests.infra.cli.test_console_pages import filled, text_of

_, MOST = NEWEST["orders"]
SAID = f"Counted are the newest {MOST:,} orders"


def test_where_orders_went_for_the_bound_the_page_says_which_its_counts_cover(tmp_path: Path) -> None:
    """Of twice as many as stay every second opened an answer."""

    async def main() -> None:
        async with looking(tmp_path, await filled()) as (client, _):
            with closing(sqlite3.connect(tmp_path / "state" / FILE)) as database:
                for first, last in ((0, MOST), (MOST, 2 * MOST)):
                    with database:
                        database.executemany(
                            "INSERT INTO orders (n, offset, time_ms, word, owner, about, reason)"
                            " VALUES (?, ?, 0, ?, 'a', 'b', 'c')",
                            [(n + 1, n + 1, "open" if n % 2 else "pause") for n in range(first, last)],
                        )
                    trim(database, 0)
                    text = text_of(await client.get("/privacy"))
                    assert f"{MOST // 2:,} times something sealed" in text
                    assert (SAID in text) is (first > 0), "at the bound nothing went yet"

    asyncio.run(main())
