"""Evidence of the gate: recorded prompts answered again, and counts of what people say of each version."""

import math
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from actors.config import GateConfig, GateReplies, GateSuite, PeopleConfig
from actors.master.gate.counts import MAX_ANSWERS, MAX_COMPARISONS, MAX_PEOPLE, Counts
from actors.master.gate.gate import Gate
from actors.master.gate.replies import Replies
from schemas import Answered, Client, Closure, EvalResult, Experience, Message, PolicyEvent, Progress
from schemas.fields import End
from schemas.ids import fallback_rater
from tests.actors.rig import BLOCK_MS, decisions, rated
from tests.schemas.record_samples import group_block

CONFIG = GateReplies(max_distance=0.9)


BASE = group_block(num_members=1).experiences[0]


PROMPTS = tuple(f"How do I reset number {number}?" for number in range(64))


ALL = len(PROMPTS)


HELPFUL = "Hold the button for ten seconds"


SORRY = "I'm sorry, I cannot help you with that"


def answer(version: int, prompt: str, text: str, *, tokens: int = 8, end: End = "terminal") -> Experience:
    base = BASE
    span = replace(base.spans[0], start=0, stop=tokens, version=version)
    messages = (Message(role="user", content=prompt), Message(role="assistant", content=text))
    made = base.with_bulk(
        tokens=np.arange(tokens), logprobs=np.zeros(tokens, dtype=np.float32), messages=messages, spans=(span,)
    )
    return replace(made, suite="production", end=end, part=0, last=True)


def result(version: int, suite: str, share: float = 0.8) -> EvalResult:
    return EvalResult(policy="main", version=version, suite=suite, num_tasks=100, num_correct=round(100 * share))


def gate(config: GateReplies = CONFIG) -> Gate:
    return Gate(GateConfig(suites={"dev": GateSuite()}, replies=config), policy="main")


def answered(one: Gate, version: int, *texts: str, tokens: int = 8, end: End = "terminal") -> tuple[bool, str]:
    for prompt, text in zip(PROMPTS, texts, strict=True):
        one.reply(answer(version, prompt, text, tokens=tokens, end=end))
    one.result(result(version, "production"))
    one.result(result(version, "dev"))
    (verdict,) = decisions(one)
    return verdict.event == "promoted", verdict.reason


def test_a_candidate_that_refuses_more_is_held_though_its_evals_are_as_good() -> None:
    one = gate()
    assert answered(one, 3, *[HELPFUL] * ALL)[0], "there is nothing to compare the first one with"
    assert answered(one, 4, *[SORRY] * 11, *[HELPFUL] * (ALL - 11))[0], "11 of 11 that differ may be chance"
    one = gate()
    assert answered(one, 3, *[HELPFUL] * ALL)[0]
    passed, reason = answered(one, 5, *[SORRY] * 12, *[HELPFUL] * (ALL - 12))
    expected = "production: 0.188 cut off, refused or out of form, the stable version 3 has 0.000"
    assert (passed, reason) == (False, expected)
    assert answered(one, 7, *[HELPFUL] * ALL) == (True, "dev 0.800, 64 recorded prompts compared")


@pytest.mark.parametrize(("tokens", "passed"), [(12, True), (13, False), (6, True), (5, False)])
def test_answers_may_not_become_much_longer_or_shorter(tokens: int, passed: bool) -> None:
    one = gate()
    answered(one, 3, *[HELPFUL] * ALL)
    assert answered(one, 5, *[HELPFUL] * ALL, tokens=tokens)[0] == passed


def test_answers_cut_off_or_out_of_form_count_as_failed() -> None:
    one = gate()
    answered(one, 3, *[HELPFUL] * ALL)
    assert not answered(one, 5, *[HELPFUL] * ALL, end="truncated")[0]
    formed = gate(GateReplies(form="[0-9]{3}"))
    answered(formed, 3, *["280"] * ALL)
    assert not answered(formed, 5, *["28"] * 12, *["280"] * (ALL - 12))[0]


def test_only_prompts_that_both_answered_are_compared() -> None:
    replies = Replies(CONFIG)
    for version, prompts in ((3, PROMPTS[:-1]), (5, PROMPTS[3:])):
        for prompt in prompts:
            replies.take(answer(version, prompt, HELPFUL))
    numbers, faults = replies.weigh(5, 3)
    assert numbers["production/prompts"] == ALL - 4.0 and numbers["production/distance"] == 0.0 and not faults
    assert replies.weigh(5, -1) == ({"production/prompts": 0.0}, [])


def test_a_restart_compares_with_the_stable_versions_answers_in_whatever_order_the_topics_are_read() -> None:
    one = gate()
    first = [answer(3, prompt, HELPFUL) for prompt in PROMPTS]
    for reply in first:
        one.reply(reply)
    one.result(result(3, "production")), one.result(result(3, "dev"))
    (verdict,) = decisions(one)
    event = verdict
    for events_first in (True, False):
        again = gate()
        if events_first:
            again.event(event)
        for reply in first:
            again.reply(reply)
        again.result(result(3, "production")), again.result(result(3, "dev"))
        again.event(event)
        assert not answered(again, 5, *[SORRY] * ALL)[0], events_first


def test_answers_of_versions_that_are_compared_with_nothing_are_neither_kept_nor_taken() -> None:
    one = gate()
    for version in (3, 5, 7):
        assert answered(one, version, *[HELPFUL] * ALL)[0]
    one.reply(answer(3, PROMPTS[0], HELPFUL))
    one.event(PolicyEvent(event="pinned", policy="main", version=3, channel="stable", owner="ann"))
    assert answered(one, 9, *[SORRY] * ALL) == (True, "dev 0.800"), "of version 3 no answer is known any more"


def lengths(random: Random, count: int) -> list[int]:
    """Heavy in the tail, as answers are: half are below 60 tokens, one in a hundred above 600."""
    return [max(1, round(60 * math.exp(random.gauss(0.0, 1.0)))) for _ in range(count)]


def is_held(random: Random, old: list[int], new: list[int], refuses: tuple[float, float]) -> bool:
    """Whether a candidate is held for answers of these lengths that refuse so often."""
    replies = Replies(GateReplies(max_distance=0.6))
    words = tuple(random.random() < 0.6 for _ in old)
    for version, sizes, share in ((3, old, refuses[0]), (5, new, refuses[1])):
        for at, size in enumerate(sizes):
            text = SORRY if random.random() < share else "" if version == 3 and words[at] else HELPFUL
            replies.take(answer(version, f"Prompt {at}", text, tokens=size))
    return bool(replies.weigh(5, 3)[1])


@pytest.mark.parametrize("count", [20, 4, 100])
def test_where_nothing_differs_at_most_one_candidate_in_a_hundred_is_held(count: int) -> None:
    random = Random(count)
    held = sum(is_held(random, lengths(random, count), lengths(random, count), (0.1, 0.1)) for _ in range(200))
    assert held <= 2, f"{held} of 200; expected distance is as far as it may be"


def test_where_answers_truly_differ_the_candidate_is_held() -> None:
    random = Random(1)
    longer = refusing = 0
    for _ in range(50):
        old = lengths(random, 100)
        longer += is_held(random, old, [round(2.5 * size) for size in lengths(random, 100)], (0.1, 0.1))
        refusing += is_held(random, old, lengths(random, 100), (0.05, 0.4))
    assert longer >= 40 and refusing >= 40, (longer, refusing)


def test_copies_of_one_prompt_count_once() -> None:
    """What the intervals assume: prompts are independent of each other."""
    replies = Replies(GateReplies())
    for _ in range(50):
        replies.take(answer(3, "The same", HELPFUL))
        replies.take(answer(5, "The same", SORRY))
    numbers, faults = replies.weigh(5, 3)
    assert numbers["production/prompts"] == 1.0 and not faults


PEOPLE = PeopleConfig(rating_window="1h")


HOUR_MS = 3_600_000


ANN_DOWN = rated("ann", 5, 0.0, trial=7)


def after(*closures: Closure, config: PeopleConfig = PEOPLE) -> Counts:
    counts = Counts(config)
    for closure in closures:
        counts.closure(closure, closure.answered_ms)
    return counts


def heard(counts: Counts, trial: int = 7) -> dict[int, tuple[int, int]]:
    """People and complaints, by version."""
    found = {}
    for version, sums in counts.comparison(trial).rated.items():
        people, bad = (sum(row[column] for row in sums.values()) for column in (0, 1))
        if people:
            found[version] = (people, bad)
    return found


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        ([], {5: (1, 1)}),
        ([rated("ann", 5, 1.0, revision=1, trial=7)], {5: (1, 0)}),
        ([rated("ann", 5, revision=1, trial=7)], {}),
        ([rated("ann", 5, revision=1, trial=7), rated("ann", 5, 0.2, revision=2, trial=7)], {5: (1, 1)}),
        ([rated("ann", 5, 1.0, revision=1, trial=7), ANN_DOWN], {5: (1, 0)}),
        ([rated("ann", 5, 1.0, late_ms=2 * HOUR_MS, revision=1, trial=7)], {5: (1, 1)}),
        ([rated("ann", 5, 1.0, late_ms=2 * HOUR_MS, revision=1, trial=7), rated("ann", 5, revision=2, trial=7)], {}),
    ],
    ids=[
        "said",
        "revised",
        "taken back",
        "said again",
        "an older revision again",
        "revised too late",
        "then taken back",
    ],
)
def test_a_word_counts_as_it_stands_when_its_time_is_over(
    later: list[Closure], expected: dict[int, tuple[int, int]]
) -> None:
    assert heard(after(ANN_DOWN, *later)) == expected


def test_a_closure_that_comes_twice_counts_once_and_only_production_answers_count() -> None:
    once = [ANN_DOWN, rated("ann", 5, 1.0, revision=1, trial=7), rated("bob", 5, 0.0, trial=7)]
    assert heard(after(*once, *once)) == heard(after(*once)) == {5: (2, 1)}
    usual = Closure(group="t.0", outcome="buffered", lane="usual", mean_reward=0.0, version=5, trial=7)
    assert heard(after(usual, rated("x", -1, 0.0, trial=7), rated("y", 5, 0.0, revision=1, trial=7))) == {}


def test_of_one_person_the_word_on_the_first_answer_counts_whichever_version_gave_it() -> None:
    named = [rated(f"s{number}", 5 + number, 0.0, rater="ann", at_ms=1000 * number, trial=7) for number in range(20)]
    assert heard(after(*named)) == heard(after(*named[::-1])) == {5: (1, 1)}, "a rater is one person in all sessions"
    assert heard(after(*named, rated("s", 5, 0.0, rater="ann", tenant="globex", trial=7))) == {5: (2, 2)}
    for nobody in (fallback_rater("key", "abcd"), fallback_rater("answer", "hr-s.0")):
        unnamed = [rated(f"s{number % 3}", 5, 0.0, rater=nobody, number=number, trial=7) for number in range(20)]
        assert heard(after(*unnamed)) == {5: (3, 3)}, "a session is a person where the rater is none"


def test_a_late_word_counts_for_nothing_whether_good_or_bad() -> None:
    in_time = after(rated("ann", 5, 0.0, late_ms=HOUR_MS, trial=7), rated("bob", 5, 1.0, late_ms=HOUR_MS, trial=7))
    assert heard(in_time) == {5: (2, 1)}
    late = after(*(rated(name, 5, value, late_ms=HOUR_MS + 1, trial=7) for name, value in (("ann", 0.0), ("bob", 1.0))))
    assert heard(late) == {} and late.comparison(7).counts == [0, 1, 1]


def test_a_complaint_is_below_the_threshold_of_its_source() -> None:
    config = PeopleConfig(bad_below=0.5, bad_below_by_source={"stars": 3.0})
    two = rated("ann", 5, 2.0, trial=7)
    stars = replace(two, ratings=tuple(replace(rating, source="stars") for rating in two.ratings or ()))
    assert heard(after(stars, config=config)) == {5: (1, 1)} and heard(after(two, config=config)) == {5: (1, 0)}
    assert heard(after(rated("ann", 5, 0.5, trial=7))) == {5: (1, 0)}, "at the threshold"


def test_every_person_of_a_comparison_counts_and_the_oldest_is_forgotten_past_the_bound() -> None:
    counts = after(*(rated(f"s{number}", 5, 1.0, trial=7, at_ms=number) for number in range(MAX_PEOPLE + 1)))
    assert heard(counts) == {5: (MAX_PEOPLE + 1, 0)} and len(counts.comparison(7).words) == MAX_PEOPLE


def test_the_newest_comparisons_are_kept_and_the_word_on_an_answer_past_the_bound_stands() -> None:
    counts = after(*(rated("ann", 5, 1.0, number=trial, trial=trial) for trial in range(MAX_COMPARISONS + 1)))
    assert [bool(heard(counts, trial)) for trial in range(1, MAX_COMPARISONS + 1)] == [True] * MAX_COMPARISONS
    assert not heard(counts, 0)
    counts = after(ANN_DOWN)
    for number in range(MAX_ANSWERS):
        counts.closure(Closure(group=f"{number}.0", outcome="buffered", lane="live", version=5, ratings=()), 0)
    counts.closure(rated("ann", 5, 1.0, revision=1, trial=7), 0)
    assert heard(counts) == {5: (1, 1)}


def test_a_comparison_with_a_version_that_was_compared_before_begins_anew() -> None:
    counts = after(ANN_DOWN, rated("bob", 5, 0.0, at_ms=HOUR_MS, trial=7))
    counts.comparison(7).restart(HOUR_MS, counts.block(HOUR_MS))
    assert heard(counts) == {5: (1, 1)}
    counts.closure(rated("ann", 6, 1.0, at_ms=2 * HOUR_MS, trial=7, number=1), 2 * HOUR_MS)
    assert heard(counts) == {5: (1, 1), 6: (1, 0)}, "ann counts again"


def reported(instance: str, version: int, *clients: tuple[str, int, int, int], trial: int = 7) -> Progress:
    told = tuple(Client(client=name, sessions=a, failed=b, refused=c) for name, a, b, c in clients)
    answered = Answered(version=version, trial=trial, answers=99, clients=told)
    return Progress(role="serve", instance=instance, answered=(answered,))


def test_what_gateways_report_since_their_start_is_counted_once_in_its_block_and_gateways_add_up() -> None:
    counts = Counts(PEOPLE)
    for at_ms, told in (
        (0, reported("a", 5, ("acme", 10, 1, 0))),
        (1, reported("a", 5, ("acme", 10, 1, 0))),
        (BLOCK_MS, reported("a", 5, ("acme", 30, 2, 3), ("globex", 4, 0, 0))),
        (BLOCK_MS, reported("a", 5, ("acme", 20, 1, 2))),
        (BLOCK_MS, reported("b", 5, ("acme", 5, 0, 0))),
        (BLOCK_MS, reported("b", 3, ("acme", 7, 0, 0))),
    ):
        counts.progress(told, at_ms)
    assert counts.comparison(7).served == {
        5: {("acme", 0): [10, 1, 0], ("acme", 1): [25, 1, 3], ("globex", 1): [4, 0, 0]}, 3: {("acme", 1): [7, 0, 0]},
    }  # fmt: skip
