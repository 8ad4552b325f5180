"""Pages of answers and versions: what happened to each, and two versions side by side."""

import asyncio
import re
from html import unescape
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.cli.console.answers import beside
from infra.cli.console.reading import History
from infra.cli.console.versions import MAX_PAIRED, MAX_TASKS, SHOWN, Budget, marked, timeline, version_rows
from infra.cli.govern.channel import ChannelDecision
from infra.cli.terminal import printable
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.policies.fold import Stable
from infra.store.memory import MemoryStore
from infra.store.seal import seal_text
from schemas import Batch, BatchItem, Block, EvalResult, Feedback, PolicyEvent, topics
from schemas.ids import answer_id
from tests.infra.cli.console_rig import SESSION, TOML, browser, console, folded, live, look, page_text, suite_answer

FIRST = f"/answers/{SESSION}.1-0.0-0-0"


def test_one_answers_page_has_its_whole_life(tmp_path: Path) -> None:
    (page,) = look(tmp_path, FIRST)
    text = page_text(page)
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
        tmp_path, f"/answers/{live(4, '', '').id}", "/answers?suite=dev", f"/answers/{suite_answer(3, 2).id}"
    )
    way = page_text(waits).partition("Its way")[2].partition("Its session")[0]
    assert "It was answered. Nothing else has happened to it yet." in way
    rows = page_text(listed).rpartition("became")[2]
    assert rows.count("evaluated") == 48 and "pending" not in rows
    assert "Not learned from: it was asked to evaluate a version." in page_text(evaluated)


def test_what_the_trainer_dropped_says_so_on_its_page(tmp_path: Path) -> None:
    name = live(3, "", "").id
    item = BatchItem(id=name, partition=0, offset=0, index=0, lane="live", advantage=0.5, min_version=3)
    batch = Batch(run="t", token=1, step=10, version=4, items=(), dropped=(item,), dropped_because=("too old",))
    (page,) = look(tmp_path, f"/answers/{name}", more=lambda log: log.publish(topics.BATCHES, batch))
    text = page_text(page)
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

    shown, shut = map(page_text, look(tmp_path, f"/answers/{nobodys.id}", FIRST, more=write))
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


@pytest.mark.parametrize("has_gate", [False, True])
def test_a_version_that_nobody_decided_says_why_which_version_customers_get_and_the_command(has_gate: bool) -> None:
    gate = '[[master.evals]]\nsuite = "dev"\n[master.gate.suites.dev]\nat_least = 0.5\n' if has_gate else ""
    with console(TOML + gate) as here, browser(here, "look") as client:
        text = page_text(client.get("/versions/6"))
        assert ("No gate is configured ( [master.gate] with suites of [[master.evals]] )" in text) is not has_gate
        assert ("No decision was made about it." in text) is has_gate
        assert "Customers get version 2 ." in text
        assert re.search(r"headrace promote 6 --config \S+headrace.toml", text)
        assert "Customers get this version." in page_text(client.get("/versions/2"))
        held = page_text(client.get("/versions/5"))
        assert "Held back by gate: dev: 0.500, expected at least 0.600. Customers get version 2 ." in held
        assert client.get("/versions/99").status_code == client.get("/versions/x").status_code == 404


def test_the_timeline_and_the_list_have_the_newest_versions_first_and_a_bound() -> None:
    events = [(1000 * at, PolicyEvent(event="published", policy="main", version=at)) for at in range(1000)]
    decided = [ChannelDecision(1000 * at, "promoted", at, "ann", "") for at in (10, 500)]
    history = History(events, Stable(version=500), decided, is_whole=True)
    drawn = timeline(history)
    assert drawn["num_published"] == 1000 and len(drawn["published"]) <= 500
    stable = [(round(at, 2), round(end, 2), version) for at, end, version in drawn["stable"]]
    assert stable == [(0.01, 0.5, 10), (0.5, 1.0, 500)]
    assert [row["version"] for row in version_rows(history, {}, None, every=False)] == [999, 500, 10]
    assert [row["version"] for row in version_rows(history, {}, 900, every=True)] == [*range(899, 899 - SHOWN, -1)]
    assert timeline(History([], Stable(), [], is_whole=True))["stable"] == []


def test_whole_answers_are_compared_and_what_is_not_shown_of_them_is_said(tmp_path: Path) -> None:
    """One pair differs behind what the index holds, one is the same; more pairs than are shown; a second sample of a task."""
    long = "so on " * 500

    def said(version: int, task: int, text: str, sample: int = 0) -> Block:
        answer = suite_answer(version, task)
        both = (answer.messages[0], msgspec.structs.replace(answer.messages[1], content=text))
        name = f"{answer.group}.0-{sample}-0"
        return Block((msgspec.structs.replace(answer, id=name, episode=sample, group_size=2).with_bulk(messages=both),))

    async def more(log: Log) -> None:
        await log.create_topics(partitions=1, keep_ms=-1)
        for version in (1, 4):
            result = EvalResult(policy="main", version=version, suite="dev", num_tasks=MAX_TASKS + 3, num_correct=1)
            await log.publish(topics.EVALS, result)
            await log.publish(topics.EXPERIENCES, said(version, 0, long + str(version)))
            await log.publish(topics.EXPERIENCES, said(version, 0, "another sample", sample=1))
            await log.publish(topics.EXPERIENCES, said(version, 1, long + "the same"))
            for task in range(2, MAX_TASKS + 3):
                await log.publish(topics.EXPERIENCES, said(version, task, f"version {version}"))

    log = Log(MemoryBus(), "t", store=MemoryStore())
    text = page_text(look(tmp_path, "/versions/compare?a=1&b=4&suite=dev", log=log, more=more)[0])
    assert f"{MAX_TASKS + 2} answers differ, 1 are the same" in text
    assert "2 more of these are not shown." in text and "2 more answers are not compared" in text
    assert "They differ only in the 1,001 characters that follow." in text


@given(st.text(max_size=60), st.text(max_size=60))
def test_marks_of_a_comparison_are_the_only_markup_and_nothing_is_left_out(left: str, right: str) -> None:
    for text, tag, whole in zip(marked(left, right, Budget(MAX_PAIRED)), ("del", "ins"), (left, right), strict=True):
        assert set(re.findall(r"</?(\w+)", text)) <= {tag}
        assert unescape(re.sub(r"</?(?:del|ins)>", "", text)) == printable(whole)


def test_what_a_comparison_costs_is_bounded_for_two_texts_and_for_a_page() -> None:
    """Ten thousand equal words on both sides are a hundred million pairs, of which none is weighed."""
    budget = Budget(10 * MAX_PAIRED)
    left, right = marked("so " + "b a " * 5_000 + "end", "so " + "a b " * 5_001 + "end", budget)
    assert left.startswith("so <del>") and left.endswith("</del> end") and left.count("<del>") == 1
    assert right.count("<ins>") == 1 and budget.left == 10 * MAX_PAIRED
    budget = Budget(20)
    assert marked("a b c", "a x c", budget)[0].count("<del>") == 1
    spent = budget.left
    assert marked("p q r s t u v w", "w v u t s r q p", budget)[0].count("<del>") == 1 and budget.left == spent
