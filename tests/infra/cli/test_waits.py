"""What `trace` says that an answer waits for, at each place of its way."""

import re

import pytest
from msgspec.structs import replace

from infra.cli.waits import waits
from infra.ledger.trace import AnswerTrace, TrainedUse
from schemas import Closure, Experience, Feedback, Message, Span, make_experience
from schemas.fields import FeedbackKind, Lane

WINDOWS = {"user": 600.0, "csat": 3600.0}


def answer(lane: Lane = "live", turn: int = -1) -> Experience:
    return make_experience(
        id="a.0.0-0-0", group="a.0.0", episode=0, group_size=1, lane=lane, turn=turn, spans=(Span(1, 2, 3),),
        tokens=[1, 2], logprobs=[-0.5], messages=(Message(role="user", content="1+1="),),
    )  # fmt: skip


def said(source: str, kind: FeedbackKind = "value", rater: str = "") -> tuple[int, Feedback]:
    return 1, Feedback(ref="hr-a.0.0-0-0", id=f"{source}-{kind}", value=1.0, source=source, type=kind, rater=rater)


def trace(one: Experience | None = None, **more: object) -> AnswerTrace:
    base = AnswerTrace(id="a.0.0-0-0", published=answer(), judged=one, judged_ms=1_763_715_600_000)
    return replace(base, **more)


USE = TrainedUse(step=1, time_ms=1, version=1, lane="live", revision=0, use=0, advantage=1.0, weight=1.0)
CLOSED = ((1, Closure(group="a.0.0", outcome="dropped", reason="unlabelled")),)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (trace(), "waits for verify"),
        (trace(dropped="too short"), ""),
        (trace(answer()), r"waits for feedback of user, csat, until \d\d-\d\d \d\d:\d\d:\d\d"),
        (trace(answer(), feedback=(said("user"),)), r"waits for feedback of csat, until .*"),
        (trace(answer(), feedback=(said("user"), said("user", "retraction"))), r"waits for feedback of user, csat, .*"),
        (trace(answer(), feedback=(said("user"), said("csat"))), "waits for the others of its group"),
        (trace(answer(turn=2), feedback=(said("user"), said("csat"))), "waits for the rest of its session"),
        (trace(answer(lane="usual")), "waits for the others of its group"),
        (trace(answer(), closures=CLOSED), ""),
        (trace(answer(), buffered=((1, answer()),)), "waits in the buffer for a step that draws it"),
        (trace(answer(), buffered=((1, answer()),), uses=(USE,)), "trained; waits for the next version"),
        (
            trace(answer(), buffered=((1, answer()),), uses=(replace(USE, undone="rolled back"),)),
            "waits in the buffer for a step that draws it",
        ),
        (trace(answer(), buffered=((1, answer()),), uses=(USE,), first_version=2), ""),
    ],
)
def test_trace_says_what_an_answer_waits_for(found: AnswerTrace, words: str) -> None:
    assert re.fullmatch(words, waits(found, WINDOWS))


def test_an_answer_waits_as_long_as_the_slowest_source_has() -> None:
    one, other = waits(trace(answer()), WINDOWS), waits(trace(answer()), {"user": 600.0, "csat": 600.0})
    assert one != other and one[-8:-6] != other[-8:-6], "an hour and ten minutes after the same moment"
