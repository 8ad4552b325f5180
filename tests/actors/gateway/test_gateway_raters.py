"""Who may say what about which answer, and as whom: scopes, tokens, quotas, webhooks, pseudonyms."""

import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import httpx

from actors.gateway.config import Webhook
from infra.store.memory import MemoryStore
from infra.store.seal import FOLDER, SECRET
from schemas import Received
from schemas.errors import StoreError
from schemas.ids import keyed_session, keyed_subject
from tests.actors.gateway.gateway_rig import RunningGateway, serving
from tests.actors.gateway.test_gateway_privacy import stored

HOOK = Webhook("/zendesk", b"s3cret", "x-signature")
BOUND = Webhook("/bound", b"s3cret", "x-signature", tenant="acme")


async def token_for(http: httpx.AsyncClient, answer: str, choice: int = 0) -> str:
    made = await http.post("/v1/feedback/tokens", json={"answer_id": answer, "choice": choice})
    assert made.status_code == 200, made.text
    return str(made.json()["token"])


async def rated(served: RunningGateway, token: str, answer: str, **more: Any) -> int:
    async with served.http() as http:
        said = {"answer_id": answer, "value": 1, **more}
        return (await http.post("/v1/feedback", json=said, headers={"x-feedback-token": token})).status_code


async def hooked(served: RunningGateway, body: object, hook: Webhook = HOOK) -> int:
    data = json.dumps(body).encode()
    signature = hmac.new(hook.secret, data, hashlib.sha256).hexdigest()
    async with served.http() as http:
        return (await http.post(hook.path, content=data, headers={hook.header: signature})).status_code


def sealing_keys(served: RunningGateway) -> list[str]:
    return list(served.store.keys(FOLDER))


async def test_ratings_grants_and_tokens_have_quotas(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        few, many = await served.new_key(rpm=2), await served.new_key()
        answer = served.answer()
        async with served.http(few) as http:
            token = await token_for(http, answer)
            assert await rated(served, token, answer) == 202
            for path in ("/v1/feedback", "/v1/feedback/tokens"):
                body = {"answer_id": answer} | ({"value": 1} if path == "/v1/feedback" else {})
                assert (await http.post(path, json=body)).status_code == 429
            assert await rated(served, token, answer) == 429, "what a token says counts for the key that asked for it"
        async with served.http(many) as http:
            token, other = await token_for(http, answer), await token_for(http, answer, choice=1)
        assert [await rated(served, token, answer) for _ in range(11)] == [202] * 10 + [429]
        assert await rated(served, other, answer, choice=1) == 202, "and one browser uses up no other's"


async def test_a_browser_takes_no_id_and_no_rater_of_anybody_else(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        key, globex = await served.new_key(), await served.new_key(tenant="globex")
        answers = [served.answer(session=name) for name in ("s", "t")]
        async with served.http(key) as http:
            for answer in answers:
                assert await rated(served, await token_for(http, answer), answer, id="ticket-7", rater="ann") == 202
            for more in ({}, {"rater": "ann"}, {"rater": "ann"}, {"rater": "bob"}):
                said = {"answer_id": answers[0], "value": 1, "id": "ticket-7", **more}
                told = await http.post("/v1/feedback", json=said)
                assert told.status_code == 202
        async with served.http(globex) as http:
            said = {"answer_id": served.answer("globex"), "value": 1, "id": "ticket-7", "rater": "ann"}
            assert (await http.post("/v1/feedback", json=said)).status_code == 202
        found: list[Received] = sorted(await served.received(), key=lambda one: (one.tenant, one.rater, one.ref))
        by_browser = [one for one in found if one.rater.startswith("answer ")]
        assert {one.rater for one in by_browser} == {f"answer {answer}" for answer in answers}
        by_key = [one for one in found if one.tenant == "acme" and one not in by_browser]
        assert len({one.id for one in by_browser}) == 2 and len({one.id for one in by_key}) == 1
        assert not {one.id for one in by_browser} & {one.id for one in by_key}
        raters = [one.rater for one in by_key]
        assert raters.count(f"key {key.split('-')[1]}") == 1 and len(set(raters)) == 3
        (other,) = [one for one in found if one.tenant == "globex"]
        assert other.rater not in raters and other.id != by_key[0].id


async def test_no_dictionary_finds_a_user_a_session_a_tenant_an_id_or_a_rater(tmp_path: Path) -> None:
    words = {"acme": "tenant", "ann@example.org": "user", "chat-81": "session", "u-4711": "rater", "ticket-7": "id"}
    plain = [*words, *(hashlib.sha256(word.encode()).hexdigest()[:16] for word in words)]
    plain += [keyed_session(b"", "acme", "chat-81", "yes"), keyed_subject(b"", "acme", "ann@example.org")]

    async with serving(tmp_path) as served:
        key = await served.new_key()
        async with served.http(key) as http:
            asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "user": "ann@example.org"}
            made = await http.post("/v1/chat/completions", json=asked, headers={"x-session-id": "chat-81"})
            said = {"answer_id": made.json()["id"], "value": 1, "id": "ticket-7", "rater": "u-4711"}
            assert (await http.post("/v1/feedback", json=said)).status_code == 202
        (one,), (heard,) = await served.recorded(1), await served.received(1)
        assert len(one.subject) == 32 and len(one.group.partition(".")[0]) == 64 and heard.ref == f"hr-{one.id}"
        for name in list(served.store.keys("gateway/keys/")):
            served.store.delete(name)  # a key says whose it is
        found = (await stored(served)).replace(b'tenant": "acme', b"")
        assert one.tenant == "acme", "the tenant of an experience is the operator's word, not a person's"
        assert not [word for word in plain if word != "acme" and word.encode() in found]


async def test_an_answer_that_was_made_up_is_refused_and_makes_no_sealing_key(tmp_path: Path) -> None:
    async with serving(tmp_path, webhooks=(HOOK,)) as served:
        key = await served.new_key()
        given = served.answer()
        session = given[3:67]
        made_up = [given.replace(session, session[:at] + "z" * (64 - at)) for at in (32, 52)]
        async with served.http(key) as http:
            for answer in made_up:
                told = await http.post("/v1/feedback", json={"answer_id": answer, "correction": "no"})
                assert told.status_code == 403
        assert await hooked(served, {"about": made_up}) == 202
        assert not sealing_keys(served)
        assert served.metrics.counters()["feedback_unsealed{path=/zendesk}"] == 1


async def test_nothing_is_written_of_an_answer_whose_key_may_not_be_trained_on_whoever_says_it(tmp_path: Path) -> None:
    async with serving(tmp_path, webhooks=(HOOK,)) as served:
        key = await served.new_key()
        private, given = served.answer(train="no"), served.answer()
        async with served.http(key) as http:
            told = await http.post("/v1/feedback", json={"answer_id": private, "correction": "no"})
        assert (told.status_code, told.json()["recorded"]) == (202, False)
        for named in ([private], [given, private]):
            assert await hooked(served, {"about": named, "csat": 1}) == 202
        assert not await served.received() and not sealing_keys(served)
        counters = served.metrics.counters()
        assert counters["feedback_received{outcome=no consent,path=/zendesk}"] == 2
        assert await hooked(served, {"about": [given]}) == 202 and len(await served.received(1)) == 1


async def test_a_webhooks_body_that_is_sent_again_is_one_record(tmp_path: Path) -> None:
    store = MemoryStore()
    async with serving(tmp_path, store=store, webhooks=(HOOK,)) as served:
        for csat in (1, 1, 2):
            assert await hooked(served, {"ticket": 7, "csat": csat}) == 202
        (first, second) = await served.received(2)
        assert first.id != second.id
        assert served.metrics.counters()["feedback_received{outcome=repeated,path=/zendesk}"] == 1
    async with serving(tmp_path, store=store, bus=served.bus, webhooks=(HOOK,), topics=False) as again:
        assert await hooked(again, {"ticket": 7, "csat": 1}) == 202
        ids = [one.id for one in await again.received(3)]
        assert len(ids) == 3 and len(set(ids)) == 2, "whoever takes it, it has the same id"


async def test_a_webhook_waits_for_the_store_where_the_apps_secret_was_never_read(tmp_path: Path) -> None:
    class AwayStore(MemoryStore):
        away = True

        def get(self, key: str) -> bytes:
            if self.away:
                raise StoreError("the store is away")
            return super().get(key)

    store = AwayStore()
    store.put(SECRET, b"s" * 32)
    async with serving(tmp_path, store=store, webhooks=(HOOK,)) as served:
        answer = f"hr-{keyed_session(b's' * 32, 'acme', 's', 'yes')}.7-3.0-0-0"
        assert await hooked(served, {"about": answer}) == 503
        store.away = False
        await served.keys_read()
        assert await hooked(served, {"about": answer}) == 202
        assert not served.count("feedback_unsealed") and len(await served.received(1)) == 1


async def test_a_webhook_of_one_tenant_speaks_of_no_others_answers(tmp_path: Path) -> None:
    async with serving(tmp_path, webhooks=(BOUND,)) as served:
        assert await hooked(served, {"about": served.answer("globex")}, BOUND) == 403
        assert await hooked(served, {"about": served.answer("acme")}, BOUND) == 202
        assert len(await served.received(1)) == 1


async def test_feedback_says_whether_its_answer_is_known_here(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        async with served.http(await served.new_key()) as http:
            asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
            made = (await http.post("/v1/chat/completions", json=asked)).json()["id"]
            known = (await http.post("/v1/feedback", json={"answer_id": made, "value": 1})).json()
            other = (await http.post("/v1/feedback", json={"answer_id": served.answer(), "value": 1})).json()
        assert "note" not in known and "unknown answer_id" in other["note"] and other["recorded"]
        assert served.metrics.counters()["feedback_not_known_here"] == 1
