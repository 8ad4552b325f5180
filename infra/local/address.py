"""Ports of a data folder's broker: chosen once, written down, and kept while they are free.

So a broker that is restarted is found again by clients that know its old address.
"""

import random
import socket
from pathlib import Path

import msgspec

from infra.files import replace_file

HOST = "127.0.0.1"
# Below the range from which systems number outgoing connections: such a number may be taken while the broker is down,
# and a client that retries one of them can even connect to itself.
PORTS = range(20_000, 32_000)


class BrokerPorts(msgspec.Struct, frozen=True):
    """Ports of one embedded broker.

    port: for clients. controller_port: of the controller.
    """

    port: int
    controller_port: int

    @property
    def bootstrap(self) -> str:
        """Address for clients."""
        return f"{HOST}:{self.port}"


def is_free(port: int) -> bool:
    """True if a server could listen on `port` now."""
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as Java does: a closing connection does not matter
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def choose_address() -> BrokerPorts:
    """Two free ports, at random so that brokers started together differ."""
    ports = random.SystemRandom().sample(PORTS, len(PORTS))
    free = (port for port in ports if is_free(port))
    return BrokerPorts(next(free), next(free))


def read_address(folder: Path) -> BrokerPorts | None:
    """The address written in the broker's folder, if any."""
    try:
        return msgspec.json.decode((folder / "address.json").read_bytes(), type=BrokerPorts)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def plan_address(folder: Path, *, anew: bool = False) -> BrokerPorts:
    """The folder's address if its ports are free, else a new one, written down."""
    address = read_address(folder)
    if anew or address is None or not (is_free(address.port) and is_free(address.controller_port)):
        address = choose_address()
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "address.json", msgspec.json.encode(address))
    return address
