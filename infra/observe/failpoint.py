"""Named failpoints: places around every send, acknowledgement, fsync, rename, upload, swap and commit where a test may end,
stop, delay or fail the process.

    HEADRACE_FAILPOINTS="batches.batch.after_send=kill@3,store.write=tear" headrace train …

Armed by that variable alone, never by configuration. Unarmed, `reach` is one cached call that returns. Each entry is
name=action or name=action@n, for the n-th time the place is reached (1 unless said); it happens once. The process
writes `failpoint NAME ACTION` to stderr before the action.

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
from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

from schemas.errors import BrokerUnavailable, ConfigError, HeadraceError, PolicyRefused, StoreError
from schemas.topics import ALL

VARIABLE = "HEADRACE_FAILPOINTS"
DELAY_S = 0.05
ANYWHERE = ("kill", "stop", "delay")
WITH_ERROR = (*ANYWHERE, "raise")
ACTIONS = (*WITH_ERROR, "tear", "full")


class Point(NamedTuple):
    """One failpoint. actions: the actions that make sense there. error: the error of "raise"."""

    actions: tuple[str, ...] = ANYWHERE
    error: type[HeadraceError] = StoreError


@functools.cache
def send_point(topic: str, kind: str, side: Literal["before", "after"]) -> str:
    """Name of the failpoint around sends of one kind of record.

    >>> send_point("batches", "Batch", "after")
    'batches.batch.after_send'
    """
    return f"{topic}.{kind.lower()}.{side}_send"


POINTS: dict[str, Point] = {
    **{
        send_point(topic.name, kind, side): Point(WITH_ERROR, BrokerUnavailable)
        for topic in ALL for kind in topic.holds for side in ("before", "after")
    },
    "store.write": Point(ACTIONS),  # of the bytes of an object in a folder, under a temporary name
    "store.after_rename": Point(),
    **dict.fromkeys(
        (
            "store.before_rename", "store.before_delete", "blobs.before_upload", "blobs.after_upload", "weights.before_shard",
            "weights.after_shard", "weights.before_manifest", "weights.after_manifest", "weights.before_fetch",
        ),
        Point(WITH_ERROR),
    ),
    "weights.after_fetch": Point(WITH_ERROR, PolicyRefused),  # once a version is verified, before it is the held copy
    **dict.fromkeys(
        (
            "checkpoint.before_state", "checkpoint.before_manifest", "checkpoint.after_manifest", "checkpoint.before_prune",
            "checkpoint.amid_prune", "learner.before_step", "learner.after_step", "stage.before_ack", "stage.after_ack",
            "collect.after_commit", "collect.before_ack", "collect.after_ack", "explore.after_commit", "explore.after_swap",
        ),
        Point(),
    ),
    "collect.before_commit": Point((*ANYWHERE, "full")),  # in the transaction of state and offset
    "explore.before_commit": Point(WITH_ERROR, BrokerUnavailable),
    "explore.before_swap": Point(WITH_ERROR, PolicyRefused),
}  # fmt: skip


def reach(name: str, write_half: Callable[[], object] = lambda: None) -> None:
    """Say that this place is reached; does nothing unless it is armed. write_half: for "tear" and "full"."""
    if (armed := _armed()) is None:
        return
    assert name in POINTS, f"no failpoint {name!r}: add it to the table"
    wanted, reached = armed
    action, nth = wanted.get(name, ("", 0))
    reached[name] += 1
    if reached[name] == nth:
        if action in ("tear", "full"):
            write_half()
        _do(name, action)


def write(name: str, data: bytes | memoryview, sink: Callable[[bytes | memoryview], object]) -> None:
    """Give `data` to `sink`, in a place where half of it may be all that is written."""
    reach(name, lambda: sink(data[: len(data) // 2]))
    sink(data)


def check() -> None:
    """Read the variable, again if it was read before. Raises ConfigError for a name that is not in the table."""
    _armed.cache_clear()
    _armed()


def parse(entry: str) -> tuple[str, str, int]:
    """Name, action and count of `name=action@n`; raises ConfigError naming the fault and the nearest name or the actions."""
    name, _, rest = entry.partition("=")
    action, at, number = rest.partition("@")
    if name not in POINTS:
        nearest = difflib.get_close_matches(name, POINTS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"{VARIABLE}: no failpoint {name!r}; the nearest is {nearest!r}")
    if action not in POINTS[name].actions:
        raise ConfigError(f"{VARIABLE}: {name}: got {action!r}, expected one of {', '.join(POINTS[name].actions)}")
    if at and not (number.isdecimal() and int(number) > 0):
        raise ConfigError(f"{VARIABLE}: {name}: got @{number}, expected a number of 1 or more")
    return name, action, int(number or 1)


@functools.lru_cache(maxsize=1)
def _armed() -> tuple[dict[str, tuple[str, int]], Counter[str]] | None:
    """The action and count of each armed failpoint, and how often each was reached."""
    parts = filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(",")))
    wanted = {name: (action, nth) for name, action, nth in map(parse, parts)}
    return (wanted, Counter()) if wanted else None


def _do(name: str, action: str) -> None:
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
        raise POINTS[name].error(f"failpoint {name}")
