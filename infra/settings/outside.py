"""Addresses of services that settings name: a canary, a judge, a model that rewrites tasks.

Guarantee: http or https, no user name or password in it (they would end in logs; endpoints have `api_key_env`), and no
link-local address: there clouds hand out a machine's credentials. A name is not looked up: what it leads to is its owner's.
"""

import ipaddress
import socket
import ssl
from contextlib import suppress
from functools import cache
from urllib.parse import SplitResult, urlsplit

# What clouds call their metadata service, beside 169.254.0.0/16 and fe80::/10.
METADATA = ("metadata", "metadata.google.internal", "metadata.goog", "instance-data", "instance-data.ec2.internal")
METADATA_ADDRESSES = (ipaddress.ip_address("100.100.100.200"), ipaddress.ip_address("fd00:ec2::254"))


def checked_url(url: str) -> str:
    """The address, if roles may ask it. Raises ValueError, which says neither its user name nor its password."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
        if parts.scheme not in ("http", "https") or not host or not (parts.port is None or parts.port):
            raise ValueError
    except ValueError:
        raise ValueError(f'got url = "{without_secrets(url)}", expected one such as "http://127.0.0.1:8010"') from None
    if "@" in parts.netloc:
        raise ValueError(f'got url = "{without_secrets(url)}" with a user name or password, expected one without')
    if is_metadata(host):
        raise ValueError(f'got url = "{without_secrets(url)}", which is link-local, where clouds hand out credentials')
    return url


@cache
def shared_tls() -> ssl.SSLContext:
    """What `httpx` checks a server with, read once: each client that reads it anew takes 20 ms of a core for it."""
    import httpx

    return httpx.create_ssl_context()


def is_metadata(host: str) -> bool:
    """Whether a host is a link-local address, however it is spelled, or a cloud's metadata service."""
    if host.lower() in METADATA:
        return True
    for read in (ipaddress.ip_address, _as_the_resolver_reads):
        with suppress(ValueError, OSError):
            address = read(host.partition("%")[0])
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


def _as_the_resolver_reads(host: str) -> ipaddress.IPv4Address:
    """2852039166, 0xa9fea9fe and 169.254.43518 are addresses too. Raises OSError for a name."""
    return ipaddress.IPv4Address(socket.inet_aton(host))
