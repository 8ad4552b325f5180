"""`forget`: the keys go first, whoever holds the data drops it with a reason, and what was learned from it is told exactly."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from infra.ledger.forget import ForgetReport, complete, destroy, tell
from infra.ledger.index import LogIndex
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.policies.manifest import decode_manifest
from infra.store.memory import MemoryStore
from infra.store.seal import Keys, open_text, seal_text
from schemas import Batch, Block, Directive, Drawn, Experience, Feedback, PolicyEvent, Saved, ids, topics
from schemas.errors import Sealed, StoreError
from tests.infra.ledger.ledger_records import ANN, TENANT, USER, batch, log_with_ann, of_ann
from tests.names import secret_store, session_name
from tests.trainer.memory_run import CONFIG, STEPS, block, journal, published, replaying, train
from trainer.learners.scripted import ScriptedLearner
from trainer.replay.replay import Compared, find_start, lost_steps, replay


async def empty_log() -> Log:
    log = Log(MemoryBus(), "t", store=secret_store())
    await log.create_topics(partitions=1, keep_ms=-1)
    return log


def turn_of_ann(log: Log, chat: str) -> Experience:
    """An answer to her in a session."""
    group = ids.request_group(session_name(TENANT, chat), 7, 3)
    first = of_ann(log, 1).experiences[0]
    return msgspec.structs.replace(first, id=ids.experience_id(group, 0, 0), group=group, lane="live", sequence=-1)


async def reported(log: Log, folder: Path) -> ForgetReport:
    assert log.store is not None
    keys = Keys(log.store)
    key_ids = destroy(keys, TENANT, USER)
    with closing(LogIndex(folder / "trace.sqlite", run="t", policy="main")) as index:
        about = await tell(log, TENANT, USER, secret=b"s", owner="ops")
        return await complete(log, index, keys, about, key_ids)


async def replayed(log: Log, store: MemoryStore, from_step: int | None = None) -> tuple[list[Compared], str, list[int]]:
    start = await find_start(log, store, "t", from_step=from_step, to_step=None)
    run = replaying(ScriptedLearner())
    found: list[Compared] = []
    try:
        async for one in replay(run, "t", log, store, start):
            found.append(one)
    except Sealed as error:
        return found, str(error), [*await lost_steps(log, "t", start)]
    return found, "", []


def steps_of(journaled: list[object], group: str) -> list[int]:
    return [
        one.step
        for one in journaled
        if isinstance(one, Batch) and any(ids.group_of(item.id) == group for item in one.items)
    ]


async def test_the_report_names_every_step_and_version_that_learned_from_the_user(tmp_path: Path) -> None:
    log, store = await log_with_ann()
    await train(log, store, ScriptedLearner())
    expected = steps_of(await journal(log), "usual-6.0") + steps_of(await journal(log), "usual-7.0")
    found = await reported(log, tmp_path)
    assert found.steps == tuple(sorted(set(expected))) and found.steps and found.groups == 2
    versions = [event.version for event in await published(log) if event.step >= found.steps[0]]
    assert (found.first_version, found.newest_version) == (min(versions), max(versions))


async def test_replay_says_which_steps_it_cannot_do_and_does_those_before_and_after(tmp_path: Path) -> None:
    log, store = await log_with_ann()
    await train(log, store, ScriptedLearner())
    whole, why, _ = await replayed(log, store)
    assert not why and all(one.equal for one in whole)
    found = await reported(log, tmp_path)
    again = Log(log.bus, "t", store=store)
    before, why, steps = await replayed(again, store, from_step=found.steps[0] - 1)
    assert f"step {found.steps[0]}: forgotten" in why and tuple(steps) == found.steps
    assert all(one.equal and one.step < found.steps[0] for one in before)
    after, why, _ = await replayed(again, store, from_step=whole[-1].step)
    assert not why and after and all(one.equal for one in after)


async def test_what_waits_in_the_buffer_is_dropped_with_a_reason_and_never_trained() -> None:
    log, store = await log_with_ann()
    destroy(Keys(store), TENANT, USER)
    fewer = msgspec.structs.replace(CONFIG, max_steps=STEPS - 2)
    await train(Log(log.bus, "t", store=store), store, ScriptedLearner(), fewer)
    journaled = await journal(log)
    assert not steps_of(journaled, "usual-6.0") and not steps_of(journaled, "usual-7.0")
    told = [message.value async for message in log.scan(topics.PROGRESS)]
    dropped = {group: why for one in told if isinstance(one, Drawn) for group, why in one.dropped.items()}
    assert dropped.items() >= {("usual-6.0", "forgotten"), ("usual-7.0", "forgotten")}


async def test_no_manifest_of_a_version_holds_in_clear_what_a_named_user_said() -> None:
    log, store = await log_with_ann(at=(6, 13, 20))  # nobody else's groups have these tokens
    await train(log, store, ScriptedLearner())
    probes = [decode_manifest(store.get(event.manifest)).probe for event in await published(log)]
    probed = {sequence for probe in probes if probe is not None for sequence in probe.sequences}
    assert probed and not probed & {tuple(one.tokens.tolist()) for one in block(6).experiences}


async def test_a_trainer_that_restarts_on_lost_steps_goes_on_without_them() -> None:
    log, store = await log_with_ann()
    learner = ScriptedLearner()
    await train(log, store, learner)
    for key in list(store.keys("checkpoints/")):
        store.delete(key)  # as if it had died before its first checkpoint
    destroy(Keys(store), TENANT, USER)
    again = ScriptedLearner()
    await train(Log(log.bus, "t", store=store), store, again)
    assert again.tensors() != learner.tensors(), "what was forgotten is not in these weights"


async def test_the_event_of_forgetting_is_in_the_log_and_names_nobody() -> None:
    log = await empty_log()
    about = await tell(log, TENANT, USER, secret=b"s", owner="ops")
    (message,) = [one async for one in log.scan(topics.POLICIES)]
    assert message.value == Directive(order="forget", owner="ops", about=about)
    assert USER.encode() not in message.record.value and ANN.encode() not in message.record.value
    assert about != await tell(log, TENANT, USER, secret=b"other", owner="ops")


@pytest.mark.parametrize(
    "group",
    [ids.synthetic_group(("q.0.0-0-0",), "synthesize@1", 0), ids.request_group(session_name(TENANT, "chat"), 7, 3)],
    ids=["derived", "a turn of a session"],
)
async def test_what_is_sealed_is_found_by_its_key_whatever_group_it_lies_in(tmp_path: Path, group: str) -> None:
    log = await empty_log()
    first = of_ann(log, 1).experiences[0]
    name = ids.experience_id(group, 0, 0)
    made = msgspec.structs.replace(first, id=name, group=group, lane="expert", sequence=-1)
    await log.publish(topics.BUFFER, Block((made,)))
    await log.publish(topics.BATCHES, msgspec.structs.replace(batch(4, name), run="t"))
    await log.publish(
        topics.POLICIES, PolicyEvent(event="published", policy="main", version=5, parent=4, step=4, token=1)
    )
    found = await reported(log, tmp_path)
    assert (found.steps, found.first_version, found.groups) == ((4,), 5, 1)


async def test_what_was_written_about_their_answers_is_forgotten_with_them_and_what_is_anothers_stays(
    tmp_path: Path,
) -> None:
    log = await empty_log()
    names = {chat: turn_of_ann(log, chat).id for chat in ("hers", "his")}
    await log.publish(topics.EXPERIENCES, Block((turn_of_ann(log, "hers"),)))
    keys, store = Keys(log.store), log.store
    written = {name: seal_text("a fine name", keys, answer) for name, answer in names.items()}
    key_ids = destroy(keys, TENANT, USER)
    index = LogIndex(tmp_path / "trace.sqlite", run="t", policy="main")
    for _ in range(2):
        assert (await complete(log, index, keys, "9f", key_ids)).texts == 1, "again is harmless"
    index.close()
    assert open_text(written["his"], Keys(store), names["his"]) == "a fine name"
    with pytest.raises(Sealed, match="forgotten"):
        open_text(written["hers"], Keys(store), names["hers"])


async def test_the_index_names_a_session_of_a_key_as_long_as_the_log_does(tmp_path: Path) -> None:
    log = await empty_log()
    hers = turn_of_ann(log, "chat")
    await log.publish(topics.EXPERIENCES, Block((hers,)))
    await log.publish(topics.VERIFIED, Feedback(ref=f"hr-{hers.id}", id="t-1", value=0.5, source="csat"))
    index = LogIndex(tmp_path / "trace.sqlite", run="t", policy="main", prune_at=1)
    await index.refresh(log)
    known = []
    for topic in (topics.EXPERIENCES, topics.VERIFIED):
        await log.bus.delete_records(Partition(log.name(topic), 0), 1)
        await index.refresh(log)
        known.append(index.sessions_under([hers.key_id]))
    index.close()
    assert known == [[session_name(TENANT, "chat")], []], "feedback on her answer is sealed under a key of the session"


async def test_a_writer_of_the_index_that_reads_nothing_is_named_and_not_waited_for_without_end(tmp_path: Path) -> None:
    log = await empty_log()
    writer, index = (LogIndex(tmp_path / "trace.sqlite", run="t", policy="main") for _ in range(2))
    await writer.refresh(log)
    await tell(log, TENANT, USER, secret=b"s", owner="ops")
    with pytest.raises(StoreError, match=r"trace\.sqlite is behind the log, .* repeat"):
        await complete(log, index, Keys(secret_store()), "9f", (), wait_s=0.0)
    await writer.refresh(log)
    assert (await complete(log, index, Keys(secret_store()), "9f", ())).groups == 0
    index.close()
    writer.close()


async def journaled_until(log: Log, enough: Callable[[list[object]], bool]) -> None:
    """Until the journal holds enough."""
    found: list[object] = []
    async with asyncio.timeout(60):
        async for message in log.tail(topics.BATCHES, "beginning"):
            found.append(message.value)
            if enough(found):
                return


@pytest.mark.slow
async def test_a_trainer_that_waits_for_more_lets_go_of_what_is_forgotten_and_writes_a_checkpoint() -> None:
    log, store = await log_with_ann()
    await log.publish(topics.BUFFER, of_ann(log, 2 * STEPS))  # one group alone makes no step
    endless = msgspec.structs.replace(CONFIG, max_steps=0, checkpoint_every=10_000)
    trainer = Log(log.bus, "t", store=store)
    training = asyncio.create_task(train(trainer, store, ScriptedLearner(), endless))
    await journaled_until(
        log, lambda found: sum(isinstance(one, Batch) and one.phase == "train" for one in found) == STEPS
    )
    before = [one for one in await journal(log) if isinstance(one, Saved)]
    destroy(Keys(store), TENANT, USER)
    await tell(log, TENANT, USER, secret=b"s", owner="ops")
    await journaled_until(log, lambda found: len([one for one in found if isinstance(one, Saved)]) > len(before))
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)
    told = [message.value async for message in log.scan(topics.PROGRESS)]
    dropped = {group: why for one in told if isinstance(one, Drawn) for group, why in one.dropped.items()}
    assert dropped == {f"usual-{2 * STEPS}.0": "forgotten"}
    newest = [one for one in await journal(log) if isinstance(one, Saved)][-1]
    assert newest.step == max(one.step for one in await journal(log) if isinstance(one, Batch))
