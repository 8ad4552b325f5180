"""The console's doors: who may look, who may act, and from where."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import quote

import httpx
import pytest

from infra.cli.console.actions import SCOPES
from schemas import Directive, PolicyEvent, topics
from tests.infra.cli.console_rig import HOSTILE, LINK, SECRET, SESSION, Console, console

Kind = TypeVar("Kind", PolicyEvent, Directive)
PAGES = (
    "/", "/learning", "/answers", f"/answers/{SESSION}.1-0.0-0-0", "/versions", "/versions/5", "/versions/compare", "/data",
    "/privacy", "/help/see-what-happened",
)  # fmt: skip
FORM = {"version": "3", "why": "for a test", "answer": f"{SESSION}.1-22.0-0-0", "stage": "verify"}
OPENS = {"operate": {"operate"}, "unseal": {"unseal"}}  # scope → keys that have it
SEALED = f"/answers/{SESSION}.1-22.0-0-0"


@pytest.fixture(scope="module")
def here() -> Iterator[Console]:
    with console() as found:
        yield found


@contextmanager
def browser(here: Console, key: str = "") -> Iterator[httpx.Client]:
    """A browser that has signed in with a key, if that opens."""
    # It speaks without TLS: certificates that are not read cost no time.
    with httpx.Client(base_url=here.url, headers={"origin": here.url}, verify=False) as client:
        if key:
            client.post("/enter", data={"key": here.keys.get(key, key)})
        yield client


def token_of(client: httpx.Client) -> str:
    text = client.get("/versions").text
    return text.partition('name="token" value="')[2].partition('"')[0]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("key", ["", "serve", "revoked", "expired", "hr-nobody-nothing", "look", "operate", "unseal"])
def test_a_page_is_shown_to_a_key_of_the_console_and_to_nobody_else(here: Console, page: str, key: str) -> None:
    with browser(here, key) as client:
        answer = client.get(page)
        if key in ("look", "operate", "unseal"):
            assert answer.status_code == 200, answer.text
        else:
            assert answer.status_code == 401 and "refund" not in answer.text


@pytest.mark.parametrize("action", sorted(SCOPES))
@pytest.mark.parametrize("key", ["", "serve", "revoked", "expired", "hr-nobody-nothing", "look", "operate", "unseal"])
def test_an_action_is_refused_to_every_key_but_the_one_that_may(here: Console, action: str, key: str) -> None:
    with browser(here, key) as client:
        if key in OPENS[SCOPES[action]]:
            return  # what they may do is done in tests of its own
        answer = client.post(f"/actions/{action}", data=FORM | {"token": "0" * 64})
        assert answer.status_code == (403 if key in ("look", "operate", "unseal") else 401)


@pytest.mark.parametrize("action", sorted(SCOPES))
@pytest.mark.parametrize("origin", ["https://elsewhere.example", "null", "", "http://127.0.0.1:1"])
def test_an_action_from_another_page_is_refused_even_with_the_right_key(
    here: Console, action: str, origin: str
) -> None:
    key = next(iter(OPENS[SCOPES[action]]))
    with browser(here, key) as client:
        form = FORM | {"token": token_of(client)}
        client.headers.pop("origin")
        answer = client.post(f"/actions/{action}", data=form, headers={"origin": origin} if origin else {})
        assert answer.status_code == 403


@pytest.mark.parametrize("action", sorted(SCOPES))
def test_an_action_without_the_token_of_its_session_is_refused(here: Console, action: str) -> None:
    key = next(iter(OPENS[SCOPES[action]]))
    with browser(here, key) as client, browser(here, key) as other:
        for token in ("", "0" * 64, token_of(other)):
            assert client.post(f"/actions/{action}", data=FORM | {"token": token}).status_code == 403


def test_the_link_looks_and_does_nothing_else(here: Console) -> None:
    with browser(here) as client:
        assert client.get("/enter", params={"link": LINK}).status_code == 303
        assert client.get("/").status_code == 200
        for action in SCOPES:
            assert client.post(f"/actions/{action}", data=FORM | {"token": "x"}).status_code == 403
    with browser(here) as client:
        assert client.get("/enter", params={"link": "another"}).status_code == 401


def test_nothing_is_done_by_a_get_and_no_other_host_is_answered(here: Console) -> None:
    with browser(here, "operate") as client:
        for action in SCOPES:
            assert client.get(f"/actions/{action}").status_code in (404, 405)
        assert client.get("/", headers={"host": "elsewhere.example"}).status_code == 400
        assert client.post("/actions/forget", data=FORM).status_code == 404


def test_a_move_is_the_record_of_the_command_with_the_key_as_its_owner(here: Console) -> None:
    with browser(here, "operate") as client:
        token = token_of(client)
        assert client.post("/actions/promote", data={"token": token, "version": "6", "why": ""}).status_code == 400
        assert client.post("/actions/promote", data={"token": token, "version": "99", "why": "x"}).status_code == 400
        answer = client.post("/actions/promote", data={"token": token, "version": "6", "why": "looked at it"})
        assert answer.status_code == 303
        page = client.get("/versions").text
        assert "Customers get" in page and "version 6" in page and "looked at it" in page
    record = newest(here, PolicyEvent)
    assert (record.event, record.version, record.channel, record.reason) == ("promoted", 6, "stable", "looked at it")
    assert record.owner == f"console:acme/{here.keys['operate'].split('-')[1]}"


def test_pause_and_resume_are_the_words_of_the_commands(here: Console) -> None:
    with browser(here, "operate") as client:
        token = token_of(client)
        for action, order in (("pause", "pause"), ("resume", "continue")):
            assert client.post(f"/actions/{action}", data={"token": token, "why": "a test"}).status_code == 303
            assert newest(here, Directive).order == order


def test_what_is_sealed_stays_sealed_until_a_key_that_may_opens_it_and_the_log_says_so(here: Console) -> None:
    with browser(here, "operate") as client:
        assert "Sealed" in client.get(SEALED).text and SECRET not in client.get(SEALED).text
        assert SECRET not in client.get("/answers", params={"text": "Wilhelmina"}).text
    with browser(here, "unseal") as client:
        assert SECRET not in client.get(SEALED).text
        form = {"token": token_of_open(client), "answer": SEALED.rpartition("/")[2]}
        assert client.post("/actions/open", data=form | {"why": " "}).status_code == 400
        opened = client.post("/actions/open", data=form | {"why": "a complaint"})
        assert opened.status_code == 200 and "sister" in opened.text
        assert opened.headers["cache-control"] == "no-store"
        assert SECRET not in client.get(SEALED).text
    record = newest(here, Directive)
    assert (record.order, record.about, record.reason) == ("open", SEALED.rpartition("/")[2], "a complaint")


def token_of_open(client: httpx.Client) -> str:
    return client.get(SEALED).text.partition('name="token" value="')[2].partition('"')[0]


@pytest.mark.parametrize("place", range(10, 10 + len(HOSTILE)))
def test_hostile_answers_are_text(here: Console, place: int) -> None:
    with browser(here, "look") as client:
        page = client.get(f"/answers/{SESSION}.1-{place}.0-0-0")
    assert page.status_code == 200
    assert "<script>document" not in page.text and "<img src=x" not in page.text
    assert not [one for one in page.text if one in "\x00\x1b\x07\u202e\u2066"]


def test_every_answer_forbids_what_it_does_not_need(here: Console) -> None:
    with browser(here, "look") as client:
        for path in (*PAGES, "/assets/console.css", "/nowhere", "/enter"):
            policy = client.get(path).headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy, path


def test_ten_megabytes_are_shown_cut_and_said(here: Console) -> None:
    with browser(here, "look") as client:
        page = client.get(f"/answers/{SESSION}.1-21.0-0-0").text
        assert len(page) < 200_000 and "characters more" in page
        assert len(client.get(f"/answers/{SESSION}.1-21.0-0-0?whole=1").text) < 3_000_000


@pytest.mark.parametrize(
    "text", ["'\"<>--", "NOT OR AND (", "a* NEAR", "\x00", "💥" * 300, quote("é"), "refund'; DROP TABLE answers"]
)
def test_a_search_takes_any_text(here: Console, text: str) -> None:
    with browser(here, "look") as client:
        for field in ("text", "version", "low", "learned", "session", "fate", "before"):
            assert client.get("/answers", params={field: text}).status_code == 200


def newest(here: Console, kind: type[Kind]) -> Kind:
    async def read() -> list[Kind]:
        found = [one.value async for one in here.log.read_all(topics.POLICIES)]
        return [one for one in found if isinstance(one, kind)]

    return asyncio.run_coroutine_threadsafe(read(), here.loop).result(timeout=20)[-1]
