"""OpenAI's Responses API: the response, the events and the conversation that its clients expect. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from actors.gateway.answering.conversation import (
    Called,
    ChatMessage,
    Conversation,
    ToolCall,
    assistant_message,
)
from actors.gateway.answering.parsing import Parsed
from actors.gateway.answering.requests import Ignored, ParsedRequest, decoded, parsed_chat
from actors.gateway.apis.api import Api, Recall, Reply, named_event
from actors.gateway.apis.responses_request import ResponsesRequest, chat_request
from actors.gateway.config import GatewayLimits
from actors.gateway.errors import ApiError

Object = dict[str, Any]


def read_responses(body: bytes, limits: GatewayLimits, recall: Recall, *, strict: bool = False) -> ParsedRequest:
    """The request in a body of /v1/responses. Raises ApiError."""
    ignored = Ignored(strict=strict)
    request = decoded(body, _responses, ignored)
    before: Conversation | None = None
    if request.previous_response_id is not None:
        before = recall(request.previous_response_id)
        if before is None:
            where = "previous_response_id"
            message = f"{where}: not known here: send the whole conversation as input"
            raise ApiError(404, message, param=where, code="previous_response_not_found")
    chat = chat_request(request, before.messages if before is not None else (), ignored)
    parsed = parsed_chat(chat, limits, ignored)
    said = tuple(chat.messages[1:] if request.instructions else chat.messages)
    return msgspec.structs.replace(
        parsed,
        said=said if parsed.store else (),
        goes_on=before.session if before is not None else "",
        echo=_echo(request),
    )


def after(reply: Reply) -> tuple[ChatMessage, ...]:
    """The conversation with the answer, for a request that goes on from it."""
    parsed = reply.parsed(0)
    calls = [ToolCall(call, reply.call_id(0, at)) for at, call in enumerate(parsed.calls)]
    return (*reply.request.said, assistant_message(parsed.thought, [parsed.said], calls))


def whole(reply: Reply) -> bytes:
    """A response."""
    parsed = reply.parsed(0)
    thought, said, calls = parsed.thought, parsed.said, parsed.calls
    output = [_reasoning(reply, thought)] if thought else []
    output += [_message(reply, said)] if said or not (calls or thought) else []
    return msgspec.json.encode(_ended(reply, [*output, *(_call(reply, at, call) for at, call in enumerate(calls))]))


class ResponseEvents:
    """The EventWriter of Responses. Items follow each other; a tool call is one piece, sent once it is whole."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._number = 0
        self._output: list[Object] = []
        self._open = ""  # kind of the item that is open, "" for none
        self._text = ""  # of it

    def begin(self) -> list[bytes]:
        empty = _response(self._reply, "in_progress", [])
        return [self._event("response.created", response=empty), self._event("response.in_progress", response=empty)]

    def text(self, index: int, more: Parsed, tokens: Sequence[int] = (), logprobs: Sequence[float] = ()) -> list[bytes]:
        return [*self._more("reasoning", more.thought), *self._more("message", more.said)]

    def finish(self, index: int, rest: Parsed) -> list[bytes]:
        events = [*self.text(index, rest), *self._close()]
        for at, call in enumerate(rest.calls):
            item, place = _call(self._reply, at, call), {"output_index": len(self._output)}
            arguments = {"item_id": item["id"], **place}
            begun = item | {"arguments": "", "status": "in_progress"}
            events += [
                self._event("response.output_item.added", item=begun, **place),
                self._event("response.function_call_arguments.delta", delta=call.arguments, **arguments),
                self._event(
                    "response.function_call_arguments.done", arguments=call.arguments, name=call.name, **arguments
                ),
                self._event("response.output_item.done", item=item, **place),
            ]
            self._output.append(item)
        return events

    def end(self) -> list[bytes]:
        response = _ended(self._reply, self._output)
        return [self._event(f"response.{response['status']}", response=response)]

    def _event(self, kind: str, **fields: object) -> bytes:
        self._number += 1
        return named_event(kind, sequence_number=self._number - 1, **fields)

    def _more(self, kind: str, text: str) -> list[bytes]:
        if not text:
            return []
        events = [] if self._open == kind else [*self._close(), *self._begin(kind)]
        self._text += text
        name = "output_text" if kind == "message" else "reasoning_text"
        more: Object = {"logprobs": []} if kind == "message" else {}
        return [*events, self._event(f"response.{name}.delta", delta=text, content_index=0, **self._place(), **more)]

    def _begin(self, kind: str) -> list[bytes]:
        self._open, self._text = kind, ""
        item = self._item() | {"content": [], "status": "in_progress"}
        place = {"output_index": len(self._output)}
        events = [self._event("response.output_item.added", item=item, **place)]
        part = self._item()["content"][0] | {"text": ""}
        return [*events, self._event("response.content_part.added", part=part, content_index=0, **self._place())]

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        item, place = self._item(), self._place()
        name = "output_text" if self._open == "message" else "reasoning_text"
        more: Object = {"logprobs": []} if self._open == "message" else {}
        events = [
            self._event(f"response.{name}.done", text=self._text, content_index=0, **place, **more),
            self._event("response.content_part.done", part=item["content"][0], content_index=0, **place),
            self._event("response.output_item.done", item=item, output_index=len(self._output)),
        ]
        self._output.append(item)
        self._open = ""
        return events

    def _item(self) -> Object:
        make = _message if self._open == "message" else _reasoning
        return make(self._reply, self._text)

    def _place(self) -> Object:
        return {"item_id": self._item()["id"], "output_index": len(self._output)}


def error_event(error: ApiError) -> bytes:
    """The event of a stream that breaks off."""
    return named_event("error", sequence_number=0, code=error.code or error.kind, message=str(error), param=error.param)


RESPONSES = Api(
    read=lambda body, limits, recall, strict: read_responses(body, limits, recall, strict=strict),
    whole=whole,
    events=ResponseEvents,
    error=ApiError.body,
    error_event=error_event,
    openings=lambda choices: 2,
)

_responses = msgspec.json.Decoder(ResponsesRequest)


def _name(reply: Reply, kind: str) -> str:
    return f"{kind}_{reply.answer_ids[0].removeprefix('hr-')}"


def _message(reply: Reply, text: str) -> Object:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {
        "type": "message",
        "id": _name(reply, "msg"),
        "status": "completed",
        "role": "assistant",
        "content": content,
    }


def _reasoning(reply: Reply, text: str) -> Object:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": _name(reply, "rs"), "status": "completed", "summary": [], "content": content}


def _call(reply: Reply, at: int, call: Called) -> Object:
    return {
        "type": "function_call",
        "id": f"{_name(reply, 'fc')}_{at}",
        "call_id": reply.call_id(0, at),
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _ended(reply: Reply, output: Sequence[Object]) -> Object:
    """The response at its end; incomplete if the answer was cut off."""
    cut_off = reply.in_flight.answers[0].finish == "length"
    why = {"incomplete_details": {"reason": "max_output_tokens"}} if cut_off else {}
    num_prompt, num_sampled = len(reply.in_flight.tokens), reply.in_flight.num_sampled
    usage = {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_sampled,
    }
    return _response(reply, "incomplete" if cut_off else "completed", output) | why | {"usage": usage}


def _response(reply: Reply, status: str, output: Sequence[Object]) -> Object:
    return {
        "id": reply.answer_ids[0],
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": reply.request.model,
        "output": output,
        "usage": None,
        **reply.request.echo,
    }


def _echo(request: ResponsesRequest) -> Object:
    """Fields of the request that a response repeats."""
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": request.reasoning,
        "store": request.store is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": msgspec.to_builtins(request.text) if request.text else {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": msgspec.to_builtins(request.tools or []),
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
