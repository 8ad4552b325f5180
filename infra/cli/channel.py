"""`headrace promote | pin | unpin | rollback | channel`: what customers are served, moved by hand, and who moved it when."""

import getpass
import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from infra.bus.log import Log
from infra.cli.connect import connected, reading
from infra.cli.settings import load_settings
from infra.weights.channel import Stable, moved
from schemas import PolicyEvent, topics
from schemas.errors import ConfigError
from schemas.fields import PolicyEventKind

MOVES = ("promoted", "held", "pinned", "rolled_back")


async def run_move(kind: PolicyEventKind, version: int, reason: str, config: Path, sets: list[str]) -> int:
    """Append one move of the stable channel. version: -1 with `pinned` ends a pin. Raises ConfigError for one there is not."""
    settings = load_settings(config, sets)
    async with connected(settings) as log:
        history = await policy_history(log, settings.policy.name)
        before = stable_of(history, settings.policy.name)
        check_move(history, before, kind, version)
        event = PolicyEvent(
            event=kind,
            policy=settings.policy.name,
            version=version,
            channel="stable",
            reason=reason,
            owner=getpass.getuser(),
        )
        await log.publish(topics.POLICIES, event)
        after = moved(before, event, settings.policy.name)
    Console(highlight=False).print(f"stable: {told(before)} → {told(after)}")
    return 0


async def run_channel(config: Path, sets: list[str], *, as_json: bool) -> int:
    """Print what customers are served and every decision about it."""
    settings = load_settings(config, sets)
    async with reading(settings) as log:
        history = await policy_history(log, settings.policy.name)
    stable = stable_of(history, settings.policy.name)
    moves = [(time_ms, event) for time_ms, event in history if event.channel == "stable" and event.event in MOVES]
    if as_json:
        decisions = [
            {"time_ms": time_ms, "event": one.event, "version": one.version, "by": one.owner, "reason": one.reason,
             "numbers": one.stats}
            for time_ms, one in moves
        ]  # fmt: skip
        print(json.dumps({"stable": stable.version, "pinned": stable.pinned, "decisions": decisions}))
        return 0
    console = Console(highlight=False)
    console.print(f"stable: {told(stable)}", style="bold")
    if moves:
        console.print(decisions_table(moves))
    return 0


def decisions_table(moves: Sequence[tuple[int, PolicyEvent]]) -> Table:
    """Every decision with who made it and on what numbers."""
    rows = Table("when", "what", "version", "by", "why")
    for time_ms, event in moves:
        clock = time.strftime("%m-%d %H:%M:%S", time.localtime(time_ms / 1000))
        what = "unpinned" if event.event == "pinned" and event.version < 0 else event.event.replace("_", " ")
        style = {"held": "yellow", "rolled_back": "red"}.get(event.event)
        rows.add_row(
            clock, what, "" if event.version < 0 else str(event.version), event.owner, event.reason, style=style
        )
    return rows


def check_move(history: Sequence[tuple[int, PolicyEvent]], stable: Stable, kind: PolicyEventKind, version: int) -> None:
    """Raises ConfigError for a version nobody published or everybody refused, and for a rollback that goes forward."""
    if version < 0:
        return
    published = {event.version for _, event in history if event.event == "published"}
    orphaned = {event.version for _, event in history if event.event == "orphaned"}
    if version not in published - orphaned:
        newest = max(published - orphaned, default=-1)
        raise ConfigError(
            f"version {version}: never published; " + (f"the newest is {newest}" if newest >= 0 else "none is")
        )
    if kind == "rolled_back" and version >= stable.version:
        raise ConfigError(f"rollback: got version {version}, expected one below the stable version {stable.version}")


async def policy_history(log: Log, policy: str) -> list[tuple[int, PolicyEvent]]:
    """Every event of one policy, with its time."""
    found: list[tuple[int, PolicyEvent]] = []
    async for message in log.read_all(topics.POLICIES):
        if isinstance(message.value, PolicyEvent) and message.value.policy == policy:
            found.append((message.timestamp_ms, message.value))
    return found


def stable_of(history: Sequence[tuple[int, PolicyEvent]], policy: str) -> Stable:
    """Where the stable channel stands."""
    stable = Stable()
    for _, event in history:
        stable = moved(stable, event, policy)
    return stable


def told(stable: Stable) -> str:
    """The channel in words."""
    if stable.version < 0:
        return "nothing was promoted yet"
    return f"version {stable.version}{' (pinned)' if stable.pinned else ''}"
