"""What a search of the console finds: whatever people write, in any script."""

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from infra.cli.console.search import PAGE, Query, query_of, search, terms_of
from infra.cli.look.console_bounds import read_only
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from schemas import Block, Feedback, Score, topics
from schemas.ids import answer_id
from tests.infra.cli.console_rig import ANN, SESSION, fill, live, looking
from tests.infra.cli.test_console_index import run_of

LONG = "x " * 3000 + "behind"
SAID = {
    "chinese": "我想申请退款，请帮忙。", "thai": "ฉันต้องการคืนเงินค่ะ", "hindi": "मुझे पैसे वापस चाहिए",
    "burst": "it went 💥 at once", "loud": "what!!!",
    "share": "50%_off \\o/", "model": "GPT-4.1-mini-2025 said so", "long": LONG,
}  # fmt: skip


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    """An index of what was SAID: the first two scored, and the third rated."""
    log, index, folder = run_of(tmp_path_factory.mktemp("search"))

    async def main() -> None:
        await log.create_topics(partitions=1, keep_ms=-1)
        for number, text in enumerate(SAID.values()):
            await log.publish(topics.EXPERIENCES, Block((live(number, text, "so"),)))
        for number, value in enumerate((0.25, 0.75)):
            one = msgspec.structs.replace(live(number, "", ""), scores=(Score("tone", value, None, "1"),))
            await log.publish(topics.VERIFIED, Block((one,)))
        rated = Feedback(ref=answer_id(live(2, "", "").id), id="f", value=0.5, source="user", rater="r")
        await log.publish(topics.VERIFIED, rated)
        await folder.refresh(log)

    asyncio.run(main())
    index.close()
    database = read_only(index.path)
    yield database
    database.close()


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (Query(text="退款"), {"chinese"}), (Query(text="คืนเงิน"), {"thai"}), (Query(text="वापस"), {"hindi"}),
        (Query(text="💥"), {"burst"}), (Query(text="!!!"), {"loud"}), (Query(text="what!!!"), {"loud"}),
        (Query(text="went 💥"), {"burst"}), (Query(text="退款 💥"), set()), (Query(text="%"), {"share"}),
        (Query(text="_%"), set()), (Query(text="\\"), {"share"}), (Query(text="GPT-4.1-mini-2025"), {"model"}),
        (Query(text="behind"), set()), (Query(score="tone"), {"chinese", "thai"}), (Query(score="tone", low=0.5), {"thai"}),
        (Query(score="tone", high=0.5), {"chinese"}), (Query(score="none"), set()), (Query(low=0.0), set()),
        (Query(rated_from=0.5), {"hindi"}), (Query(rated_to=0.4), set()),
    ],
)  # fmt: skip
def test_a_search_finds_what_has_all_of_it_and_nothing_else(
    searched: sqlite3.Connection, query: Query, found: set[str]
) -> None:
    names = {text[:2000]: name for name, text in SAID.items()}
    assert {names[row["asked"]] for row in search(searched, query).rows} == found


def test_of_many_signs_some_are_searched_for_and_that_is_said() -> None:
    text = " ".join("!" * at for at in range(1, 30))
    _, faults = query_of({"text": text})
    assert "the first 16" in faults["text"] and len(terms_of(text)[1]) == 16
    assert not query_of({"text": "💥 !!! refund"})[1]


def test_what_looks_like_an_id_and_is_none_is_searched_for(tmp_path: Path) -> None:
    async def main() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await fill(log)
        async with looking(tmp_path, log) as (client, _):
            page = await client.get("/answers", params={"text": "GPT-4.1-mini-2025"})
            assert page.status_code == 200 and "Nothing fits." in page.text
            listed = await client.get("/answers", params={"text": ANN})
            assert listed.status_code == 303 and listed.headers["location"].endswith(ANN)

    asyncio.run(main())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    """An index of all that the rig's run has."""
    log, index, folder = run_of(tmp_path_factory.mktemp("whole"))

    async def main() -> None:
        await fill(log)
        await folder.refresh(log)

    asyncio.run(main())
    index.close()
    database = read_only(index.path)
    yield database
    database.close()


@pytest.mark.parametrize(
    ("query", "num"),
    [
        (Query(), PAGE), (Query(lane="live"), 15), (Query(lane="none"), 0), (Query(tenant="acme"), 15),
        (Query(suite="dev"), 48), (Query(suite="dev", version=5), 6), (Query(version=5), 6), (Query(version=4, lane="live"), 8),
        (Query(task="add-3"), 8), (Query(session=SESSION), 15), (Query(session="n" * 64), 0), (Query(fate="too short"), 1),
        (Query(fate="trained"), 1), (Query(fate="pending", lane="live"), 13),
        (Query(fate="pending"), 13), (Query(said="yes"), 1), (Query(made="yes"), 1),
        (Query(learned=5), 1), (Query(learned=4), 0), (Query(rated_from=1.0), 1), (Query(low=1.0), 1), (Query(low=1.1), 0),
        (Query(score="exact", low=1.0, lane="live"), 10), (Query(fate="trained", said="yes", text="refunds", tenant="acme"), 1),
        (Query(fate="trained", said="no"), 0),
    ],
)  # fmt: skip
def test_each_field_of_the_form_finds_what_the_log_says_and_fields_together_narrow(
    whole: sqlite3.Connection, query: Query, num: int
) -> None:
    assert len(search(whole, query).rows) == num
