"""Authentication of clients and brokers: TLS and SASL, with Kafka's own settings.

Secrets come from the environment or from a file, never from the settings; no text of this module shows one.
A refused client is told why: aiokafka only says that it is not connected.
"""

import asyncio
import inspect
import os
import ssl
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiokafka.abc import AbstractTokenProvider
from aiokafka.conn import create_conn
from aiokafka.errors import (
    AuthenticationFailedError,
    IllegalSaslStateError,
    KafkaConnectionError,
    KafkaError,
    SaslAuthenticationFailed,
    for_code,
)
from aiokafka.protocol.admin import ApiVersionRequest

from infra.settings.config import Floor, Kafka
from infra.settings.plugin import load
from infra.settings.secret import read_secret
from schemas.errors import ConfigError

EMBEDDED_FOLDER = "kafka"  # beside the TOML
EMBEDDED_PASSWORD = "password"  # file in the folder of an embedded broker
EMBEDDED_USER = "headrace"
USERNAME_VARIABLE = "HEADRACE_KAFKA_USERNAME"  # comes before kafka.sasl_username: each role has a user, all one file
TOKEN_S = 20.0  # for a plugin to give a token
Token = Callable[[], str | Awaitable[str]]


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials of a client. protocol, mechanism: as [kafka] names them. token: gives a bearer token anew each time.

    username, password: under SASL. context: under TLS.
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


def kafka_access(floor: Floor) -> Access:
    """Credentials that the [kafka] table names, with secrets read now. Raises ConfigError naming what is not there."""
    kafka = floor.kafka
    if not kafka.bootstrap_servers:
        return embedded_access(floor.folder / EMBEDDED_FOLDER)
    if kafka.security_protocol == "PLAINTEXT":
        return PLAINTEXT
    asks_token = kafka.is_sasl and kafka.sasl_mechanism == "OAUTHBEARER"
    password = ""
    if kafka.is_sasl and not asks_token:
        password = read_secret("kafka.sasl_password", kafka.sasl_password_env, kafka.sasl_password_file, floor.folder)
    return Access(
        protocol=kafka.security_protocol,
        mechanism=kafka.sasl_mechanism,
        username=os.environ.get(USERNAME_VARIABLE) or kafka.sasl_username,
        password=password,
        context=_context(kafka, floor.folder) if kafka.security_protocol.endswith("SSL") else None,
        token=load(kafka.sasl_token, {}, "kafka.sasl_token") if asks_token else None,
    )


def embedded_access(folder: Path) -> Access:
    """Credentials of a folder's embedded broker: its password, if it has one. Raises ConfigError."""
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


class TokenFailed(KafkaConnectionError):  # type: ignore[misc]
    """A plugin gave no token. To aiokafka, which catches its own errors alone, a broker that is away: it is tried again."""


class TokenProvider(AbstractTokenProvider):  # type: ignore[misc]
    """Asks a plugin for the token of a connection, in a thread unless it is a coroutine function."""

    def __init__(self, token: Token) -> None:
        self._token = token

    async def token(self) -> str:
        """The token now. Raises TokenFailed, which names the plugin and not its error's message, which may hold a token."""
        try:
            async with asyncio.timeout(TOKEN_S):
                found = (
                    self._token() if inspect.iscoroutinefunction(self._token) else await asyncio.to_thread(self._token)
                )
                found = await found if inspect.isawaitable(found) else found
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"raised {type(error).__name__} in {Path(where.filename).name}, line {where.lineno}"
            raise TokenFailed(f"kafka.sasl_token: {name_of(self._token)} {what}") from error
        if not isinstance(found, str) or not found:
            raise TokenFailed(
                f"kafka.sasl_token: {name_of(self._token)} returned {type(found).__name__}, expected a token as text"
            )
        return found


def name_of(plugin: object) -> str:
    kind = plugin if hasattr(plugin, "__qualname__") else type(plugin)
    return f"{kind.__module__}:{getattr(kind, '__qualname__', '')}"


def _context(kafka: Kafka, folder: Path) -> ssl.SSLContext:
    try:
        authority = str(folder / kafka.ssl_ca_file) if kafka.ssl_ca_file else None
        context = ssl.create_default_context(cafile=authority)
        if kafka.ssl_cert_file:
            key = str(folder / kafka.ssl_key_file) if kafka.ssl_key_file else None
            context.load_cert_chain(str(folder / kafka.ssl_cert_file), key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"kafka.ssl_ca_file, ssl_cert_file, ssl_key_file: cannot be read: {error}") from error
    return context


ASK_S = 5.0
Refusal = ConfigError | TokenFailed


async def refusal(bootstrap_servers: str, access: Access, ask_s: float = ASK_S) -> Refusal | None:
    """Why none of these brokers lets this client in; None where all are away. All are asked at once.

    TokenFailed where the plugin gave no token, ConfigError where a broker says no.
    """
    if access is PLAINTEXT:
        return None
    servers = [server.strip() for server in bootstrap_servers.split(",")]
    answers = await asyncio.gather(*(_answer(server, access, ask_s) for server in servers))
    return next((answer for answer in answers if answer is not None), None)


async def _answer(server: str, access: Access, ask_s: float) -> Refusal | None:
    try:
        async with asyncio.timeout(ask_s):
            try:
                return await _asked(server, access, int(ask_s * 1000))
            except (AuthenticationFailedError, SaslAuthenticationFailed, TokenFailed, ssl.SSLCertVerificationError):
                raise
            except (KafkaError, OSError):
                return await _alerted(server, access)
    except (AuthenticationFailedError, SaslAuthenticationFailed):
        return _shut_out(server, access)
    except ssl.SSLCertVerificationError as error:
        return ConfigError(f"kafka.ssl_ca_file: the certificate of {server} is not trusted: {error.verify_message}")
    except TokenFailed as failed:
        return failed
    except (KafkaError, OSError, ValueError):  # it is away, or silent
        return None


async def _alerted(server: str, access: Access) -> ConfigError | None:
    """Error where a broker refuses the client's certificate: it says so only to a client that listens and does not write."""
    if access.context is None:
        return None
    host, _, port = server.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=access.context)
        try:
            await reader.read(1)
        finally:
            writer.close()
    except ssl.SSLError as error:
        reason = error.reason or ""
        if "ALERT" in reason and any(word in reason for word in ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED")):
            said = reason.lower().replace("_", " ")
            return ConfigError(f"kafka.ssl_cert_file: {server} asks for another certificate of this client: {said}")
    return None


async def _asked(server: str, access: Access, timeout_ms: int) -> Refusal | None:
    host, _, port = server.rpartition(":")
    connection = await create_conn(host.strip("[]"), int(port), request_timeout_ms=timeout_ms, **client_options(access))
    try:
        # A broker answers a token that it refuses with words that aiokafka takes for success (RFC 7628, section 3.2.2), and
        # refuses the next request.
        answer = await connection.send(ApiVersionRequest())
        refused = access.token is not None and for_code(answer.error_code) is IllegalSaslStateError
        return _shut_out(server, access) if refused else None
    finally:
        connection.close()


def _shut_out(server: str, access: Access) -> ConfigError:
    if access.token is None:
        who = f'"{access.username}" with this password'
        return ConfigError(f"kafka.sasl_*: {server} refused the login of {who} ({access.mechanism})")
    who = f"the token of {name_of(access.token)}"
    return ConfigError(f"kafka.sasl_token: {server} refused {who} ({access.mechanism}): check whether it has expired")
