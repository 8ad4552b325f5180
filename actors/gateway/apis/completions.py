"""OpenAI's Chat Completions: the objects and events a client expects. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from actors.gateway.answering.conversation import Called
from actors.gateway.answering.in_flight import Decode
from actors.gateway.answering.parsing import Parsed
from actors.gateway.answering.requests import ParsedRequest, read_chat
from actors.gateway.apis.api import Api, Reply
from actors.gateway.errors import ApiError

Object = dict[str, Any]
DONE = b"data: [DONE]\n\n"


class CompletionEvents:
    """The EventWriter of chat completions. A tool call is one event, sent once it is whole."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def begin(self) -> list[bytes]:
        choices = range(self._reply.request.choices)
        return [self._event([_delta(index, {"role": "assistant", "content": ""})]) for index in choices]

    def text(self, index: int, more: Parsed, tokens: Sequence[int] = (), logprobs: Sequence[float] = ()) -> list[bytes]:
        found = _logprobs(self._reply.request, self._reply.decode, tokens, logprobs)
        thought = {"reasoning": more.thought} if more.thought else {}
        said = {"content": more.said} if more.said or not thought else {}
        return [self._event([_delta(index, thought | said, logprobs=found)])]

    def finish(self, index: int, rest: Parsed) -> list[bytes]:
        finish, calls = self._reply.in_flight.answers[index].finish, rest.calls
        events = self.text(index, rest) if rest.thought or rest.said else []
        if calls:
            finish = "tool_calls"
            deltas = [{"index": at, **_call(self._reply, index, at, call)} for at, call in enumerate(calls)]
            events.append(self._event([_delta(index, {"tool_calls": deltas})]))
        last = _delta(index, {}, finish) | {"answer_id": self._reply.answer_ids[index]}
        return [*events, self._event([last])]

    def end(self) -> list[bytes]:
        used = [self._event([], _usage(self._reply))] if self._reply.request.usage else []
        return [*used, DONE]

    def _event(self, choices: Sequence[Object], usage: Object | None = None) -> bytes:
        more = {} if usage is None else {"usage": usage}
        head = _head(self._reply, "chat.completion.chunk")
        return b"data: " + msgspec.json.encode({**head, "choices": choices, **more}) + b"\n\n"


def whole_chat(reply: Reply) -> bytes:
    choices = [_choice(reply, index) for index in range(reply.request.choices)]
    return msgspec.json.encode({**_head(reply, "chat.completion"), "choices": choices, "usage": _usage(reply)})


def error_event(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"


CHAT = Api(
    read=lambda body, limits, recall: read_chat(body, limits),
    whole=whole_chat,
    events=CompletionEvents,
    error=ApiError.body,
    error_event=error_event,
    openings=lambda choices: choices,
)


def _head(reply: Reply, kind: str) -> Object:
    return {
        "id": reply.answer_ids[0],
        "object": kind,
        "created": reply.created,
        "model": reply.request.model,
        "system_fingerprint": f"v{reply.version}",
    }


def _usage(reply: Reply) -> Object:
    num_prompt, num_sampled = len(reply.in_flight.tokens), reply.in_flight.num_sampled
    total = num_prompt + num_sampled
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": total}


def _choice(reply: Reply, index: int) -> Object:
    parsed = reply.parsed(index)
    calls = parsed.calls
    message: Object = {"role": "assistant", "content": parsed.said if parsed.said or not calls else None}
    if parsed.thought:
        message["reasoning"] = parsed.thought
    if calls:
        message["tool_calls"] = [_call(reply, index, at, call) for at, call in enumerate(calls)]
    return {
        "index": index,
        "message": message,
        "finish_reason": "tool_calls" if calls else reply.in_flight.answers[index].finish,
        "logprobs": _logprobs(reply.request, reply.decode, *reply.in_flight.seen(index)),
        "answer_id": reply.answer_ids[index],
    }


def _delta(index: int, delta: Object, finish: str | None = None, logprobs: Object | None = None) -> Object:
    return {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}


def _logprobs(
    request: ParsedRequest, decode: Decode, tokens: Sequence[int], logprobs: Sequence[float]
) -> Object | None:
    """Log-probabilities of a chat completion; the engine tells only that of the chosen token. A token of a part of a character
    has no bytes, since its text does not tell them.
    """
    if not request.logprobs:
        return None
    entries = []
    for token, logprob in zip(tokens, logprobs, strict=True):
        text = decode((token,))
        entry = {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
        entries.append({**entry, "top_logprobs": [entry] if request.top_logprobs else []})
    return {"content": entries, "refusal": None}


def _call(reply: Reply, index: int, at: int, call: Called) -> Object:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": reply.call_id(index, at), "type": "function", "function": function}
