"""From settings to a connection: which broker, which store, and a log over both."""

import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from infra.bus.log import Log
from infra.cli.settings import Settings
from infra.store import Store, open_store
from schemas.errors import ConfigError


def kafka_folder(settings: Settings) -> Path:
    """Where the embedded broker of these settings keeps its data."""
    return settings.folder / "kafka"


def bootstrap_of(settings: Settings) -> str:
    """The broker's address: configured, or that of the embedded broker that `up` started in this folder."""
    if settings.kafka.bootstrap_servers:
        return settings.kafka.bootstrap_servers
    from infra.local.address import read_address

    address = read_address(kafka_folder(settings))
    if address is None:
        raise ConfigError(
            f"no broker: kafka.bootstrap_servers is empty and nothing was started in {kafka_folder(settings)}; "
            "run `headrace up` first, or name a broker"
        )
    return address.bootstrap


def store_of(settings: Settings) -> Store:
    """The configured object store."""
    return open_store(settings.store.url, base=settings.folder)


@asynccontextmanager
async def connected(settings: Settings, *, deadline_s: float | None = None) -> AsyncIterator[Log]:
    """A log that is connected inside the `with`. Raises BrokerUnavailable naming the address after the deadline."""
    from infra.bus.kafka import KafkaBus

    bus = KafkaBus(bootstrap_of(settings), deadline_s=deadline_s or settings.kafka.deadline_s)
    await bus.start()
    try:
        yield Log(bus, settings.app, store=store_of(settings))
    finally:
        await bus.close()


def log_to_stderr(level: int = logging.INFO) -> None:
    """Plain lines on stderr: the supervisor sends them to a file per role."""
    logging.basicConfig(
        stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    for noisy in ("aiokafka", "faust", "mode", "urllib3", "vllm"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
