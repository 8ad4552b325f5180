"""Versions: what was decided of each and why, which customers get, and two of them side by side."""

import re
from html import unescape
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.cli.console.reading import History
from infra.cli.console.versions import MAX_PAIRED, MAX_TASKS, SHOWN, Budget, marked, timeline, version_rows
from infra.cli.govern.channel import ChannelDecision
from infra.cli.terminal import printable
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.policies.channel import Stable
from infra.store.memory import MemoryStore
from schemas import Block, EvalResult, PolicyEvent, topics
from tests.infra.cli.console_rig import TOML, browser, console, look, of_suite, text_of


@pytest.mark.parametrize("has_gate", [False, True])
def test_a_version_that_nobody_decided_says_why_which_version_customers_get_and_the_command(has_gate: bool) -> None:
    gate = '[[master.evals]]\nsuite = "dev"\n[master.gate.suites.dev]\nat_least = 0.5\n' if has_gate else ""
    with console(TOML + gate) as here, browser(here, "look") as client:
        text = text_of(client.get("/versions/6"))
        assert ("No gate is configured ( [master.gate] with suites of [[master.evals]] )" in text) is not has_gate
        assert ("No decision was made about it." in text) is has_gate
        assert "Customers get version 2 ." in text
        assert re.search(r"headrace promote 6 --config \S+headrace.toml", text)
        assert "Customers get this version." in text_of(client.get("/versions/2"))
        held = text_of(client.get("/versions/5"))
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
        answer = of_suite(version, task)
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
    text = text_of(look(tmp_path, "/versions/compare?a=1&b=4&suite=dev", log=log, more=more)[0])
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
