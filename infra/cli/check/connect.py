"""`headrace check --connect`: tests everything that the roles use from this machine, and prints the missing parts.

It leaves nothing behind: it queries rights of topics, and puts a small object into the store, lists, reads and removes it.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.table import Table

from infra.cli.connect import app_store, broker_address, quieten_client
from infra.cli.look.reader import READS
from infra.cli.settings import Settings
from infra.cli.terminal import Screen
from infra.log.access import Access, kafka_access
from infra.roles.rights import CHECKS, RIGHTS
from infra.settings.config import duration_s
from infra.settings.plugin import add_plugin_folders
from infra.store.store import PRIVATE, Store
from schemas import topics
from schemas.errors import BrokerUnavailable, ConfigError, StoreError
from schemas.topics import topic_config, topic_name

ANSWER_S = 10.0
BODY = b"headrace check --connect"
OPERATOR = "operator"


class Tried(NamedTuple):
    """One test. fault: the missing part and where to fix it, "" where all is well."""

    what: str
    found: str
    fault: str = ""


async def try_connections(settings: Settings, role: str = OPERATOR) -> int:
    """Print the tests; returns 1 where a part that the role needs is missing. Raises ConfigError for wrong settings."""
    if role not in RIGHTS:
        raise ConfigError(f"--role: got {role}, expected one of {', '.join(RIGHTS)}")
    add_plugin_folders(settings.folder, settings.plugins)
    tried = [*await kafka_tried(settings, role), *await asyncio.to_thread(lambda: list(store_tried(settings, role)))]
    table = Table("tried", "found")
    for attempt in tried:
        table.add_row(attempt.what, attempt.fault or attempt.found, style="red" if attempt.fault else None)
    Screen().print(table)
    return int(any(attempt.fault for attempt in tried))


async def kafka_tried(settings: Settings, role: str = OPERATOR) -> list[Tried]:
    """The brokers, and each topic and group that the role uses."""
    from infra.log.kafka import answers

    quieten_client()
    try:
        bootstrap, access = broker_address(settings), kafka_access(settings)
        there = await answers(bootstrap, timeout_s=ANSWER_S, access=access)
    except (ConfigError, BrokerUnavailable) as error:
        return [Tried("broker", "", str(error))]
    what = f"broker {bootstrap}"
    if not there:
        return [Tried(what, "", f"no broker answers within {ANSWER_S:g} s: kafka.bootstrap_servers, or the network")]
    who = access.username or access.mechanism if access.protocol.startswith("SASL") else "without a name"
    return [Tried(what, f"answers, {access.protocol}, {who}"), *await _rights_tried(settings, bootstrap, access, role)]


async def _rights_tried(settings: Settings, bootstrap: str, access: Access, role: str) -> list[Tried]:
    from infra.log.rights import asking

    keep_ms, found = int(duration_s(settings.keep.replay) * 1000), []
    async with asking(bootstrap, access) as rights:
        for topic in topics.ALL:
            wanted = RIGHTS[role].at_topic(topic)
            if role == OPERATOR and topic.retention != "trimmed":
                wanted = tuple(right for right in wanted if right != "delete")
            if not wanted:
                continue
            name, count = topic_name(settings.app, topic), topic.partitions or settings.kafka.partitions
            asked = await rights.topic_rights(
                name, wanted, count, topic_config(topic, keep_ms, settings.kafka.replication)
            )
            what, fault = f"topic {name}", asked.fault
            if asked.denied:
                fault = denied(asked.denied)
            elif not asked.partitions and not fault:
                may = "headrace check --create makes it" if asked.creates else "and may not be made with these rights"
                fault = f"is not there; {may}"
            elif not fault and asked.partitions != count:
                fault = f"has {asked.partitions} partitions, expected {count} (kafka.partitions)"
            found.append(Tried(what, f"{asked.partitions} partitions: {', '.join(wanted)}", fault))
        sources = settings.feedback if role in (OPERATOR, "process") else ()
        for source_topic in dict.fromkeys(source.from_.topic for source in sources if source.from_.topic):
            asked = await rights.topic_rights(source_topic, ("read",), 1)
            fault = asked.fault or denied(asked.denied)
            if not asked.partitions and not fault:
                fault = "is not there, and [[feedback]] names it: headrace check --create makes it"
            found.append(Tried(f"topic {source_topic}", f"{asked.partitions} partitions: read", fault))
        # Stages, explorers, feedback over HTTP, and each source with a topic read as a group.
        for group in (*READS, *(f"feedback.{source.name}" for source in settings.feedback if source.from_.topic)):
            if group.startswith(RIGHTS[role].groups):
                name = f"{settings.app}.{group}"
                asked = await rights.group_rights(name)
                fault = asked.fault or denied(asked.denied, " of the group")
                found.append(Tried(f"group {name}", "read", fault))
    return found


def denied(rights: Sequence[str], where: str = "") -> str:
    return f"may not {', '.join(rights)}: it needs an ACL{where}" if rights else ""


def store_tried(settings: Settings, role: str = OPERATOR) -> Iterator[Tried]:
    """Put, list, get and delete, below `checks/` and for an operator where keys lie. Blocking."""
    try:
        store = app_store(settings)
    except (ConfigError, StoreError) as error:
        yield Tried(f"store {settings.store.shown}", "", str(error))
        return
    places = [(f"store {settings.store.shown}", CHECKS)]
    if role == OPERATOR:
        places.append((f"keys {settings.store.keys or settings.store.shown}", PRIVATE[-1]))
    for what, folder in places:
        yield Tried(what, "put, list, get, delete", object_fault(store, f"{folder}check-{secrets.token_hex(8)}"))


def object_fault(store: Store, key: str) -> str:
    """Failed operations on an object of this name, in a line; "" for none."""
    faults = []

    def listed() -> None:
        if key not in store.keys(key):
            raise StoreError("it is not in the list")

    def same() -> None:
        if store.get(key) != BODY:
            raise StoreError("other bytes came back")

    steps: dict[str, Callable[[], None]] = {
        "put": lambda: store.put(key, BODY),
        "list": listed,
        "get": same,
        "delete": lambda: store.delete(key),
    }
    for verb, step in steps.items():
        try:
            step()
        except (ConfigError, StoreError) as error:
            faults.append(f"may not {verb}: {error}")
            if verb == "put":
                break  # nothing is there to be listed, read or removed
    return "; ".join(faults)
