"""Sign-in to the console: keys, scopes, origins and tokens, also behind a proxy that ends TLS."""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.routing import Mount, Route

from actors.gateway.access.keys import SCOPES, Refused, Scope, create_key, revoke_key
from infra.cli.console.access import LIVES_S as SESSION_S
from infra.cli.console.access import MAX_ENDED, RELOAD_S, ConsoleAccess
from infra.cli.settings import ConsoleConfig
from infra.store.memory import MemoryStore
from tests.infra.cli.console_rig import (
    HOSTILE,
    LINK,
    SECRET,
    SESSION,
    TOML,
    Console,
    browser,
    console,
    form_token,
    page_text,
)

PAGES = (
    "/", "/learning", "/answers", f"/answers/{SESSION}.1-0.0-0-0", "/versions", "/versions/5", "/data",
    "/privacy",
)  # fmt: skip
FORM = {"why": "for a test", "answer": f"{SESSION}.1-22.0-0-0"}
SINCE = ("revoked since", "expired since")
KEYS = ("", "serve", "revoked", "expired", "hr-nobody-nothing", "look", "unseal")
LIVES_S = 60.0  # keys that expire in a test
# Scope → keys that have it; every address that takes a form of a session, with the scope it needs.
OPENS: Mapping[Scope, set[str]] = {"unseal": {"unseal"}, "look": {"look", "unseal"}}
POSTS: Mapping[str, Scope] = {"/open": "unseal", "/leave": "look"}
LET_IN = {"/leave": 303}
FOREIGN = ("https://elsewhere.example", "null", "", "http://127.0.0.1:1", "another site")
SEALED = f"/answers/{SESSION}.1-22.0-0-0"


@pytest.fixture(scope="module")
def here() -> Iterator[Console]:
    with console() as found:
        yield found


def minted(client: httpx.Client) -> str:
    """The token of a client's session, whatever its key may; one of nobody where it has no session."""
    cookie = next(iter(client.cookies.jar), None)
    if cookie is None or not cookie.value:
        return "0" * 64
    return str(json.loads(base64.b64decode(cookie.value.partition(".")[0]))["token"])


@contextmanager
def signed_in(here: Console, key: str, scope: Scope) -> Iterator[tuple[httpx.Client, str]]:
    """A browser with a key that was, or was not, let in, and the token of its session. A key "revoked since" or "expired
    since" had the scope, and was let in while it opened.
    """
    if not key.endswith(" since"):
        with browser(here, key) as client:
            yield client, minted(client)
        return
    lives_s = here.ahead_s + LIVES_S  # of this machine's clock
    made, secret = create_key(here.store, tenant="acme", scopes=(scope,), train="no", rpm=0, tpm=0, lives_s=lives_s)
    here.ahead_s += RELOAD_S
    with browser(here, secret) as client:
        assert client.get("/").status_code == 200
        token = minted(client)
        if key == "revoked since":
            revoke_key(here.store, made.id)
        here.ahead_s += RELOAD_S if key == "revoked since" else LIVES_S
        yield client, token


@pytest.mark.parametrize("key", [*KEYS, *SINCE])
def test_a_page_is_shown_to_a_key_of_the_console_while_it_is_valid_and_to_nobody_else(here: Console, key: str) -> None:
    with signed_in(here, key, "look") as (client, _):
        for page in PAGES:
            answer = client.get(page)
            if key in OPENS["look"]:
                assert answer.status_code == 200, answer.text
            else:
                assert answer.status_code == 401 and "refund" not in answer.text
                assert ("was revoked" in answer.text or "has expired" in answer.text) is (key in SINCE)


def headers_at(here: Console, at: str) -> dict[str, str]:
    """Headers by which a browser names the origin of a form: "here", or one of FOREIGN."""
    if at == "another site":
        return {"origin": here.url, "sec-fetch-site": "cross-site"}
    return {"origin": here.url if at == "here" else at} if at else {}


@pytest.mark.parametrize("path", sorted(POSTS))
@pytest.mark.parametrize("key", [*KEYS, *SINCE])
def test_of_every_action_key_and_origin_only_the_one_with_the_scope_from_a_page_of_the_console_is_let_in(
    here: Console, path: str, key: str
) -> None:
    """Each with the token that this console would have put into a form of that very session."""
    with signed_in(here, key, POSTS[path]) as (client, token):
        client.headers.pop("origin")
        # Let in, an action says what lacks.
        form = {"token": token, "why": " ", "answer": SEALED.rpartition("/")[2]}
        for at in FOREIGN:
            assert client.post(path, data=form, headers=headers_at(here, at)).status_code == 403, at
        answer = client.post(path, data=form, headers=headers_at(here, "here"))
        if key in OPENS[POSTS[path]]:
            assert answer.status_code == LET_IN.get(path, 400), answer.text
        else:
            assert answer.status_code == (403 if key in OPENS["look"] else 401)


@pytest.mark.parametrize("at", ["here", *FOREIGN])
@pytest.mark.parametrize("key", KEYS)
def test_a_key_signs_in_from_a_page_of_the_console_alone(here: Console, key: str, at: str) -> None:
    """The one form that has no session yet, and so no token of it."""
    with browser(here) as client:
        client.headers.pop("origin")
        answer = client.post("/enter", data={"key": here.keys.get(key, key)}, headers=headers_at(here, at))
        may = at == "here" and key in OPENS["look"]
        assert answer.status_code == (303 if may else 403 if at != "here" or key == "serve" else 401)
        assert bool([*client.cookies.jar]) is may


def test_every_address_that_takes_a_form_is_in_the_table_and_takes_nothing_else_but_a_look(here: Console) -> None:
    """By the routes of the application: one that is new has its place in the table, or fails here."""
    taking = set()
    for route in here.routes:
        if isinstance(route, Mount):
            assert route.path == "/assets"
            with browser(here, "unseal") as client:
                assert client.post("/assets/console.css").status_code == 405
            continue
        assert isinstance(route, Route) and route.methods is not None
        assert route.methods <= {"GET", "HEAD", "POST"}
        if "POST" in route.methods:
            taking.add(route.path)
    assert taking == POSTS.keys() | {"/enter"}


@pytest.mark.parametrize("path", sorted(POSTS))
def test_a_form_without_the_token_of_its_session_is_refused(here: Console, path: str) -> None:
    key = next(iter(OPENS[POSTS[path]]))
    with signed_in(here, key, "look") as (client, own), signed_in(here, key, "look") as (_, other):
        assert own != other
        for token in ("", "0" * 64, other, own[:-1]):
            answer = client.post(path, data=FORM | {"token": token})
            assert answer.status_code == 403 and "another session" in answer.text


def test_the_link_looks_and_does_nothing_else(here: Console) -> None:
    with browser(here) as client:
        assert client.get("/enter", params={"link": LINK}).status_code == 303
        assert client.get("/").status_code == 200
        answer = client.post("/open", data=FORM | {"token": minted(client)})
        assert answer.status_code == 403 and "needs a key with the scope" in answer.text
    with browser(here) as client:
        refused = client.get("/enter", params={"link": "another"})
        assert refused.status_code == 401 and "keys create --scope look" in refused.text
        assert set(re.findall(r"<code>(\w+)</code>", refused.text)) <= {*SCOPES}, "a person can ask for each scope"


def test_nothing_is_done_by_a_get_and_no_other_host_is_answered(here: Console) -> None:
    with browser(here, "unseal") as client:
        assert client.get("/open").status_code == 405
        assert client.get("/", headers={"host": "elsewhere.example"}).status_code == 400
        assert client.post("/forget", data=FORM).status_code == 404


def test_what_is_sealed_stays_sealed_until_a_key_that_may_opens_it_and_the_log_says_so(here: Console) -> None:
    with browser(here, "look") as client:
        assert "Sealed" in client.get(SEALED).text and SECRET not in client.get(SEALED).text
        assert SECRET not in client.get("/answers", params={"text": "Wilhelmina"}).text
    with browser(here, "unseal") as client:
        assert SECRET not in client.get(SEALED).text
        form = {"token": form_token(client, SEALED), "answer": SEALED.rpartition("/")[2]}
        assert client.post("/open", data=form | {"why": " "}).status_code == 400
        opened = client.post("/open", data=form | {"why": "a complaint"})
        assert opened.status_code == 200 and SECRET in opened.text
        assert opened.headers["cache-control"] == "no-store"
        assert SECRET not in client.get(SEALED).text
    record = here.newest_order()
    assert (record.order, record.about, record.reason) == ("open", SEALED.rpartition("/")[2], "a complaint")


@pytest.mark.parametrize("place", range(10, 10 + len(HOSTILE)))
def test_hostile_answers_are_text(here: Console, place: int) -> None:
    with browser(here, "look") as client:
        page = client.get(f"/answers/{SESSION}.1-{place}.0-0-0")
    assert page.status_code == 200
    assert "<script>document" not in page.text and "<img src=x" not in page.text
    assert not [letter for letter in page.text if letter in "\x00\x1b\x07\u202e\u2066"]


def test_every_answer_forbids_what_it_does_not_need(here: Console) -> None:
    with browser(here, "look") as client:
        for path in (*PAGES, "/assets/console.css", "/nowhere", "/enter"):
            policy = client.get(path).headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy, path


def link_session(access: ConsoleAccess) -> dict[str, Any]:
    session: dict[str, Any] = {}
    access.enter(LINK, session)
    return session


def test_signing_out_ends_the_session_wherever_a_copy_of_its_cookie_lies_and_no_other(here: Console) -> None:
    with browser(here, "look") as client, browser(here, "look") as other, browser(here) as thief:
        thief.cookies.update(client.cookies)
        assert thief.get("/versions").status_code == other.get("/versions").status_code == 200
        token = minted(client)
        answer = client.post("/leave", data={"token": token})
        assert (answer.status_code, answer.headers["location"]) == (303, "/enter")
        assert not [*client.cookies.jar], "the browser forgets it, too"
        for path in ("/", "/versions", "/answers"):
            page = thief.get(path)
            assert page.status_code == 401 and "your session has ended" in page.text
        assert thief.post("/open", data=FORM | {"token": token}).status_code == 401
        assert thief.post("/leave", data={"token": token}).status_code == 401
        assert other.get("/versions").status_code == 200


def test_a_session_lasts_twelve_hours_and_at_the_bound_of_ended_ones_the_oldest_is_forgotten() -> None:
    now_s = [1000.0]
    access = ConsoleAccess(MemoryStore(), LINK, lambda: now_s[0])
    kept = link_session(access)
    ended = [link_session(access) for _ in range(MAX_ENDED + 1)]
    for session in ended:
        access.leave({**session})
    with pytest.raises(Refused, match="expired"):
        access.viewer(ended[1])
    now_s[0] += SESSION_S
    assert access.viewer(kept).name == "link"
    now_s[0] += 1.0
    for session in (kept, *ended[:2]):
        with pytest.raises(Refused, match="expired"):
            access.viewer(session)


def test_a_cookie_of_another_start_or_that_was_altered_opens_nothing(here: Console) -> None:
    with console() as other, browser(here, "look") as client:
        (cookie,) = client.cookies.jar
        assert cookie.value is not None
        body, _, rest = cookie.value.partition(".")
        longer = base64.b64encode(json.dumps({"key": "link", "until": 9e9, "token": "a"}).encode()).decode()
        for url, value in (
            (other.url, cookie.value),
            (here.url, f"{longer}.{rest}"),
            (here.url, "x" * 5000),
            (here.url, body),
        ):
            name = f"headrace_{url.rpartition(':')[2]}"
            page = httpx.get(f"{url}/versions", headers={"cookie": f"{name}={value}"}, verify=False)
            assert page.status_code == 401 and "refund" not in page_text(page)


URL = "https://console.example.org"
NAME = "console.example.org"
FORWARDED = {
    "x-forwarded-proto": "https", "x-forwarded-host": NAME, "x-forwarded-for": "10.0.0.9", "x-forwarded-ssl": "on",
    "x-forwarded-port": "443", "forwarded": f"for=10.0.0.9;proto=https;host={NAME}", "front-end-https": "on",
}  # fmt: skip


@pytest.fixture(scope="module")
def named() -> Iterator[Console]:
    """One whose settings allow the proxy's name, and nothing more."""
    with console(f'{TOML}[console]\nhosts = ["{NAME}"]\n') as found:
        yield found


@pytest.fixture(scope="module")
def behind() -> Iterator[Console]:
    """One whose settings say where browsers reach it."""
    with console(f'{TOML}[console]\nurl = "{URL}"\n') as found:
        yield found


def proxied(here: Console, **headers: str) -> httpx.Client:
    """A browser, as its requests come to a console through a proxy."""
    return httpx.Client(base_url=here.url, headers=headers, verify=False)


def signed_in_by(here: Console, headers: Mapping[str, str], key: str = "unseal") -> httpx.Response:
    with proxied(here, **headers) as client:
        return client.post("/enter", data={"key": here.keys[key]})


def sent_cookie(answer: httpx.Response) -> str:
    """The part of a cookie that a browser sends back, over TLS."""
    return answer.headers["set-cookie"].partition(";")[0]


def test_headers_of_a_proxy_are_believed_of_nobody(named: Console) -> None:
    """Neither where the request came by, nor for which host it was: not from this machine either."""
    for forwarded in ({}, FORWARDED):
        answer = signed_in_by(named, {**forwarded, "origin": named.url})
        assert answer.status_code == 303 and "secure" not in answer.headers["set-cookie"].lower()
    assert signed_in_by(named, {**FORWARDED, "origin": URL}).status_code == 403
    with proxied(named, **FORWARDED, host="elsewhere.example") as client:
        assert client.get("/versions").status_code == 400


def test_a_name_behind_a_proxy_that_keeps_it_is_a_page_of_the_console(named: Console) -> None:
    assert signed_in_by(named, {"host": NAME, "origin": URL}).status_code == 303
    assert signed_in_by(named, {"host": NAME, "origin": "https://elsewhere.example"}).status_code == 403


@pytest.mark.parametrize("host", [NAME, NAME.upper(), "127.0.0.1:8400"], ids=["kept", "upper", "the proxy's own"])
@pytest.mark.parametrize("forwarded", [{}, FORWARDED], ids=["bare", "forwarded"])
def test_behind_tls_every_cookie_is_sent_over_tls_alone_and_none_from_another_name(
    behind: Console, host: str, forwarded: Mapping[str, str]
) -> None:
    """Whichever host the proxy names, and whether it says that it ended TLS. Of the name `__Host-…` a browser takes no cookie
    that another host of the same domain has set."""
    answers = [signed_in_by(behind, {**forwarded, "host": host, "origin": URL})]
    with proxied(behind, **forwarded, host=host) as client:
        answers.append(client.get("/enter", params={"link": LINK}))
    for answer in answers:
        cookie = answer.headers["set-cookie"].lower()
        assert answer.status_code == 303 and cookie.startswith("__host-headrace_")
        assert {"secure", "httponly", "samesite=strict", "path=/"} <= set(cookie.split("; ")) and "domain" not in cookie


@pytest.mark.parametrize(
    "origin",
    ["", "null", "https://elsewhere.example", f"http://{NAME}", f"{URL}:444", f"{URL}.", f"https://a.{NAME}", "here", "http://["],
)  # fmt: skip
@pytest.mark.parametrize("forwarded", [{}, FORWARDED], ids=["bare", "forwarded"])
def test_behind_tls_a_form_is_taken_from_the_pages_of_its_url_alone(
    behind: Console, origin: str, forwarded: Mapping[str, str]
) -> None:
    """Also not from the same name without TLS, where somebody on the way may have written the page."""
    cookie = sent_cookie(signed_in_by(behind, {"host": NAME, "origin": URL}))
    said = {"origin": behind.url if origin == "here" else origin} if origin else {}
    for host in (NAME, behind.url.removeprefix("http://")):
        headers = {**forwarded, **said, "cookie": cookie, "host": host}
        with proxied(behind, **headers) as client:
            token = form_token(client)
            assert len(token) == 64
            for path in ("/open", "/leave"):
                assert client.post(path, data=FORM | {"token": token}).status_code == 403
            assert client.post("/enter", data={"key": behind.keys["unseal"]}).status_code == 403


def test_behind_tls_who_signed_in_opens_and_signs_out(behind: Console) -> None:
    cookie = sent_cookie(signed_in_by(behind, {"host": NAME, "origin": URL}))
    with proxied(behind, host=NAME, origin=URL, cookie=cookie) as client:
        token = form_token(client)
        assert client.post("/open", data=FORM | {"token": token}).status_code == 200
        answer = client.post("/leave", data={"token": token})
        gone = answer.headers["set-cookie"].lower()
        assert answer.status_code == 303 and gone.startswith("__host-headrace_") and "expires=thu, 01 jan 1970" in gone
        assert "secure" in gone, "or a browser would not take it for a cookie of that name"
        assert client.get("/versions").status_code == 401


@pytest.mark.parametrize(
    "url",
    ["console.example.org", f"http://{NAME}", f"{URL}/headrace", f"{URL}?a=1", f"{URL}#a", "https://", "https://a:0", "https://[",
     "https://ann:pass@console.example.org", "https://bücher.example", "https://a b", "https://*.example.org"],
)  # fmt: skip
def test_an_address_that_no_browser_names_so_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="got url = ") as found:
        ConsoleConfig(url=url)
    assert "pass" not in str(found.value).replace("password", "")
