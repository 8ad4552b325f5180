"""How clients prove to Kafka who they are, and that the broker is the one they mean: TLS and SASL, in Kafka's own words.

Secrets come from the environment or from a file, never from the settings; no text of this module shows one.
"""

import asyncio
import inspect
import os
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiokafka.abc import AbstractTokenProvider
from aiokafka.conn import create_conn
from aiokafka.errors import (
    AuthenticationFailedError,
    IllegalSaslStateError,
    KafkaError,
    SaslAuthenticationFailed,
    for_code,
)
from aiokafka.protocol.admin import ApiVersionRequest

from infra.settings.config import Floor, Kafka
from infra.settings.plugin import load
from schemas.errors import ConfigError

EMBEDDED_FOLDER = "kafka"  # beside the TOML
EMBEDDED_PASSWORD = "password"  # file in the folder of an embedded broker
EMBEDDED_USER = "headrace"
Token = Callable[[], str | Awaitable[str]]


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What a client connects with. protocol, mechanism: as [kafka] names them. token: gives a bearer token anew each time.

    Example: Access(protocol="SASL_SSL", mechanism="SCRAM-SHA-512", username="headrace", password="…")
    """

    protocol: str = "PLAINTEXT"
    mechanism: str = "PLAIN"
    username: str = ""
    password: str = ""
    context: ssl.SSLContext | None = None
    token: Token | None = None

    def __repr__(self) -> str:
        return f"Access({self.protocol}, {self.mechanism}, username={self.username!r})"


PLAINTEXT = Access()


def access_of(floor: Floor) -> Access:
    """What the [kafka] table asks for, its secrets read now. Raises ConfigError naming what is not there."""
    kafka = floor.kafka
    if not kafka.bootstrap_servers:
        return embedded_access(floor.folder / EMBEDDED_FOLDER)
    if kafka.security_protocol == "PLAINTEXT":
        return PLAINTEXT
    asks_token = kafka.is_sasl and kafka.sasl_mechanism == "OAUTHBEARER"
    return Access(
        protocol=kafka.security_protocol,
        mechanism=kafka.sasl_mechanism,
        username=kafka.sasl_username,
        password=_password(kafka, floor.folder) if kafka.is_sasl and not asks_token else "",
        context=_context(kafka, floor.folder) if kafka.security_protocol.endswith("SSL") else None,
        token=load(kafka.sasl_token, {}, "kafka.sasl_token") if asks_token else None,
    )


def embedded_access(folder: Path) -> Access:
    """What the embedded broker of a folder asks for: its password, or nothing where there is none. Raises ConfigError."""
    try:
        password = (folder / EMBEDDED_PASSWORD).read_text(encoding="ascii")
    except FileNotFoundError:
        return PLAINTEXT
    except OSError as error:
        raise ConfigError(
            f"{folder / EMBEDDED_PASSWORD}: cannot be read ({error.strerror}): whose broker is it?"
        ) from error
    return Access(protocol="SASL_PLAINTEXT", username=EMBEDDED_USER, password=password)


def client_options(access: Access) -> dict[str, Any]:
    """Keyword arguments of every aiokafka client."""
    if access.protocol == "PLAINTEXT":
        return {}
    options: dict[str, Any] = {"security_protocol": access.protocol, "ssl_context": access.context}
    if access.protocol.startswith("SASL"):
        options["sasl_mechanism"] = access.mechanism
        if access.token is not None:
            options["sasl_oauth_token_provider"] = TokenProvider(access.token)
        else:
            options |= {"sasl_plain_username": access.username, "sasl_plain_password": access.password}
    return options


class TokenProvider(AbstractTokenProvider):  # type: ignore[misc]
    """Asks a plugin for the token of a connection, in a thread where it is no coroutine function."""

    def __init__(self, token: Token) -> None:
        self._token = token

    async def token(self) -> str:
        """The token now."""
        found = self._token() if inspect.iscoroutinefunction(self._token) else await asyncio.to_thread(self._token)
        return await found if inspect.isawaitable(found) else found


async def refusal(bootstrap_servers: str, access: Access, timeout_ms: int) -> ConfigError | None:
    """Why none of these brokers lets this client in, where that is no outage: aiokafka only says that it is not connected."""
    for server in bootstrap_servers.split(",") if access is not PLAINTEXT else ():
        host, _, port = server.strip().rpartition(":")
        try:
            connection = await create_conn(
                host.strip("[]"), int(port), request_timeout_ms=timeout_ms, **client_options(access)
            )
        except (AuthenticationFailedError, SaslAuthenticationFailed):
            return _shut_out(server, access)
        except ssl.SSLCertVerificationError as error:
            return ConfigError(f"kafka.ssl_ca_file: the certificate of {server} is not trusted: {error.verify_message}")
        except (KafkaError, OSError, ValueError):
            continue
        try:
            # A broker answers a token that it refuses with words that aiokafka takes for success (RFC 7628, section 3.2.2),
            # and refuses the next request.
            answer = await connection.send(ApiVersionRequest())
            if access.token is not None and for_code(answer.error_code) is IllegalSaslStateError:
                return _shut_out(server, access)
        except (KafkaError, OSError):
            continue
        finally:
            connection.close()
    return None


def _shut_out(server: str, access: Access) -> ConfigError:
    if access.token is None:
        who = f'"{access.username}" with this password'
        return ConfigError(f"kafka.sasl_*: {server} does not let {who} in ({access.mechanism})")
    who = f"the token of {_name_of(access.token)}"
    return ConfigError(f"kafka.sasl_token: {server} does not let {who} in ({access.mechanism}): has it expired?")


def _name_of(plugin: object) -> str:
    kind = plugin if hasattr(plugin, "__qualname__") else type(plugin)
    return f"{kind.__module__}:{getattr(kind, '__qualname__', '')}"


def _password(kafka: Kafka, folder: Path) -> str:
    if kafka.sasl_password_file:
        path = folder / kafka.sasl_password_file
        try:
            return path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"kafka.sasl_password_file: {path} cannot be read: {error}") from error
    password = os.environ.get(kafka.sasl_password_env, "")
    if not password:
        raise ConfigError(
            f"kafka.sasl_password_env: {kafka.sasl_password_env} is not set; or name a sasl_password_file"
        )
    return password


def _context(kafka: Kafka, folder: Path) -> ssl.SSLContext:
    """TLS that verifies the broker's certificate and name, with the client's own certificate where there is one."""
    try:
        authority = str(folder / kafka.ssl_ca_file) if kafka.ssl_ca_file else None
        context = ssl.create_default_context(cafile=authority)
        if kafka.ssl_cert_file:
            key = str(folder / kafka.ssl_key_file) if kafka.ssl_key_file else None
            context.load_cert_chain(str(folder / kafka.ssl_cert_file), key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"kafka.ssl_ca_file, ssl_cert_file, ssl_key_file: cannot be read: {error}") from error
    return context
