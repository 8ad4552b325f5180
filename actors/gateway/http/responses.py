"""The objects an OpenAI client expects: chat completions and completions, whole and in pieces. Pure."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from actors.gateway.answering.conversation import Called
from actors.gateway.answering.sample import Decode
from actors.gateway.http.requests import ParsedRequest

Object = dict[str, Any]
DONE = b"data: [DONE]\n\n"


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What every object of one response shares. id: of the first answer. answers: id of each choice."""

    id: str
    answers: Sequence[str]
    model: str
    chat: bool
    created: int
    fingerprint: str

    def whole(self, choices: Sequence[Object], usage: Object) -> bytes:
        """The response that comes in one piece."""
        kind = "chat.completion" if self.chat else "text_completion"
        return msgspec.json.encode({**self._head(kind), "choices": choices, "usage": usage})

    def event(self, choices: Sequence[Object], usage: Object | None = None) -> bytes:
        """One event of a stream."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        more = {} if usage is None else {"usage": usage}
        return b"data: " + msgspec.json.encode({**self._head(kind), "choices": choices, **more}) + b"\n\n"

    def _head(self, kind: str) -> Object:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def usage(num_prompt: int, num_completion: int) -> Object:
    """Tokens of a request."""
    total = num_prompt + num_completion
    return {"prompt_tokens": num_prompt, "completion_tokens": num_completion, "total_tokens": total}


def chat_choice(
    envelope: Envelope, index: int, content: str, calls: Sequence[Called], finish: str, logprobs: Object | None
) -> Object:
    """A choice of a whole chat completion."""
    message: Object = {"role": "assistant", "content": content if content or not calls else None}
    if calls:
        message["tool_calls"] = [_call(envelope, index, at, call) for at, call in enumerate(calls)]
    return {
        "index": index,
        "message": message,
        "finish_reason": "tool_calls" if calls else finish,
        "logprobs": logprobs,
        "answer_id": envelope.answers[index],
    }


def chat_delta(index: int, delta: Object, finish: str | None = None, logprobs: Object | None = None) -> Object:
    """A choice of one piece of a chat completion."""
    return {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}


def call_deltas(envelope: Envelope, index: int, calls: Sequence[Called]) -> Object:
    """Tool calls as a delta."""
    return {"tool_calls": [{"index": at, **_call(envelope, index, at, call)} for at, call in enumerate(calls)]}


def text_choice(envelope: Envelope, index: int, text: str, finish: str | None, logprobs: Object | None) -> Object:
    """A choice of a completion, whole or in a piece."""
    answer = {"answer_id": envelope.answers[index]} if finish else {}
    return {"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs, **answer}


def chat_logprobs(
    request: ParsedRequest, decode: Decode, tokens: Sequence[int], logprobs: Sequence[float]
) -> Object | None:
    """logprobs of a chat completion; of alternatives only the chosen one is known."""
    if not request.logprobs:
        return None
    entries = []
    for token, logprob in zip(tokens, logprobs, strict=True):
        text = decode((token,))
        one = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        entries.append({**one, "top_logprobs": [one] if request.top_logprobs else []})
    return {"content": entries, "refusal": None}


def text_logprobs(
    request: ParsedRequest, decode: Decode, tokens: Sequence[int], logprobs: Sequence[float]
) -> Object | None:
    """logprobs of a completion."""
    if not request.logprobs:
        return None
    texts = [decode((token,)) for token in tokens]
    offsets = [sum(len(text) for text in texts[:at]) for at in range(len(texts))]
    top = [{text: logprob} for text, logprob in zip(texts, logprobs, strict=True)] if request.top_logprobs else None
    return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": top, "text_offset": offsets}


def now_s() -> int:
    """Seconds of the epoch, as `created` has them."""
    return int(time.time())


def _call(envelope: Envelope, index: int, at: int, call: Called) -> Object:
    identity = f"call_{envelope.answers[index].removeprefix('hr-')}_{at}"
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
