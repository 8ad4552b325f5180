"""What the gateway serves as a document of OpenAPI 3.1: its routes, their bodies, headers and keys, made from the types."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from actors.gateway.access.authenticator import SCOPE_OF
from actors.gateway.answering.requests import SESSION_END_HEADER, SESSION_HEADER, ChatRequest, TextRequest
from actors.gateway.apis.messages import MessagesError
from actors.gateway.apis.messages_request import MessagesRequest
from actors.gateway.apis.responses_request import ResponsesRequest
from actors.gateway.config import Webhook
from actors.gateway.errors import ErrorReply
from actors.gateway.http.replies import (
    Answer,
    FeedbackReply,
    FeedbackTokenReply,
    Health,
    ServedModel,
    ServedModels,
    TokenCount,
)
from actors.gateway.recording.feedback_intake import PATH, FeedbackRequest, TokenRequest

Object = dict[str, Any]
OPENAPI_PATH = "/openapi.json"
COUNT_PATH = "/v1/messages/count_tokens"
TOKEN_HEADER = "x-feedback-token"
_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_KEY: list[dict[str, list[str]]] = [{"key": []}, {"api_key": []}]
_SIGNATURE = "HMAC-SHA256 of the body, in hexadecimal or base64; `sha256=` may stand before it"


class ApiRoute(msgspec.Struct, frozen=True, kw_only=True):
    """One route. request: type of its body. reply: type of what it replies, None for one that is text. status: of a reply.

    headers: what each means. answers: it gives answers, whole or as a stream. method: in lower case. summary: one
    sentence. media: of what it replies. error: type of a refusal's body.
    """

    method: str
    summary: str
    request: Any = None
    reply: Any = None
    status: int = 200
    media: str = _JSON
    headers: Mapping[str, str] = {}
    error: Any = ErrorReply
    answers: bool = False


_ASKS = {
    SESSION_HEADER: "ties the turns of a conversation together; at most 512 characters",
    SESSION_END_HEADER: "`true`: no turn of its session follows, so that it is trained without waiting",
}


def _answers(summary: str, request: Any, error: Any = ErrorReply) -> ApiRoute:
    return ApiRoute(
        method="POST", summary=summary, request=request, reply=Answer, headers=_ASKS, error=error, answers=True
    )


# Every route that all gateways have, by its path.
ROUTES: Mapping[str, ApiRoute] = {
    "/v1/chat/completions": _answers("answers a conversation, as OpenAI's Chat Completions", ChatRequest),
    "/v1/completions": _answers("continues a text or token ids, as OpenAI's Completions", TextRequest),
    "/v1/messages": _answers("answers a conversation, as Anthropic's Messages", MessagesRequest, MessagesError),
    "/v1/responses": _answers("answers a conversation, as OpenAI's Responses", ResponsesRequest),
    COUNT_PATH: ApiRoute(
        method="POST",
        summary="counts the tokens of a prompt",
        request=MessagesRequest,
        reply=TokenCount,
        error=MessagesError,
    ),
    "/v1/models": ApiRoute(method="GET", summary="lists the served policies", reply=ServedModels),
    "/v1/models/{model:path}": ApiRoute(method="GET", summary="shows a served policy", reply=ServedModel),
    PATH: ApiRoute(
        method="POST",
        summary="says something about an answer: exactly one of value, label, correction, text and retract",
        request=FeedbackRequest,
        reply=FeedbackReply,
        status=202,
        headers={TOKEN_HEADER: "a browser's token for this answer, instead of a key"},
    ),
    f"{PATH}/tokens": ApiRoute(
        method="POST",
        summary="makes a token with which a browser may speak of one answer",
        request=TokenRequest,
        reply=FeedbackTokenReply,
    ),
    "/healthz": ApiRoute(method="GET", summary="says whether it serves; 503 where it does not", reply=Health),
    "/metrics": ApiRoute(method="GET", summary="metrics, as Prometheus reads them", media="text/plain"),
    OPENAPI_PATH: ApiRoute(method="GET", summary="this document", reply=dict[str, Any]),
}


def document(webhooks: Sequence[Webhook] = ()) -> Object:
    """The document of a gateway with these webhooks."""
    types = [kind for one in ROUTES.values() for kind in (one.request, one.reply, one.error) if kind is not None]
    found, components = msgspec.json.schema_components(types, ref_template=_REF)
    schemas = dict(zip(types, found, strict=True))
    paths = {shown(path): {one.method.lower(): _operation(path, one, schemas)} for path, one in ROUTES.items()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "headrace gateway",
            "version": "1",
            "description": "Answers, and feedback about them. Scopes are those of `headrace keys create`.",
        },
        "paths": paths | {one.path: {"post": _hook(one, schemas)} for one in webhooks},
        "components": {
            "schemas": {name: _one_line(schema) for name, schema in sorted(components.items())},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "a key, `hr-…`"},
                "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "the same key"},
                "feedback_token": {"type": "apiKey", "in": "header", "name": TOKEN_HEADER},
                "signature": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "x-signature",
                    "description": f"of a webhook: {_SIGNATURE}. The settings may give the header another name.",
                },
            },
        },
    }


def shown(path: str) -> str:
    """A path as OpenAPI writes it.

    >>> shown("/v1/models/{model:path}")
    '/v1/models/{model}'
    """
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _operation(path: str, one: ApiRoute, schemas: Mapping[Any, Object]) -> Object:
    content: Object = {one.media: {"schema": schemas[one.reply] if one.reply else {"type": "string"}}}
    if one.answers:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    found: Object = {"operationId": _name(one.method, path), "summary": one.summary}
    parameters = [
        *(
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"\{(\w+)", path)
        ),
        *_headers({} if path == PATH else one.headers),
    ]
    if parameters:
        found["parameters"] = parameters
    if one.request is not None:
        found["requestBody"] = {"required": True, "content": {_JSON: {"schema": schemas[one.request]}}}
    found["responses"] = {str(one.status): {"description": "done", "content": content}, **_refusals(schemas[one.error])}
    if path == "/healthz":
        found["responses"] = {status: {"description": what, "content": content} for status, what in _HEALTH.items()}
    scope = SCOPE_OF.get(path)
    found["security"] = [*_KEY, {"feedback_token": []}] if path == PATH else _KEY if scope else []
    return found | ({"x-scope": scope} if scope else {})


_HEALTH = {"200": "it serves", "503": "it cannot serve"}


def _hook(one: Webhook, schemas: Mapping[Any, Object]) -> Object:
    """A webhook: what the body means is its feedback source's matter."""
    headers = {one.header: _SIGNATURE}
    if one.timestamp_header:
        headers = {
            one.header: f"{_SIGNATURE}; the timestamp is signed in front of it",
            one.timestamp_header: "seconds of the epoch or a time of ISO 8601, within five minutes of now",
        }
    return {
        "operationId": _name("post", one.path),
        "summary": "hands an event to a feedback source",
        "parameters": list(_headers(headers, required=True)),
        "requestBody": {"required": True, "content": {_JSON: {"schema": {}}}},
        "responses": {
            "202": {"description": "taken", "content": {_JSON: {"schema": {"type": "object"}}}},
            **_refusals(schemas[ErrorReply]),
        },
        "security": [],
    }


def _headers(headers: Mapping[str, str], *, required: bool = False) -> Iterator[Object]:
    for name, meaning in headers.items():
        one = {"name": name, "in": "header", "description": meaning, "schema": {"type": "string"}}
        yield one | ({"required": True} if required else {})


def _refusals(error: Object) -> Object:
    return {"default": {"description": "refused", "content": {_JSON: {"schema": error}}}}


def _name(method: str, path: str) -> str:
    return re.sub(r"\W+", "_", f"{method.lower()}{shown(path)}").strip("_")


def _one_line(schema: Object) -> Object:
    """The schema with its description in one line, as a docstring is wrapped for the source."""
    described = schema.get("description")
    return schema | {"description": " ".join(described.split())} if described else schema
