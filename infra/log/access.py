"""Authentication of clients and brokers: TLS and SASL, with Kafka's own settings.

Secrets come from the environment or from a file, never from the settings; no text of this module shows one.
A refused client is told why: aiokafka only says that it is not connected.
"""

import asyncio
import os
import ssl
from pathlib import Path
from typing import Any

import msgspec
from aiokafka.conn import create_conn
from aiokafka.errors import AuthenticationFailedError, KafkaError, SaslAuthenticationFailed

from infra.settings.config import Floor, Kafka
from infra.settings.secret import read_secret
from schemas.errors import ConfigError

EMBEDDED_FOLDER = "kafka"  # beside the TOML
EMBEDDED_PASSWORD = "password"  # file in the folder of an embedded broker
EMBEDDED_USER = "headrace"
USERNAME_VARIABLE = "HEADRACE_KAFKA_USERNAME"  # comes before kafka.sasl_username: each role has a user, all one file
ASK_S = 5.0


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials of a client. protocol, mechanism: as [kafka] names them. username, password: for SASL. context: for TLS."""

    protocol: str = "PLAINTEXT"
    mechanism: str = "PLAIN"
    username: str = ""
    password: str = ""
    context: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        return f"Access({self.protocol}, {self.mechanism}, username={self.username!r})"


PLAINTEXT = Access()


def kafka_access(floor: Floor) -> Access:
    """Credentials that the [kafka] table names, with secrets read now. Raises ConfigError naming the missing setting."""
    kafka = floor.kafka
    if not kafka.bootstrap_servers:
        return embedded_access(floor.folder / EMBEDDED_FOLDER)
    if kafka.security_protocol == "PLAINTEXT":
        return PLAINTEXT
    password = ""
    if kafka.is_sasl:
        password = read_secret("kafka.sasl_password", kafka.sasl_password_env, kafka.sasl_password_file, floor.folder)
    return Access(
        protocol=kafka.security_protocol,
        mechanism=kafka.sasl_mechanism,
        username=os.environ.get(USERNAME_VARIABLE) or kafka.sasl_username,
        password=password,
        context=_context(kafka, floor.folder) if kafka.security_protocol.endswith("SSL") else None,
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
        options |= {
            "sasl_mechanism": access.mechanism,
            "sasl_plain_username": access.username,
            "sasl_plain_password": access.password,
        }
    return options


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


async def refusal(bootstrap_servers: str, access: Access, ask_s: float = ASK_S) -> ConfigError | None:
    """Reason why a broker refuses this client, None if all are away. All are asked at once."""
    if access is PLAINTEXT:
        return None
    answers = await asyncio.gather(*(_answer(server.strip(), access, ask_s) for server in bootstrap_servers.split(",")))
    return next((answer for answer in answers if answer is not None), None)


async def _answer(server: str, access: Access, ask_s: float) -> ConfigError | None:
    host, _, port = server.rpartition(":")
    options = {"request_timeout_ms": int(ask_s * 1000), **client_options(access)}
    try:
        async with asyncio.timeout(ask_s):
            connection = await create_conn(host.strip("[]"), int(port), **options)
    except (AuthenticationFailedError, SaslAuthenticationFailed):
        who = f'"{access.username}" with this password'
        return ConfigError(f"kafka.sasl_*: {server} refused the login of {who} ({access.mechanism})")
    except ssl.SSLCertVerificationError as error:
        return ConfigError(f"kafka.ssl_ca_file: the certificate of {server} is not trusted: {error.verify_message}")
    except (KafkaError, OSError, ValueError):  # it is away, or silent
        return None
    connection.close()
    return None
