"""From settings to a connection: which broker, which store, and a log over both."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from infra.cli.settings import Settings
from infra.cli.terminal import JsonFormatter, LineFormatter
from infra.log.access import EMBEDDED_FOLDER
from infra.log.log import Log
from infra.settings.config import duration_s
from infra.store.open import DividedStore, open_store
from infra.store.store import Store
from schemas.errors import BrokerUnavailable, ConfigError
from schemas.topics import FEEDBACK, topic_config

UP_LOCK = "state/up.lock"  # in the run's folder, held by `headrace up`
HELD_S, STOPPED_S = 30.0, 2.0  # for an embedded broker that a process runs, slow on a busy machine; for any other


def kafka_folder(settings: Settings) -> Path:
    return settings.folder / EMBEDDED_FOLDER


def broker_address(settings: Settings) -> str:
    """The broker's address: configured, or that of the embedded broker that `up` started in this folder."""
    if settings.kafka.bootstrap_servers:
        return settings.kafka.bootstrap_servers
    from infra.local.broker import read_address

    address = read_address(kafka_folder(settings))
    if address is None:
        raise ConfigError(
            f"no broker: kafka.bootstrap_servers is empty and nothing was started in {kafka_folder(settings)}; "
            "run `headrace up` first, or name a broker"
        )
    return address.bootstrap


def app_store(settings: Settings) -> Store:
    """The configured object store, secrets where they are meant to lie."""
    store = main_store(settings)
    if not settings.store.keys:
        return store
    return DividedStore(store, open_store(settings.store.keys, base=settings.folder))


def main_store(settings: Settings) -> Store:
    """Store of weights and checkpoints: `[store] use`, else its url. Raises ConfigError."""
    config = settings.store
    if not config.use:
        return open_store(config.url, base=settings.folder)
    from infra.settings.plugin import add_plugin_folders, load

    add_plugin_folders(settings.folder, settings.plugins)
    store = load(config.use, config.options, "store")
    if not isinstance(store, Store):
        raise ConfigError(
            f"[store] use: got {config.use!r}, a {type(store).__name__}, expected a subclass of headrace.Store"
        )
    return store


@asynccontextmanager
async def connected(
    settings: Settings, *, deadline_s: float | None = None, create: bool = False, linger_ms: int | None = None
) -> AsyncIterator[Log]:
    """A log that is connected inside the `with`. create: the caller creates the topics, so they need not be there.
    linger_ms: how long a record waits for others to leave with it, None for the bus's own choice.

    Raises BrokerUnavailable naming the address after the deadline (that of the settings, if it is shorter), ConfigError
    for topics that are missing.
    """
    from infra.log.access import kafka_access
    from infra.log.kafka import LINGER_MS, KafkaBus

    quieten_client()
    limit_s = settings.kafka.deadline_s
    bus = KafkaBus(
        broker_address(settings),
        deadline_s=min(deadline_s or limit_s, limit_s),
        linger_ms=LINGER_MS if linger_ms is None else linger_ms,
        access=kafka_access(settings),
    )
    try:
        await bus.start()
        log = Log(bus, settings.app, store=app_store(settings))
        if not create:
            await log.require_topics()
        yield log
    finally:
        await bus.close()


@asynccontextmanager
async def reading(settings: Settings, *, create: bool = False) -> AsyncIterator[Log]:
    """`connected`, for commands that only look: an embedded broker that is not running is started for as long as they take.

    create: see `connected`; the broker's folder need not be there either.
    """
    from infra.local.broker import EmbeddedKafka, read_address
    from infra.log.access import kafka_access
    from infra.log.kafka import answers

    quieten_client()
    runs, held = bool(settings.kafka.bootstrap_servers), is_held(settings)
    if not runs and (read_address(kafka_folder(settings)) is not None or not (create or held)):
        wait_s = HELD_S if held else STOPPED_S
        runs = await answers(broker_address(settings), timeout_s=wait_s, access=kafka_access(settings))
    if runs:
        async with connected(settings, deadline_s=10.0, create=create) as log:
            yield log
        return
    if is_held(settings):
        raise BrokerUnavailable(
            f"the broker in {kafka_folder(settings)} does not answer yet: `headrace up` or another command of this run is "
            "starting or stopping it; try again in a moment, or see broker.log there"
        )
    broker = EmbeddedKafka(kafka_folder(settings), with_password=True)
    await asyncio.to_thread(broker.start)
    try:
        async with connected(settings, deadline_s=10.0, create=True) as log:
            if not create:
                await create_topics(log, settings)  # a run of an earlier release may lack one of them
            yield log
    finally:
        await asyncio.to_thread(broker.stop)


def is_held(settings: Settings) -> bool:
    """True while `headrace up` runs in this folder, or any process has its embedded broker."""
    from infra.files import is_locked
    from infra.local.broker import LOCK

    return is_locked(settings.folder / UP_LOCK) or is_locked(kafka_folder(settings) / LOCK)


async def create_topics(log: Log, settings: Settings) -> list[str]:
    """Create the topics of the app that are missing; their names. Raises ConfigError, see `Log.create_topics`."""
    keep_ms, copies = int(duration_s(settings.keep.replay) * 1000), settings.kafka.replication
    return await log.create_topics(partitions=settings.kafka.partitions, keep_ms=keep_ms, replication=copies)


async def create_source_topics(log: Log, settings: Settings) -> list[str]:
    """Create the missing topics of feedback sources, with one partition; their names."""
    keep_ms, created = int(duration_s(settings.keep.replay) * 1000), []
    for name in dict.fromkeys(source.from_.topic for source in settings.feedback if source.from_.topic):
        try:
            await log.bus.partitions(name)
        except ValueError:
            config = topic_config(FEEDBACK, keep_ms, settings.kafka.replication)
            await log.bus.create_topic(name, 1, config, settings.kafka.replication)
            created.append(name)
    return created


def log_to_stderr(*, as_json: bool = False) -> None:
    """Lines on stderr: the supervisor sends them to a file per role."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter())
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    for noisy in ("faust", "httpx", "mode", "urllib3", "vllm"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    quieten_client()


def quieten_client() -> None:
    """In an outage aiokafka prints several lines a second; the bus says the same once, with the address."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
