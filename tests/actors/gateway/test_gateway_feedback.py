"""Feedback over HTTP: taken in with keys and signatures, read by sources, once each in `verified`."""

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.config import Webhook
from actors.gateway.errors import ApiError
from actors.gateway.recording.feedback_intake import check_signature, read_feedback
from infra.store.memory import MemoryStore
from infra.store.seal import Keys, open_event, open_text
from tests.actors.gateway.gateway_rig import ASK, AwayBus, engine, says, serving
from tests.actors.gateway.test_gateway_log_away import spooled
from tests.actors.rig import until
from tests.names import session_name

HOOK = Webhook("/zendesk", b"s3cret", "x-signature")
STAMPED = Webhook("/stamped", b"s3cret", "x-signature", "x-timestamp")
ANSWER = f"hr-{session_name('acme', 's')}.7-3.0-0-0"


def signature(body: bytes, secret: bytes = b"s3cret") -> bytes:
    return hmac.new(secret, body, hashlib.sha256).digest()


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"value": 0.25}, "value"),
        ({"value": True}, "value"),
        ({"label": "rude"}, "label"),
        ({"text": "too long"}, "label"),
        ({"value": 1, "text": "great"}, "value"),
        ({"correction": "It is 42."}, "correction"),
        ({"retract": True}, "retraction"),
    ],
)
def test_what_is_said_is_one_kind(said: dict[str, Any], kind: str) -> None:
    assert read_feedback(json.dumps({"answer_id": ANSWER, **said}).encode()).kind == kind


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"value": 2},
        {"value": "good"},
        {"value": 1, "correction": "x"},
        {"value": 1, "kind": "label"},
        {"value": 1, "source": "csat"},
        {"correction": ""},
        {"value": 1, "choice": -1},
    ],
)
def test_what_makes_no_sense_is_a_400(said: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        read_feedback(json.dumps({"answer_id": ANSWER, **said}).encode())
    assert caught.value.status == 400


def test_signatures_in_hexadecimal_and_base64_open_and_forged_or_old_ones_do_not() -> None:
    body, now = b'{"x": 1}', 1_000_000.0
    for shown in (signature(body).hex(), f"sha256={signature(body).hex()}", base64.b64encode(signature(body)).decode()):
        check_signature(HOOK, {"x-signature": shown}, body, now)
    for shown in ("", "sha256=", signature(body, b"other").hex(), signature(b"{}").hex(), "zz"):
        with pytest.raises(ApiError) as caught:
            check_signature(HOOK, {"x-signature": shown}, body, now)
        assert caught.value.status == 401
    stamp = str(int(now))
    good = {"x-timestamp": stamp, "x-signature": signature(stamp.encode() + body).hex()}
    check_signature(STAMPED, good, body, now)
    for later in (now + 3600, now - 3600):
        with pytest.raises(ApiError, match="not within"):
            check_signature(STAMPED, good, body, later)
    with pytest.raises(ApiError):
        check_signature(STAMPED, {**good, "x-timestamp": str(int(now) + 1)}, body, now)
    for stamp in ("nan", "inf", "", "yesterday"):
        odd = {"x-timestamp": stamp, "x-signature": signature(stamp.encode() + body).hex()}
        with pytest.raises(ApiError, match="not within"):
            check_signature(STAMPED, odd, body, now)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.dictionaries(
    st.sampled_from(["answer_id", "value", "label", "text", "correction", "retract", "kind", "choice", "rater"]),
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8) | st.lists(st.text(max_size=3), max_size=2),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_bytes_are_feedback_or_a_400(body: bytes) -> None:
    try:
        read_feedback(body)
    except ApiError as error:
        assert error.status == 400


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=80), st.text(max_size=80))
def test_any_signature_that_is_not_ours_is_a_401(signature: str, stamp: str) -> None:
    with pytest.raises(ApiError) as forged:
        check_signature(STAMPED, {"x-signature": signature, "x-timestamp": stamp}, b"{}", 0.0)
    assert forged.value.status == 401


async def test_a_webhook_is_taken_redacted_and_sealed_and_a_forged_one_is_not(tmp_path: Path) -> None:
    store = MemoryStore()
    async with serving(tmp_path, store=store, webhooks=(HOOK,)) as served:
        answer = served.answer()
        body = json.dumps({"ticket": 7, "mail": "ada@x.example", "answer": answer}).encode()
        async with served.http() as http:
            headers = {"x-signature": signature(body).hex()}
            assert (await http.post("/zendesk", content=body, headers=headers)).status_code == 202
            assert (await http.post("/zendesk", content=body)).status_code == 401
            assert (await http.post("/zendesk", content=body + b" ", headers=headers)).status_code == 401
            for broken in (b"{", b"\xff", b'{"a":' * 700 + b"1" + b"}" * 700, b"[" * 100_000):
                signed = {"x-signature": signature(broken).hex()}
                assert (await http.post("/zendesk", content=broken, headers=signed)).status_code == 400
        (received,) = await served.received(1)
        assert received.path == "/zendesk" and b"ticket" not in received.body
        said = json.loads(open_event(received.body, Keys(store)))
        assert said == {"ticket": 7, "mail": "[email]", "answer": answer}


async def test_a_webhook_that_names_no_answer_is_counted_and_one_that_names_too_many_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, webhooks=(HOOK,)) as served, served.http() as http:
        for said in (
            {"note": "nobody's"},
            {f"{n}": f"hr-{session_name('acme', f's{n}')}.7-3.0-0-0" for n in range(17)},
        ):
            body = json.dumps(said).encode()
            told = await http.post("/zendesk", content=body, headers={"x-signature": signature(body).hex()})
            assert told.status_code == (202 if "note" in said else 400)
        assert served.metrics.counters()["feedback_unsealed{path=/zendesk}"] == 1
        assert [json.loads(one.body) for one in await served.received(1)] == [{"note": "nobody's"}]


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (ANSWER.replace("0-0-0", "a-b-c"), 400),
        (ANSWER.replace("0-0-0", "0-0"), 400),
        ("latest", 400),
        ("hr-", 400),
        ("0-0-0", 400),
        ("hr-.0-0-0", 400),
        ("hr-add-3745.2.0-7-0", 403),
        (f"hr-{session_name('globex', 's')}.7-3.0-0-0", 403),
        (f"hr-{'é' * 64}.7-3.0-0-0", 403),
        (f"hr-{'é' * 24}.7-3.0-0-0", 403),
        (f"hr-{session_name('acme', 'never')}.7-3.0-0-0", 202),
    ],
)
async def test_an_id_that_is_none_or_anothers_is_told_and_one_that_was_never_given_waits_for_its_answer(
    tmp_path: Path, answer: str, status: int
) -> None:
    async with serving(tmp_path) as served, served.http(await served.new_key()) as http:
        told = await http.post("/v1/feedback", json={"answer_id": answer, "value": 1})
        assert told.status_code == status
        assert status == 202 or told.json()["error"]["param"] == "answer_id"
        assert len(await served.received(int(status == 202))) == (status == 202)


async def test_feedback_that_no_source_reads_is_not_recorded_and_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path, reads_feedback=False) as served, served.http(await served.new_key()) as http:
        told = (await http.post("/v1/feedback", json={"answer_id": ANSWER, "value": 1})).json()
        assert told["recorded"] is False and "no [[feedback]] source" in told["note"]
        assert served.metrics.counters()["feedback_unread"] == 1 and await served.received() == []


SPELLINGS: dict[str, Callable[[str], str]] = {
    "upper case": str.upper,
    "percent-encoded": lambda id: id.replace("-", "%2d").replace(".", "%2E"),
    "with a blank": lambda id: f"{id[:9]} {id[9:]}",
}


@pytest.mark.parametrize("spelled", SPELLINGS.values(), ids=SPELLINGS)
async def test_a_webhook_that_spells_an_id_otherwise_is_sealed_or_refused_as_its_answer_says(
    tmp_path: Path, spelled: Callable[[str], str]
) -> None:
    async with serving(tmp_path, engine(says("a", "b")), webhooks=(HOOK,)) as served:
        keys = [await served.new_key(train="yes"), await served.new_key("other", train="no")]
        async with served.http() as http:
            for key in keys:
                done = await served.client(key).chat.completions.create(model="m", messages=ASK)
                body = json.dumps({"note": "WORDS", "answer": spelled(done.id)}).encode()
                told = await http.post("/zendesk", content=body, headers={"x-signature": signature(body).hex()})
                assert told.status_code == 202
        (received,) = await served.received(1)
        assert b"WORDS" not in received.body
        assert served.metrics.counters()["feedback_received{outcome=no consent,path=/zendesk}"] == 1


async def test_what_people_write_is_masked_then_sealed_before_the_first_write_to_log_or_disk(tmp_path: Path) -> None:
    bus, store = AwayBus(), MemoryStore()
    async with serving(tmp_path, bus=bus, store=store) as served:
        key = await served.new_key()
        bus.away = True
        async with served.http(key) as http:
            given = served.answer()
            for name in ("correction", "label"):
                said = {"answer_id": given, name: "ask WILHELMINA at ada@x.example", "rater": "bob"}
                assert (await http.post("/v1/feedback", json=said)).status_code == 202
        written = spooled(tmp_path)[0].read_bytes()
        assert given.encode() in written and b"WILHELMINA" not in written and b"bob" not in written
        bus.away = False
        await until(lambda: not spooled(tmp_path), seconds=30)
        bodies = [json.loads(one.body) for one in await served.received()]
        texts = [body.get("correction") or body["label"] for body in bodies]
        answer = given.removeprefix("hr-")
        assert not any("WILHELMINA" in text for text in texts)
        assert {open_text(text, Keys(store), answer) for text in texts} == {"ask WILHELMINA at [email]"}
