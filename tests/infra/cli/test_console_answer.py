"""The page of one answer: its whole life, what lies beside it, and what of it stays shut."""

import asyncio
import math
import re
from pathlib import Path

from infra.cli.console.answers import beside, level_of
from infra.log.log import Log
from infra.store.seal import seal_text
from schemas import Batch, BatchItem, Block, Feedback, topics
from schemas.ids import answer_id
from tests.infra.cli.console_rig import SESSION, folded, live, look, of_suite, text_of

FIRST = f"/answers/{SESSION}.1-0.0-0-0"


def test_one_answers_page_has_its_whole_life(tmp_path: Path) -> None:
    (page,) = look(tmp_path, FIRST)
    text = text_of(page)
    assert "question 0 about refunds" in text and "answer 0" in text
    assert page.text.count('class="tok l') > 6 and ' odd"' in page.text, "tokens by chance, and by version"
    assert "exact 1 the whole answer version 1" in text and "Went through validate@1 → exact@1." in text
    said = text.partition("Feedback")[2].partition("Its way")[0]
    assert re.findall(r"user (?:\w+ )?([01])", said) == ["0", "1"], "feedback as it came and as it was revised"
    assert "buffered 1 +0.5" in text and "trained, step 9 – +0.5 1 lane live, on version 4" in text
    assert "First learned in version 5" in text
    assert "The turns of the session around it." in text and "question 1 about refunds" in text
    assert "Nothing else has happened" not in text


def test_an_answer_that_waits_and_one_to_a_suite_say_so(tmp_path: Path) -> None:
    waits, listed, evaluated = look(
        tmp_path, f"/answers/{live(4, '', '').id}", "/answers?suite=dev", f"/answers/{of_suite(3, 2).id}"
    )
    way = text_of(waits).partition("Its way")[2].partition("Its session")[0]
    assert "It was answered. Nothing else has happened to it yet." in way
    rows = text_of(listed).rpartition("became")[2]
    assert rows.count("evaluated") == 48 and "pending" not in rows
    assert "Not learned from: it was asked to evaluate a version." in text_of(evaluated)


def test_what_the_trainer_dropped_says_so_on_its_page(tmp_path: Path) -> None:
    name = live(3, "", "").id
    item = BatchItem(id=name, partition=0, offset=0, index=0, lane="live", advantage=0.5, min_version=3)
    batch = Batch(run="t", token=1, step=10, version=4, items=(), dropped=(item,), dropped_because=("too old",))
    (page,) = look(tmp_path, f"/answers/{name}", more=lambda log: log.publish(topics.BATCHES, batch))
    text = text_of(page)
    assert "Not learned from: too old." in text and "became too old" in text.partition("Its way")[2]


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

    shown, shut = map(text_of, look(tmp_path, f"/answers/{nobodys.id}", FIRST, more=write))
    assert "a fine answer" in shown and "a fine answer" not in shut and "text sealed" in shut


def test_beside_an_answer_are_its_group_or_the_turns_of_its_session_around_it(tmp_path: Path) -> None:
    group = [
        live(0, "2+2=", f"it is {at}", id=f"sum-7.0-{at}-0", group="sum-7", episode=at, lane="usual", turn=-1)
        for at in range(4)
    ]

    async def talk(log: Log) -> None:
        await log.publish(topics.EXPERIENCES, Block(tuple(group)))
        for at in range(200):
            await log.publish(topics.EXPERIENCES, Block((live(at, f"turn {at}", "so"),)))

    index = folded(tmp_path, talk)
    turns = [row["id"] for row in index.database.execute("SELECT id FROM answers WHERE session != '' ORDER BY n")]
    assert [row["id"] for row in beside(index.database, turns[150])] == turns[119:183]
    assert [row["id"] for row in beside(index.database, turns[2])] == turns[:35]
    assert [row["answered"] for row in beside(index.database, group[2].id)] == [f"it is {at}" for at in range(4)]
    index.close()


def test_a_token_is_as_dark_as_it_was_unlikely() -> None:
    assert [level_of(math.log(share)) for share in (1.0, 0.5, 0.25, 0.125, 1 / 16, 1e-9)] == [0, 1, 2, 3, 4, 5]
