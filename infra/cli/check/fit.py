"""What `headrace check` says of log and store together: whether they are of one app, or one of them lost what it held."""

from pathlib import Path

from infra.cli.connect import bootstrap_of, kafka_folder, main_store_of, quieten_client
from infra.cli.settings import Settings
from infra.local.address import read_address
from infra.log.access import access_of
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.roles.identity import Fit, fault, fit_of
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas.errors import BrokerUnavailable, ConfigError

ANSWER_S = 2.0
DEADLINE_S = 10.0


async def check_fit(settings: Settings) -> list[str]:
    """Compare them as a role does when it starts; nothing is started or made for it, and a broker that is away is reported.

    Raises ConfigError, with what helps, where they do not belong together, or where one refuses the credentials; StoreError.
    """
    has_store, has_log = is_there(settings), bool(settings.kafka.bootstrap_servers) or embedded_is_there(settings)
    if not has_store and not has_log:
        return []  # nothing has begun
    try:
        store = main_store_of(settings) if has_store else MemoryStore()
        fit = await found(settings, store) if has_log else await fit_of(Log(MemoryBus(), settings.app), store, settings)
    except BrokerUnavailable as error:
        return [f"log and store were not compared, as the roles do when they start: {error}"]
    why = fault(fit, settings.app, repr(store) if has_store else f"{settings.store.shown} (nothing is there)")
    if why:
        raise ConfigError(why)
    return []


async def found(settings: Settings, store: Store) -> Fit:
    """What the broker's log and the store say. Raises BrokerUnavailable, ConfigError, StoreError."""
    from infra.log.kafka import KafkaBus, answers

    quieten_client()
    bootstrap, access = bootstrap_of(settings), access_of(settings)
    if not await answers(bootstrap, timeout_s=ANSWER_S, access=access):
        raise BrokerUnavailable(f"no broker answers at {bootstrap}")
    bus = KafkaBus(bootstrap, deadline_s=DEADLINE_S, access=access)
    try:
        await bus.start()
        return await fit_of(Log(bus, settings.app), store, settings)
    finally:
        await bus.close()


def embedded_is_there(settings: Settings) -> bool:
    """Whether an embedded broker was ever started for this app."""
    return read_address(kafka_folder(settings)) is not None


def is_there(settings: Settings) -> bool:
    """Whether the store may hold something: a folder that is not there holds nothing, and opening it would make it."""
    url = settings.store.url
    return bool(settings.store.use) or "://" in url or (settings.folder / Path(url).expanduser()).is_dir()
