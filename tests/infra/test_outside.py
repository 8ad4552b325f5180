"""Services that settings name: their addresses are checked and their answers bounded."""

import asyncio
import gzip
import ssl
from collections.abc import Awaitable, Callable

import httpx
import pytest

from actors.gateway.config import CanaryShare
from actors.program.launch import ProgramInput, ask_service
from actors.rollout.environments.http import HttpEnvironment
from actors.rollout.failure import EpisodeFailed
from infra.settings.outside import checked_url, shared_tls
from schemas import Message, Task
from schemas.errors import ConfigError
from streams.config import LangfuseConfig
from streams.processors.task_vary import Vary
from streams.scores.endpoint import UNREADABLE, Endpoint, EndpointConfig
from streams.sources import langfuse

METADATA = (
    "169.254.169.254", "169.254.169.254.", "2852039166", "0xa9fea9fe", "169.254.43518", "0251.0376.0251.0376",
    "[fe80::1]", "[fe80::1%25eth0]", "[::ffff:169.254.169.254]", "[fd00:ec2::254]", "100.100.100.200",
    "metadata.google.internal", "Metadata",
)  # fmt: skip


@pytest.mark.parametrize("host", METADATA)
def test_a_clouds_metadata_service_is_refused_however_it_is_spelled(host: str) -> None:
    with pytest.raises(ValueError, match="link-local"):
        checked_url(f"http://{host}/latest/meta-data")


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "gopher://x/", "http://", "ftp://x", "x", "http://h:99999", "http://[::1"]
)
def test_what_is_no_web_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected one such as"):
        checked_url(url)


def test_a_password_is_refused_and_not_told() -> None:
    for make in (
        lambda url: checked_url(url),
        lambda url: CanaryShare(url=url),
        lambda url: EndpointConfig(url=url, model="m"),
    ):
        for url in ("http://ann:S3CRET@judge:8000/v1?S3CRET", "ftp://ann:S3CRET@judge/", "ann:S3CRET@judge"):
            with pytest.raises(ValueError) as caught:
                make(url)
            assert "S3CRET" not in str(caught.value)


def test_canary_judge_and_rewriter_are_checked() -> None:
    for make in (
        lambda: CanaryShare(url="http://169.254.169.254:80"),
        lambda: EndpointConfig(url="http://169.254.169.254/v1", model="m"),
        lambda: Vary(url="http://169.254.169.254/v1", model="m"),
    ):
        with pytest.raises((ValueError, ConfigError), match="link-local"):
            make()
    for url in ("http://127.0.0.1:8010", "https://judge.example:443/v1", "http://[::1]:8000/v1", "http://10.0.0.7/v1"):
        assert checked_url(url) == url


def test_servers_are_checked_by_their_name_and_a_known_authority() -> None:
    """What all clients share is no weaker than what each would make for itself."""
    shared = shared_tls()
    assert shared is shared_tls()
    assert shared.verify_mode is ssl.CERT_REQUIRED and shared.check_hostname
    assert len(shared.get_ca_certs()) == len(httpx.create_ssl_context().get_ca_certs()) > 0


TASK = Task(id="t", messages=(Message(role="user", content="1+1?"),))


async def langfuse_refuses(url: str) -> None:
    async with httpx.AsyncClient() as client:
        with pytest.raises(langfuse.LangfuseAway) as caught:
            await langfuse._scores(client, LangfuseConfig(score="s", url=url), 0, 10)
    assert caught.value.reason == "page refused"


async def judge_refuses(url: str) -> None:
    endpoint = Endpoint(EndpointConfig(url=url, model="m"))
    assert (await endpoint.ask("", "", {}, lambda reply: True)).reason == UNREADABLE
    await endpoint.aclose()


async def rewriter_refuses(url: str) -> None:
    assert await Vary(url=url, model="m")(TASK) == [TASK]


async def program_refuses(url: str) -> None:
    with pytest.raises(EpisodeFailed, match=r"Content-Encoding|more than"):
        await ask_service(url, ProgramInput("http://x", "k", "m", {}), None)


async def environment_refuses(url: str) -> None:
    environment = HttpEnvironment(url=url)
    with pytest.raises(RuntimeError, match=r"Content-Encoding|more than"):
        await environment.reset(TASK, seed=0)
    await environment.close()


@pytest.mark.parametrize(
    "refuses", [langfuse_refuses, judge_refuses, rewriter_refuses, program_refuses, environment_refuses]
)
@pytest.mark.parametrize("kind", ["compressed", "endless"])
def test_an_answer_of_a_service_takes_no_more_memory_than_its_limit(
    refuses: Callable[[str], Awaitable[None]], kind: str
) -> None:
    """A compressed answer, which nobody asked for, is refused before it is decoded; an endless answer at its limit."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append((await reader.readuntil(b"\r\n\r\n")).lower())
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"
        try:
            if kind == "compressed":
                writer.write(head + b"content-encoding: gzip\r\n\r\n" + gzip.compress(b" " * (1 << 22)))
                await writer.drain()
            else:
                writer.write(head + b"\r\n")
                while True:
                    writer.write(b" " * 65_536)
                    await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def scene() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            await refuses(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    asyncio.run(scene())
    assert requests and all(b"accept-encoding: identity\r\n" in request for request in requests)
