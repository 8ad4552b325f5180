"""Kills, stops, fails and delays a whole cluster at every failpoint, and says which were reached and what was broken.

    python -m tests.crash.matrix FOLDER [ACTION ...]

One process imports everything once and forks a life at a time. A life is armed with all that is left to do of one action:
the first failpoint it reaches ends it, the next life goes on from the same log. When nothing is left, a last life drains
everything, and every experience must be accounted for. Prints one line of JSON.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

from infra.ledger.audit import audit
from infra.observe.failpoint import POINTS, VARIABLE, Action, check
from infra.policies.fetch import PolicyFetcher
from infra.store.directory import DirectoryStore
from schemas import PolicyEvent, topics
from tests.crash.cluster import APP, FLOOR, Log, live
from tests.crash.file_bus import FileBus
from tests.e2e.crash_ledger import SOURCES, Fates

LIFE_S = 12.0
# A partition ticks when nothing comes, so these have a life without anybody who sends.
QUIET = frozenset({"verified.tick.before_send", "verified.tick.after_send"})


def cells(action: Action) -> list[str]:
    """Failpoints where this action makes sense."""
    return [name for name, point in POINTS.items() if action in point.actions]


def fork(folder: Path, armed: list[str], action: Action, life: int, *, quiet: bool, finish: bool) -> int:
    """Start one life; its process id. Its stderr is `folder/lives`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ[VARIABLE] = ",".join(f"{name}={action}" for name in armed)
        check()
        output = os.open(folder / "lives", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 2)
        logging.basicConfig(level=logging.ERROR, force=True)
        limit_s = 60.0 if finish else LIFE_S
        done = asyncio.run(live(folder, life=life, quiet=quiet, finish=finish, limit_s=limit_s))
        code = 0 if done else 3
    except BaseException:
        logging.exception("a life ended")
    finally:
        os._exit(code)


def watch(pid: int, folder: Path, left: set[str]) -> int:
    """Wait for the end of a life, waking it where it stopped; `left` loses what it reached. Its exit status.

    A life that has reached all it was armed with, and goes on, is ended here.
    """
    begun = os.path.getsize(folder / "lives") if (folder / "lives").exists() else 0
    waited = bool(left)
    while True:
        found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        for line in lines_since(folder / "lives", begun):
            if line.startswith("failpoint "):
                left.discard(line.split()[1])
        if found and os.WIFSTOPPED(status):
            os.kill(pid, signal.SIGCONT)
        elif found:
            return os.waitstatus_to_exitcode(status)
        elif waited and not left:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def lines_since(path: Path, offset: int) -> list[str]:
    """Whole lines of a file from an offset."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace").splitlines()


def walk(folder: Path, action: Action) -> dict[str, object]:
    """Every cell of one action, then the drain and the account."""
    folder.mkdir(parents=True)
    started_s = time.monotonic()
    left = set(cells(action))
    life = 0
    fruitless = 0
    while left and fruitless < 3:
        quiet = not left - QUIET
        armed = sorted(left if quiet else left - QUIET)
        waiting = set(armed)
        watch(fork(folder, armed, action, life, quiet=quiet, finish=False), folder, waiting)
        fruitless = fruitless + 1 if waiting == set(armed) else 0
        left -= set(armed) - waiting
        life += 1
    code = watch(fork(folder, [], action, life, quiet=False, finish=True), folder, set())
    account = asyncio.run(accounted(folder))
    seconds = round(time.monotonic() - started_s, 1)
    cell_count = len(cells(action))
    return {
        "cells": cell_count,
        "lives": life,
        "unreached": sorted(left),
        "drained": code == 0,
        **account,
        "seconds": seconds,
    }


async def accounted(folder: Path) -> dict[str, object]:
    """What the log and the store hold after everything is drained."""
    store = DirectoryStore(folder / "store")
    log = Log(FileBus(folder / "log"), APP, store=store)
    account = await audit(log, APP)
    fates = await Fates.read(log, FLOOR.pacing.max_staleness)
    acknowledged = set(fates.published)
    for topic in SOURCES:
        async for message in log.read_all(topic):
            acknowledged |= {one.id for one in getattr(message.value, "experiences", ()) if not one.suite}
    # Demonstrations are drawn at the side of a step; after the last one some may be left.
    pending = [name for name in account.pending_ids if not name.startswith("expert-")]
    return {
        "acknowledged": len(acknowledged),
        "trained": account.trained,
        "dropped": account.dropped,
        "lost": sorted(fates.lost(acknowledged, set(account.pending_ids))),
        "pending": pending,
        "trained_twice": sorted({*fates.trained_twice(), *account.trained_twice}),
        "unknown": list(account.unknown),
        **await policies(log, store),
    }


async def policies(log: Log, store: DirectoryStore) -> dict[str, object]:
    """Versions that count, whether each can be fetched whole, and those that an explorer refused."""
    events = [(message.offset, message.value) async for message in log.read_all(topics.POLICIES)]
    token = -1
    contents: dict[int, set[str]] = {}
    follower = PolicyFetcher(store, "main")
    for offset, event in events:
        if not isinstance(event, PolicyEvent):
            continue
        if event.event == "lease":
            token = max(token, offset)
        elif event.event == "published" and event.token >= token:
            policy = follower.fetch(event)
            contents.setdefault(event.version, set()).add(repr(sorted(policy.tensors.items())))
    refused = [event.version for _, event in events if isinstance(event, PolicyEvent) and event.event == "refused"]
    two = sorted(version for version, found in contents.items() if len(found) > 1)
    return {"versions": len(contents), "refused": refused, "two_contents": two}


def main(arguments: list[str]) -> int:
    """Walk the given actions, or all."""
    folder = Path(arguments[0])
    actions: tuple[Action, ...] = ("kill", "raise", "tear", "full", "stop", "delay")
    wanted = [action for action in actions if action in arguments[1:] or len(arguments) == 1]
    print(json.dumps({action: walk(folder / action, action) for action in wanted}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
