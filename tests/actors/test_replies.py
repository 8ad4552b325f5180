"""Recorded prompts answered again: a candidate that answers much worse in form is held, with the numbers."""

import pytest
from msgspec.structs import replace

from actors.config import EvalSuite, GateConfig, GateReplies, GateSuite, MasterConfig
from actors.master.gate.gate import Gate, verdict_event
from actors.master.gate.replies import Replies, jaccard, word_pairs
from schemas import EvalResult, Experience, Message, PolicyEvent
from schemas.fields import End
from tests.schemas.record_samples import group_block

CONFIG = GateReplies(max_distance=0.9)
PROMPTS = ("How do I reset it?", "Where is my parcel?", "Cancel my plan", "Thanks")
HELPFUL = "Hold the button for ten seconds"
SORRY = "I'm sorry, I cannot help you with that"


def answer(version: int, prompt: str, text: str, *, tokens: int = 8, end: End = "terminal") -> Experience:
    base = group_block(num_members=1).experiences[0]
    span = replace(base.spans[0], start=0, stop=tokens, version=version)
    messages = (Message(role="user", content=prompt), Message(role="assistant", content=text))
    made = base.with_bulk(tokens=range(tokens), logprobs=[-1.0] * tokens, messages=messages, spans=(span,))
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
    (verdict,) = one.verdicts()
    return verdict.passed, verdict.reason


def test_a_candidate_that_refuses_more_is_held_though_its_evals_are_as_good() -> None:
    one = gate()
    assert answered(one, 3, *[HELPFUL] * 4)[0], "there is nothing to compare the first one with"
    passed, reason = answered(one, 5, HELPFUL, HELPFUL, HELPFUL, SORRY)
    expected = "production: 0.250 cut off, refused or out of form, the stable version 3 has 0.000"
    assert (passed, reason) == (False, expected)
    assert answered(one, 7, *[HELPFUL] * 4) == (True, "dev 0.800, 4 recorded prompts compared")


@pytest.mark.parametrize(("tokens", "passed"), [(12, True), (13, False), (6, True), (5, False)])
def test_answers_may_not_become_much_longer_or_shorter(tokens: int, passed: bool) -> None:
    one = gate()
    answered(one, 3, *[HELPFUL] * 4)
    assert answered(one, 5, *[HELPFUL] * 4, tokens=tokens)[0] == passed


def test_answers_cut_off_or_out_of_form_count_as_failed() -> None:
    one = gate()
    answered(one, 3, *[HELPFUL] * 4)
    assert not answered(one, 5, *[HELPFUL] * 4, end="truncated")[0]
    formed = gate(GateReplies(form="[0-9]{3}"))
    answered(formed, 3, "280", "281", "282", "283")
    assert not answered(formed, 5, "280", "281", "282", "28")[0]


def test_answers_in_other_words_altogether_are_too_far_away() -> None:
    one = gate()
    answered(one, 3, *[HELPFUL] * 4)
    passed, reason = answered(one, 5, *["Entirely different words"] * 4)
    assert not passed and reason == "production: 1.000 away from the stable version 3's answers"


def test_only_prompts_that_both_answered_are_compared() -> None:
    replies = Replies(CONFIG)
    for version, prompts in ((3, PROMPTS[:3]), (5, PROMPTS[1:])):
        for prompt in prompts:
            replies.take(answer(version, prompt, HELPFUL))
    numbers, faults = replies.weigh(5, 3)
    assert numbers["production/prompts"] == 2.0 and numbers["production/distance"] == 0.0 and not faults
    assert replies.weigh(5, -1) == ({"production/prompts": 0.0}, [])


def test_without_recorded_prompts_the_gate_does_not_wait_for_any() -> None:
    one = gate()
    one.result(result(3, "dev"))
    assert [verdict.passed for verdict in one.verdicts()] == [True]
    answered(one, 5, *[HELPFUL] * 4)
    one.result(result(7, "dev"))
    assert one.verdicts() == [], "from now on there are some"


def test_a_restart_compares_with_the_stable_versions_answers_in_whatever_order_the_topics_are_read() -> None:
    one = gate()
    first = [answer(3, prompt, HELPFUL) for prompt in PROMPTS]
    for reply in first:
        one.reply(reply)
    one.result(result(3, "production")), one.result(result(3, "dev"))
    (verdict,) = one.verdicts()
    event = verdict_event(verdict, "main", 0)
    for events_first in (True, False):
        again = gate()
        if events_first:
            again.event(event)
        for reply in first:
            again.reply(reply)
        again.result(result(3, "production")), again.result(result(3, "dev"))
        again.event(event)
        assert not answered(again, 5, *[SORRY] * 4)[0], events_first


def test_the_distance_is_jaccards() -> None:
    """ "a b" has ^a ab b$, "a c" has ^a ac c$: one of five in common."""
    assert jaccard(word_pairs("a b"), word_pairs("a c")) == pytest.approx(0.8)
    assert jaccard(word_pairs(""), word_pairs("")) == 0.0


def test_the_suite_of_recorded_prompts_must_be_one_of_the_evals() -> None:
    with pytest.raises(ValueError, match="got suite production"):
        MasterConfig(gate=GateConfig(replies=GateReplies()), evals=(EvalSuite(suite="dev"),))
    with pytest.raises(ValueError, match="expected a regular expression"):
        GateReplies(form="(")


def test_answers_of_versions_that_are_compared_with_nothing_are_neither_kept_nor_taken() -> None:
    one = gate()
    for version in (3, 5, 7):
        assert answered(one, version, *[HELPFUL] * 4)[0]
    one.reply(answer(3, PROMPTS[0], HELPFUL))
    one.event(PolicyEvent(event="pinned", policy="main", version=3, channel="stable", owner="ann"))
    assert answered(one, 9, *[SORRY] * 4) == (True, "dev 0.800"), "of version 3 no answer is known any more"


def test_answers_of_the_stable_version_before_and_of_the_newest_one_held_are_kept_and_taken() -> None:
    for back in (3, 7):
        one = gate()
        assert answered(one, 3, *[HELPFUL] * 4)[0] and answered(one, 5, *[HELPFUL] * 4)[0]
        one.reply(answer(3, "One more prompt", HELPFUL))
        assert not answered(one, 7, *[SORRY] * 4)[0]
        one.reply(answer(7, "One more prompt", HELPFUL))
        one.event(PolicyEvent(event="promoted", policy="main", version=back, channel="stable", owner="ann"))
        one.reply(answer(9, "One more prompt", HELPFUL))
        assert answered(one, 9, *[SORRY if back == 7 else HELPFUL] * 4) == (
            True,
            "dev 0.800, 5 recorded prompts compared",
        )


def test_a_gate_without_recorded_prompts_leaves_answers_alone() -> None:
    one = Gate(GateConfig(suites={"dev": GateSuite()}), policy="main")
    one.reply(answer(3, PROMPTS[0], HELPFUL))
    one.result(result(3, "dev"))
    assert [verdict.passed for verdict in one.verdicts()] == [True]
