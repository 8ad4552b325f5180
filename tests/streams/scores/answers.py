"""Answers to score, and a judge's endpoint in this process."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from schemas import Experience, Message, Span, ids, make_experience
from tests.http_endpoint import Reply, http_endpoint


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


class FakeJudge:
    """replies: the next ones: text, an HTTP status, or None to never answer; the last one is repeated."""

    def __init__(self) -> None:
        self.replies: list[str | int | None] = ['{"grade": 8}']
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.usage: dict[str, int] | None = {"prompt_tokens": 1000, "completion_tokens": 10}
        self.url = ""
        self.released = threading.Event()

    def next_reply(self) -> str | int | None:
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


@contextmanager
def fake_judge() -> Iterator[FakeJudge]:
    """The endpoint, serving until the block ends."""
    judge = FakeJudge()

    def answer(path: str, headers: Mapping[str, str], body: bytes) -> Reply | None:
        judge.asked.append(json.loads(body))
        judge.headers.append(dict(headers))
        reply = judge.next_reply()
        if reply is None:
            judge.released.wait(60)
            return None
        completion = {"choices": [{"message": {"role": "assistant", "content": reply}}], "usage": judge.usage}
        return (reply, b"{}") if isinstance(reply, int) else (200, json.dumps(completion).encode())

    with http_endpoint(answer) as address:
        judge.url = f"{address}/v1"
        try:
            yield judge
        finally:
            judge.released.set()
