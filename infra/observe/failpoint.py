"""Named failpoints: places around every send, acknowledgement, fsync, rename, upload, swap and commit where a test may end,
stop, delay or fail the process.

    HEADRACE_FAILPOINTS="batches.batch.after_send=kill@3,store.write=tear" headrace train …

Armed by that variable alone, never by configuration. Unarmed, `reach` is one cached call that returns. Each entry is
name=action or name=action@n, for the n-th time the place is reached (1 unless said); it happens once. What happened is
written to stderr as `failpoint NAME ACTION` before it does.

    kill    SIGKILL of this process              raise   the error that its surroundings must expect there
    stop    SIGSTOP; another process continues   delay   DELAY_S of standing still, event loop included
    tear    half of the bytes, then kill         full    half of the bytes, then ENOSPC (no space left on the device)
"""

import difflib
import errno
import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Literal, get_args

import msgspec

from schemas.errors import BrokerUnavailable, ConfigError, HeadraceError, PolicyRefused, StoreError
from schemas.topics import ALL

VARIABLE = "HEADRACE_FAILPOINTS"
DELAY_S = 0.05

Action = Literal["kill", "stop", "raise", "delay", "tear", "full"]
ANYWHERE: tuple[Action, ...] = ("kill", "stop", "delay")
WITH_ERROR: tuple[Action, ...] = (*ANYWHERE, "raise")
WRITES: tuple[Action, ...] = (*WITH_ERROR, "tear", "full")


class Point(msgspec.Struct, frozen=True):
    """One failpoint. where: what it is before or after. actions: those that make sense. error: what "raise" raises.

    Example: Point("after the broker confirmed it", ("kill", "raise"), BrokerUnavailable)
    """

    where: str
    actions: tuple[Action, ...] = ANYWHERE
    error: type[HeadraceError] = StoreError


@functools.cache
def send_point(topic: str, kind: str, side: Literal["before", "after"]) -> str:
    """Name of the failpoint around sends of one kind of record.

    >>> send_point("batches", "Batch", "after")
    'batches.batch.after_send'
    """
    return f"{topic}.{kind.lower()}.{side}_send"


def _send_points() -> dict[str, Point]:
    found = {}
    for topic in ALL:
        for kind in topic.holds:
            what = f"{kind} to {topic.name}"
            found[send_point(topic.name, kind, "before")] = Point(
                f"before {what} is sent", WITH_ERROR, BrokerUnavailable
            )
            found[send_point(topic.name, kind, "after")] = Point(
                f"after the broker confirmed {what}, before anybody here knows", WITH_ERROR, BrokerUnavailable
            )
    return found


POINTS: dict[str, Point] = {
    **_send_points(),
    "store.write": Point("the bytes of an object in a folder, under a temporary name", WRITES),
    "store.before_rename": Point("after these bytes, before they are durable and the object has its name", WITH_ERROR),
    "store.after_rename": Point("after the object has its name"),
    "store.before_delete": Point("before an object is removed", WITH_ERROR),
    "blobs.before_upload": Point("before a frame too large for the log goes to the store", WITH_ERROR),
    "blobs.after_upload": Point("after it, before the record that claims it is sent", WITH_ERROR),
    "weights.before_shard": Point("before a shard of a policy is stored", WITH_ERROR),
    "weights.after_shard": Point("after it, before the next or the manifest", WITH_ERROR),
    "weights.before_manifest": Point("after all shards, before the manifest of a version", WITH_ERROR),
    "weights.after_manifest": Point("after the manifest, before the event that names it", WITH_ERROR),
    "weights.before_fetch": Point("before a version is read from the store", WITH_ERROR),
    "weights.after_fetch": Point("after a version is verified, before it is the held copy", WITH_ERROR, PolicyRefused),
    "checkpoint.before_state": Point("before the state of a checkpoint is stored"),
    "checkpoint.before_manifest": Point("after the state, before the manifest that makes it a checkpoint"),
    "checkpoint.after_manifest": Point("after the manifest, before anything is pruned"),
    "checkpoint.before_prune": Point("before the manifest of an old checkpoint is removed"),
    "checkpoint.amid_prune": Point("after it, before its state is removed"),
    "learner.before_step": Point("after the batch is journaled, before the optimizer step"),
    "learner.after_step": Point("after the optimizer step, before the position knows of it"),
    "stage.before_ack": Point("after a record's outputs are confirmed, before it is acknowledged"),
    "stage.after_ack": Point("after a record is acknowledged"),
    "collect.before_commit": Point("in the transaction of state and offset, before it commits", (*ANYWHERE, "full")),
    "collect.after_commit": Point("after it committed, before memory forgets what was saved"),
    "collect.before_ack": Point("after the state is saved, before the records are acknowledged"),
    "collect.after_ack": Point("after the records are acknowledged"),
    "explore.before_commit": Point("after tasks are read, before their offset is committed", WITH_ERROR, BrokerUnavailable),
    "explore.after_commit": Point("after their offset is committed, before any of them is started"),
    "explore.before_swap": Point("after a policy is verified, before the engine loads it", WITH_ERROR, PolicyRefused),
    "explore.after_swap": Point("after the engine serves it, before the follower knows"),
}  # fmt: skip


def reach(name: str) -> None:
    """Say that this place is reached; does nothing unless it is armed."""
    armed = _armed()
    if armed is not None:
        armed.reach(name)


def write(name: str, data: bytes | memoryview, sink: Callable[[bytes | memoryview], object]) -> None:
    """Give `data` to `sink`, in a place where half of it may be all that is written."""
    armed = _armed()
    if armed is None:
        sink(data)
    else:
        armed.write(name, data, sink)


def check() -> None:
    """Read the variable, again if it was read before: a name there is not is a ConfigError that names the nearest."""
    _armed.cache_clear()
    _armed()


class Armed:
    """Failures that the variable asks for; each happens once."""

    def __init__(self, text: str) -> None:
        self._wanted: dict[str, tuple[Action, int]] = {}
        self._reached: dict[str, int] = {}
        for entry in filter(None, (part.strip() for part in text.split(","))):
            name, action, nth = parse(entry)
            self._wanted[name] = (action, nth)

    def due(self, name: str) -> Action | None:
        """Count one more time; what is to happen now."""
        assert name in POINTS, f"no failpoint {name!r}: add it to the table"
        if name not in self._wanted:
            return None
        action, nth = self._wanted[name]
        count = self._reached[name] = self._reached.get(name, 0) + 1
        return action if count == nth else None

    def reach(self, name: str) -> None:
        """Count one more time and do what is due."""
        action = self.due(name)
        if action is not None:
            _do(name, action)

    def write(self, name: str, data: bytes | memoryview, sink: Callable[[bytes | memoryview], object]) -> None:
        """Count one more time, and write what is due to be written before the end."""
        action = self.due(name)
        if action in ("tear", "full"):
            sink(data[: len(data) // 2])
        if action is not None:
            _do(name, action)
        sink(data)


def parse(entry: str) -> tuple[str, Action, int]:
    """Name, action and count of `name=action@n`; raises ConfigError naming what is wrong and the nearest there is."""
    name, equals, rest = entry.partition("=")
    action, at, number = rest.partition("@")
    if name not in POINTS:
        raise ConfigError(f"{VARIABLE}: no failpoint {name!r}{_nearest(name, POINTS)}")
    known: tuple[str, ...] = get_args(Action)
    if not equals or action not in known:
        raise ConfigError(f"{VARIABLE}: {name}: got action {action!r}, expected one of {', '.join(known)}")
    if action not in POINTS[name].actions:
        expected = ", ".join(POINTS[name].actions)
        raise ConfigError(f"{VARIABLE}: {name}: {action} makes no sense there, expected one of {expected}")
    if at and not (number.isdecimal() and int(number) > 0):
        raise ConfigError(f"{VARIABLE}: {name}: got @{number}, expected a number of 1 or more")
    return name, msgspec.convert(action, Action), int(number or 1)


def _nearest(name: str, known: dict[str, Point]) -> str:
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"; the nearest is {found[0]!r}"


@functools.lru_cache(maxsize=1)
def _armed() -> Armed | None:
    text = os.environ.get(VARIABLE, "")
    return Armed(text) if text else None


def _do(name: str, action: Action) -> None:
    os.write(2, f"failpoint {name} {action}\n".encode())
    if action in ("kill", "tear"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "delay":
        time.sleep(DELAY_S)
    elif action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:
        raise POINTS[name].error(f"failpoint {name}: {POINTS[name].where}")
