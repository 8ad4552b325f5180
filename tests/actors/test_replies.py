"""Recorded prompts answered again: a candidate that answers much worse in form is held, with the numbers."""

import math
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from actors.config import EvalSuite, GateConfig, GateReplies, GateSuite, MasterConfig
from actors.master.gate.gate import Gate
from actors.master.gate.replies import Replies, ReplyFacts, distance
from schemas import EvalResult, Experience, Message, PolicyEvent
from schemas.fields import End
from tests.actors.acting import decisions
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


def test_answers_in_other_words_altogether_are_too_far_away() -> None:
    one = gate()
    answered(one, 3, *[HELPFUL] * ALL)
    passed, reason = answered(one, 5, *["Entirely different words"] * ALL)
    assert not passed and reason == "production: 1.000 away from the stable version 3's answers"


def test_only_prompts_that_both_answered_are_compared() -> None:
    replies = Replies(CONFIG)
    for version, prompts in ((3, PROMPTS[:-1]), (5, PROMPTS[3:])):
        for prompt in prompts:
            replies.take(answer(version, prompt, HELPFUL))
    numbers, faults = replies.weigh(5, 3)
    assert numbers["production/prompts"] == ALL - 4.0 and numbers["production/distance"] == 0.0 and not faults
    assert replies.weigh(5, -1) == ({"production/prompts": 0.0}, [])


def test_without_recorded_prompts_the_gate_does_not_wait_for_any() -> None:
    one = gate()
    one.result(result(3, "dev"))
    assert [decision.event == "promoted" for decision in decisions(one)] == [True]
    answered(one, 5, *[HELPFUL] * ALL)
    one.result(result(7, "dev"))
    assert decisions(one) == [], "from now on there are some"


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


def test_the_distance_is_jaccards() -> None:
    ab, ac = (ReplyFacts(1, "", frozenset(words)) for words in ((b"^a", b"ab", b"b$"), (b"^a", b"ac", b"c$")))
    assert distance((ab, ac)) == pytest.approx(0.8) and distance((ab, ab)) == 0.0


def test_the_suite_of_recorded_prompts_must_be_one_of_the_evals() -> None:
    with pytest.raises(ValueError, match="got suite production"):
        MasterConfig(gate=GateConfig(replies=GateReplies()), evals=(EvalSuite(suite="dev"),))
    with pytest.raises(ValueError, match="expected a regular expression"):
        GateReplies(form="(")


def test_answers_of_versions_that_are_compared_with_nothing_are_neither_kept_nor_taken() -> None:
    one = gate()
    for version in (3, 5, 7):
        assert answered(one, version, *[HELPFUL] * ALL)[0]
    one.reply(answer(3, PROMPTS[0], HELPFUL))
    one.event(PolicyEvent(event="pinned", policy="main", version=3, channel="stable", owner="ann"))
    assert answered(one, 9, *[SORRY] * ALL) == (True, "dev 0.800"), "of version 3 no answer is known any more"


def test_answers_of_the_stable_version_before_and_of_the_newest_one_held_are_kept_and_taken() -> None:
    for back in (3, 7):
        one = gate()
        assert answered(one, 3, *[HELPFUL] * ALL)[0] and answered(one, 5, *[HELPFUL] * ALL)[0]
        one.reply(answer(3, "One more prompt", HELPFUL))
        assert not answered(one, 7, *[SORRY] * ALL)[0]
        one.reply(answer(7, "One more prompt", HELPFUL))
        one.event(PolicyEvent(event="promoted", policy="main", version=back, channel="stable", owner="ann"))
        one.reply(answer(9, "One more prompt", HELPFUL))
        assert answered(one, 9, *[SORRY if back == 7 else HELPFUL] * ALL) == (
            True,
            "dev 0.800, 65 recorded prompts compared",
        )


def test_a_gate_without_recorded_prompts_leaves_answers_alone() -> None:
    one = Gate(GateConfig(suites={"dev": GateSuite()}), policy="main")
    one.reply(answer(3, PROMPTS[0], HELPFUL))
    one.result(result(3, "dev"))
    assert [decision.event == "promoted" for decision in decisions(one)] == [True]


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


def test_near_copies_of_one_prompt_are_what_the_intervals_do_not_allow_for() -> None:
    """One in two candidates as good as the stable version is held: copies share the chance that speaks against it."""
    random, held = Random(2), 0
    for _ in range(50):
        replies = Replies(GateReplies())
        worse = random.choice((3, 5))
        for version in (3, 5):
            for copy in range(20):
                replies.take(answer(version, f"The same, {copy}", SORRY if version == worse else HELPFUL))
        held += bool(replies.weigh(5, 3)[1])
    assert 15 <= held <= 35
