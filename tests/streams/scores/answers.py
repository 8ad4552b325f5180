"""Answers to score, for the tests of scores."""

from schemas import Experience, Message, Span, ids, make_experience


def answered(
    text: str, *, prompt: str = "", answer: str | None = None, **meta: str | int | float | bool | None
) -> Experience:
    """An experience whose response is `text`."""
    return make_experience(
        tokens=[1, 2],
        logprobs=[-0.1],
        messages=[Message(role="user", content=prompt), Message(role="assistant", content=text)],
        id=ids.experience_id("t.0", 0, 0),
        group="t.0",
        episode=0,
        group_size=1,
        spans=(Span(1, 2, 3),),
        answer=answer,
        meta=dict(meta),
    )
