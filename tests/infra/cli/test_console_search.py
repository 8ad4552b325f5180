"""What a search of the console finds: whatever people write, in any script."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.cli.console.search import PAGE, Query, choices, parse_query, search, split_terms
from infra.log.log import Log
from schemas import Block, Feedback, PolicyEvent, Score, topics
from schemas.ids import answer_id
from tests.infra.cli.console_rig import ANN, SESSION, fill, folded, live, look, sqlite_steps
from tests.infra.ledger.test_index import batch

LONG = "x " * 3000 + "behind"
SAID = {
    "chinese": "我想申请退款，请帮忙。", "thai": "ฉันต้องการคืนเงินค่ะ", "hindi": "मुझे पैसे वापस चाहिए",
    "burst": "it went 💥 at once", "loud": "what!!!",
    "share": "50%_off \\o/", "model": "GPT-4.1-mini-2025 said so", "long": LONG,
}  # fmt: skip


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    """An index of what was SAID: the first two scored, and the third rated."""

    async def say(log: Log) -> None:
        for number, text in enumerate(SAID.values()):
            await log.publish(topics.EXPERIENCES, Block((live(number, text, "so"),)))
        for number, value in enumerate((0.25, 0.75)):
            scored = msgspec.structs.replace(live(number, "", ""), scores=(Score("tone", value, None, "1"),))
            await log.publish(topics.VERIFIED, Block((scored,)))
        rated = Feedback(ref=answer_id(live(2, "", "").id), id="f", value=0.5, source="user", rater="r")
        await log.publish(topics.VERIFIED, rated)

    index = folded(tmp_path_factory.mktemp("search"), say)
    yield index.database
    index.close()


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
    _, faults = parse_query({"text": text})
    assert "the first 16" in faults["text"] and len(split_terms(text)[1]) == 16
    assert not parse_query({"text": "💥 !!! refund"})[1]


def test_what_looks_like_an_id_and_is_none_is_searched_for(tmp_path: Path) -> None:
    page, listed = look(tmp_path, "/answers?text=GPT-4.1-mini-2025", f"/answers?text={ANN}")
    assert page.status_code == 200 and "Nothing fits." in page.text
    assert listed.status_code == 303 and listed.headers["location"].endswith(ANN)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    """An index of all that the rig's run has."""
    index = folded(tmp_path_factory.mktemp("whole"), fill)
    yield index.database
    index.close()


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


def test_pages_of_a_search_hold_every_answer_once_the_newest_first(tmp_path: Path) -> None:
    wanted = 3 * PAGE + 7

    async def ask(log: Log) -> None:
        for number in range(2 * wanted):
            tenant = "acme" if number % 2 else "globex"
            await log.publish(topics.EXPERIENCES, Block((live(number, "where is it", "here", tenant=tenant),)))

    index = folded(tmp_path, ask)
    for query in (
        Query(tenant="acme"), Query(tenant="acme", text="where"), Query(tenant="acme", text="her", lane="live"),
        Query(tenant="acme", session=SESSION),
    ):  # fmt: skip
        seen: list[int] = []
        before = None
        while True:
            page = search(index.database, msgspec.structs.replace(query, before=before))
            seen += [row["n"] for row in page.rows]
            if page.further is None:
                break
            before = page.further
        assert len(set(seen)) == wanted and seen == sorted(seen, reverse=True)
    assert choices(index.database)["tenant"] == ["acme", "globex"]
    index.close()


def test_a_search_for_the_newest_looks_at_no_more_rows_in_a_long_index_and_a_slow_one_goes_on_later(
    tmp_path: Path,
) -> None:
    async def nothing(log: Log) -> None:
        pass

    index = folded(tmp_path, nothing)
    found, last = [], 0
    for many in (2_000, 18_000):
        rows = [(n << 21, n, f"{n}", "trained") for n in range(last + 1, last + many + 1)]
        with index.database as database:
            database.executemany("INSERT INTO answers (n, key, id, fate) VALUES (?, ?, ?, ?)", rows)
        last += many
        queries = (Query(), Query(fate="trained"))
        found.append(
            [sqlite_steps(index.database, lambda asked, query=query: search(asked, query)) for query in queries]
        )
    assert all(after <= 2 * before for before, after in zip(*found, strict=True)), found
    slow = search(index.database, Query(fate="none"), longest_s=-1.0)
    assert not slow.rows and slow.further is not None and slow.looked_at_ms == 19_501, "it says how far back it looked"
    index.close()


def test_a_version_names_every_answer_it_learned_from_though_later_ones_did_too(tmp_path: Path) -> None:
    async def learn(log: Log) -> None:
        for number in range(4):
            await log.publish(topics.EXPERIENCES, Block((live(number, f"question {number}", "said"),)))
        for step, chosen in ((1, (0, 1, 2)), (2, (1, 2, 3)), (3, (0, 1))):
            await log.publish(topics.BATCHES, batch(step, *chosen))
            event = PolicyEvent(event="published", policy="main", version=step, parent=step - 1, step=step)
            await log.publish(topics.POLICIES, event)

    index = folded(tmp_path, learn)
    for version, numbers in ((1, (0, 1, 2)), (2, (1, 2, 3)), (3, (0, 1)), (4, ())):
        asked = sorted(row["asked"] for row in search(index.database, Query(learned=version)).rows)
        assert asked == [f"question {number}" for number in numbers]
    index.close()


@given(st.dictionaries(st.sampled_from([field.name for field in msgspec.structs.fields(Query)]), st.text(max_size=30)))
def test_a_query_takes_whatever_a_form_holds(asked: dict[str, str]) -> None:
    query, faults = parse_query(asked)
    assert set(faults) <= set(asked) and isinstance(query, Query)
