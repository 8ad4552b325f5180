"""Why brokers do not let a client in: aiokafka only says that it is not connected.

Guarantee: in an outage the brokers are asked once for all callers, for at most ASK_S, and the answer is kept for KEPT_S.
"""

import asyncio
import ssl
import time
from collections.abc import Callable

from aiokafka.conn import create_conn
from aiokafka.errors import (
    AuthenticationFailedError,
    IllegalSaslStateError,
    KafkaError,
    SaslAuthenticationFailed,
    for_code,
)
from aiokafka.protocol.admin import ApiVersionRequest

from infra.log.access import PLAINTEXT, Access, TokenFailed, client_options, name_of
from schemas.errors import ConfigError

ASK_S = 5.0
KEPT_S = 30.0
Refusal = ConfigError | TokenFailed


class Refusals:
    """The answer of its brokers to one client. ask_s: for all of them. clock: seconds."""

    def __init__(
        self,
        bootstrap_servers: str,
        access: Access,
        *,
        ask_s: float = ASK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._access = access
        self._ask_s = ask_s
        self._clock = clock
        self._asking = asyncio.Lock()
        self._kept: tuple[float, Refusal | None] | None = None  # when, and what

    async def now(self) -> Refusal | None:
        return await refusal(self._bootstrap_servers, self._access, self._ask_s)

    async def lately(self) -> Refusal | None:
        """The answer of at most KEPT_S ago, or a new one."""
        async with self._asking:
            if self._kept is None or self._clock() - self._kept[0] >= KEPT_S:
                self._kept = self._clock(), await self.now()
            return self._kept[1]


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
        return ConfigError(f"kafka.sasl_*: {server} does not let {who} in ({access.mechanism})")
    who = f"the token of {name_of(access.token)}"
    return ConfigError(f"kafka.sasl_token: {server} does not let {who} in ({access.mechanism}): has it expired?")
