"""What a score was asked: a verdict on record stands for the same question, and for no other."""

import functools
from typing import Any

import pytest
from msgspec.structs import replace

from infra.chain.processor import score
from infra.chain.verdict import code_hash, input_hash
from schemas import Experience, Message, Span, make_experience


def asked(**header: Any) -> Experience:
    return make_experience(
        id="t.0.0-0-0",
        group="t.0",
        episode=0,
        group_size=1,
        spans=(Span(1, 2, 3),),
        tokens=[1, 2],
        logprobs=[-0.1],
        messages=[Message(role="user", content="140+140="), Message(role="assistant", content="280")],
        **header,
    )


def test_the_question_in_an_older_log_has_the_hash_that_was_recorded_then() -> None:
    older = asked(answer="280", task="t", meta={"level": "easy", "answer": "280", "task": "t"})
    assert input_hash("options", older) == "ffef03ed1d7be4fb"


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
    one = asked(answer="280", task="t", meta={"level": "easy"})
    assert input_hash("options", replace(one, **change)) != input_hash("options", one)


def test_a_meta_that_says_what_the_fields_say_is_told_from_fields_that_say_nothing() -> None:
    meta = {"answer": "280", "task": "t"}
    assert input_hash("", asked(answer="280", task="t", meta=meta)) != input_hash("", asked(meta=meta))


def test_the_hash_of_the_code_stands_beside_the_question_and_is_no_part_of_it() -> None:
    one = asked(answer="280")
    assert input_hash("options:1a2b", one) == input_hash("options", one) + ":1a2b"


def right(experience: Experience, *, weight: float = 1.0) -> float:
    """One docstring."""
    return weight  # and a comment


class ScoreWithOptions:
    """A score with options as fields."""

    def __call__(self, experience: Experience) -> float:
        return 1.0


def test_comments_docstrings_and_layout_do_not_change_the_hash_of_code() -> None:
    first = code_hash(right)

    def other() -> str:
        def right(
            experience: Experience,
            *,
            weight: float = 1.0,
        ) -> float:
            """Another docstring."""
            return weight

        return code_hash(right)

    assert first == other() != ""
    assert code_hash(functools.partial(right, weight=2.0)) == first
    assert code_hash(ScoreWithOptions()) == code_hash(ScoreWithOptions) != first
    assert code_hash(score(version=1)(right)) == first
    assert code_hash(len) == "", "no source to read"
