"""The chain and steps that misbehave: what they raise, return or wait for stays their own problem."""

import asyncio
import threading

import pytest
from msgspec.structs import replace

from infra.chain.calls import MAX_HUNG
from infra.chain.processor import Drop, Verdict, processor, score
from schemas import Experience
from streams.stages.verify import handled_from
from tests.infra.test_chain import answer, run, step_of

ENDS = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), BaseException("odd")]


@pytest.mark.parametrize("way", ["inline", "thread", "async"])
@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
def test_a_plugin_cannot_end_the_worker_and_counts_as_failed_at_once(error: BaseException, way: str) -> None:
    def leaves(experience: Experience) -> float:
        raise error

    async def leaves_later(experience: Experience) -> float:
        await asyncio.sleep(0)
        raise error

    function = leaves_later if way == "async" else leaves
    step = step_of(score(version=1, inline=way == "inline")(function), timeout_s=30.0)
    outcome = run([step], [answer()])
    assert outcome.dropped[0].reason == "score failed" and type(error).__name__ in outcome.dropped[0].detail


class Odd:
    """A number that raises when it is looked at."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __float__(self) -> float:
        raise self.error

    __str__ = __repr__ = __bool__ = __len__ = __float__  # type: ignore[assignment]


@pytest.mark.parametrize(
    "result",
    [
        10**400, -(10**5000), Odd(ValueError()), Odd(KeyError("x")), Odd(KeyboardInterrupt()), Odd(SystemExit()),
        Verdict(value=10**400), Verdict(value=Odd(ZeroDivisionError())),  # type: ignore[arg-type]
        Verdict(reason=Odd(RuntimeError())),  # type: ignore[arg-type]
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_verdict_that_cannot_be_read_is_a_counted_drop_and_its_neighbours_go_on(result: object) -> None:
    @score(version=1, inline=True)
    def odd(experience: Experience) -> object:
        return result if experience.episode == 1 else 1.0

    outcome = run([step_of(odd)], [answer(0), answer(1), answer(2)])
    assert [one.episode for one in outcome.kept] == [0, 2]
    assert [(one.experience.episode, one.reason) for one in outcome.dropped] == [(1, "score returned nonsense")]


def test_the_first_error_of_a_kind_is_logged_with_its_place_and_no_text_of_a_user(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @score(version=1)
    def looks_up(experience: Experience) -> float:
        return {"answer": 1.0}[f"name {experience.episode % 1}"]

    @score(version=1, inline=True)
    def converts(experience: Experience) -> float:
        return float(experience.response)

    run([step_of(looks_up, "looks")], [answer(episode, group_size=9) for episode in range(9)])
    run([step_of(converts, "converts")], [answer(text="secret \x1b]52;c;x\x07")])
    first, second = [record.getMessage() for record in caplog.records]
    assert (
        first.startswith("step_failed step=looks@1 at=test_chain_faults.py:") and "error=KeyError \"'name 0'\"" in first
    )
    assert 'return {"answer": 1.0}' in first, "the line of the source"
    assert second.startswith("step_failed step=converts@1") and "ValueError (not logged)" in second
    assert "secret" not in second and "\x1b" not in second


def test_after_too_many_hanging_calls_the_step_is_not_called_until_one_returns() -> None:
    release = threading.Event()
    called: list[int] = []

    @score(version=1)
    def hangs(experience: Experience) -> float:
        called.append(experience.episode)
        release.wait(30)
        return 1.0

    step = step_of(hangs, timeout_s=0.01)
    num = MAX_HUNG + 4
    try:
        outcome = run([step], [answer(episode, group_size=num) for episode in range(num)])
        assert len(called) == MAX_HUNG
        assert [gone.reason for gone in outcome.dropped] == ["score timed out"] * num
        assert f"not called: {MAX_HUNG} earlier calls still hang; restart this role" in outcome.dropped[-1].detail
    finally:
        release.set()
    for thread in step.trouble.hung:
        thread.join(10)
    assert run([step], [answer()]).kept


def test_what_a_step_failed_at_is_counted_under_its_name_and_its_decisions_are_not() -> None:
    @score(version=1, inline=True)
    def raises(experience: Experience) -> float:
        raise KeyError("name")

    @processor(version=2, inline=True)
    def refuses(experience: Experience) -> Drop:
        return Drop("too short")

    members = [answer(episode) for episode in range(3)]
    assert handled_from(members, run([step_of(raises, "raises")], members)).failed == {"raises@1": 3}
    assert handled_from(members, run([step_of(refuses, "refuses")], members)).failed == {}


@pytest.mark.parametrize("bad", [set[int](), {0}, {64}, {3, 69}, set(range(70))], ids=str)
def test_a_header_that_cannot_be_read_back_drops_its_own_experience_and_no_other(bad: set[int]) -> None:
    """Also beside a new number, where nothing else is looked at before the end."""

    @processor(version=1, inline=True)
    def writes(experience: Experience) -> Experience:
        if experience.episode in bad:
            experience.meta["model"] = object()  # type: ignore[assignment]
        return replace(experience, reward=1.0) if experience.episode % 2 else experience

    outcome = run([step_of(writes)], [answer(episode, group_size=70) for episode in range(70)])
    assert {one.episode for one in outcome.kept} == set(range(70)) - bad
    assert {one.experience.episode for one in outcome.dropped} == bad
    assert all(one.reason == "processor returned nonsense" and "object" in one.detail for one in outcome.dropped)
