"""A real broker with a second listener that asks for TLS and SASL, its certificate from an authority made here."""

import asyncio
import datetime
import ipaddress
import json
import os
import subprocess
import sys
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from aiokafka import AIOKafkaClient
from aiokafka.protocol.admin import CreateAclsRequest, DeleteAclsRequest, DescribeAclsRequest
from aiokafka.protocol.api import Request
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner, Result

from infra.cli.main import app
from infra.local.broker import HOST, EmbeddedKafka, choose_address, plan_address
from infra.log.log import Log
from schemas import Block
from schemas.topics import EXPERIENCES, VERIFIED
from tests.streams.collect.collecting import answer, block

USER, PASSWORD = "headrace", "one-two-three"


class Secured(NamedTuple):
    """bootstrap: of the listener that asks. authority: its certificate, PEM. broker: with a plain listener beside it."""

    bootstrap: str
    authority: Path
    broker: EmbeddedKafka


@contextmanager
def secured_broker(folder: Path, *, asks_certificate: bool = False) -> Iterator[Secured]:
    """PLAIN and OAUTHBEARER (unsigned tokens) know no more than the broker's own settings; SCRAM has one user.

    asks_certificate: of clients, too, signed by the same authority.
    """
    authority, chain, key = certificates()
    (folder / "ca.pem").write_text(authority)
    port = choose_address().port
    secured = f"{HOST}:{port}"
    plain = plan_address(folder / "kafka")
    listener = "listener.name.secured"
    modules = "org.apache.kafka.common.security"
    settings = {
        "listeners": f"PLAINTEXT://{plain.bootstrap},CONTROLLER://{HOST}:{plain.controller_port},SECURED://{secured}",
        "advertised.listeners": f"PLAINTEXT://{plain.bootstrap},SECURED://{secured}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SECURED:SASL_SSL",
        "inter.broker.listener.name": "PLAINTEXT",
        # Everybody may do what no rule is about; the plain listener may do anything.
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
        "super.users": "User:ANONYMOUS",
        f"{listener}.ssl.keystore.type": "PEM",
        f"{listener}.ssl.keystore.key": one_line(key),
        f"{listener}.ssl.keystore.certificate.chain": one_line(chain),
        f"{listener}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,OAUTHBEARER",
        f"{listener}.plain.sasl.jaas.config": (f'{modules}.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'),
        f"{listener}.scram-sha-256.sasl.jaas.config": f"{modules}.scram.ScramLoginModule required;",
        # A connection with a token is closed after so long, and the next one asks for a new token.
        f"{listener}.oauthbearer.connections.max.reauth.ms": "3000",
        f"{listener}.oauthbearer.sasl.jaas.config": (
            f'{modules}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="{USER}";'
        ),
    }
    if asks_certificate:
        settings |= {
            f"{listener}.ssl.client.auth": "required",
            f"{listener}.ssl.truststore.type": "PEM",
            f"{listener}.ssl.truststore.certificates": one_line(authority),
        }
    scram = ("--add-scram", f"SCRAM-SHA-256=[name={USER},password={PASSWORD}]")
    broker = EmbeddedKafka(folder / "kafka", settings=settings, format_options=scram)
    with broker:
        yield Secured(secured, folder / "ca.pem", broker)


def one_line(pem: str) -> str:
    """As Java reads a value of several lines."""
    return pem.strip().replace("\n", "\\n")


def certificates() -> tuple[str, str, str]:
    """An authority's certificate, a broker's for 127.0.0.1, and that broker's key, all PEM."""
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = (rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "headrace tests")])

    def certificate(name: x509.Name, public: rsa.RSAPublicKey, extension: x509.ExtensionType) -> str:
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(ca_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
            .sign(ca_key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM).decode()

    broker_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "broker")])
    places = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))])
    pem_key = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (
        certificate(ca_name, ca_key.public_key(), x509.BasicConstraints(ca=True, path_length=0)),
        certificate(broker_name, key.public_key(), places),
        pem_key.decode(),
    )


Kind = Literal["topic", "group", "cluster"]
RESOURCES = {"topic": 2, "group": 3, "cluster": 4}
OPERATIONS = {"all": 2, "read": 3, "write": 4, "create": 5, "delete": 6, "describe": 8}
CLUSTER = "kafka-cluster"
ANY = 1
LITERAL, PREFIXED = 3, 4
DENY, ALLOW = 2, 3


class Rule(NamedTuple):
    """A rule about a resource by its name, or about all whose name begins so (PREFIXED). principal: such as "User:ann"."""

    kind: Kind
    name: str
    pattern: int
    principal: str
    operation: str
    permission: int

    @property
    def sent(self) -> tuple[int, str, int, str, str, int, int]:
        operation = OPERATIONS[self.operation]
        return RESOURCES[self.kind], self.name, self.pattern, self.principal, "*", operation, self.permission


async def deny(bootstrap: str, user: str, resource: Kind, name: str, *operations: str) -> None:
    """From now on `user` may do all but these. bootstrap: of a listener that may do anything."""
    # Where a resource has a rule, what no rule allows is denied; a denial comes before what is allowed.
    denied = [Rule(resource, name, LITERAL, f"User:{user}", operation, DENY) for operation in operations]
    await add_rules(bootstrap, [Rule(resource, name, LITERAL, f"User:{user}", "all", ALLOW), *denied])


async def allow(bootstrap: str, user: str, resource: Kind, name: str) -> None:
    """From now on `user` may do all, and a user without a rule may do nothing."""
    await add_rules(bootstrap, [Rule(resource, name, LITERAL, f"User:{user}", "all", ALLOW)])


async def add_rules(bootstrap: str, rules: Sequence[Rule]) -> None:
    """Make these rules; those that are there stay."""
    for reply in await _asked(bootstrap, [CreateAclsRequest(*rule.sent) for rule in rules]):
        assert [code for code, _ in reply.creation_responses] == [0], reply


async def remove_rules(bootstrap: str, rules: Sequence[Rule]) -> None:
    """Take these rules back. Raises AssertionError where one is not there."""
    for reply in await _asked(bootstrap, [DeleteAclsRequest(*rule.sent) for rule in rules]):
        assert all(code == 0 and found for code, _, found in reply.filter_responses), reply


async def list_rules(bootstrap: str) -> list[str]:
    """Return every rule of a broker, as Kafka's own tool lists them."""
    (answer,) = await _asked(bootstrap, [DescribeAclsRequest(ANY, None, ANY, None, None, ANY, ANY)])  # type: ignore[arg-type]
    operations, kinds = ({number: name.upper() for name, number in table.items()} for table in (OPERATIONS, RESOURCES))
    found = []
    for kind, name, pattern, rules in answer.resources:
        how = "PREFIXED" if pattern == PREFIXED else "LITERAL"
        found.append(
            f"Current ACLs for resource `ResourcePattern(resourceType={kinds[kind]}, name={name}, patternType={how})`:"
        )
        found += [
            f"\t(principal={principal}, host={host}, operation={operations[operation]}, "
            f"permissionType={'DENY' if permission == DENY else 'ALLOW'})"
            for principal, host, operation, permission in rules
        ]
    return found


async def _asked(bootstrap: str, requests: Sequence[Request[Any]]) -> list[Any]:
    client = AIOKafkaClient(bootstrap_servers=bootstrap)
    await client.bootstrap()
    try:
        return [await client.send(client.get_random_node(), request) for request in requests]
    finally:
        await client.close()


REPOSITORY = Path(__file__).parents[2]
SCRAM = {"sasl_mechanism": "SCRAM-SHA-256"}


def unsigned_token(expires: int = 4_000_000_000) -> str:
    """What Kafka's own test module takes: a JSON web token that nobody signed. expires: seconds since 1970."""
    parts = ({"alg": "none"}, {"sub": USER, "iat": 1_700_000_000, "exp": expires})
    return ".".join(urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + "."


def expired_token() -> str:
    return unsigned_token(1_700_000_100)


def broken() -> str:
    raise LookupError("the-secret-of-the-platform")


def by_token(plugin: str) -> dict[str, str]:
    """A way in by the tokens that a function of this module gives."""
    given = f"tests.e2e.secured_broker:{plugin}"
    return {"sasl_mechanism": "OAUTHBEARER", "sasl_token": given, "sasl_username": "", "sasl_password_file": ""}


def settings_file(secured: Secured, folder: Path, app_name: str, **more: str) -> Path:
    (folder / "password").write_text(PASSWORD + "\n")
    table = {
        "bootstrap_servers": secured.bootstrap,
        "security_protocol": "SASL_SSL",
        "sasl_username": USER,
        "sasl_password_file": "password",
        "ssl_ca_file": str(secured.authority),
        **more,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in table.items() if value]
    file = folder / "headrace.toml"
    file.write_text(f'app = "{app_name}"\n[kafka]\npartitions = 2\ndeadline_s = 20\n' + "\n".join(lines) + "\n")
    return file


def call(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "-c", str(config)], env={"COLUMNS": "160", "TERM": "dumb"})


@contextmanager
def stream_worker(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A stream worker as a process; ended with the block."""
    command = [sys.executable, "-m", "infra.cli.main", "process", "-c", str(config)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, env={**os.environ})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def through(log: Log, group: str) -> None:
    """Until a record that is published now has gone through the stream worker."""
    await log.publish(EXPERIENCES, block(answer(group, 0, size=1)))
    async with asyncio.timeout(90):
        async for message in log.read_all(VERIFIED, until_end=False):
            if isinstance(message.value, Block) and message.value.experiences[0].group == group:
                return
