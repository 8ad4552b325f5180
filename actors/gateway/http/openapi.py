"""What the gateway serves as a document of OpenAPI 3.1: its routes, their bodies, headers and keys, made from the types."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from actors.gateway.access.authenticator import ROUTE_SCOPES
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
MODELS_PATH = "/v1/models"
TOKEN_HEADER = "x-feedback-token"
_JSON = "application/json"
_TEXT = {"type": "string"}
_HEADERS = {"api_key": "x-api-key", "feedback_token": TOKEN_HEADER, "signature": "x-signature"}


class ApiRoute(msgspec.Struct, frozen=True, kw_only=True):
    """One route. method: of HTTP. summary: one sentence. request: type of its body. reply: type of the reply, None for text.
    status: of a reply. headers: of a request, with their meaning. error: type of a refusal's body. answers: whether the reply
    may be a stream.
    """

    method: str = "POST"
    summary: str
    request: Any = None
    reply: Any = None
    status: int = 200
    headers: Mapping[str, str] = {}
    error: Any = ErrorReply
    answers: bool = False


def _answers(summary: str, request: Any, error: Any = ErrorReply) -> ApiRoute:
    headers = {
        SESSION_HEADER: "ties the turns of a conversation together; at most 512 characters",
        SESSION_END_HEADER: "`true`: no turn of its session follows, so that it is trained without waiting",
    }
    return ApiRoute(summary=summary, request=request, reply=Answer, headers=headers, error=error, answers=True)


# Every route that all gateways have, by its path.
ROUTES: Mapping[str, ApiRoute] = {
    "/v1/chat/completions": _answers("answers a conversation, as OpenAI's Chat Completions", ChatRequest),
    "/v1/completions": _answers("continues a text or token ids, as OpenAI's Completions", TextRequest),
    "/v1/messages": _answers("answers a conversation, as Anthropic's Messages", MessagesRequest, MessagesError),
    "/v1/responses": _answers("answers a conversation, as OpenAI's Responses", ResponsesRequest),
    COUNT_PATH: ApiRoute(
        summary="counts the tokens of a prompt", request=MessagesRequest, reply=TokenCount, error=MessagesError
    ),
    MODELS_PATH: ApiRoute(method="GET", summary="lists the served policies", reply=ServedModels),
    "/v1/models/{model:path}": ApiRoute(method="GET", summary="shows a served policy", reply=ServedModel),
    PATH: ApiRoute(
        summary="takes feedback on an answer: exactly one of value, label, correction, text and retract",
        request=FeedbackRequest, reply=FeedbackReply, status=202,
    ),
    f"{PATH}/tokens": ApiRoute(
        summary="makes a token with which a browser may give feedback on one answer",
        request=TokenRequest, reply=FeedbackTokenReply,
    ),
    "/healthz": ApiRoute(method="GET", summary="says whether the gateway serves; 503 where it does not", reply=Health),
    "/metrics": ApiRoute(method="GET", summary="metrics in the format of Prometheus"),
    OPENAPI_PATH: ApiRoute(method="GET", summary="this document", reply=dict[str, Any]),
}  # fmt: skip


def document(webhooks: Sequence[Webhook] = ()) -> Object:
    """The document of a gateway with these webhooks."""
    types = [
        kind for route in ROUTES.values() for kind in (route.request, route.reply, route.error) if kind is not None
    ]
    found, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(types, found, strict=True))
    paths = {shown(path): {route.method.lower(): _operation(path, route, schemas)} for path, route in ROUTES.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "headrace gateway", "version": "1"},
        "paths": paths | {hook.path: {"post": _hook(hook, schemas)} for hook in webhooks},
        "components": {
            "schemas": {name: _one_line(schema) for name, schema in sorted(components.items())},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                **{name: {"type": "apiKey", "in": "header", "name": header} for name, header in _HEADERS.items()},
            },
        },
    }


def shown(path: str) -> str:
    """A path as OpenAPI writes it.

    >>> shown("/v1/models/{model:path}")
    '/v1/models/{model}'
    """
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _operation(path: str, route: ApiRoute, schemas: Mapping[Any, Object]) -> Object:
    content = {_JSON: {"schema": schemas[route.reply]}} if route.reply else {"text/plain": {"schema": _TEXT}}
    if route.answers:
        content["text/event-stream"] = {"schema": _TEXT}
    found: Object = {"operationId": _name(route.method, path), "summary": route.summary}
    in_path = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in re.findall(r"\{(\w+)", path)]
    if parameters := [*in_path, *_headers(route.headers)]:
        found["parameters"] = parameters
    if route.request is not None:
        found["requestBody"] = {"required": True, "content": {_JSON: {"schema": schemas[route.request]}}}
    replies = {str(route.status): {"description": "done", "content": content}}
    if path == "/healthz":
        replies["503"] = {"description": "the gateway cannot serve", "content": content}
    found["responses"] = replies | _refusals(schemas[route.error])
    scope = ROUTE_SCOPES.get(path)
    keys: list[Object] = [{"key": []}, {"api_key": []}] if scope else []
    found["security"] = [*keys, {"feedback_token": []}] if path == PATH else keys
    return found | ({"x-scope": scope} if scope else {})


def _hook(hook: Webhook, schemas: Mapping[Any, Object]) -> Object:
    headers = {hook.header: "HMAC-SHA256 of the body, or of timestamp and body, in hexadecimal or base64"}
    if hook.timestamp_header:
        headers[hook.timestamp_header] = "seconds of the epoch or a time of ISO 8601, within five minutes of now"
    return {
        "operationId": _name("post", hook.path),
        "summary": "hands an event to a feedback source",
        "parameters": [header | {"required": True} for header in _headers(headers)],
        "requestBody": {"required": True, "content": {_JSON: {"schema": {}}}},
        "responses": {
            "202": {"description": "taken", "content": {_JSON: {"schema": {"type": "object"}}}},
            **_refusals(schemas[ErrorReply]),
        },
        "security": [],
    }


def _headers(headers: Mapping[str, str]) -> Iterator[Object]:
    for name, meaning in headers.items():
        yield {"name": name, "in": "header", "description": meaning, "schema": _TEXT}


def _refusals(error: Object) -> Object:
    return {"default": {"description": "refused", "content": {_JSON: {"schema": error}}}}


def _name(method: str, path: str) -> str:
    return re.sub(r"\W+", "_", f"{method.lower()}{shown(path)}").strip("_")


def _one_line(schema: Object) -> Object:
    described = schema.get("description")
    return schema | {"description": " ".join(described.split())} if described else schema
