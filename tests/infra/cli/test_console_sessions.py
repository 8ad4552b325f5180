"""A session of the console: from the key that was presented until somebody signs out."""

from collections.abc import Iterator

import pytest

from actors.gateway.access.keys import Refused
from infra.cli.console.access import ConsoleAccess
from infra.cli.look.console_bounds import LIVES_S, MAX_ENDED, ended_bound
from infra.store.memory import MemoryStore
from tests.infra.cli.console_rig import LINK, Console, console
from tests.infra.cli.test_console_access import browser, minted
from tests.infra.cli.test_console_pages import text_of


@pytest.fixture(scope="module")
def here() -> Iterator[Console]:
    with console() as found:
        yield found


def door(now_s: list[float]) -> ConsoleAccess:
    return ConsoleAccess(MemoryStore(), LINK, lambda: now_s[0])


def signed_out(access: ConsoleAccess) -> str:
    """The cookie of a session that was ended."""
    cookie = access.enter(LINK)
    access.leave(access.viewer(cookie))
    return cookie


def test_signing_out_ends_the_session_wherever_a_copy_of_its_cookie_lies_and_no_other(here: Console) -> None:
    with browser(here, "look") as client, browser(here, "look") as other, browser(here) as thief:
        thief.cookies.update(client.cookies)
        assert thief.get("/versions").status_code == other.get("/versions").status_code == 200
        token = minted(here, client)
        answer = client.post("/leave", data={"token": token})
        assert (answer.status_code, answer.headers["location"]) == (303, "/enter")
        assert not [*client.cookies.jar], "the browser forgets it, too"
        for path in ("/", "/versions", "/answers"):
            page = thief.get(path)
            assert page.status_code == 401 and "your session has ended" in page.text
        assert thief.post("/actions/pause", data={"token": token, "why": "mine"}).status_code == 401
        assert thief.post("/leave", data={"token": token}).status_code == 401
        assert other.get("/versions").status_code == 200


def test_signing_out_takes_the_token_of_the_session_as_every_action_does(here: Console) -> None:
    with browser(here, "look") as client, browser(here, "look") as other:
        for token in ("", "0" * 64, minted(here, other), minted(here, client)[:-1]):
            answer = client.post("/leave", data={"token": token})
            assert answer.status_code == 403 and "another session" in answer.text
        assert client.get("/versions").status_code == 200, "nobody else signs a viewer out"


def test_every_page_signs_out_by_its_own_form(here: Console) -> None:
    with browser(here) as client:
        client.get("/enter", params={"link": LINK})
        form = client.get("/answers").text.partition('action="/leave"')[2].partition("</form>")[0]
        token = form.partition('name="token" value="')[2].partition('"')[0]
        assert client.post("/leave", data={"token": token}).status_code == 303
        assert client.get("/answers").status_code == 401


def test_an_ended_session_is_remembered_until_its_cookie_would_have_expired() -> None:
    now_s = [1000.0]
    access = door(now_s)
    early = signed_out(access)
    now_s[0] += LIVES_S / 2
    late = signed_out(access)
    now_s[0] += LIVES_S / 2
    for cookie in (early, late):
        with pytest.raises(Refused, match="expired"):
            access.viewer(cookie)
    now_s[0] += 1.0
    signed_out(access)
    assert access.num_ended == 2, "the first has expired"


def test_at_the_bound_of_ended_sessions_every_session_ends_and_none_comes_back() -> None:
    access = ConsoleAccess(MemoryStore(), LINK, lambda: 1000.0, max_ended=50)
    others = access.enter(LINK)
    ended = [signed_out(access) for _ in range(50)]
    assert access.num_ended == 50 and access.viewer(others).name == "link"
    ended.append(signed_out(access))
    assert access.num_ended == 0
    for cookie in (*ended, others):
        with pytest.raises(Refused, match="wrong"):
            access.viewer(cookie)
    assert access.viewer(access.enter(LINK)).name == "link", "and who signs in again looks again"


def test_a_session_is_of_one_console_and_of_one_start_of_it() -> None:
    """Two that share a store, or one and the same after a restart: none takes a cookie that another has made."""
    store = MemoryStore()
    first, second = ConsoleAccess(store, LINK), ConsoleAccess(store, LINK)
    cookie, ended = first.enter(LINK), signed_out(first)
    for one in (cookie, ended):
        with pytest.raises(Refused, match="wrong"):
            second.viewer(one)
    assert first.viewer(cookie).name == "link"


def test_the_bound_of_ended_sessions_is_on_the_page_of_bounds_with_how_many_there_are(here: Console) -> None:
    with browser(here, "look") as client, browser(here, "look") as other:
        before = here.access.num_ended
        other.post("/leave", data={"token": minted(here, other)})
        text = text_of(client.get("/data"))
        assert f"{before + 1} {ended_bound()}" in text and f"{MAX_ENDED:,}" in ended_bound()
