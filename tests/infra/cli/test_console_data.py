"""The Data page, sealed letters, which a key that may opens once, and what a search finds, whatever people write."""

import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.cli.console.data import SHOWN
from infra.cli.console.search import PAGE, Query, choices, parse_query, search
from infra.log.log import Log
from infra.store.seal import seal_event, seal_text
from schemas import Block, DeadLetter, PolicyEvent, Score, topics
from tests.infra.cli.console_rig import (
    ANN,
    HOSTILE,
    MADE,
    SECRET,
    SESSION,
    fill,
    filled,
    folded,
    live,
    look,
    looking,
    page_text,
)
from tests.infra.ledger.test_index import batch


def test_letters_and_what_processors_made_are_listed(tmp_path: Path) -> None:
    text, made, answer = map(page_text, look(tmp_path, "/data", "/answers?made=yes", f"/answers/{MADE}"))
    assert "experiences/0@9 verify bad frame" in text
    assert "made from question 0" in made and f"{SESSION}.1-0.0-0-0" in answer


async def test_every_letter_is_on_a_page_of_the_data_though_many_came_at_one_moment(tmp_path: Path) -> None:
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


async def test_what_a_letter_holds_is_shown_unless_it_is_sealed_or_not_json_and_is_never_run(tmp_path: Path) -> None:
    log = await filled()
    assert log.keys is not None
    shut = json.dumps({"said": seal_text(SECRET, log.keys, MADE), "stars": 3}).encode()
    values = [
        json.dumps({"text": HOSTILE["markup"], "turned": HOSTILE["control"]}).encode(), shut,
        seal_event(json.dumps({"said": SECRET}).encode(), log.keys, [SESSION]), b"\x00HR\xff", b"", b"[" * 60_000,
    ]  # fmt: skip
    places = []
    for at, value in enumerate(values):
        lost = DeadLetter(topic="tasks", partition=0, offset=at, stage="verify", reason="odd", value=value)
        places.append(await log.publish(topics.DEAD_LETTERS, lost))
    async with looking(tmp_path, log) as (client, _):
        paths = [f"/data/letters/{place.partition}/{place.offset}" for place in places]
        listed = (await client.get("/data")).text
        pages = [await client.get(path) for path in paths]
        assert all(path in listed for path in paths) and {page.status_code for page in pages} == {200}
        assert "&lt;script&gt;" in pages[0].text and "<script>document" not in pages[0].text
        assert not {"\x1b", "\u202e"} & set(pages[0].text)
        assert "(sealed)" in pages[1].text and "&#34;stars&#34;: 3" in pages[1].text
        assert "Sealed: it concerns an answer of a named user." in page_text(pages[2])
        assert "Not JSON: 4 bytes." in page_text(pages[3]) and "The letter is empty." in page_text(pages[4])
        assert "Not JSON: 60,000 bytes." in page_text(pages[5])
        assert not any(SECRET in page.text or "sealed:" in page.text for page in pages)
        for nowhere in ("0/999999", "7/0", "x/1", "0/-1", f"0/{'9' * 30}"):
            assert (await client.get(f"/data/letters/{nowhere}")).status_code == 404
        client.cookies.clear()
        assert (await client.get(paths[0])).status_code == 401


LONG = "x " * 3000 + "behind"
SAID = {
    "chinese": "我想申请退款，请帮忙。", "thai": "ฉันต้องการคืนเงินค่ะ", "hindi": "मुझे पैसे वापस चाहिए",
    "burst": "it went 💥 at once", "loud": "what!!!",
    "share": "50%_off \\o/", "model": "GPT-4.1-mini-2025 said so", "long": LONG,
}  # fmt: skip


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    """An index of what was SAID, the first two scored."""

    async def say(log: Log) -> None:
        for number, text in enumerate(SAID.values()):
            await log.publish(topics.EXPERIENCES, Block((live(number, text, "so"),)))
        for number, value in enumerate((0.25, 0.75)):
            scored = msgspec.structs.replace(live(number, "", ""), scores=(Score("tone", value, None, "1"),))
            await log.publish(topics.VERIFIED, Block((scored,)))

    index = folded(tmp_path_factory.mktemp("search"), say)
    yield index.database
    index.close()


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (Query(text="退款"), {"chinese"}), (Query(text="คืนเงิน"), {"thai"}), (Query(text="वापस"), {"hindi"}),
        (Query(text="💥"), {"burst"}), (Query(text="!!!"), {"loud"}), (Query(text="what!!!"), {"loud"}),
        (Query(text="went 💥"), {"burst"}), (Query(text="退款 💥"), set()), (Query(text="%"), {"share"}),
        (Query(text="_%"), set()), (Query(text="NOT OR AND ("), set()), (Query(text="'\"<>--"), set()),
        (Query(text="a* NEAR"), set()), (Query(text="\\"), {"share"}), (Query(text="GPT-4.1-mini-2025"), {"model"}),
        (Query(text="behind"), set()), (Query(score="tone"), {"chinese", "thai"}), (Query(score="tone", low=0.5), {"thai"}),
        (Query(score="tone", high=0.5), {"chinese"}), (Query(score="none"), set()), (Query(low=0.0), set()),
    ],
)  # fmt: skip
def test_a_search_finds_what_has_all_of_it_and_nothing_else(
    searched: sqlite3.Connection, query: Query, found: set[str]
) -> None:
    names = {text[:2000]: name for name, text in SAID.items()}
    assert {names[row["asked"]] for row in search(searched, query).rows} == found


def test_what_looks_like_an_id_and_is_none_is_searched_for(tmp_path: Path) -> None:
    page, listed = look(tmp_path, "/answers?text=GPT-4.1-mini-2025", f"/answers?text={ANN}")
    assert page.status_code == 200 and "No matches." in page.text
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
        (Query(learned=5), 1), (Query(learned=4), 0), (Query(low=1.0), 1), (Query(low=1.1), 0),
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
