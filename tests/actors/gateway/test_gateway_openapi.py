"""The document of the gateway's API: valid, whole, and true of what real replies hold."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from actors.gateway.access.authenticator import ROUTE_SCOPES
from actors.gateway.config import Webhook
from actors.gateway.http.app import APIS
from actors.gateway.http.openapi import OPENAPI_PATH, ROUTES, document, shown
from tests.actors.gateway.gateway_rig import serving

HOOK = Webhook("/zendesk", b"s3cret", "x-zendesk-signature", "x-zendesk-time")
SAID = [{"role": "user", "content": "Hi"}]
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": "main", "messages": SAID}),
    ("/v1/completions", {"model": "main", "prompt": "Hi"}),
    ("/v1/messages", {"model": "main", "messages": SAID, "max_tokens": 9}),
    ("/v1/responses", {"model": "main", "input": "Hi"}),
    ("/v1/messages/count_tokens", {"model": "main", "messages": SAID}),
]


def schema_at(found: dict[str, Any], path: str, method: str, status: int) -> Draft202012Validator:
    responses = found["paths"][path][method]["responses"]
    one = responses.get(str(status)) or responses["default"]
    return Draft202012Validator({**one["content"]["application/json"]["schema"], "components": found["components"]})


@pytest.mark.parametrize("webhooks", [(), (HOOK,)], ids=["no webhook", "one webhook"])
def test_the_document_is_valid_openapi(webhooks: tuple[Webhook, ...]) -> None:
    OpenAPIV31SpecValidator(json.loads(json.dumps(document(webhooks)))).validate()


def test_each_route_of_the_app_is_in_the_document_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> set[tuple[str, str]]:
        async with serving(tmp_path, webhooks=[HOOK]) as served, served.http() as http:
            found = (await http.get(OPENAPI_PATH)).raise_for_status().json()
            assert found == document((HOOK,))
            for path, methods in found["paths"].items():  # each is there, whatever it says to an empty request
                for method in methods:
                    answer = await http.request(method, path.replace("{model}", "main"))
                    assert answer.status_code not in (404, 405), path
            return {(method, path) for path, methods in found["paths"].items() for method in methods}

    listed = asyncio.run(main())
    assert listed == {(one.method.lower(), shown(path)) for path, one in ROUTES.items()} | {("post", HOOK.path)}
    assert set(APIS) | set(ROUTE_SCOPES) <= set(ROUTES)


def test_the_document_names_the_headers_and_the_scope_of_a_route() -> None:
    found = document((HOOK,))
    named = {
        path: {one["name"] for one in operation.get("parameters", ()) if one["in"] == "header"}
        for path, operations in found["paths"].items()
        for operation in operations.values()
    }
    assert all(named[path] == {"x-session-id", "x-session-end"} for path in APIS)
    assert named[HOOK.path] == {"x-zendesk-signature", "x-zendesk-time"}
    schemes = found["components"]["securitySchemes"]
    feedback = found["paths"]["/v1/feedback"]["post"]
    assert {schemes[name].get("name", "") for one in feedback["security"] for name in one} == {
        "", "x-api-key", "x-feedback-token",
    }  # fmt: skip
    assert schemes["signature"]["name"] == "x-signature" and feedback["x-scope"] == "feedback"
    assert found["paths"]["/healthz"]["get"]["security"] == []


async def test_what_the_gateway_takes_and_replies_is_what_the_document_says(tmp_path: Path) -> None:
    found = document()

    async with serving(tmp_path) as served, served.http(await served.new_key()) as http:

        async def check(method: str, path: str, body: Any = None, status: int = 200, at: str = "") -> Any:
            if body is not None and status < 400:
                content = found["paths"][path][method]["requestBody"]["content"]
                schema = {**content["application/json"]["schema"], "components": found["components"]}
                Draft202012Validator(schema).validate(body)
            answer = await http.request(method, at or path, json=body)
            assert answer.status_code == status, answer.text
            schema_at(found, path, method, status).validate(answer.json())
            return answer.json()

        for path, body in ASKED:
            await check("post", path, body)
            await check("post", path, {**body, "model": 5}, 400)
        answer = (await check("post", *ASKED[0]))["id"]
        said = {"answer_id": answer, "value": True, "rater": "ann"}
        assert (await check("post", "/v1/feedback", said, 202))["recorded"]
        await check("post", "/v1/feedback", {"answer_id": answer}, 400)
        await check("post", "/v1/feedback/tokens", {"answer_id": answer, "expires_in": 60})
        models = await check("get", "/v1/models")
        await check("get", "/v1/models/{model}", at=f"/v1/models/{models['data'][0]['id']}")
        await check("get", "/healthz")
