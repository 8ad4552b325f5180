"""The gateway's routes, and the document of OpenAPI 3.1 that it serves about them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from actors.gateway.access.keys import Scope
from actors.gateway.answering.requests import SESSION_END_HEADER, SESSION_HEADER, ChatRequest, TextRequest
from actors.gateway.apis.messages import MessagesRequest
from actors.gateway.apis.responses import ResponsesRequest
from actors.gateway.config import Webhook
from actors.gateway.recording.feedback_intake import PATH, FeedbackRequest, TokenRequest

OPENAPI_PATH = "/openapi.json"
COUNT_PATH = "/v1/messages/count_tokens"
MODELS_PATH = "/v1/models"
TOKEN_HEADER = "x-feedback-token"
_TEXT = {"type": "string"}
_SESSION = {
    SESSION_HEADER: "ties the turns of a conversation together; at most 512 characters",
    SESSION_END_HEADER: "`true`: no turn of its session follows, so that it is trained without waiting",
}


class ApiRoute(msgspec.Struct, frozen=True):
    """One route. method: of HTTP. summary: one sentence. scope: that opens it, None where it knows no keys. request: type of
    its body. headers: that it reads, with their meaning.
    """

    method: str
    summary: str
    scope: Scope | None = None
    request: Any = None
    headers: Mapping[str, str] = {}


# Every route that all gateways have, by its path.
ROUTES: Mapping[str, ApiRoute] = {
    "/v1/chat/completions": ApiRoute("POST", "answers a conversation, as Chat Completions", "serve", ChatRequest, _SESSION),
    "/v1/completions": ApiRoute("POST", "continues a text or token ids, as Completions", "serve", TextRequest, _SESSION),
    "/v1/messages": ApiRoute("POST", "answers a conversation, as Messages", "serve", MessagesRequest, _SESSION),
    "/v1/responses": ApiRoute("POST", "answers a conversation, as Responses", "serve", ResponsesRequest, _SESSION),
    COUNT_PATH: ApiRoute("POST", "counts the tokens of a prompt", "serve", MessagesRequest),
    MODELS_PATH: ApiRoute("GET", "lists the served policies", "serve"),
    "/v1/models/{model:path}": ApiRoute("GET", "shows a served policy", "serve"),
    PATH: ApiRoute(
        "POST", "takes feedback on an answer: exactly one of value, label, correction, text and retract", "feedback",
        FeedbackRequest, {TOKEN_HEADER: "a browser's token, instead of a key"},
    ),
    f"{PATH}/tokens": ApiRoute(
        "POST", "makes a token with which a browser may give feedback on one answer", "feedback", TokenRequest
    ),
    "/healthz": ApiRoute("GET", "says whether the gateway serves; 503 where it does not"),
    "/metrics": ApiRoute("GET", "metrics in the format of Prometheus", "admin"),
    OPENAPI_PATH: ApiRoute("GET", "this document"),
}  # fmt: skip


def document(webhooks: Sequence[Webhook] = ()) -> dict[str, Any]:
    routes = dict(ROUTES)
    for hook in webhooks:
        headers = {hook.header: "HMAC-SHA256 of the body, or of timestamp and body, in hexadecimal or base64"}
        if hook.timestamp_header:
            headers[hook.timestamp_header] = "seconds of the epoch or a time of ISO 8601, within five minutes of now"
        routes[hook.path] = ApiRoute("POST", "hands an event to a feedback source", None, dict[str, Any], headers)
    types = [route.request for route in routes.values() if route.request is not None]
    found, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(types, found, strict=True))
    for schema in components.values():
        if "description" in schema:
            schema["description"] = " ".join(schema["description"].split())
    return {
        "openapi": "3.1.0",
        "info": {"title": "headrace gateway", "version": "1"},
        "paths": {
            shown(path): {route.method.lower(): _operation(path, route, schemas)} for path, route in routes.items()
        },
        "components": {
            "schemas": dict(sorted(components.items())),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "feedback_token": {"type": "apiKey", "in": "header", "name": TOKEN_HEADER},
            },
        },
    }


def shown(path: str) -> str:
    """A path as OpenAPI writes it.

    >>> shown("/v1/models/{model:path}")
    '/v1/models/{model}'
    """
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _operation(path: str, route: ApiRoute, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    keys: list[dict[str, list[str]]] = [{"key": []}, {"api_key": []}] if route.scope else []
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in re.findall(r"\{(\w+)", path)
    ] + [
        {"name": name, "in": "header", "description": meaning, "schema": _TEXT}
        for name, meaning in route.headers.items()
    ]
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{shown(path)}").strip("_"),
        "summary": route.summary,
        "parameters": parameters,
        "responses": {"2XX": {"description": "done"}, "default": {"description": "refused"}},
        "security": [*keys, {"feedback_token": []}] if path == PATH else keys,
    }
    if route.scope:
        found["x-scope"] = route.scope
    if route.request is not None:
        content = {"application/json": {"schema": schemas[route.request]}}
        found["requestBody"] = {"required": True, "content": content}
    return found
