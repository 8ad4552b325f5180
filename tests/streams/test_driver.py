"""The windowed driver: acks in order whatever finishes first, and nothing escapes."""

import asyncio

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from infra.chain.chain import ChainTurn, make_step
from infra.chain.processor import Drop, Memory, processor
from infra.log.bus import Partition, Record
from infra.log.log import Log, LogMessage
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from infra.store.seal import Keys
from schemas import BadFrame, Block, DeadLetter, DropMarker, Experience, Message, Score, Task, Tick, encode
from schemas.experience import withdrawal_of
from schemas.topics import BUFFER, DEAD_LETTERS, EVALS, EXPERIENCES, TASKSET, VERIFIED
from streams.processors.filter import dedupe
from streams.stages.driver import Moved, Ticket, Window, WindowDriver, read_back
from streams.stages.stage import Handled, Output, letter, publish_all
from streams.stages.verify import Verifier
from tests.actors.rig import until
from tests.streams.collect.collecting import answer, block
from tests.streams.deliveries import KeptDelivery, memory_log, stored, values


class GatedStage:
    """A stage whose records finish when the test says so."""

    def __init__(self) -> None:
        self.gates: dict[int, asyncio.Event] = {}
        self.errors: dict[int, Exception] = {}
        self.num_forgets = 0

    async def recall(self, log: Log, at: Partition, before: int, moved: Moved) -> None:
        """Nothing is remembered here."""

    async def handle(self, message: LogMessage, turn: ChainTurn | None = None) -> Handled:
        await self.gates.setdefault(message.offset, asyncio.Event()).wait()
        if message.offset in self.errors:
            raise self.errors[message.offset]
        task = Task(id=f"task-{message.offset}", messages=(Message(role="user", content="?"),))
        return Handled(first=(Output(TASKSET, task),), num_in=1, num_out=1)

    def failed(self, message: LogMessage, reason: str, error: str) -> Handled:
        return Handled(then=(letter(message, "gated", reason, error),), dropped={reason: 1})

    def forget(self) -> None:
        self.num_forgets += 1

    def open(self, offset: int) -> None:
        self.gates.setdefault(offset, asyncio.Event()).set()


async def fed(log: Log, number: int) -> list[Record]:
    for index in range(number):
        await log.publish(EXPERIENCES, block(answer(f"t{index}.0", 0)))
    return [message.record for message in await stored(log, EXPERIENCES)]


async def test_a_full_window_holds_its_partition_back() -> None:
    async with memory_log() as log, asyncio.TaskGroup() as tasks:
        stage = GatedStage()
        driver = WindowDriver("gated", stage, log, Metrics("process"), tasks, limit=2)
        first, second, third = (KeptDelivery(record) for record in await fed(log, 3))
        await driver.accept(first)
        await driver.accept(second)
        waiting = tasks.create_task(driver.accept(third))
        await asyncio.sleep(0)
        assert not waiting.done()
        stage.open(0)
        await waiting
        assert first.is_acknowledged
        stage.open(1)
        stage.open(2)


async def test_a_stage_that_raises_becomes_a_dead_letter_and_its_neighbours_go_on() -> None:
    async with memory_log() as log, asyncio.TaskGroup() as tasks:
        stage = GatedStage()
        stage.errors[1] = RuntimeError("no such thing")
        metrics = Metrics("process")
        driver = WindowDriver("gated", stage, log, metrics, tasks)
        deliveries = [KeptDelivery(record) for record in await fed(log, 3)]
        for delivery in deliveries:
            await driver.accept(delivery)
            stage.open(delivery.record.offset)
        await until(lambda: all(delivery.is_acknowledged for delivery in deliveries))
        assert len(await values(log, TASKSET)) == 2
        (dead,) = await values(log, DEAD_LETTERS)
        assert isinstance(dead, DeadLetter)
        assert (dead.topic, dead.offset, dead.reason) == ("experiences", 1, "stage failed")
        assert metrics.counters()["dropped{reason=stage failed}"] == 1


async def test_a_stage_that_hangs_is_given_up_after_its_timeout() -> None:
    async with memory_log() as log, asyncio.TaskGroup() as tasks:
        driver = WindowDriver("gated", GatedStage(), log, Metrics("process"), tasks, timeout_s=0.01)
        (record,) = await fed(log, 1)
        delivery = KeptDelivery(record)
        await driver.accept(delivery)
        await until(lambda: delivery.is_acknowledged)
        (dead,) = await values(log, DEAD_LETTERS)
        assert isinstance(dead, DeadLetter)
        assert dead.reason == "timed out"


async def test_what_was_in_flight_before_a_rebalance_is_not_acknowledged_after_it() -> None:
    async with memory_log() as log, asyncio.TaskGroup() as tasks:
        stage = GatedStage()
        driver = WindowDriver("gated", stage, log, Metrics("process"), tasks)
        (record,) = await fed(log, 1)
        slow, again = KeptDelivery(record, generation=1), KeptDelivery(record, generation=2)
        await driver.accept(slow)
        driver.abandon()
        assert slow.is_abandoned
        await driver.accept(again)
        stage.open(0)
        await until(lambda: again.is_acknowledged)
        assert not slow.is_acknowledged
        assert stage.num_forgets == 2


async def test_a_generation_that_was_given_up_acknowledges_nothing_more() -> None:
    """Faust commits past a gap at the beginning of a partition, so a later record would skip those that were given up."""
    async with asyncio.timeout(10), memory_log() as log, asyncio.TaskGroup() as tasks:
        stage = GatedStage()
        driver = WindowDriver("gated", stage, log, Metrics("process"), tasks, limit=1)
        records = await fed(log, 3)
        first, waiting, late = (KeptDelivery(record, generation=1) for record in records)
        await driver.accept(first)
        accepting = tasks.create_task(driver.accept(waiting))
        await asyncio.sleep(0)
        driver.abandon()
        await accepting
        await driver.accept(late)
        assert all(delivery.is_abandoned for delivery in (first, waiting, late))
        again = KeptDelivery(records[0], generation=2)
        await driver.accept(again)
        stage.open(0)
        await until(lambda: again.is_acknowledged)


async def test_outputs_of_one_key_keep_the_order_of_the_records() -> None:
    async with memory_log() as log, asyncio.TaskGroup() as tasks:
        stage = GatedStage()
        driver = WindowDriver("gated", stage, log, Metrics("process"), tasks)
        for _ in range(2):
            await log.publish(EXPERIENCES, block(answer("t.0", 0)))
        deliveries = [KeptDelivery(message.record) for message in await stored(log, EXPERIENCES)]
        for delivery in deliveries:
            await driver.accept(delivery)
        stage.open(1)
        await asyncio.sleep(0.01)
        assert await values(log, TASKSET) == []
        stage.open(0)
        await until(lambda: all(delivery.is_acknowledged for delivery in deliveries))
        tasks_out = [task for task in await values(log, TASKSET) if isinstance(task, Task)]
        assert [task.id for task in tasks_out] == ["task-0", "task-1"]


@given(st.lists(st.tuples(st.sampled_from(["take", "done", "rebalance"]), st.integers(0, 30)), max_size=120))
def test_nothing_is_acked_before_everything_earlier_of_its_generation_is_done(steps: list[tuple[str, int]]) -> None:
    window: Window[tuple[int, int]] = Window(8)
    generation, next_offset, committed = 1, 0, 0
    flying: list[Ticket] = []
    done: set[int] = set()
    for action, number in steps:
        if action == "take" and not window.is_full(0, generation):
            ticket = window.take(0, next_offset, generation, (generation, next_offset))
            assert ticket is not None
            flying.append(ticket)
            next_offset += 1
        elif action == "done" and flying:
            ticket = flying.pop(number % len(flying))
            if ticket.generation == generation:
                done.add(ticket.offset)
            for acked_generation, offset in window.complete(ticket):
                assert acked_generation == generation
                assert offset == committed
                assert offset in done
                committed += 1
        elif action == "rebalance":
            generation += 1
            done = set(range(committed))
            ticket = window.take(0, committed, generation, (generation, committed))
            assert ticket is not None
            flying.append(ticket)
            next_offset = committed + 1


@processor(version=1, inline=True)
def even_only(experience: Experience) -> Experience | Drop:
    return Drop("odd") if experience.episode % 2 else experience


def message_of(value: object, offset: int = 0, error: BadFrame | None = None) -> LogMessage:
    frame = encode(value) if value is not None else b"??"  # type: ignore[arg-type]
    record = Record("app.experiences", 0, offset, 1_000, b"t.0", frame)
    return LogMessage(record, value=value, error=error)  # type: ignore[arg-type]


def handled(value: object, *steps: object) -> Handled:
    return asyncio.run(verifier(*steps).handle(message_of(value)))


def test_kept_members_go_on_in_one_block_and_dropped_ones_leave_a_stub() -> None:
    result = handled(block(*(answer("t.0", episode, size=4) for episode in range(4))), even_only)
    (kept,) = result.first
    assert kept.topic is VERIFIED
    assert isinstance(kept.record, Block)
    assert [member.episode for member in kept.record.experiences] == [0, 2]
    stubs = [output.record for output in result.then]
    assert stubs == [
        DropMarker(
            id=f"t.0.0-{n}-0",
            group="t.0",
            episode=n,
            group_size=4,
            reason="odd",
            stage="verify",
            processor="even_only@1",
        )
        for n in (1, 3)
    ]
    assert result.dropped == {"odd": 2}


def test_a_duplicate_is_counted_and_closes_nobodys_place() -> None:
    verifier = Verifier([make_step("dedupe", dedupe)])
    sent = block(answer("t.0", 0))
    first = asyncio.run(verifier.handle(message_of(sent, offset=3)))
    retried = asyncio.run(verifier.handle(message_of(sent, offset=3)))
    second = asyncio.run(verifier.handle(message_of(sent, offset=4)))
    assert first.first == retried.first
    assert (second.first, second.then, second.dropped) == ((), (), {"duplicate": 1})


def test_eval_answers_go_to_evals_and_are_never_dropped() -> None:
    members = [msgspec.structs.replace(answer("t.0", episode), suite="held-out") for episode in range(2)]
    result = handled(block(*members), even_only)
    (output,) = result.first
    assert output.topic is EVALS
    assert isinstance(output.record, Block)
    assert [member.failure for member in output.record.experiences] == ["", "odd"]
    assert output.record.experiences[1].scores == ()
    assert result.then == ()


def test_bad_frames_and_strange_records_are_dead_lettered() -> None:
    bad = asyncio.run(Verifier([]).handle(message_of(None, error=BadFrame("header: checksum differs"))))
    strange = asyncio.run(Verifier([]).handle(message_of(Tick(partition=0, due_ms=1))))
    letters = [output.record for result in (bad, strange) for output in result.then]
    assert [output.topic for result in (bad, strange) for output in result.then] == [DEAD_LETTERS, DEAD_LETTERS]
    assert [dead_letter.reason for dead_letter in letters if isinstance(dead_letter, DeadLetter)] == [
        "bad frame",
        "unexpected record",
    ]
    assert "checksum" in letters[0].error  # type: ignore[union-attr]


def test_members_of_a_record_that_failed_as_a_whole_leave_stubs_and_eval_answers_count_as_failed() -> None:
    message = message_of(block(answer("t.0", 0), answer("t.0", 1)))
    result = Verifier([]).failed(message, "record too large", "9 MB")
    assert [type(output.record) for output in result.then] == [DropMarker, DropMarker, DeadLetter]
    assert result.dropped == {"record too large": 2}
    member = msgspec.structs.replace(answer("t.0", 0), suite="held-out", meta={"large": "x" * 1000})
    counted, dead = Verifier([]).failed(message_of(block(member)), "timed out", "120 s").then
    assert counted.topic is EVALS and isinstance(counted.record, Block) and isinstance(dead.record, DeadLetter)
    (failed,) = counted.record.experiences
    assert (failed.suite, failed.failure, failed.num_tokens, failed.meta) == ("held-out", "timed out", 0, {})


@processor(version=1, memory=1000)
def numbered(experience: Experience, *, memory: Memory) -> Experience:
    """Depends on everything that came before: how many there were."""
    count = memory.get("count", 0)
    assert isinstance(count, int)
    memory.set("count", count + 1)
    return msgspec.structs.replace(experience, scores=(Score(name="number", value=float(count)),))


@processor(version=1)
def slow_if_odd(experience: Experience) -> Experience:
    """Threaded, and later records overtake earlier ones."""
    import time

    time.sleep(0.02 if experience.episode % 2 else 0.0)
    return experience


def verifier(*functions: object) -> Verifier:
    return Verifier([make_step(function.__name__, function) for function in functions])  # type: ignore[attr-defined,arg-type]


async def drive(log: Log, stage: Verifier, deliveries: list[KeptDelivery]) -> None:
    async with asyncio.TaskGroup() as tasks:
        driver = WindowDriver("verify", stage, log, Metrics("process"), tasks)
        for delivery in deliveries:
            await driver.accept(delivery)
        await until(lambda: all(delivery.is_acknowledged for delivery in deliveries))


async def test_kept_members_with_damaged_bulk_are_a_dead_letter() -> None:
    members = [answer("t.0", episode) for episode in (0, 1, 3)]
    members[0].held()._logprobs = -members[0].logprobs
    async with memory_log() as log:
        await log.publish(EXPERIENCES, block(*members))
        (message,) = await stored(log, EXPERIENCES)
        await drive(log, verifier(even_only), [KeptDelivery(message.record)])
        (dead,) = await values(log, DEAD_LETTERS)
        assert isinstance(dead, DeadLetter) and dead.reason == "cannot be encoded"


async def test_a_duplicate_after_a_restart_is_still_a_duplicate() -> None:
    async with memory_log() as log:
        for group in ("a.0", "b.0", "a.0"):
            await log.publish(EXPERIENCES, block(answer(group, 0)))
        records = [message.record for message in await stored(log, EXPERIENCES)]
        await drive(log, verifier(dedupe), [KeptDelivery(record) for record in records[:2]])
        await drive(log, verifier(dedupe), [KeptDelivery(record) for record in records[2:]])
        sent = await values(log, VERIFIED)
        assert [sent_block.group for sent_block in sent if isinstance(sent_block, Block)] == ["a.0", "b.0"]


async def test_a_rebalance_rebuilds_the_memory_before_the_first_record_is_handled() -> None:
    async with memory_log() as log:
        for number in range(6):
            await log.publish(EXPERIENCES, block(answer(f"g{number}.0", 0)))
        records = [message.record for message in await stored(log, EXPERIENCES)]
        stage = verifier(numbered)
        async with asyncio.TaskGroup() as tasks:
            driver = WindowDriver("verify", stage, log, Metrics("process"), tasks)
            first = [KeptDelivery(record) for record in records[:4]]
            for delivery in first:
                await driver.accept(delivery)
            await until(lambda: all(delivery.is_acknowledged for delivery in first))
            again, moved = [KeptDelivery(record, generation=2) for record in records[2:]], driver.mark(0)
            for delivery in again:
                await driver.accept(delivery)
            await until(lambda: all(delivery.is_acknowledged for delivery in again))
            assert driver.mark(0) > moved, "the watchdog sees that the rebuild goes on"
        sent = [record.experiences[0] for record in await values(log, VERIFIED) if isinstance(record, Block)]
        assert {sent_block.group: sent_block.score("number") for sent_block in sent} == {
            f"g{n}.0": float(n) for n in range(6)
        }


async def test_reading_back_ends_where_the_memory_reaches() -> None:
    async with memory_log() as log:
        for number in range(40):
            await log.publish(EXPERIENCES, block(answer(f"g{number}.0", 0), answer(f"g{number}.0", 1)))
        read = read_back(log, 10, Partition(log.name(EXPERIENCES), 0), 30, lambda: None)
        assert [message.offset async for message in read] == [25, 26, 27, 28, 29]


async def test_a_withdrawal_is_stored_behind_the_copy_that_it_takes_back() -> None:
    async with memory_log() as plain:
        log = Log(plain.bus, plain.app, store=(store := MemoryStore()))
        named = msgspec.structs.replace(answer("t.0", 0), key_id=Keys(store).of("ann").key_id)
        back = withdrawal_of(named, lane="usual", revision=1)
        await publish_all(log, [Output(BUFFER, block(member)) for member in (named, back)])
        assert [sent.experiences[0].revision for sent in await values(log, BUFFER)] == [0, 1]  # type: ignore[union-attr]


async def test_memories_see_records_in_log_order_whatever_overtakes_before() -> None:
    async with memory_log() as log:
        for number in range(12):
            await log.publish(EXPERIENCES, block(answer(f"g{number}.0", number % 2)))
        deliveries = [KeptDelivery(message.record) for message in await stored(log, EXPERIENCES)]
        await drive(log, verifier(slow_if_odd, numbered), deliveries)
        sent = [record.experiences[0] for record in await values(log, VERIFIED) if isinstance(record, Block)]
        assert {sent_block.group: sent_block.score("number") for sent_block in sent} == {
            f"g{n}.0": float(n) for n in range(12)
        }
