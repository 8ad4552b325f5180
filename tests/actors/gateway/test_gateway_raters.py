"""Rights of raters: answers that a webhook or a pseudonym may rate, and the name it rates under."""

import hashlib
import hmac
import json
from pathlib import Path

from actors.gateway.config import Webhook
from infra.store.memory import MemoryStore
from infra.store.seal import FOLDER, SECRET
from schemas import Received
from schemas.ids import keyed_session, keyed_subject
from tests.actors.gateway.gateway_rig import RunningGateway, serving
from tests.actors.gateway.test_gateway_privacy import stored
from tests.infra.test_seal import AwayStore

HOOK = Webhook("/zendesk", b"s3cret", "x-signature")
BOUND = Webhook("/bound", b"s3cret", "x-signature", tenant="acme")


async def hooked(served: RunningGateway, body: object, hook: Webhook = HOOK) -> int:
    data = json.dumps(body).encode()
    signature = hmac.new(hook.secret, data, hashlib.sha256).hexdigest()
    async with served.http() as http:
        return (await http.post(hook.path, content=data, headers={hook.header: signature})).status_code


def sealing_keys(served: RunningGateway) -> list[str]:
    return list(served.store.keys(FOLDER))


async def test_an_id_and_a_rater_are_of_their_tenant_alone(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        key, globex = await served.new_key(), await served.new_key(tenant="globex")
        for asking, tenant, raters in ((key, "acme", (None, "ann", "ann", "bob")), (globex, "globex", ("ann",))):
            async with served.http(asking) as http:
                for rater in raters:
                    said = {"answer_id": served.answer(tenant), "value": 1, "id": "ticket-7", "rater": rater}
                    assert (await http.post("/v1/feedback", json=said)).status_code == 202
        found: list[Received] = await served.received(5)
        own = [received for received in found if received.tenant == "acme"]
        (other,) = [received for received in found if received.tenant == "globex"]
        raters = [received.rater for received in own]
        assert len({received.id for received in own}) == 1 and len(set(raters)) == 3
        assert raters.count(f"key {key.split('-')[1]}") == 1
        assert other.rater not in raters and other.id != own[0].id


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
    store = AwayStore()
    store.put(SECRET, b"s" * 32)
    store.away = True
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
