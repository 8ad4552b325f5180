"""The wait of a step: the paced lane decides, the others follow in proportion."""

import asyncio
import tomllib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.cli.commands.init import example_files
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.policies.fold import PoliciesFold
from infra.settings.config import Floor, Pacing, decode
from infra.store.memory import MemoryStore
from schemas import Batch, BatchItem, Block, Directive, Drawn, MasterState, Progress, topics
from schemas.fields import MasterPhase
from tests.actors.rig import until
from tests.trainer.memory_run import STEPS, journal, new_run, train
from tests.trainer.trainer_samples import block, message
from trainer.buffer.buffer import Buffer
from trainer.buffer.intake import Intake
from trainer.buffer.pool import Draw
from trainer.config import LaneConfig, TrainerConfig
from trainer.journal.checkpoint import Position
from trainer.journal.journal import Lease
from trainer.learners.scripted import ScriptedLearner
from trainer.loop.publication import WeightPublisher
from trainer.loop.report import TrainerReport
from trainer.loop.state import Run
from trainer.loop.step import tell_drawn
from trainer.loop.supply import QUIET_S, TOO_MANY, Supply
from trainer.loop.supply import decide as decide_draw
from trainer.loop.waiting import DIVERGED, admitted, drop, next_draw, readable

USUAL = LaneConfig(weight=0.9)
EXPERT = LaneConfig(loss="sft", weight=0.1, max_uses=9)


def run_of(*blocks: Block, version: int = 3, lanes: dict[str, LaneConfig] | None = None, **pacing: float) -> Run:
    given = {"groups_per_step": 2, "max_staleness": 2, "straggler_s": 5.0, **pacing}
    floor = Floor(app="t", pacing=Pacing(**given))  # type: ignore[arg-type]
    config = TrainerConfig(lanes=lanes or {"usual": USUAL, "expert": EXPERT})  # type: ignore[arg-type]
    log, store, lease = Log(MemoryBus(), "t"), MemoryStore(), Lease(run="t", token=0, owner="o")
    intake = Intake(
        Buffer({lane: lane_config.max_uses for lane, lane_config in config.lanes.items()}),
        buffer_next=0,
        progress_next=0,
    )
    run = Run(
        floor=floor, config=config, log=log, store=store, learner=ScriptedLearner(), lease=lease,
        publisher=WeightPublisher(log, store, lease, "main", {}, PoliciesFold()), report=TrainerReport(Metrics("train")),
        position=Position(step=9, version=version),
        supply=Supply(config=config, pacing=floor.pacing, intake=intake, seed=1),
    )  # fmt: skip
    arrive(run, *blocks)
    return run


def decide(run: Run, *, now_s: float) -> Draw:
    return decide_draw(run.supply, run.position, now_s=now_s)


def arrive(run: Run, *blocks: Block) -> None:
    for each in blocks:
        offset = run.supply.intake.buffer_next
        assert run.supply.intake.take_block(message(each, offset), each) == ""
        run.supply.intake.buffer_next = offset + 1


def usual(sequence: int, version: int = 3, *, num_members: int = 18, ratio: bool = True) -> Block:
    return block(f"u{sequence}.0", sequence=sequence, version=version, num_members=num_members, ratio=ratio)


def expert(number: int) -> Block:
    return block(f"e{number}.0", lane="expert", num_members=1, version=-1, ratio=False)


def taken(draw: Draw) -> list[str]:
    return [candidate.group for candidate in draw.taken]


def dropped(draw: Draw) -> list[tuple[str, str]]:
    return [(candidate.group, reason) for candidate, reason in draw.dropped]


def master(state: MasterPhase, outstanding: int) -> Progress:
    return Progress(role="master", instance="m", master=MasterState(state=state, outstanding=outstanding))


def live(number: int, **header: object) -> Block:
    return block(f"l{number}.0", lane="live", num_members=1, **header)


def test_a_lane_alone_waits_for_as_many_as_a_step_takes_and_a_draining_run_for_none() -> None:
    lanes = {"live": LaneConfig(min_sequences=3), "expert": LaneConfig(loss="sft", weight=0.1, optional=True)}
    run = run_of(live(0), live(1), expert(0), lanes=lanes, groups_per_step=3)
    assert decide(run, now_s=0.0) == Draw(wait=True)
    arrive(run, live(2))
    assert sorted(taken(decide(run, now_s=0.0))) == ["e0.0", "l0.0", "l1.0", "l2.0"]
    rest = run_of(live(0), lanes=lanes, groups_per_step=3)
    for state in ("draining", "drained"):
        rest.supply.intake.take_report(master(state, outstanding=0))
        assert taken(decide(rest, now_s=0.0)) == ["l0.0"], state


@pytest.mark.parametrize(("weights", "wanted"), [((1.0, 1.0), 36), ((0.99, 0.01), 1), ((0.9, 0.0), 0)])
def test_a_lane_beside_the_usual_one_is_asked_for_as_much_as_it_weighs(weights: tuple[float, ...], wanted: int) -> None:
    lanes = {"usual": LaneConfig(weight=weights[0]), "expert": LaneConfig(loss="sft", weight=weights[1], max_uses=9)}
    draw = decide(run_of(usual(0), usual(1), *(expert(number) for number in range(50)), lanes=lanes), now_s=0.0)
    assert taken(draw)[:2] == ["u0.0", "u1.0"] and len(draw.taken) == 2 + wanted


def test_a_step_that_could_teach_nothing_is_not_made_and_what_it_would_have_used_is_dropped() -> None:
    lanes = {"live": LaneConfig(loss="topr", min_sequences=2)}
    run = run_of(live(0, advantage=0.0), live(1, advantage=0.0), lanes=lanes)
    draw = decide(run, now_s=0.0)
    assert draw.wait and not draw.taken
    assert sorted(dropped(draw)) == [("l0.0", "no advantage in the step"), ("l1.0", "no advantage in the step")]
    arrive(run, live(2, advantage=0.5))
    assert "l2.0" in taken(decide(run_of(live(0, advantage=0.0), live(2, advantage=0.5), lanes=lanes), now_s=0.0))


@pytest.mark.parametrize(
    "lane", [LaneConfig(loss="sft", min_sequences=1), LaneConfig(loss="grpo", min_sequences=1, kl=0.1)]
)
def test_a_loss_that_learns_without_advantages_trains_where_they_are_0(lane: LaneConfig) -> None:
    assert taken(decide(run_of(live(0, advantage=0.0), lanes={"live": lane}), now_s=0.0)) == ["l0.0"]
    assert taken(decide(run_of(live(0), lanes={"live": LaneConfig(min_sequences=1)}), now_s=0.0)) == ["l0.0"], (
        "nobody set one"
    )


def test_a_lane_alone_makes_no_version_before_the_last_one_has_its_time() -> None:
    run = run_of(live(0), lanes={"live": LaneConfig(min_sequences=1)})
    run.supply.config = msgspec.structs.replace(run.supply.config, min_publish_interval="5m")
    assert taken(decide(run, now_s=50.0)) == ["l0.0"], "nothing was published yet"
    run.supply.published_s = 50.0
    assert decide(run, now_s=349.0).wait and taken(decide(run, now_s=350.0)) == ["l0.0"]
    run.supply.intake.take_report(master("draining", outstanding=0))
    assert taken(decide(run, now_s=51.0)) == ["l0.0"]
    paced = run_of(usual(0), usual(1))
    paced.config = msgspec.structs.replace(paced.config, min_publish_interval="5m")
    paced.supply.published_s = 50.0
    assert taken(decide(paced, now_s=51.0)) == ["u0.0", "u1.0"], "rollouts are never held up"


def test_eight_ratings_with_the_file_that_init_writes_make_no_version() -> None:
    text = example_files("agent")["headrace.toml"].read_text()
    trainer = decode(tomllib.loads(text)["trainer"], TrainerConfig, "headrace.toml")
    run = run_of(lanes=trainer.lanes)
    run.supply.config = trainer
    for number in range(8):
        arrive(run, live(number, advantage=0.5))
        assert decide(run, now_s=0.0).wait
    for number in range(8, 64):
        arrive(run, live(number, advantage=0.5))
    assert not decide(run, now_s=0.0).wait
    run.supply.published_s = 0.0
    assert decide(run, now_s=299.0).wait


def test_more_than_may_wait_in_a_lane_are_dropped_with_a_reason_the_oldest_first() -> None:
    run = run_of(
        *(live(number) for number in range(5)),
        lanes={"live": LaneConfig(max_waiting=3, min_sequences=1)},
        groups_per_step=9,
    )
    draw = decide(run, now_s=0.0)
    assert dropped(draw) == [("l0.0", TOO_MANY), ("l1.0", TOO_MANY)]
    assert sorted(taken(draw)) == ["l2.0", "l3.0", "l4.0"]
    lanes = {"usual": USUAL, "live": LaneConfig(max_waiting=2), "expert": LaneConfig(weight=0.0, max_waiting=1)}
    idle = decide(run_of(*map(live, range(3)), expert(0), expert(1), lanes=lanes), now_s=0.0)
    assert idle.wait and dropped(idle) == [("l0.0", TOO_MANY), ("e0.0", TOO_MANY)], "also while no step is made"


def test_answers_without_a_ratio_are_dropped_with_a_reason_unless_the_loss_is_supervised() -> None:
    run = run_of(usual(0, ratio=False), usual(1), usual(2))
    draw = decide(run, now_s=0.0)
    assert dropped(draw) == [("u0.0", "no ratio")] and taken(draw) == ["u1.0", "u2.0"]
    assert not decide(run_of(usual(0, ratio=False), lanes={"usual": LaneConfig(loss="sft")}), now_s=0.0).dropped


def test_answers_without_a_reward_are_dropped_with_a_reason_where_a_critic_needs_them() -> None:
    lanes = {"live": LaneConfig(loss="ppo", min_sequences=1)}
    draw = decide(run_of(live(0), live(1, reward=1.0), lanes=lanes), now_s=0.0)
    assert dropped(draw) == [("l0.0", "no reward")] and taken(draw) == ["l1.0"]


def test_a_straggler_about_to_pass_the_bound_is_waited_for_until_its_time_is_up() -> None:
    run = run_of(usual(1, version=1), usual(2, version=1))
    assert decide(run, now_s=100.0).wait and decide(run, now_s=105.0).wait
    assert taken(decide(run, now_s=105.1)) == ["u1.0", "u2.0"]
    run.settle([1, 2])
    assert run.supply.intake.floor == 3, "a number that was given up is not looked for again"


def test_late_groups_hold_up_the_end_of_a_run_no_longer_than_the_quiet_after_the_newest_arrival() -> None:
    run = run_of(usual(0), expert(0))
    run.supply.intake.take_report(master("draining", 2))
    assert decide(run, now_s=run.supply.intake.arrived_s + 0.9 * QUIET_S).wait
    assert "u0.0" in taken(decide(run, now_s=run.supply.intake.arrived_s + QUIET_S))


@pytest.mark.parametrize(
    ("state", "outstanding", "waits"),
    [
        ("issuing", 1, True),
        ("draining", 1, False),
        ("draining", 2, True),
        ("draining", 0, False),
        ("evaluating", 0, False),
        ("evaluating", 2, True),
        ("done", 0, False),
    ],
)
def test_the_last_groups_of_a_run_make_a_smaller_step_once_no_more_can_come(
    state: str, outstanding: int, waits: bool
) -> None:
    run = run_of(usual(0), expert(0))
    run.supply.intake.take_report(master(state, outstanding))
    draw = decide(run, now_s=0.0)
    assert draw.wait == waits and ("u0.0" in taken(draw)) == (not waits)


GROUPS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=10, unique_by=lambda pair: pair[0])


@given(GROUPS, st.integers(3, 8), st.floats(0, 20))
def test_no_draw_breaks_issue_order_the_bound_or_the_size_of_a_step(
    groups: list[tuple[int, int]], version: int, later_s: float
) -> None:
    run = run_of(*(usual(number, at, num_members=2) for number, at in groups), version=version)
    for now_s in (0.0, later_s):
        draw = decide(run, now_s=now_s)
        numbers = [candidate.sequence for candidate in draw.taken if candidate.lane == "usual"]
        fresh = sorted(number for number, at in groups if version - at <= 2)
        assert numbers == ([] if draw.wait else fresh[:2])
        assert sorted(each.sequence for each, _ in draw.dropped) == sorted(n for n, at in groups if version - at > 2)


OLD = 3  # versions behind nothing could be in the usual lane
NOW = 1000


def live_admit(number: int) -> Block:
    return block(f"l{number}.0", lane="live", num_members=1, version=OLD)


def with_live(bound: float = 0.0, **lanes: LaneConfig) -> Run:
    config = {"live": LaneConfig(weight=1.0, max_mean_abs_log_ratio=bound, min_sequences=1), **lanes}
    return run_of(live_admit(0), live_admit(1), version=NOW, lanes=config)


async def drawn(run: Run) -> Draw:
    await run.log.create_topics(partitions=1, keep_ms=-1)
    return await admitted(run, decide_draw(run.supply, run.position, now_s=0.0))


def distance() -> float:
    """Distance of these blocks under the scripted learner, for which every token is certain: mean of -logprob."""
    return float(-live_admit(0).experiences[0].logprobs.mean())


async def test_a_group_within_the_bound_is_trained_and_one_beyond_it_is_dropped_and_told() -> None:
    for bound in (0.0, distance() * 1.01):  # by default there is none
        draw = await drawn(with_live(bound))
        assert {candidate.group for candidate in draw.taken} == {"l0.0", "l1.0"} and not draw.dropped
    run = with_live(bound=distance() * 0.99)
    draw = await drawn(run)
    assert draw.wait and not draw.taken
    assert {reason for _, reason in draw.dropped} == {DIVERGED}
    assert run.supply.intake.buffer.num_groups("live") == 0

    records = [each.value async for each in run.log.scan(topics.PROGRESS)]
    (record,) = [record for record in records if isinstance(record, Drawn)]
    assert record.dropped == {"l0.0": DIVERGED, "l1.0": DIVERGED}


@pytest.mark.parametrize("bound", [0.0, distance() * 0.99, distance() * 1.01])
async def test_an_answer_that_is_revised_while_it_is_weighed_is_neither_trained_nor_dropped(bound: float) -> None:
    """People change their minds while a thread compares: the older revision is gone, the newer one is drawn later."""
    run = with_live(bound=bound)
    await run.log.create_topics(partitions=1, keep_ms=-1)
    first = decide_draw(run.supply, run.position, now_s=0.0)
    weighing = asyncio.create_task(admitted(run, first))
    if bound:
        await asyncio.sleep(0)  # it has begun, and waits for the learner's thread
    newer = block("l0.0", lane="live", num_members=1, version=OLD, revision=1)
    assert run.supply.intake.take_block(message(newer, 2), newer) == ""
    draw = await weighing
    held = {(candidate.group, candidate.revision) for candidate in run.supply.intake.buffer.candidates("live")}
    assert ("l0.0", 1) in held and "l0.0" not in {
        candidate.group for candidate in (*draw.taken, *(gone for gone, _ in draw.dropped))
    }
    assert all(run.supply.intake.buffer.holds(candidate) for candidate in draw.taken)


async def test_what_is_replaced_while_keys_are_looked_up_is_neither_drawn_nor_dropped() -> None:
    run = with_live()
    await run.log.create_topics(partitions=1, keep_ms=-1)
    draw = decide(run, now_s=0.0)
    arrive(run, block("l0.0", lane="live", num_members=1, version=OLD, revision=1))
    assert taken(await readable(run, draw)) == ["l1.0"]
    await drop(run, Draw(dropped=tuple((candidate, "forgotten") for candidate in draw.taken)))
    (told,) = [each.value async for each in run.log.scan(topics.PROGRESS)]
    assert told.dropped == {"l1.0": "forgotten"} and run.supply.intake.buffer.num_groups("live") == 1


async def test_a_group_of_a_task_that_begins_like_an_answer_is_told_by_its_own_name() -> None:
    run, item = run_of(), BatchItem(id="hr-0042.0.0-7-0", partition=0, offset=0, index=0, lane="usual")
    await run.log.create_topics(partitions=1, keep_ms=-1)
    await tell_drawn(run, Batch(run="t", token=1, step=0, version=0, items=(item,)))
    (told,) = [each.value async for each in run.log.scan(topics.PROGRESS)]
    assert told.groups == ("hr-0042.0",)


async def test_groups_that_are_left_below_the_minimum_of_a_step_wait_for_more() -> None:
    far = Block((live_admit(2).experiences[0].with_bulk(logprobs=[-9.0, -9.0]),))
    lanes = {"live": LaneConfig(max_mean_abs_log_ratio=1.0, min_sequences=3)}
    run = run_of(live_admit(0), live_admit(1), far, version=NOW, lanes=lanes)
    await run.log.create_topics(partitions=1, keep_ms=-1)
    assert (await admitted(run, decide(run, now_s=0.0))).wait and run.supply.intake.buffer.num_groups("live") == 2
    arrive(run, live_admit(3))
    assert len((await admitted(run, decide(run, now_s=0.0))).taken) == 3


async def test_a_step_whose_paced_groups_are_all_revised_waits_for_them() -> None:
    run = run_of(usual(0), usual(1), expert(0))
    draw = decide(run, now_s=0.0)
    arrive(run, *(block(f"u{number}.0", sequence=number, revision=1) for number in (0, 1)))
    assert "e0.0" in taken(draw) and (await admitted(run, draw)).wait


async def test_the_paced_lane_is_held_by_its_versions_and_never_asked() -> None:
    run = run_of(usual(0), usual(1), lanes={"usual": LaneConfig(max_mean_abs_log_ratio=1e-9)})
    assert len((await drawn(run)).taken) == 2


@pytest.mark.virtual
async def test_a_pause_holds_the_next_step_until_somebody_resumes() -> None:
    run = run_of(usual(0), usual(1), *(expert(number) for number in range(8)))
    run.supply.intake.take_directive(Directive(order="pause", owner="ann"))
    waiting = asyncio.create_task(next_draw(run, asyncio.Event()))
    await until(lambda: run.report.state == "paused")
    run.supply.intake.take_directive(Directive(order="lease", owner="a master that began"))
    await asyncio.sleep(0)
    assert not waiting.done() and run.supply.intake.paused
    run.supply.intake.take_directive(Directive(order="continue", owner="ann"))
    async with asyncio.timeout(10):
        draw = await waiting
    assert draw is not None and draw.taken and run.report.state != "paused"


@pytest.mark.virtual
async def test_a_trainer_reports_that_it_trains_until_its_version_is_published() -> None:
    run, out = run_of(), asyncio.Event()
    run.saving.running = asyncio.create_task(out.wait())  # type: ignore[arg-type]
    waiting = asyncio.create_task(next_draw(run, asyncio.Event()))
    await until(lambda: run.report.trains)
    out.set()
    await until(lambda: not run.report.trains)
    arrive(run, usual(0), usual(1))
    assert await waiting is not None and run.report.trains


@pytest.mark.parametrize("is_paused", [True, False])
@pytest.mark.virtual
async def test_a_stop_ends_the_wait_for_a_step_without_another_step(is_paused: bool) -> None:
    run, stop = run_of(*(usual(0), usual(1)) if is_paused else ()), asyncio.Event()
    if is_paused:
        run.supply.intake.take_directive(Directive(order="pause", owner="ann"))
    waiting = asyncio.create_task(next_draw(run, stop))
    await until(lambda: run.report.state == "paused" or not is_paused)
    stop.set()
    async with asyncio.timeout(10):
        assert await waiting is None


@pytest.mark.virtual
async def test_a_trainer_that_starts_into_a_pause_begins_no_step_tells_what_waits_and_resumes_with_it() -> None:
    log, store = await new_run()
    await log.publish(topics.POLICIES, Directive(order="pause", owner="ann"))
    training = asyncio.create_task(train(log, store, ScriptedLearner()))
    await said_paused(log, groups=4 + 2 * STEPS)
    assert await batches(log) == [], "neither the warm-up nor a step began"
    await log.publish(topics.POLICIES, Directive(order="continue", owner="ann"))
    async with asyncio.timeout(60):
        await training
    assert len([batch for batch in await batches(log) if batch.phase == "train"]) == STEPS
    reports = [each.value async for each in log.scan(topics.REPORTS) if isinstance(each.value, Progress)]
    assert reports[-1].gauges["groups_waiting"] == 4, "demonstrations, which may be trained again"


async def said_paused(log: Log, groups: int | None = None) -> None:
    """Until the trainer has reported it, and that so many groups wait, if that is asked."""
    async with asyncio.timeout(60):
        async for message in log.tail(topics.REPORTS, "beginning"):
            is_paused = isinstance(message.value, Progress) and message.value.state == "paused"
            if is_paused and groups in (None, message.value.gauges["groups_waiting"]):
                return


async def batches(log: Log) -> list[Batch]:
    return [entry for entry in await journal(log) if isinstance(entry, Batch)]
