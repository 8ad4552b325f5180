"""The password of the embedded broker. It listens on 127.0.0.1, where every account of the machine can connect.

    <folder>/password   drawn once, its owner's alone; clients of the same folder read it (`infra.log.access.embedded_access`)

Clients and controller are asked alike (SASL PLAIN, which the loopback keeps to itself). Another tool of yours takes the user
`headrace` and that password.
"""

import os
import secrets
from pathlib import Path

from infra.local.address import HOST, BrokerPorts
from infra.log.access import EMBEDDED_PASSWORD, EMBEDDED_USER

_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"


def password_settings(folder: Path, address: BrokerPorts) -> dict[str, str]:
    """Kafka's settings for a broker that asks."""
    password = password_of(folder)
    who = f'{_MODULE} required username="{EMBEDDED_USER}" password="{password}" user_{EMBEDDED_USER}="{password}";'
    return {
        "listeners": f"CLIENT://{HOST}:{address.port},CONTROLLER://{HOST}:{address.controller_port}",
        "advertised.listeners": f"CLIENT://{address.bootstrap}",
        "listener.security.protocol.map": "CONTROLLER:SASL_PLAINTEXT,CLIENT:SASL_PLAINTEXT",
        "inter.broker.listener.name": "CLIENT",
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "sasl.mechanism.controller.protocol": "PLAIN",
        "listener.name.client.plain.sasl.jaas.config": who,
        "listener.name.controller.plain.sasl.jaas.config": who,
    }


def password_of(folder: Path) -> str:
    """The password of a broker's folder, made if it is not there. The caller holds the folder's lock."""
    path = folder / EMBEDDED_PASSWORD
    if not path.exists():
        temporary = folder / f"{EMBEDDED_PASSWORD}.tmp"
        write_private(temporary, secrets.token_urlsafe(32))
        temporary.replace(path)
    return path.read_text(encoding="ascii")


def write_private(path: Path, text: str) -> None:
    """Write a file that is its owner's alone, also where it was there and open."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
