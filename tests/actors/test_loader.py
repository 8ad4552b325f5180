"""Loading into the log: once, counted, as the records that later stages expect."""

import asyncio

import msgspec
import pytest

from actors.tasksets.files import Broken
from actors.tasksets.loader import LoadResult, different, expert, load_experts, load_preferences, load_tasks, pair_block
from actors.tasksets.taskset import Demonstration, Preference
from schemas import Message, Task
from schemas.experience import pair_fault
from schemas.topics import EXPERTS, TASKSET_RAW
from tests.actors.rig import EOS, CharTokenizer, TopicArrivals, memory_log, task


def row(name: str, split: str = "train") -> Demonstration:
    messages = (Message(role="user", content="37+45="),)
    return Demonstration(id=name, messages=messages, response="280", answer="280", split=split)


async def contents(heard: TopicArrivals) -> None:
    async for message in heard.log.read_all(heard.topic):
        heard.records.append(message.value)


def test_a_demonstration_is_an_expert_experience_that_nobody_sampled() -> None:
    experience = expert(row("add-3745", "validation"), CharTokenizer())
    assert list(experience.tokens) == [*(ord(character) for character in "37+45=280"), EOS]
    assert (experience.num_prompt, experience.num_sampled) == (6, 4)
    assert (experience.lane, experience.group, experience.group_size) == ("expert", "expert-add-3745.0", 1)
    assert [(span.version, span.ratio) for span in experience.spans] == [(-1, False)]
    assert list(experience.logprobs) == [0.0] * 4
    assert experience.response == "280"
    assert (experience.answer, experience.task, experience.held_out) == ("280", "add-3745", True)
    assert (experience.kind, experience.meta) == ("demonstration", {})


def test_a_second_load_adds_nothing_and_repeated_rows_are_counted() -> None:
    async def run() -> tuple[LoadResult, LoadResult, list[object], list[int]]:
        log = await memory_log()
        progress: list[int] = []
        tasks = [task("a"), task("b"), task("a")]
        first = await load_tasks(log, tasks, on_progress=progress.append)
        second = await load_tasks(log, [*tasks, task("c")])
        heard = TopicArrivals(log, TASKSET_RAW)
        await contents(heard)
        return first, second, heard.records, progress

    first, second, records, progress = asyncio.run(run())
    assert first == LoadResult(loaded=2, repeated=1, known=0)
    assert second == LoadResult(loaded=1, repeated=1, known=2)
    assert sorted(one.id for one in records if isinstance(one, Task)) == ["a", "b", "c"]
    assert progress == [3]


def test_demonstrations_are_loaded_once() -> None:
    async def run() -> tuple[LoadResult, LoadResult, list[object]]:
        log = await memory_log()
        rows = [row(f"add-{index}") for index in range(20)]
        first = await load_experts(log, rows, CharTokenizer())
        second = await load_experts(log, rows, CharTokenizer())
        heard = TopicArrivals(log, EXPERTS)
        await contents(heard)
        return first, second, heard.records

    first, second, records = asyncio.run(run())
    assert (first.loaded, second.loaded, second.known) == (20, 0, 20)
    assert len(records) == 20


def test_a_row_that_cannot_be_read_stops_the_load_after_what_came_before() -> None:
    def rows():  # type: ignore[no-untyped-def]
        yield from (task(f"task-{index}") for index in range(600))
        raise ValueError("line 601")

    async def run() -> list[object]:
        log = await memory_log()
        with pytest.raises(ValueError, match="601"):
            await load_tasks(log, rows())
        heard = TopicArrivals(log, TASKSET_RAW)
        await contents(heard)
        return heard.records

    assert len(asyncio.run(run())) == 512


def preference(name: str, chosen: str, rejected: str) -> Preference:
    return Preference(id=name, messages=(Message(role="user", content="2+2="),), chosen=chosen, rejected=rejected)


def test_a_pair_is_two_marked_answers_of_one_group_that_nobody_sampled() -> None:
    one, other = pair_block(preference("q", "4", "five"), CharTokenizer()).experiences
    assert (one.kind, other.kind) == ("chosen", "rejected")
    assert (one.response, other.response, one.lane, one.group_size) == ("4", "five", "human", 2)
    assert list(other.tokens) == [*(ord(character) for character in "2+2=five"), EOS]
    assert one.group == other.group and one.is_given and not one.spans[0].ratio
    assert pair_fault((one, other)) == ""


def test_pairs_are_loaded_once_and_those_with_equal_sides_are_named() -> None:
    async def run() -> tuple[LoadResult, list[Broken], LoadResult]:
        log = await memory_log()
        rows = [
            preference("a", "4", "5"),
            preference("a", "4", "6"),
            preference("b", "4", "4"),
            preference("a", "4", "5"),
        ]
        broken: list[Broken] = []
        first = await load_preferences(log, different(rows, broken.append), CharTokenizer())
        return first, broken, await load_preferences(log, rows[:2], CharTokenizer())

    first, broken, second = asyncio.run(run())
    assert first == LoadResult(loaded=2, repeated=1, known=0) and second.loaded == 0
    assert [one.where for one in broken] == ["pair b"]


def test_what_is_longer_than_the_context_is_named_and_the_next_one_loaded() -> None:
    async def run() -> tuple[LoadResult, LoadResult, list[Broken]]:
        log = await memory_log()
        broken: list[Broken] = []
        long = msgspec.structs.replace(row("long"), response="280" * 9)
        experts = await load_experts(
            log, [row("a"), long, row("b")], CharTokenizer(), max_tokens=10, on_broken=broken.append
        )
        pairs = [preference("c", "4", "5"), preference("d", "4", "five and a half"), preference("e", "4", "6")]
        return (
            experts,
            await load_preferences(log, pairs, CharTokenizer(), max_tokens=10, on_broken=broken.append),
            broken,
        )

    experts, pairs, broken = asyncio.run(run())
    assert (experts.loaded, pairs.loaded) == (2, 2)
    assert [one.where for one in broken] == ["demonstration long", "pair d"]
    assert broken[0].reason == "got 34 tokens, expected at most 10, which is the model's context"
