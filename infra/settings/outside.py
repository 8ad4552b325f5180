"""Services that settings name (a canary, a judge, an environment): checks of their addresses, bounds on their answers.

Guarantees: an address is http or https, has no user name or password (these would end in logs; endpoints have
`api_key_env`) and is not link-local, where clouds hand out a machine's credentials. Host names are not resolved. An answer
takes no more memory than its limit: services are asked for uncompressed answers, and compressed answers are refused.
"""

import ipaddress
import socket
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import SplitResult, urlsplit

if TYPE_CHECKING:
    import httpx

# Names of the clouds' metadata services, beside 169.254.0.0/16 and fe80::/10.
METADATA = ("metadata", "metadata.google.internal", "metadata.goog", "instance-data", "instance-data.ec2.internal")
METADATA_ADDRESSES = (ipaddress.ip_address("100.100.100.200"), ipaddress.ip_address("fd00:ec2::254"))
IDENTITY = {"Accept-Encoding": "identity"}  # request header: the answer is not compressed


class AnswerRefused(ValueError):
    """An HTTP answer is longer than its limit, or compressed although the request asked for an uncompressed answer."""


def checked_url(url: str) -> str:
    """The address, if roles may ask it. Raises ValueError, which says neither its user name nor its password."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
        if parts.scheme not in ("http", "https") or not host or not (parts.port is None or parts.port):
            raise ValueError
    except ValueError:
        raise ValueError(
            f'got url = "{without_secrets(url)}", expected a URL such as "http://127.0.0.1:8010"'
        ) from None
    if "@" in parts.netloc:
        raise ValueError(
            f'got url = "{without_secrets(url)}" with a user name or password, expected a URL without them'
        )
    if is_metadata(host):
        raise ValueError(f'got url = "{without_secrets(url)}", which is link-local, where clouds hand out credentials')
    return url


@cache
def shared_tls() -> ssl.SSLContext:
    """TLS context for `httpx`, made once: each client that makes its own takes 20 ms of a core."""
    import httpx

    return httpx.create_ssl_context()


async def bounded_answer(
    client: "httpx.AsyncClient", method: str, url: str, max_bytes: int, **request: Any
) -> "tuple[httpx.Response, bytes]":
    """Send a request; return the response and its body of at most `max_bytes`. request: keyword arguments of
    `httpx.AsyncClient.stream`. Raises AnswerRefused, httpx.HTTPError.
    """
    headers = {**request.pop("headers", {}), **IDENTITY}
    async with client.stream(method, url, headers=headers, **request) as response:
        body = bytearray()
        stream = cast("AsyncIterable[bytes]", response.stream)
        async for piece in bounded_pieces(response.headers, stream, max_bytes):
            body += piece
    return response, bytes(body)


async def bounded_pieces(headers: Mapping[str, str], raw: AsyncIterable[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """Pass on the pieces of a body as they came over the wire, at most `max_bytes` of them. headers: of the answer to a
    request with `IDENTITY`. Raises AnswerRefused.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise AnswerRefused(f"got Content-Encoding {encoding!r}, expected an uncompressed answer, as requested")
    num_bytes = 0
    async for piece in raw:
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise AnswerRefused(f"got an answer of more than {max_bytes} bytes")
        yield piece


def is_metadata(host: str) -> bool:
    """True if a host is a link-local address, however it is spelled, or a cloud's metadata service."""
    if host.lower() in METADATA:
        return True
    for read in (str, socket.inet_aton):  # 2852039166, 0xa9fea9fe and 169.254.43518 are addresses too
        with suppress(ValueError, OSError):
            address = ipaddress.ip_address(read(host.partition("%")[0]))
            address = getattr(address, "ipv4_mapped", None) or address
            return address.is_link_local or address in METADATA_ADDRESSES
    return False


def without_secrets(url: str) -> str:
    """The address without user name, password and query."""
    try:
        parts: SplitResult = urlsplit(url)
    except ValueError:
        return "…"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc else url.rpartition("@")[2]
