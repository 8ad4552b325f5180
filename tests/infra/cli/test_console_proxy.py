"""The console behind a proxy that ends TLS: what its settings say of where browsers reach it, and that no header says it."""

from collections.abc import Iterator, Mapping

import httpx
import pytest

from infra.cli.settings import ConsoleConfig
from tests.infra.cli.console_rig import LINK, TOML, Console, console, token_of

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


def signed_in(here: Console, headers: Mapping[str, str], key: str = "operate") -> httpx.Response:
    with proxied(here, **headers) as client:
        return client.post("/enter", data={"key": here.keys[key]})


def cookie_of(answer: httpx.Response) -> str:
    """What a browser sends back of a cookie, over TLS."""
    return answer.headers["set-cookie"].partition(";")[0]


def test_headers_of_a_proxy_are_believed_of_nobody(named: Console) -> None:
    """Neither where the request came by, nor for which host it was: not from this machine either."""
    for forwarded in ({}, FORWARDED):
        answer = signed_in(named, {**forwarded, "origin": named.url})
        assert answer.status_code == 303 and "secure" not in answer.headers["set-cookie"].lower()
    assert signed_in(named, {**FORWARDED, "origin": URL}).status_code == 403
    with proxied(named, **FORWARDED, host="elsewhere.example") as client:
        assert client.get("/versions").status_code == 400


def test_a_name_behind_a_proxy_that_keeps_it_is_a_page_of_the_console(named: Console) -> None:
    assert signed_in(named, {"host": NAME, "origin": URL}).status_code == 303
    assert signed_in(named, {"host": NAME, "origin": "https://elsewhere.example"}).status_code == 403


@pytest.mark.parametrize("host", [NAME, NAME.upper(), "127.0.0.1:8400"], ids=["kept", "upper", "the proxy's own"])
@pytest.mark.parametrize("forwarded", [{}, FORWARDED], ids=["bare", "forwarded"])
def test_behind_tls_every_cookie_is_sent_over_tls_alone_and_none_from_another_name(
    behind: Console, host: str, forwarded: Mapping[str, str]
) -> None:
    """Whichever host the proxy names, and whether it says that it ended TLS. Of the name `__Host-…` a browser takes no cookie
    that another host of the same domain has set."""
    answers = [signed_in(behind, {**forwarded, "host": host, "origin": URL})]
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
    cookie = cookie_of(signed_in(behind, {"host": NAME, "origin": URL}))
    said = {"origin": behind.url if origin == "here" else origin} if origin else {}
    for host in (NAME, behind.url.removeprefix("http://")):
        headers = {**forwarded, **said, "cookie": cookie, "host": host}
        with proxied(behind, **headers) as client:
            token = token_of(client)
            assert len(token) == 64
            for path in ("/actions/pause", "/leave"):
                assert client.post(path, data={"token": token, "why": "theirs"}).status_code == 403
            assert client.post("/enter", data={"key": behind.keys["operate"]}).status_code == 403


def test_behind_tls_who_signed_in_acts_and_signs_out(behind: Console) -> None:
    cookie = cookie_of(signed_in(behind, {"host": NAME, "origin": URL}))
    with proxied(behind, host=NAME, origin=URL, cookie=cookie) as client:
        token = token_of(client)
        assert client.post("/actions/pause", data={"token": token, "why": "a test"}).status_code == 303
        answer = client.post("/leave", data={"token": token})
        gone = answer.headers["set-cookie"].lower()
        assert answer.status_code == 303 and gone.startswith("__host-headrace_") and "expires=thu, 01 jan 1970" in gone
        assert "secure" in gone, "or a browser would not take it for a cookie of that name"
        assert client.get("/versions").status_code == 401


@pytest.mark.parametrize("origin", ["http://[", "http://a b", "https://" + "x" * 9000])
def test_an_origin_that_is_no_address_is_refused_in_words(named: Console, origin: str) -> None:
    assert signed_in(named, {"origin": origin}).status_code == 403


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        (URL, URL), (f"{URL}/", URL), (f"{URL}:443", URL), ("https://Console.Example.ORG:8443", f"{URL}:8443"),
        ("https://[fd00::7]", "https://[fd00::7]"), ("", ""),
    ],
)  # fmt: skip
def test_the_address_is_as_browsers_say_it(url: str, origin: str) -> None:
    config = ConsoleConfig(url=url)
    assert config.origin == origin
    assert config.opened_at("127.0.0.1:8400") == (origin or "http://127.0.0.1:8400")


@pytest.mark.parametrize(
    "url",
    ["console.example.org", f"http://{NAME}", f"{URL}/headrace", f"{URL}?a=1", f"{URL}#a", "https://", "https://a:0", "https://[",
     "https://ann:pass@console.example.org", "https://bücher.example", "https://a b", "https://*.example.org"],
)  # fmt: skip
def test_an_address_that_no_browser_names_so_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="got url = ") as found:
        ConsoleConfig(url=url)
    assert "pass" not in str(found.value).replace("password", "")
