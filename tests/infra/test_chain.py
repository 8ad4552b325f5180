"""The chain: everything comes out once, kept or dropped with a reason, whatever a step does."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from infra.chain.chain import NONSENSE, ChainResult, Context, Step, make_step, new_memories, run_chain
from infra.chain.processor import Drop, Memory, feedback, processor, score
from infra.chain.verdict import input_hash
from schemas import Experience, Message, Score, Span, encode, ids, make_experience
from schemas.errors import ConfigError
from schemas.wire.block import Block


def answer(episode: int = 0, *, group: str = "t.0", text: str = "280", **header: Any) -> Experience:
    fields: dict[str, Any] = {"meta": {"answer": "280"}, "group_size": 4, **header}
    return make_experience(
        tokens=[1, 2, 3, 4, 5], logprobs=[-0.1, -0.2, -0.3],
        messages=[Message(role="user", content="37+45="), Message(role="assistant", content=text)],
        id=ids.experience_id(group, 0, episode), group=group, episode=episode, spans=(Span(2, 5, 3),), **fields,
    )  # fmt: skip


def run(steps: Sequence[Step], experiences: Sequence[Experience], context: Context | None = None) -> ChainResult:
    return asyncio.run(run_chain(steps, experiences, context or Context(memories=new_memories(steps))))


def step_of(function: Callable[..., Any], name: str = "step", **settings: Any) -> Step:
    return make_step(name, function, **settings)


@processor(version=3, inline=True)
def same(experience: Experience) -> Experience:
    return experience


def raises_on_second(experience: Experience) -> Experience:
    if experience.episode == 1:
        raise ValueError("no digits")
    return experience


@pytest.mark.parametrize("settings", [{}, {"inline": True}])
def test_an_exception_drops_its_experience_and_no_other(settings: dict[str, Any]) -> None:
    step = step_of(processor(version=1, **settings)(raises_on_second), "digits")
    outcome = run([step], [answer(0), answer(1), answer(2)])
    assert [kept.episode for kept in outcome.kept] == [0, 2]
    (gone,) = outcome.dropped
    assert (gone.reason, gone.processor) == ("processor failed", "digits@1")
    assert gone.detail == "digits@1: ValueError: no digits"
    assert gone.experience.stamps == ("digits@1",)


def test_a_drop_is_kept_with_its_reason_and_detail() -> None:
    @processor(version=1, inline=True)
    def drops(experience: Experience) -> Drop:
        return Drop("too short", "3 tokens")

    (gone,) = run([step_of(drops), step_of(same, "later")], [answer()]).dropped
    assert (gone.reason, gone.detail, gone.experience.stamps) == ("too short", "3 tokens", ("step@1",))


REPLACED = msgspec.structs.replace
ODD: list[tuple[Callable[[Experience], object], str]] = [
    (lambda one: None, "got NoneType, expected Experience"),
    (lambda one: "kept", "got str, expected Experience"),
    (lambda one: REPLACED(one, id="t.0.0-9-0"), "id: got 't.0.0-9-0', expected it unchanged"),
    (lambda one: REPLACED(one, group="u.0"), "group: got 'u.0', expected it unchanged"),
    (lambda one: REPLACED(one, subject="them"), "subject: got 'them', expected it unchanged"),
    (lambda one: REPLACED(one, stamps=("forged@1",)), "stamps: got"),
    (lambda one: REPLACED(one, reward=float("nan")), "reward"),
    (lambda one: REPLACED(one, advantage=float("inf")), "advantage"),
    (lambda one: REPLACED(one, priority=-1.0), "priority: got -1.0, expected 0 or more"),
    (lambda one: REPLACED(one, reward="high"), "reward"),
    (lambda one: REPLACED(one, lane="fast"), "lane"),
    (lambda one: REPLACED(one, spans=(Span(2, 99, 3),)), "spans: got 2 to 99"),
    (lambda one: REPLACED(one, spans=(Span(2, 4, 3),)), "2 sampled"),
    (lambda one: REPLACED(one, num_tokens=6), "6 tokens"),
    (lambda one: REPLACED(one, scores=(Score("a", float("nan")),)), "scores"),
    (lambda one: REPLACED(one, meta={"x": object()}), "object"),
    (lambda one: REPLACED(one, meta={1: "x"}), "meta"),
    (lambda one: Drop(""), "Drop.reason: got ''"),
    (lambda one: Drop("x" * 200), "Drop.reason: got"),
    (lambda one: Drop(7), "Drop.reason: got '7'"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("returns", "detail"), ODD)
def test_nonsense_is_dropped_with_the_field_named(returns: Callable[[Experience], object], detail: str) -> None:
    def nonsense(experience: Experience) -> object:
        return returns(experience)

    step = step_of(processor(version=1, inline=True)(nonsense), "odd")
    outcome = run([step, step_of(same)], [answer()])
    assert outcome.kept == ()
    (gone,) = outcome.dropped
    assert gone.reason == NONSENSE
    assert gone.detail.startswith("odd@1: ")
    assert detail in gone.detail


def test_a_hanging_step_is_given_up_and_its_neighbours_go_on() -> None:
    release = threading.Event()

    @processor(version=1)
    def hangs(experience: Experience) -> Experience:
        if experience.episode == 1:
            release.wait(30)
        return experience

    step = step_of(hangs, timeout_s=0.05)
    try:
        outcome = run([step], [answer(0), answer(1), answer(2)])
        assert [kept.episode for kept in outcome.kept] == [0, 2]
        assert outcome.dropped[0].reason == "processor timed out"
        assert outcome.dropped[0].detail == "step@1: no answer within 0.05 s"
    finally:
        release.set()


def test_async_steps_run_together_under_their_own_timeouts() -> None:
    @score(version=1)
    async def judge(experience: Experience) -> float | None:
        if experience.episode == 0:
            await asyncio.sleep(60)
        if experience.episode == 1:
            raise ConnectionError("refused")
        if experience.episode == 2:
            raise TimeoutError("read timed out")
        return 0.5

    outcome = run([step_of(judge, "judge", timeout_s=0.05)], [answer(episode) for episode in range(4)])
    assert [kept.score("judge") for kept in outcome.kept] == [0.5]
    assert [gone.reason for gone in outcome.dropped] == ["score timed out", "score failed", "score timed out"]
    assert outcome.dropped[1].detail == "judge@1: ConnectionError: refused"


async def test_cancelling_the_chain_is_not_swallowed() -> None:
    @score(version=1)
    async def waits(experience: Experience) -> float:
        await asyncio.sleep(60)
        return 1.0

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run_chain([step_of(waits)], [answer()], Context())


@pytest.mark.parametrize(("verdict", "kept"), [(1.0, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (3, 3.0), (None, None)])
def test_a_verdict_is_recorded_under_the_steps_name(verdict: object, kept: float | None) -> None:
    def given(experience: Experience) -> object:
        return verdict

    outcome = run([step_of(score(version=4, inline=True)(given), "mine")], [answer()])
    assert outcome.kept[0].score("mine") == kept
    if kept is not None:
        assert outcome.kept[0].scores[0].version == "4"
    encode(Block(outcome.kept))


@pytest.mark.parametrize("verdict", ["1.0", float("nan"), float("inf"), [1.0], object()])
def test_a_verdict_that_is_no_number_is_nonsense(verdict: object) -> None:
    def given(experience: Experience) -> object:
        return verdict

    outcome = run([step_of(score(version=1, inline=True)(given), "mine")], [answer()])
    assert outcome.dropped[0].reason == "score returned nonsense"
    assert "mine@1" in outcome.dropped[0].detail


def test_demonstrations_are_not_scored() -> None:
    @score(version=1, inline=True)
    def zero(experience: Experience) -> float:
        return 0.0

    assert run([step_of(zero)], [answer(lane="expert")]).kept[0].scores == ()


def test_memory_is_kept_per_context() -> None:
    @processor(version=1, memory=2)
    def noted(experience: Experience, *, memory: Memory) -> Experience:
        memory.set(experience.id)
        return experience

    step = step_of(noted, "noted")
    assert step.inline
    here, there = (Context(memories=new_memories([step])) for _ in range(2))
    run([step], [answer(0), answer(1), answer(2)], here)
    assert list(here.memories["noted"]) == [answer(1).id, answer(2).id]
    assert len(there.memories["noted"]) == 0


def made_from(one: Experience, index: int = 0) -> Experience:
    group = ids.synthetic_group((one.id,), "maker@1", index)
    return msgspec.structs.replace(one, id=ids.experience_id(group, 0, 0), group=group, episode=0, group_size=1)


def test_a_group_step_sees_only_its_group_and_what_it_made_goes_on_alone() -> None:
    seen: list[int] = []

    @processor(version=1, inline=True)
    def makes(group: tuple[Experience, ...]) -> tuple[Experience | Drop, ...]:
        return (Drop("weak"), *group[1:], made_from(group[0]))

    @processor(version=1, inline=True)
    def counts(group: tuple[Experience, ...]) -> tuple[Experience, ...]:
        seen.append(len(group))
        return group

    outcome = run([step_of(same, "first"), step_of(makes, "maker"), step_of(counts, "counts")], [answer(0), answer(1)])
    assert seen == [1]
    assert [kept.group == "t.0" for kept in outcome.kept] == [True, False]
    assert outcome.kept[0].stamps == ("first@3", "maker@1", "counts@1")
    assert outcome.kept[1].stamps == ("maker@1", "counts@1")
    assert [gone.reason for gone in outcome.dropped] == ["weak"]


@pytest.mark.parametrize(
    ("returns", "reason", "detail"),
    [
        (lambda group: group[:1], NONSENSE, "got 1 of 2 members"),
        (lambda group: None, NONSENSE, "got NoneType, expected a tuple"),
        (lambda group: (*group, group[0]), NONSENSE, "group: 't.0' is the parents' own"),
        (lambda group: (*group, 3), NONSENSE, "got int among the results"),
        (
            lambda group: (*group, REPLACED(group[0], id="u.0.0-0-0", group="v.0")),
            NONSENSE,
            "expected one of group 'v.0'",
        ),
        (
            lambda group: (*group, REPLACED(group[0], id="u.0.0-0-0", group="u.0", subject="them")),
            NONSENSE,
            "subject: got 'them'",
        ),
        (lambda group: (*group, made_from(group[0]), made_from(group[0])), NONSENSE, "is there already"),
        (lambda group: 1 / 0, "processor failed", "ZeroDivisionError"),
    ],
)
def test_a_group_whose_step_fails_is_dropped_whole(
    returns: Callable[[tuple[Experience, ...]], object], reason: str, detail: str
) -> None:
    def odd(group: tuple[Experience, ...]) -> object:
        return returns(group)

    outcome = run([step_of(processor(version=1, inline=True)(odd), "odd")], [answer(0), answer(1)])
    assert outcome.kept == ()
    assert [gone.reason for gone in outcome.dropped] == [reason, reason]
    assert detail in outcome.dropped[0].detail


def test_one_bad_member_of_a_group_goes_alone() -> None:
    @processor(version=1, inline=True)
    def half(group: tuple[Experience, ...]) -> tuple[object, ...]:
        return (msgspec.structs.replace(group[0], reward=float("nan")), *group[1:])

    outcome = run([step_of(half)], [answer(0), answer(1)])
    assert [kept.episode for kept in outcome.kept] == [1]
    assert "reward" in outcome.dropped[0].detail


def test_what_fits_no_kind_of_step_is_a_config_error() -> None:
    @feedback(version=1)
    def event(ticket: dict[str, Any]) -> None: ...

    @processor(version=1)
    def other(ticket: Experience) -> Experience:
        return ticket

    @processor(version=1)
    def undeclared(experience: Experience, *, memory: Memory) -> Experience:
        return experience

    @processor(version=1, memory=3)
    async def late(experience: Experience, *, memory: Memory) -> Experience:
        return experience

    for function, message in [
        (event, "got a @feedback function"),
        (other, 'first parameter is "ticket"'),
        (undeclared, "go together"),
        (late, "async processor with memory"),
        (len, "not marked"),
    ]:
        with pytest.raises(ConfigError, match=f"step: .*{message}"):
            make_step("step", function)


@pytest.mark.parametrize(
    "change",
    [
        {"answer": "281"},
        {"answer": None},
        {"task": "u"},
        {"notes": {"tool_calls": 1}},
        {"meta": {"level": "hard"}},
        {"meta": {"level": "easy", "answer": "281"}},
    ],
)
def test_another_reference_or_another_meta_is_another_question(change: dict[str, Any]) -> None:
    one = answer(answer="280", task="t", meta={"level": "easy"})
    assert input_hash("options", replace(one, **change)) != input_hash("options", one)
