"""The context of a role in a test."""

import asyncio

from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.roles.role import Role
from infra.settings.config import Floor
from infra.store.store import Store


def role_of(
    name: str,
    floor: Floor,
    log: Log,
    store: Store,
    *,
    metrics: Metrics | None = None,
    stop: asyncio.Event | None = None,
    instance: str = "",
) -> Role:
    return Role(
        floor=floor,
        log=log,
        store=store,
        metrics=metrics or Metrics(name),
        stop=stop or asyncio.Event(),
        instance=instance or f"{name}/test",
    )
