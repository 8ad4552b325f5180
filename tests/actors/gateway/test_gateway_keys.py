"""Rights of keys: every route with every kind of key, quotas, revocation, and browser tokens."""

import time
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from actors.gateway.access.authenticator import Bucket
from actors.gateway.access.keys import KeyBook, Refused, create_key, list_keys, revoke_key
from actors.gateway.config import GatewayConfig, Webhook
from actors.gateway.http.app import ROUTES as SERVED
from actors.gateway.http.app import Site
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from infra.store.store import API_KEYS
from tests.actors.gateway.gateway_rig import serving
from tests.actors.rig import until
from tests.infra.test_seal import AwayStore
from tests.names import session_name

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
OWN = f"hr-{session_name('acme', 's')}.7-0.0-0-0"
ROUTES: list[tuple[str, str, Any, str]] = [
    ("POST", "/v1/chat/completions", CHAT, "serve"),
    ("POST", "/v1/responses", {"model": "m", "input": "Hi"}, "serve"),
    ("POST", "/v1/messages", {**CHAT, "max_tokens": 5}, "serve"),
    ("POST", "/v1/messages/count_tokens", CHAT, "serve"),
    ("GET", "/v1/models", None, "serve"),
    ("POST", "/v1/feedback", {"answer_id": OWN, "value": 1}, "feedback"),
    ("GET", "/metrics", None, "admin"),
]
WEBHOOK = Webhook(path="/zendesk", secret=b"shared", header="x-signature")
KEYLESS = {"/healthz"}
CASES = ("right", "missing", "wrong", "almost", "revoked", "expired", "other scope", "other tenant")


async def test_every_route_with_every_kind_of_key(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        keys = {scope: served.key(scopes=(scope,)) for scope in ("serve", "feedback", "admin")}
        revoked = served.key(scopes=("serve", "feedback", "admin"))
        revoke_key(served.store, revoked.split("-")[1])
        presented = {
            "missing": "",
            "wrong": "sk-not-one-of-ours",
            "revoked": revoked,
            "expired": served.key(scopes=("serve", "feedback", "admin"), lives_s=1e-6),
            "other tenant": served.key(tenant="globex", scopes=("serve", "feedback", "admin")),
        }
        await served.keys_read()
        for method, path, body, scope in ROUTES:
            other = "admin" if scope != "admin" else "serve"
            per_case = {**presented, "right": keys[scope], "almost": keys[scope][:-1] + "~", "other scope": keys[other]}
            for case in CASES:
                async with served.http(per_case[case]) as http:
                    answer = await http.request(method, path, json=body)
                about = "feedback" in path
                expected = 403 if case == "other scope" or (case == "other tenant" and about) else 401
                if case == "right" or (case == "other tenant" and not about):
                    assert answer.status_code in (200, 202), (path, case, answer.text)
                    continue
                assert answer.status_code == expected, (path, case, answer.text)
                error = answer.json()["error"]
                fields = {"message", "type"} if "messages" in path else {"message", "type", "param", "code"}
                assert set(error) == fields and error["message"]
                if case not in ("missing", "other scope", "other tenant"):
                    assert error["message"] == "Incorrect API key provided.", "a client learns no more than that"
        assert await served.received(1) and len(await served.recorded(1)) >= 1


async def test_a_revoked_key_stops_working_and_the_others_go_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        first, second = await served.new_key(), await served.new_key()

        async def works(key: str) -> bool:
            async with served.http(key) as http:
                return (await http.get("/v1/models")).status_code == 200

        assert await works(first) and await works(second)
        assert revoke_key(served.store, first.split("-")[1])
        await served.keys_read()
        assert not await works(first) and await works(second)


async def test_while_the_store_is_away_known_keys_hold_and_it_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def logged(words: str) -> int:
        return sum(words in record.message for record in caplog.records)

    store = AwayStore()
    async with serving(tmp_path, store=store) as served:
        key = await served.new_key()
        for times in (1, 2):
            store.away = True
            failed = served.count("keys_not_read")
            await until(lambda failed=failed: served.count("keys_not_read") >= failed + 5)
            async with served.http(key) as http:
                assert (await http.get("/v1/models")).status_code == 200
            store.away = False
            await served.keys_read()
            assert logged("keys_not_read") == logged("keys_read_again") == times


def test_the_store_knows_no_secret_and_a_listing_shows_none() -> None:
    store = MemoryStore()
    key, shown = create_key(store, tenant="acme", scopes=("serve",), train="yes", rpm=0, tpm=0)
    secret = shown.split("-", 2)[2]
    assert len(secret) >= 43
    for name in store.keys(""):
        assert secret.encode() not in store.get(name)
    assert [one.id for one, _ in list_keys(store)] == [key.id]
    assert revoke_key(store, key.id) and list_keys(store)[0][1]
    assert not revoke_key(store, "nobody") and not revoke_key(store, "../secret")
    book = KeyBook()
    book.refresh(store)
    with pytest.raises(Refused, match="revoked"):
        book.find(shown, time.time())
    store.delete(API_KEYS + key.id)
    book.refresh(store)
    with pytest.raises(Refused, match="wrong"):
        book.find(shown, time.time())


def test_a_quota_fills_evenly_and_is_paid_back_by_waiting() -> None:
    requests = Bucket(60, 60, 0.0)
    assert [requests.take(1, 0.0) for _ in range(60)] == [0.0] * 60
    assert requests.take(1, 0.0) == pytest.approx(1.0)  # one a second
    assert requests.take(1, 1.0) == 0.0
    tokens = Bucket(600, 600, 0.0)
    assert tokens.take(0, 0.0) == 0.0
    tokens.charge(900, 0.0)  # an answer was longer than what was left
    assert tokens.take(0, 0.0) == pytest.approx(30.0)  # 300 too many, 10 come back a second
    assert tokens.take(0, 31.0) == 0.0


def test_the_matrix_knows_every_route_that_is_served() -> None:
    site = Site(
        GatewayStub(),
        None,
        None,
        Metrics("serve"),
        models=("main",),
        webhooks=(WEBHOOK,),
        state=lambda: "",  # type: ignore[arg-type]
    )
    routes = {route.path for route in site.app().routes if isinstance(route, Route)}
    known = {path for _, path, _, _ in ROUTES}
    assert routes == known | KEYLESS | {WEBHOOK.path}
    scopes = {path: scope for _, path, _, scope in ROUTES}
    assert scopes == {path: scope for path, (_, scope) in SERVED.items() if scope}


class GatewayStub:
    """The parts of a gateway that its routes need."""

    config = GatewayConfig()
