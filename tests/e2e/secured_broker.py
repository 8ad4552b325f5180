"""A real broker with a second listener that asks for TLS and SASL, its certificate from an authority made here."""

import datetime
import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from infra.local.broker import HOST, EmbeddedKafka, choose_address, plan_address

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
