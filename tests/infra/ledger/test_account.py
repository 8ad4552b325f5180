"""The account: every published experience is trained, dropped with a reason, or pending; audits and drains of a log."""

import asyncio
import itertools
import random
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.ledger.account import Ledger, audit, drain
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import (
    Block,
    Closure,
    Control,
    Directive,
    Drawn,
    DropMarker,
    Feedback,
    Fence,
    Progress,
    Rollback,
    Skip,
    topics,
)
from schemas.errors import ConfigError
from schemas.fields import GROUP_OVER
from schemas.topics import EXPERIENCES, POLICIES, PROGRESS, REPORTS, TASKS
from tests.actors.rig import TopicArrivals, load, master, memory_log, running, until
from tests.infra.ledger.ledger_records import RUN, account, batch, block, closure, dead_letter, message, stub
from tests.infra.ledger.whole_loop import trained_steps, whole_loop
from tests.streams.collect.collecting import answer
from tests.streams.collect.collecting import block as answer_block


def test_trained_comes_before_any_reason() -> None:
    records = {
        "experiences": [block("a.0")],
        "verified": [stub("a.0", 0, "too short"), stub("a.0", 1, "too short")],
        "batches": [batch(0, "a.0.0-0-0")],
    }
    found = account(records)
    assert (found.trained, found.dropped, found.pending) == (1, {"too short": 1}, 0)


def test_a_buffered_group_is_pending_until_it_is_trained_or_dropped_by_the_trainer() -> None:
    topics = {
        "experiences": [block("a.0"), block("b.0")],
        "progress": [closure("a.0", "buffered"), closure("b.0", "buffered")],
        "buffer": [block("a.0"), block("b.0")],
    }
    assert account(topics).pending == 4
    told = Drawn(token=1, step=0, version=3, groups=(), dropped={"b.0": "stale"})
    found = account({**topics, "progress": [*topics["progress"], told]})
    assert (found.dropped, found.pending) == ({"stale": 2}, 2)


def test_members_that_collect_left_out_have_the_reasons_of_the_closure_and_stubs_their_own() -> None:
    records = {
        "experiences": [block("a.0", range(5))],
        "verified": [stub("a.0", 0, "too short")],
        "progress": [closure("a.0", "buffered", too_short=1, odd=1, unlabelled=2)],
        "buffer": [block("a.0", [4])],
    }
    found = account(records)
    assert (found.dropped, found.pending) == ({"too short": 1, "unlabelled": 2, "odd": 1}, 1)


def test_a_dropped_group_gives_its_reason_to_every_member() -> None:
    found = account(
        {"experiences": [block("a.0")], "progress": [closure("a.0", "dropped", reason="all rewards equal")]}
    )
    assert found.dropped == {"all rewards equal": 2}


def test_a_superseded_attempt_is_dropped_whatever_became_of_the_other() -> None:
    for end in ({"batches": [batch(0, "a.0.1-0-0", "a.0.1-1-0")]}, {}):
        records = {
            "experiences": [block("a.0"), block("a.0", attempt=1)],
            "progress": [
                closure("a.0", "superseded"),
                closure("a.0", "buffered", attempt=1),
                Drawn(token=1, step=0, version=3, groups=(), dropped={} if end else {"a.0": "stale"}),
            ],
            "buffer": [block("a.0", attempt=1)],
            **end,
        }
        found = account(records)
        assert found.dropped["superseded"] == 2
        assert found.trained == (2 if end else 0) and found.pending == 0


def test_what_lies_in_a_dead_letter_is_accounted_for() -> None:
    letter = dead_letter(block("a.0"), "too large")
    unreadable = msgspec.structs.replace(dead_letter(block("b.0"), "bad frame"), value=b"HR")
    found = account({"experiences": [block("a.0"), block("b.0")], "dead-letters": [letter, unreadable]})
    assert (found.dropped, found.pending) == ({"too large": 2}, 2)


def test_validation_demonstrations_are_kept_apart_and_evals_are_not_counted() -> None:
    records = {
        "experts": [block("demo.0", [0], lane="expert", held_out=True)],
        "experiences": [block("held.0", suite="held-out")],
    }
    found = account(records)
    assert (found.published, found.dropped) == (1, {"kept for validation": 1})


def test_an_experience_trained_twice_under_one_use_is_found() -> None:
    published = {"experiences": [block("a.0")]}
    once = account({**published, "batches": [batch(0, "a.0.0-0-0"), batch(1, "a.0.0-0-0", use=1)]})
    assert once.is_clean and once.uses == {"usual": {2: 1}}
    twice = account({**published, "batches": [batch(0, "a.0.0-0-0"), batch(1, "a.0.0-0-0")]})
    assert twice.trained_twice == ("a.0.0-0-0",) and not twice.is_clean
    revised = account({**published, "batches": [batch(0, "a.0.0-0-0"), batch(1, "a.0.0-0-0", revision=1)]})
    assert revised.is_clean


def test_a_batch_of_an_overtaken_trainer_counts_for_nothing() -> None:
    journal = [Fence(run=RUN, token=1), Fence(run=RUN, token=5), batch(0, "a.0.0-0-0", token=1)]
    journal.append(batch(0, "a.0.0-0-0", token=5))
    found = account({"experiences": [block("a.0")], "batches": journal})
    assert found.is_clean and found.trained == 1


def test_what_was_only_in_steps_without_effect_was_not_trained() -> None:
    names = [f"a.0.0-{episode}-0" for episode in range(4)]
    journal = [
        batch(0, names[0]),
        batch(1, names[1]),
        Skip(run=RUN, token=1, step=1, reason="not finite"),
        batch(2, names[2]),
        Rollback(run=RUN, token=1, from_step=2, to_step=2, restored_version=1, version=4, reason="x"),
        batch(3, names[3]),
    ]
    found = account({"experiences": [block("a.0", range(4))], "batches": journal})
    assert (found.trained, found.dropped) == (2, {"step skipped": 1, "rolled back": 1})
    again = account({"experiences": [block("a.0", range(4))], "batches": [*journal, batch(4, names[1], use=1)]})
    assert (again.trained, again.dropped) == (3, {"rolled back": 1})


def test_synthetic_experiences_are_known_by_the_buffer_and_others_are_not_known() -> None:
    made = block("syn-1.0", [0], lane="expert")
    trained = {"batches": [batch(0, "syn-1.0.0-0-0", lane="expert")]}
    known = account({"buffer": [made], **trained})
    assert known.is_clean and known.published == 0 and known.uses == {"expert": {1: 1}}
    assert account(trained).unknown == ("syn-1.0.0-0-0",)
    assert account(trained, buffer_begins=8).is_clean, "its block lay below what is kept"


GROUPS = ("a.0", "b.0", "c.0")
MEMBERS = st.tuples(st.sampled_from(GROUPS), st.integers(0, 3))
names_of = MEMBERS.map(lambda one: f"{one[0]}.0-{one[1]}-0")
RECORDS = {
    "experiences": st.builds(block, st.sampled_from(GROUPS), st.lists(st.integers(0, 3), min_size=1, unique=True)),
    "verified": st.builds(stub, st.sampled_from(GROUPS), st.integers(0, 3), st.sampled_from(["odd", "short"]))
    | st.just(Feedback(ref="a.0.0-0-0", id="1")),
    "buffer": st.builds(block, st.sampled_from(GROUPS), st.lists(st.integers(0, 3), min_size=1, unique=True)),
    "progress": st.builds(closure, st.sampled_from(GROUPS), st.sampled_from(["buffered", "dropped", "superseded"]))
    | st.builds(
        lambda groups: Drawn(token=1, step=0, version=0, groups=(), dropped=dict.fromkeys(groups, "stale")),
        st.lists(st.sampled_from(GROUPS)),
    ),
    "batches": st.builds(batch, st.integers(0, 5), names_of, use=st.integers(0, 1))
    | st.builds(lambda step: Skip(run=RUN, token=1, step=step, reason="x"), st.integers(0, 5)),
    "dead-letters": st.builds(dead_letter, st.builds(block, st.sampled_from(GROUPS)), st.just("too large")),
}


@given(
    st.fixed_dictionaries({topic: st.lists(records, max_size=5) for topic, records in RECORDS.items()}), st.randoms()
)
def test_the_account_adds_up_and_the_order_between_topics_does_not_matter(
    topics: dict[str, list[Control | Block]], shuffle: random.Random
) -> None:
    found = account(topics)
    assert found.published == found.trained + sum(found.dropped.values()) + found.pending
    assert found.pending == len(found.pending_ids) == len(set(found.pending_ids))
    order = list(topics)
    shuffle.shuffle(order)
    assert account({topic: topics[topic] for topic in order}) == found
    stubbed = {one.id for one in topics["verified"] if isinstance(one, DropMarker)}
    assert not stubbed & set(found.pending_ids)


def test_episodes_that_were_stopped_are_told_apart_and_lend_their_reason_to_nobody() -> None:
    records = {
        "experiences": [block("a.0", [0, 1])],
        "verified": [stub("a.0", 2, GROUP_OVER), stub("b.0", 0, GROUP_OVER)],
        "progress": [Closure(group="a.0", outcome="buffered", drops={GROUP_OVER: 1, "odd": 1}, experiences=1)],
        "buffer": [block("a.0", [0])],
    }
    found = account(records)
    assert found.cancelled == {GROUP_OVER: 2}
    assert (found.published, found.dropped, found.pending) == (2, {"odd": 1}, 1)


def test_tokens_that_were_too_old_are_counted_once_and_not_those_of_steps_that_had_no_effect() -> None:
    steps = [msgspec.structs.replace(batch(step, f"a.0.0-{step}-0"), masked_below=3, masked=7) for step in range(2)]
    found = account({"experiences": [block("a.0")], "batches": [*steps, Skip(run=RUN, token=1, step=1, reason="nan")]})
    assert (found.trained, found.masked) == (1, 7)


async def log_of_a_run() -> Log:
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=2, keep_ms=-1)
    for group in ("a.0", "b.0", "c.0"):
        await log.publish(topics.EXPERIENCES, block(group))
    await log.publish(topics.BUFFER, block("a.0"))
    await log.publish(topics.PROGRESS, closure("a.0", "buffered"))
    await log.publish(topics.PROGRESS, closure("b.0", "dropped", reason="all rewards equal"))
    await log.publish(topics.BATCHES, batch(0, "a.0.0-0-0", "a.0.0-1-0"))
    return log


def test_a_full_disk_is_an_error_that_names_the_folder_of_temporary_files() -> None:
    with closing(Ledger(RUN)) as ledger:
        ledger.database.execute("PRAGMA max_page_count = 20")
        with pytest.raises(ConfigError, match="TMPDIR: the disk of temporary files: database or disk is full"):
            for number in range(2000):
                ledger.fold("experiences", message("experiences", block(f"task-{number}.0")))


async def test_a_record_that_comes_during_the_audit_is_pending_at_most() -> None:
    log = await log_of_a_run()

    def publish_all_of_a_group(topic: str, left: int) -> None:
        if topic == "dead-letters":  # batches, progress and buffer are read by now
            tasks.append(asyncio.ensure_future(pass_through()))

    async def pass_through() -> None:
        await log.publish(topics.EXPERIENCES, block("late.0"))
        await log.publish(topics.BUFFER, block("late.0"))
        await log.publish(topics.BATCHES, batch(1, "late.0.0-0-0"))

    tasks: list[asyncio.Future[None]] = []
    found = await audit(log, RUN, publish_all_of_a_group)
    await asyncio.gather(*tasks)
    assert found.is_clean and found.pending in (2, 4)


async def test_what_was_trained_from_below_the_kept_buffer_is_not_called_unknown() -> None:
    log = await log_of_a_run()
    for _ in range(7):
        await log.publish(topics.BUFFER, block("b.0"))
    await log.publish(topics.BATCHES, batch(1, "gone.0.0-0-0"))
    assert (await audit(log, RUN)).unknown == ("gone.0.0-0-0",)
    await log.bus.delete_records(Partition(log.name(topics.BUFFER), 0), 8)
    assert (await audit(log, RUN)).is_clean


async def test_what_was_published_before_the_kept_journal_is_left_out_and_never_called_pending() -> None:
    tick = itertools.count(step=1000)
    log = Log(MemoryBus(lambda: next(tick)), "t")
    await log.create_topics(partitions=2, keep_ms=-1)
    await log.publish(topics.EXPERTS, block("old.0"))
    await log.publish(topics.BATCHES, batch(0, "old.0.0-0-0", "old.0.0-1-0"))
    await log.publish(topics.BATCHES, batch(1))
    await log.publish(topics.EXPERIENCES, block("new.0"))
    await log.publish(topics.BATCHES, batch(2, "new.0.0-0-0", "new.0.0-1-0"))
    whole = await audit(log, RUN)
    assert (whole.published, whole.trained, whole.pending) == (4, 4, 0)
    await log.bus.delete_records(Partition(log.name(topics.BATCHES), 0), 1)
    kept = await audit(log, RUN)
    assert (kept.published, kept.trained, kept.pending) == (2, 2, 0)


@pytest.mark.slow
async def test_master_explorer_streams_and_trainer_drain_to_zero_and_go_on_when_told(tmp_path: Path) -> None:
    async with whole_loop(tmp_path) as log:
        await trained_steps(log, 5)
        seen: list[str] = []
        account, is_drained = await drain(log, "test", "ann", 60.0, seen.append)
        assert account.is_clean and is_drained and account.on_the_way == 0, account.pending_ids[:5]
        assert account.trained > 10 and any(words.startswith("drained: 0 groups") for words in seen)
        issued = len([one async for one in log.scan(TASKS)])
        again, _ = await drain(log, "test", "ann", 60.0, seen.append)
        assert again.published == account.published, "a drained app does not go on by itself"
        assert len([one async for one in log.scan(TASKS)]) == issued
        steps = len([one async for one in log.scan(PROGRESS) if isinstance(one.value, Drawn)])
        await log.publish(topics.POLICIES, Directive(order="continue", owner="ann"))
        await trained_steps(log, steps + 2)


async def test_a_drain_that_nobody_hears_ends_with_its_time_and_says_what_is_on_its_way(tmp_path: Path) -> None:
    log = await memory_log()
    for on_the_way in (0, 1):  # a group that is outstanding may have published nothing yet
        account, is_drained = await drain(log, "test", "ann", 0.2, lambda now: None)
        assert (account.on_the_way, is_drained) == (on_the_way, False)
        await log.publish(EXPERIENCES, answer_block(answer("t.0", 0)))


async def test_a_master_that_starts_into_a_drain_issues_nothing() -> None:
    log = await memory_log()
    await load(log)
    await log.publish(POLICIES, Directive(order="drain", owner="ann"))
    heard, tasks = TopicArrivals(log, REPORTS), TopicArrivals(log, TASKS)
    listening = [asyncio.create_task(one.listen()) for one in (heard, tasks)]
    async with running(master(log), *listening):
        await until(lambda: any(one.state == "drained" for one in heard.of(Progress)))
        assert not tasks.records
        await log.publish(topics.POLICIES, Directive(order="continue", owner="ann"))
        await until(lambda: len(tasks.records) == 4)
