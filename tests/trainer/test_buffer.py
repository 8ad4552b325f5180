"""The buffer: what is held, how often it may be trained, and that deliveries twice or late change nothing."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.policies.fold import PoliciesFold
from infra.store.memory import MemoryStore
from schemas import Block, MasterState, PolicyEvent, Progress, Span, decode, encode, topics
from schemas.errors import BadFrame, FencedOut, OffsetOutOfRange
from tests.trainer.trainer_samples import block, make_item, message, mixed, pair
from trainer.batch.batch import TrainItem
from trainer.buffer.buffer import Buffer, make_candidate, read_blocks, use_key
from trainer.buffer.intake import Intake, follow_buffer
from trainer.buffer.pool import FIRST_ROWS, Candidate, LaneRows
from trainer.journal.journal import take_lease
from trainer.train import watch_policies


def filled(*blocks: Block, **max_uses: int) -> Buffer:
    buffer = Buffer(max_uses or {"usual": 1, "expert": 2})  # type: ignore[arg-type]
    for offset, each in enumerate(blocks):
        assert buffer.add(offset, encode(each), each) == ""
    return buffer


def add(buffer: Buffer, offset: int, each: Block) -> str:
    return buffer.add(offset, encode(each), each)


def only(buffer: Buffer, lane: str = "usual") -> Candidate:
    (candidate,) = buffer.candidates(lane)  # type: ignore[arg-type]
    return candidate


def test_a_group_with_a_sequence_longer_than_the_context_is_refused_whole() -> None:
    each = block("a.0", num_members=2)
    longest = max(member.num_tokens for member in each.experiences)
    assert Buffer({"usual": 1}, max_tokens=longest).add(0, encode(each), each) == ""
    buffer = Buffer({"usual": 1}, max_tokens=longest - 1)
    assert add(buffer, 0, each) == "longer than the context" and not buffer.references()


def test_a_second_delivery_changes_nothing() -> None:
    buffer = filled(block("a.0"))
    assert add(buffer, 7, block("a.0")) == "duplicate"
    assert buffer.references() == [0]
    assert add(buffer, 0, block("a.0")) == "", "the same offset read again is no duplicate"


def test_an_amended_answer_that_was_trained_is_left_and_a_copy_that_waits_is_replaced() -> None:
    """A session of five turns rated as it goes: every rating amends what was said of all turns before it."""
    buffer = Buffer({"live": 1})
    trained: list[tuple[str, int]] = []
    offset = 0
    for rated in range(5):
        for turn in range(rated + 1):
            add(buffer, offset, block(f"turn{turn}.0", lane="live", num_members=1, revision=rated - turn))
            offset += 1
        if rated % 2:
            trained += [(candidate.group, candidate.revision) for candidate in buffer.candidates("live")]
            buffer.take(buffer.candidates("live"))
    trained += [(candidate.group, candidate.revision) for candidate in buffer.candidates("live")]
    assert trained == [("turn0.0", 1), ("turn1.0", 0), ("turn2.0", 1), ("turn3.0", 0), ("turn4.0", 0)]


def test_a_group_is_trained_again_once_each_time_it_was_sent_to_be_retrained() -> None:
    buffer = Buffer({"human": 1})
    for offset, (revision, retrained) in enumerate([(0, 0), (1, 1), (2, 1), (3, 2), (4, 0)]):
        reason = add(buffer, offset, block("a.0", lane="human", revision=revision, retrained=retrained))
        assert reason == ("already trained" if offset in (2, 4) else "")
        if not reason:
            buffer.take([only(buffer, "human")])
    assert len(buffer.uses) == 3


def test_a_group_in_half_use_keeps_its_uses_when_a_revision_takes_its_place() -> None:
    buffer = filled(block("a.0", lane="expert"))
    buffer.take([only(buffer, "expert")])
    assert add(buffer, 1, block("a.0", lane="expert", revision=1)) == ""
    assert (only(buffer, "expert").offset, only(buffer, "expert").uses) == (1, 1)
    buffer.take([only(buffer, "expert")])
    assert buffer.candidates("expert") == []


def test_uses_are_forgotten_below_the_horizon_unless_held_or_delivered_again() -> None:
    buffer = filled(*(block(f"{name}.0", lane="expert") for name in "abcd"))
    for number in (0, 0, 0, 0, 0):  # a and b twice, c once
        buffer.take(buffer.candidates("expert")[number : number + 1])
    assert add(buffer, 9, block("b.0", lane="expert")) == "already trained"
    assert (len(buffer.uses), buffer.forget_uses(5)) == (3, 1)
    assert add(buffer, 10, block("b.0", lane="expert")) == "already trained", "it came again within the horizon"
    (waits,) = (candidate for candidate in buffer.candidates("expert") if candidate.group == "c.0")
    assert waits.uses == 1, "it waits for its second use"
    assert buffer.forget_uses(5) == 0


def test_a_revision_replaces_the_older_one_that_was_not_drawn_and_never_the_other_way() -> None:
    buffer = filled(block("a.0"), block("a.0", revision=2))
    assert (only(buffer).offset, only(buffer).revision) == (1, 2)
    assert add(buffer, 2, block("a.0", revision=1)) == "duplicate"
    assert buffer.references() == [1]


def test_lanes_that_are_not_trained_and_blocks_that_mix_lanes_are_refused_with_a_reason() -> None:
    buffer = filled()
    assert add(buffer, 0, block(lane="live")) == "lane not trained"
    assert add(buffer, 1, mixed(["usual", "expert"])) == "block mixes lanes"
    assert buffer.references() == []


def test_validation_blocks_are_never_candidates_and_stay_referenced() -> None:
    buffer = filled(block("b.0", lane="expert", held_out=True), block("a.0", lane="expert", held_out=True))
    assert buffer.candidates("expert") == []
    assert [each.group for each in buffer.validation()] == ["b.0", "a.0"]
    assert buffer.references() == [0, 1]


def test_a_group_that_the_master_waits_for_is_refused_with_a_reason_where_it_is_held_out() -> None:
    buffer = filled()
    assert add(buffer, 0, block("a.0", sequence=3, held_out=True)) == "held out"
    assert buffer.references() == [] and buffer.validation() == []


def test_a_use_that_the_journal_tells_of_counts_for_whichever_revision_is_held() -> None:
    for held, told in ((0, 1), (1, 0)):
        buffer = filled(block("a.0", revision=held), block("e.0", lane="expert", revision=held))
        buffer.count_use(make_candidate(9, block("a.0", revision=told), 0))
        buffer.count_use(make_candidate(9, block("e.0", lane="expert", revision=told), 0))
        assert not buffer.candidates("usual") and only(buffer, "expert").uses == 1
        assert add(buffer, 9, block("a.0", revision=2)) == "already trained"
    gone = filled()
    gone.count_use(make_candidate(9, block("a.0"), 0))
    assert add(gone, 9, block("a.0")) == "already trained", "also if nothing of it is held"
    buffer = filled(block("a.0"))
    buffer.count_use(make_candidate(9, block("a.0", revision=1, retrained=1), 0))
    assert only(buffer).uses == 0, "what was sent to be trained again is counted by itself"


def about_another_prompt(item: TrainItem) -> TrainItem:
    return TrainItem(item.experience.with_bulk(tokens=[1, 20, 22, 30]), item.item)


@pytest.mark.parametrize(
    ("items", "fault"),
    [
        (pair([30, 2], [31, 2]), ""),
        (pair([30, 2], [30, 2]), "pair with equal sides"),
        (pair([30, 2], [31, 2])[:1], "half a pair"),
        ([*pair([30], [31]), pair([32], [33])[1]], "half a pair"),
        ([pair([30], [31])[0], about_another_prompt(pair([30], [31])[1])], "pair with different prompts"),
        ([pair([30], [31])[0], make_item([1, 20, 21], [], group="p.0", lane="human")], "nothing to train"),
        ([make_item([1, 20], [Span(0, 2, 0)], lane="human")], "nothing to train"),
    ],
)
def test_a_pair_is_two_answers_that_differ_and_each_member_can_be_trained(items: list[TrainItem], fault: str) -> None:
    held = Intake(Buffer({"human": 1}), buffer_next=0, progress_next=0)
    each = Block(tuple(item.experience for item in items))
    assert held.take_block(message(each, 0), each) == fault
    if not fault:
        (candidate,) = held.buffer.candidates("human")
        assert candidate.is_pair and candidate.num_experiences == 2


DELIVERIES = st.lists(
    st.tuples(st.sampled_from(["a.0", "b.0"]), st.integers(0, 2), st.booleans(), st.booleans()), max_size=12
)


@given(DELIVERIES, st.integers(1, 2))
def test_no_group_is_trained_more_than_max_uses_whatever_is_delivered_drawn_or_restarted(
    deliveries: list[tuple[str, int, bool, bool]], max_uses: int
) -> None:
    buffer = Buffer({"usual": max_uses})
    trained: dict[str, int] = {}
    for offset, (group, revision, draw, restart) in enumerate(deliveries):
        add(buffer, offset, block(group, revision=revision))
        if draw:
            for candidate in buffer.candidates("usual"):
                buffer.take([candidate])
                trained[candidate.group] = trained.get(candidate.group, 0) + 1
        if restart:
            held = buffer.candidates("usual")
            blocks = buffer.look_at(held)
            buffer = Buffer({"usual": max_uses}, buffer.uses)
            assert [add(buffer, block.offset, back) for block, back in zip(held, blocks, strict=True)] == [""] * len(
                held
            )
    assert all(times <= max_uses for times in trained.values())
    assert {use_key(group, 0, "usual"): times for group, times in trained.items()} == {
        key: known.count for key, known in buffer.uses
    }
    names = [candidate.group for candidate in buffer.candidates("usual")]
    assert len(names) == len(set(names)) and sorted(buffer.references()) == buffer.references()


async def filled_blocks(num_blocks: int) -> Log:
    log = Log(MemoryBus(), "t", store=MemoryStore())
    await log.create_topics(partitions=2, keep_ms=-1)
    for number in range(num_blocks):
        await log.publish(topics.BUFFER, block(f"g{number}.0"))
    return log


@pytest.mark.parametrize("offsets", [[3], [1, 900]])
async def test_an_offset_past_the_end_or_that_retention_took_is_an_error_and_never_a_gap(offsets: list[int]) -> None:
    with pytest.raises(OffsetOutOfRange, match=f"offset {offsets[-1]} is not kept, and the journal names it"):
        await read_blocks(await filled_blocks(3), offsets)
    log = await filled_blocks(6)
    await log.bus.delete_records(Partition(log.name(topics.BUFFER), 0), 4)
    assert sorted(await read_blocks(log, [4, 5])) == [4, 5]
    with pytest.raises(OffsetOutOfRange):
        await read_blocks(log, [2, 5])


async def test_a_record_that_is_no_block_is_an_error_that_names_its_offset() -> None:
    log = await filled_blocks(1)
    await log.bus.send(log.name(topics.BUFFER), b"no frame", key=b"k")
    assert sorted(await read_blocks(log, [0])) == [0]
    with pytest.raises(BadFrame, match="buffer offset 1"):
        await read_blocks(log, [0, 1])


async def test_a_block_in_the_object_store_comes_back_as_a_frame_of_its_own() -> None:
    log = await filled_blocks(0)
    large = block("large.0", num_members=64, meta={"trace": "".join(chr(33 + at % 90) for at in range(20_000))})
    await log.publish(topics.BUFFER, large)
    (found,) = (await read_blocks(log, [0])).values()
    frame, each = found.frame, found.block
    again = decode(frame)
    assert isinstance(again, Block) and each.group == again.group == "large.0"
    assert len(frame) > 768 * 1024, "the claim check was redeemed"


def test_the_memory_of_a_lane_is_that_of_what_it_holds_whatever_passed_through_it() -> None:
    rows = LaneRows()
    for at in range(10_000):
        rows.put(Candidate(group="g", lane="live", offset=at, num_experiences=1, tenant="t", subject=f"u{at}"))
        if at >= 100:
            rows.pop(at - 100)
    pool = rows.pool()
    assert len(pool) == 100 and len(pool.held) <= 200 + 2 * FIRST_ROWS
    assert len(pool.codes) <= len(pool.held) + 1, "users who have gone are forgotten with what they said"


def intake(**offsets: int) -> Intake:
    return Intake(Buffer({"usual": 1}), **{"buffer_next": 0, "progress_next": 0, **offsets})


def arrive(each: Intake, *sequences: int) -> None:
    for sequence in sequences:
        arrived = block(f"g{sequence}.0", sequence=sequence)
        assert each.take_block(message(arrived, sequence), arrived) == ""


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=30))
def test_the_floor_only_rises_and_never_passes_an_absent_number(events: list[tuple[int, bool]]) -> None:
    each, arrived = intake(), set()
    for number, draw in events:
        if number not in arrived and number >= each.floor:
            arrive(each, number)
            arrived.add(number)
        if draw:
            before, absent = each.floor, each.absent()
            each.settle([number])
            assert each.floor >= before
            assert all(each.floor <= missing for missing in absent if missing <= number)


def test_only_the_masters_word_says_that_no_more_will_come() -> None:
    each = intake()
    each.take_report(Progress(role="master", instance="m", master=MasterState(state="draining", outstanding=9)))
    assert each.draining and each.outstanding_groups == 9
    each.take_report(Progress(role="master", instance="m", state="issuing", gauges={"outstanding_groups": 1.0}))
    assert each.draining and each.outstanding_groups == 9, "names and gauges are for people"
    each.take_report(Progress(role="master", instance="m", master=MasterState(state="issuing")))
    assert not each.draining


async def test_a_restart_reads_on_no_further_than_the_drops_that_were_told() -> None:
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    each = intake()
    telling, told = asyncio.Event(), asyncio.Event()

    async def tell_dropped(dropped: dict[str, str]) -> None:
        telling.set()
        await told.wait()

    await log.publish(topics.BUFFER, block("a.0"))
    await log.publish(topics.BUFFER, block("b.0", lane="live"))
    await log.publish(topics.BUFFER, block("c.0"))
    following = asyncio.create_task(follow_buffer(log, each, Metrics("train"), tell_dropped))
    async with asyncio.timeout(10):
        await telling.wait()
        assert each.buffer_next == 1, "a checkpoint of now must not pass b.0, which nobody knows to be dropped"
        told.set()
        while each.buffer_next < 3:
            each.changed.clear()
            await each.changed.wait()
    following.cancel()
    assert each.buffer.references() == [0, 2]


async def test_what_of_the_buffer_cannot_be_read_or_trained_is_dropped_with_a_reason() -> None:
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    each, metrics = intake(), Metrics("train")
    told: dict[str, str] = {}

    async def tell_dropped(dropped: dict[str, str]) -> None:
        told.update(dropped)

    following = asyncio.create_task(follow_buffer(log, each, metrics, tell_dropped))
    await log.bus.send(log.name(topics.BUFFER), b"no frame", key=b"k", headers=(("group", b"c.0"),))
    await log.publish(topics.BUFFER, block("b.0", lane="live"))
    await log.publish(topics.BUFFER, block("a.0"))
    async with asyncio.timeout(10):
        while each.buffer_next < 3:
            each.changed.clear()
            await each.changed.wait()
    following.cancel()
    assert each.buffer.num_groups("usual") == 1
    refused = {name: value for name, value in metrics.counters().items() if name.startswith("buffer_refused")}
    assert refused == {"buffer_refused{reason=bad frame}": 1.0, "buffer_refused{reason=lane not trained}": 1.0}
    assert told == {"c.0": "bad frame", "b.0": "lane not trained"}
    assert [message.value.reason async for message in log.scan(topics.DEAD_LETTERS)] == ["bad frame"]


async def test_only_a_newer_lease_of_the_same_policy_ends_a_trainer() -> None:
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    lease = await take_lease(log, policy="main", run="r", owner="me")
    watching = asyncio.create_task(watch_policies(log, lease, "main", intake(), PoliciesFold()))
    await log.publish(topics.POLICIES, PolicyEvent(event="lease", policy="other", owner="x"))
    await log.publish(topics.POLICIES, PolicyEvent(event="published", policy="main", version=3))
    newer = await log.publish(topics.POLICIES, PolicyEvent(event="lease", policy="main", owner="newer"))
    try:
        async with asyncio.timeout(10):
            await watching
        raise AssertionError("nobody noticed")
    except FencedOut as error:
        assert str(error) == f"run 'r': token {lease.token} is held here, newer took {newer.offset}"
