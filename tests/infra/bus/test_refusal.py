"""Why a client is not let in: asked once for all that wait, for a bounded time, and a plugin that fails is named."""

import asyncio
import ipaddress
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from infra.log.access import Access, TokenFailed, TokenProvider, kafka_access, refusal
from infra.log.kafka import KafkaBus
from infra.settings.config import Floor, Kafka
from schemas.errors import ConfigError


async def silent(connections: list[object]) -> asyncio.Server:
    """A server that takes connections and never says a word."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.read()
        writer.close()

    return await asyncio.start_server(take, "127.0.0.1", 0)


def test_callers_at_once_ask_the_brokers_one_question_and_share_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[object] = []
    monkeypatch.setattr("infra.log.kafka.ASK_S", 0.2)

    async def main() -> None:
        async with await silent(connections) as server:
            port = server.sockets[0].getsockname()[1]
            bus = KafkaBus(f"127.0.0.1:{port}", access=Access(protocol="SASL_PLAINTEXT", username="u", password="p"))
            assert await asyncio.gather(*(bus.why_refused() for _ in range(1024))) == [None] * 1024
            assert len(connections) == 1

    asyncio.run(main())


class Vault:
    """A plugin that is an object."""

    def __init__(self, given: Any) -> None:
        self._given = given

    async def __call__(self) -> Any:
        if isinstance(self._given, Exception):
            raise self._given
        return self._given


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (OSError("s3cret"), "raised OSError in test_refusal.py, line "),
        (TimeoutError("s3cret"), "raised TimeoutError in test_refusal.py, line "),
        (None, "returned NoneType, expected a token as text"),
        (b"s3cret", "returned bytes, expected a token as text"),
        ("", "returned str, expected a token as text"),
    ],
)
def test_a_plugin_that_gives_no_token_is_named_and_nothing_it_said_is_shown(given: Any, said: str) -> None:
    with pytest.raises(TokenFailed) as failed:
        asyncio.run(TokenProvider(Vault(given)).token())
    assert f"kafka.sasl_token: {__name__}:Vault {said}" in str(failed.value)
    assert "s3cret" not in str(failed.value) and failed.value.retriable and not isinstance(failed.value, ConfigError)


HOST = "127.0.0.1"
NOW = datetime.now(UTC)
DAY = timedelta(days=1)
SHUT = "kafka.ssl_cert_file: BROKER asks for another certificate of this client: "


class Authority:
    """Signs certificates into a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
        self.file = folder / "authority.pem"
        self.file.write_bytes(self._signed(self._name, self._key.public_key(), x509.BasicConstraints(True, 0)))

    def sign(self, name: str, place: str = HOST, begins: datetime = NOW - DAY, ends: datetime = NOW + DAY) -> Path:
        """A certificate with its key, in one file."""
        key = ec.generate_private_key(ec.SECP256R1())
        places = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(place))])
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        file = self.folder / f"{name}.pem"
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        file.write_bytes(self._signed(subject, key.public_key(), places, begins, ends) + pem)
        return file

    def _signed(
        self,
        subject: x509.Name,
        public: ec.EllipticCurvePublicKey,
        extension: x509.ExtensionType,
        begins: datetime = NOW - DAY,
        ends: datetime = NOW + DAY,
    ) -> bytes:
        made = x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=subject,
            public_key=public,
            serial_number=x509.random_serial_number(),
            not_valid_before=begins,
            not_valid_after=ends,
        ).add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@contextmanager
def tls_server(context: ssl.SSLContext) -> Iterator[str]:
    """Its address. In threads, since asyncio's own servers close without the alert that says why."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError), context.wrap_socket(self.request, server_side=True) as connection:
                connection.recv(1)

    with socketserver.ThreadingTCPServer((HOST, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.005,), daemon=True).start()
        yield f"{HOST}:{server.server_address[1]}"
        server.shutdown()


def told(server: Path, kafka: Kafka, clients: Path | None = None) -> str:
    """Why a server with this certificate does not let a client in. clients: who vouches for those that it lets in."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(server)
    if clients is not None:
        context.load_verify_locations(clients)
        context.verify_mode = ssl.CERT_REQUIRED
    with tls_server(context) as address:
        said = asyncio.run(refusal(address, kafka_access(Floor(app="t", kafka=kafka)), ask_s=2.0))
    return str(said).replace(address, "BROKER") if isinstance(said, ConfigError) else ""


def settings(authority: Authority, cert: Path | None = None) -> Kafka:
    return Kafka(
        bootstrap_servers="b:1", security_protocol="SSL", ssl_ca_file=str(authority.file), ssl_cert_file=str(cert or "")
    )


@pytest.mark.parametrize(
    ("place", "begins", "ends", "words"),
    [
        (HOST, NOW - 3 * DAY, NOW - DAY, "certificate has expired"),
        (HOST, NOW + DAY, NOW + 3 * DAY, "certificate is not yet valid"),
        ("127.0.0.9", NOW - DAY, NOW + DAY, "IP address mismatch"),
    ],
    ids=["expired", "a clock that is behind", "another name"],
)
def test_a_brokers_certificate_that_does_not_hold_is_one_line(
    place: str, begins: datetime, ends: datetime, words: str, ours: Authority
) -> None:
    line = told(ours.sign("broker", place, begins, ends), settings(ours))
    assert line.startswith("kafka.ssl_ca_file: the certificate of BROKER is not trusted: ") and words in line


def test_a_client_without_the_certificate_that_a_broker_asks_for_is_told_which_setting(ours: Authority) -> None:
    line = told(ours.sign("broker"), settings(ours), clients=ours.file)
    assert line.startswith(SHUT) and "certificate required" in line


def test_a_clients_certificate_that_a_broker_does_not_trust_is_told(ours: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    line = told(ours.sign("broker"), settings(ours, other.sign("client")), clients=ours.file)
    assert line.startswith(SHUT) and "unknown ca" in line


def test_a_client_with_a_certificate_that_is_trusted_is_let_in(ours: Authority) -> None:
    assert told(ours.sign("broker"), settings(ours, ours.sign("client")), clients=ours.file) == ""


@pytest.mark.parametrize("content", [b"", b"no certificate", None])
def test_a_clients_certificate_that_cannot_be_read_is_one_line(content: bytes | None, ours: Authority) -> None:
    file = ours.folder / "client.pem"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="ssl_cert_file, ssl_key_file: cannot be read: "):
        kafka_access(Floor(app="t", kafka=settings(ours, file)))
