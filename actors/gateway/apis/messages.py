"""Anthropic's Messages API: the message, the events and the errors that its clients expect. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from actors.gateway.answering.conversation import Called
from actors.gateway.answering.parsing import Parsed
from actors.gateway.answering.requests import Ignored, ParsedRequest, decoded, parsed_chat
from actors.gateway.apis.api import Api, Reply, named_event
from actors.gateway.apis.messages_request import MessagesRequest, chat_request
from actors.gateway.config import GatewayLimits
from actors.gateway.errors import ApiError

Object = dict[str, Any]
_KINDS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesErrorFields(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was refused. type: Anthropic's name for it. message: what to change."""

    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True, kw_only=True):
    """The error object of Anthropic's API. type: always the same. error: what went wrong."""

    type: Literal["error"] = "error"
    error: MessagesErrorFields


def read_messages(body: bytes, limits: GatewayLimits, *, strict: bool = False) -> ParsedRequest:
    """The request in a body of /v1/messages or, where it may lack max_tokens, of /v1/messages/count_tokens. Raises ApiError."""
    ignored = Ignored(strict=strict)
    request: MessagesRequest = decoded(body, _messages, ignored)
    shows_thoughts = request.thinking is None or request.thinking.type != "disabled"
    return parsed_chat(chat_request(request, ignored), limits, ignored, shows_thoughts=shows_thoughts)


def whole(reply: Reply) -> bytes:
    """A message."""
    parsed = reply.parsed(0)
    blocks: list[Object] = []
    if parsed.thought:
        blocks.append({"type": "thinking", "thinking": parsed.thought, "signature": ""})
    blocks += [{"type": "text", "text": parsed.said}] if parsed.said else []
    blocks += [_use(reply, at, call) | {"input": _input(call)} for at, call in enumerate(parsed.calls)]
    ended = _ended(reply, parsed.calls)
    return msgspec.json.encode({**_message(reply), "content": blocks, **ended, "usage": _usage(reply)})


class MessageEvents:
    """The EventWriter of Messages. Blocks follow each other; a tool call is one piece, sent once it is whole."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._block = 0  # its index
        self._open = ""  # its kind, "" where none is open
        self._ended: Object = {}

    def begin(self) -> list[bytes]:
        used = {"input_tokens": len(self._reply.in_flight.tokens), "output_tokens": 0}
        empty: Object = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": used}
        return [named_event("message_start", message={**_message(self._reply), **empty})]

    def text(self, index: int, more: Parsed, tokens: Sequence[int] = (), logprobs: Sequence[float] = ()) -> list[bytes]:
        events: list[bytes] = []
        if more.thought:
            events += self._within("thinking", thinking="", signature="")
            events.append(self._delta("thinking_delta", thinking=more.thought))
        if more.said:
            events += self._within("text", text="")
            events.append(self._delta("text_delta", text=more.said))
        return events

    def finish(self, index: int, rest: Parsed) -> list[bytes]:
        events = [*self.text(index, rest), *self._close()]
        for at, call in enumerate(rest.calls):
            events.append(self._start({**_use(self._reply, at, call), "input": {}}))
            events += [self._delta("input_json_delta", partial_json=json.dumps(_input(call))), *self._close()]
        self._ended = _ended(self._reply, rest.calls)
        return events

    def end(self) -> list[bytes]:
        return [named_event("message_delta", delta=self._ended, usage=_usage(self._reply)), named_event("message_stop")]

    def _within(self, kind: str, **empty: str) -> list[bytes]:
        return [] if self._open == kind else [*self._close(), self._start({"type": kind, **empty})]

    def _start(self, block: Object) -> bytes:
        self._open = block["type"]
        return named_event("content_block_start", index=self._block, content_block=block)

    def _delta(self, kind: str, **more: str) -> bytes:
        return named_event("content_block_delta", index=self._block, delta={"type": kind, **more})

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        self._open, self._block = "", self._block + 1
        return [named_event("content_block_stop", index=self._block - 1)]


def error_body(error: ApiError) -> bytes:
    """The body of a refusal."""
    return msgspec.json.encode(MessagesError(error=_error(error)))


def error_event(error: ApiError) -> bytes:
    """The event of a stream that breaks off."""
    return named_event("error", error=_error(error))


MESSAGES = Api(
    read=lambda body, limits, recall, strict: read_messages(body, limits, strict=strict),
    whole=whole,
    events=MessageEvents,
    error=error_body,
    error_event=error_event,
    openings=lambda choices: 1,
)


_messages = msgspec.json.Decoder(MessagesRequest)


def _message(reply: Reply) -> Object:
    return {"id": reply.answer_ids[0], "type": "message", "role": "assistant", "model": reply.request.model}


def _usage(reply: Reply) -> Object:
    return {"input_tokens": len(reply.in_flight.tokens), "output_tokens": reply.in_flight.num_sampled}


def _use(reply: Reply, at: int, call: Called) -> Object:
    return {"type": "tool_use", "id": reply.call_id(0, at), "name": call.name}


def _input(call: Called) -> Object:
    """The arguments of a call; text if they are no object."""
    try:
        value = json.loads(call.arguments)
    except ValueError:
        value = call.arguments
    return value if isinstance(value, dict) else {"arguments": value}


def _ended(reply: Reply, calls: Sequence[Called]) -> Object:
    answer = reply.in_flight.answers[0]
    if calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answer.cut:
        return {"stop_reason": "stop_sequence", "stop_sequence": _found(reply)}
    return {"stop_reason": "end_turn" if answer.finish == "stop" else "max_tokens", "stop_sequence": None}


def _found(reply: Reply) -> str | None:
    """The stop sequence that follows the answer's text."""
    answer = reply.in_flight.answers[0]
    rest = reply.decode(answer.tokens)[len(answer.text) :]
    return next((stop for stop in reply.request.stops if rest.startswith(stop)), None)


def _error(error: ApiError) -> MessagesErrorFields:
    return MessagesErrorFields(type=_KINDS.get(error.status, "api_error"), message=str(error))
