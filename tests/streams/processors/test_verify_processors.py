"""Built-in processors of stage verify."""

from typing import Any

import numpy as np
import pytest

from infra.chain.processor import Drop, Memory
from schemas import Block, Experience, Message, Span, decode, encode, ids, make_experience
from streams.processors.filter import dedupe, repetition, validate
from tests.streams.processors.by_default import filter_answers, redact


def answer(text: str = "280", *, tokens: list[int] | None = None, episode: int = 0, **header: Any) -> Experience:
    sampled = [7, 8, 9] if tokens is None else tokens
    return make_experience(
        tokens=[1, 2, *sampled],
        logprobs=[-0.1] * len(sampled),
        messages=[Message(role="user", content="37+45="), Message(role="assistant", content=text)],
        id=ids.experience_id("t.0", 0, episode),
        group="t.0",
        episode=episode,
        group_size=4,
        spans=(Span(2, 2 + len(sampled), 3),) if sampled else (),
        **header,
    )


def reason(result: object) -> str:
    return result.reason if isinstance(result, Drop) else "kept"


def test_an_answer_of_nothing_but_the_end_token_is_valid() -> None:
    member = answer("", tokens=[0])
    assert validate(member) is member


def test_nothing_sampled_and_failed_episodes_are_not_trained_but_count_in_evals() -> None:
    assert reason(validate(answer(tokens=[]))) == "empty response"
    failed = answer(tokens=[], end="failed", failure="environment timed out")
    assert validate(failed) == Drop("episode failed", "environment timed out")
    counted = answer(tokens=[], end="failed", suite="held-out")
    assert validate(counted) is counted


def test_a_frame_whose_bulk_is_bad_names_the_section() -> None:
    frame = bytearray(encode(Block((answer(tokens=list(range(50))),))))
    place = frame.rfind(b"\x28\xb5\x2f\xfd")  # the last section's zstd magic
    for offset in range(place + 6, len(frame)):
        frame[offset] ^= 0x5A
    block = decode(bytes(frame))
    assert isinstance(block, Block)
    result = validate(block.experiences[0])
    assert isinstance(result, Drop)
    assert result.reason == "bad frame"
    assert "text" in result.detail


def test_the_second_record_with_an_id_is_a_duplicate_but_a_retry_of_the_first_is_not() -> None:
    memory = Memory(10)
    assert reason(dedupe(answer(), memory=memory, record_offset=5)) == "kept"
    assert reason(dedupe(answer(), memory=memory, record_offset=5)) == "kept"
    assert reason(dedupe(answer(), memory=memory, record_offset=9)) == "duplicate"
    assert reason(dedupe(answer(revision=1), memory=memory, record_offset=9)) == "kept"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "kept"),
        ({"min_tokens": 4}, "too short"),
        ({"min_tokens": 3}, "kept"),
        ({"max_tokens": 2}, "too long"),
        ({"max_tokens": 3}, "kept"),
        ({"truncated": "drop"}, "truncated"),
    ],
)
def test_filter_bounds(options: dict[str, Any], expected: str) -> None:
    assert reason(filter_answers(answer(end="truncated"), **options)) == expected


def test_filter_lets_evals_and_demonstrations_pass() -> None:
    assert reason(filter_answers(answer(suite="held-out"), min_tokens=99)) == "kept"
    assert reason(filter_answers(answer(lane="expert"), min_tokens=99)) == "kept"


def test_a_loop_is_dropped_and_prose_of_few_words_is_not() -> None:
    random = np.random.default_rng(0)
    prose = random.integers(0, 50, 2000).tolist()
    loop = [*prose[:40], *([5, 6, 7] * 400)]
    assert reason(filter_answers(answer(tokens=loop))) == "repetition"
    assert reason(filter_answers(answer(tokens=prose))) == "kept"
    assert reason(filter_answers(answer(tokens=[5] * 40))) == "kept"  # too short to be called a loop
    assert reason(filter_answers(answer(tokens=loop), max_repetition=1.0)) == "kept"


def test_repetition_counts_windows_seen_before() -> None:
    # 48 equal tokens have 33 windows of 16, all alike: 32 of 33 repeat.
    assert repetition(np.full(48, 3, dtype=np.uint32)) == pytest.approx(32 / 33)
    assert repetition(np.arange(48, dtype=np.uint32)) == 0.0
    assert repetition(np.arange(16, dtype=np.uint32)) == 0.0


def test_personal_data_is_found_and_masked() -> None:
    member = answer("write to ada.lovelace@mail.example.org")
    assert redact(member) == Drop("personal data", "email")
    masked = redact(member, action="mask")
    assert isinstance(masked, Experience)
    assert masked.response == "write to [email]"
    assert masked.tokens.tolist() == member.tokens.tolist()


def test_redact_takes_patterns_of_its_own() -> None:
    masked = redact(answer("see T-123"), kinds=(), patterns={r"ti\cket": "T-[0-9]+"}, action="mask")
    assert isinstance(masked, Experience)
    assert masked.response == r"see [ti\cket]"
