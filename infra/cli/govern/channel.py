"""`headrace promote | pin | unpin | rollback | channel`: move the version that customers get; list moves, authors and times."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from infra.cli.connect import app_store, connected, reading
from infra.cli.govern.words import RECENT, recent_words, words_about
from infra.cli.look.audit import operator
from infra.cli.options import JsonOption, SettingsFile, command
from infra.cli.terminal import Screen, clock, print_json
from infra.log.log import Log
from infra.policies.chain import read_manifest, walk
from infra.policies.fold import Stable, moved
from infra.store.store import Store
from schemas import Directive, PolicyEvent, topics
from schemas.errors import ConfigError, NotInStore
from schemas.fields import Channel, DirectiveKind, PolicyEventKind

Version = Annotated[int, typer.Argument(min=0, help="Published policy version.")]
Why = Annotated[str, typer.Option("--why", help="Reason, recorded with the decision.")]


@command
async def promote(
    chosen: SettingsFile,
    version: Version,
    why: Why = "",
    canary: Annotated[
        bool, typer.Option("--canary", help="Only for the share of sessions that a canary answers.")
    ] = False,
) -> int:
    """Serve a version to customers from now on; if a version is pinned, after the pin's end.

    With [bold]--canary[/] a share of sessions tries it ([bold]\\[gateway.canary][/]) until it is promoted, the gate holds it,
    or the stable version changes.

    Example: [cyan]headrace promote 144 --why "looked at fifty answers"[/]
    """
    return await _move(chosen, "promoted", version, why, channel="canary" if canary else "stable")


@command
async def pin(chosen: SettingsFile, version: Version, why: Why = "") -> int:
    """Keep customers on a version, regardless of the gate, until `headrace unpin`.

    Example: [cyan]headrace pin 120 --why "launch week"[/]
    """
    return await _move(chosen, "pinned", version, why)


@command
async def unpin(chosen: SettingsFile, why: Why = "") -> int:
    """End a pin: customers go to the newest promoted version."""
    return await _move(chosen, "pinned", -1, why)


@command
async def rollback(chosen: SettingsFile, version: Version, why: Why = "") -> int:
    """Return customers to an older version. Training continues; new versions must pass the gate.

    Example: [cyan]headrace rollback 120 --why "refuses too often"[/]
    """
    return await _move(chosen, "rolled_back", version, why)


@command
async def pause(chosen: SettingsFile, why: Why = "") -> int:
    """Stop learning while serving continues: no new groups, no optimizer step, no new version, until [bold]resume[/].

    Answers are still recorded and rated, and wait in the buffer. The pause outlives restarts.

    Example: [cyan]headrace pause --why "feedback source looks wrong"[/]
    """
    done = "learning is paused: no new groups, no new steps; `headrace resume` continues it"
    return await _order(chosen, "pause", why, done)


@command
async def resume(chosen: SettingsFile, why: Why = "") -> int:
    """Continue learning after a [bold]pause[/] or a drain, with the waiting experiences first."""
    return await _order(chosen, "continue", why, "learning continues")


async def _order(chosen: SettingsFile, order: DirectiveKind, reason: str, done: str) -> int:
    """The master and the trainer hear it within a second, or when they start."""
    async with connected(chosen.load()) as log:
        await log.publish(topics.POLICIES, Directive(order=order, owner=operator(), reason=reason))
    Screen().print(done)
    return 0


async def _move(
    chosen: SettingsFile, kind: PolicyEventKind, version: int, reason: str, channel: Channel = "stable"
) -> int:
    """version: -1 with `pinned` ends a pin."""
    settings = chosen.load()
    async with connected(settings) as log:
        versions, before = await versions_and_stable(log, settings.policy.name, version)
        check_move(versions, before, kind, version)
        if version >= 0:
            await asyncio.to_thread(check_stored, app_store(settings), versions[version])
        event = PolicyEvent(
            event=kind, policy=settings.policy.name, version=version, channel=channel, reason=reason, owner=operator()
        )
        await log.publish(topics.POLICIES, event)
        after = moved(before, event, settings.policy.name)
    Screen().print(f"stable: {stable_text(before)} → {stable_text(after)}")
    return 0


@command
async def channel(
    chosen: SettingsFile,
    as_json: JsonOption = False,
    every: Annotated[bool, typer.Option("--all", help="Show all decisions since the app began.")] = False,
) -> int:
    """Show the version customers are served, and the newest decisions about it with their numbers.

    The gate ([bold]\\[master.gate][/]) promotes versions that pass its tests; the commands below move the channel by hand.
    """
    settings = chosen.load()
    async with reading(settings) as log:
        words = await recent_words(log, settings.policy.name, at_least=None if every else RECENT)
    stable, made = words.stable, words.decisions
    if as_json:
        told_of = {"stable": stable.version, "pinned": stable.pinned, "trial": stable.trial}
        told_of |= {"decisions": msgspec.to_builtins(made)}
        print_json(told_of)
        return 0
    console = Screen()
    console.print(f"stable: {stable_text(stable)}", style="bold")
    if made:
        rows = Table("when", "what", "version", "by", "why")
        for decision in made:
            style = {"held": "yellow", "pause": "yellow", "rolled_back": "red"}.get(decision.event)
            of = "" if decision.version < 0 else str(decision.version)
            rows.add_row(clock(decision.time_ms), decision.word, of, decision.by, decision.reason, style=style)
        console.print(rows)
    if not words.is_whole:
        console.print("decisions of before: headrace channel --all", style="dim")
    return 0


async def versions_and_stable(log: Log, policy: str, version: int) -> tuple[Mapping[int, PolicyEvent], Stable]:
    """Versions of a policy that may be served, from some place before `version` on, and where its channel is."""
    words = await (words_about(log, policy, version) if version >= 0 else recent_words(log, policy))
    return servable(words.events), words.stable


def servable(history: Sequence[tuple[int, PolicyEvent]]) -> dict[int, PolicyEvent]:
    gone = {event.version for _, event in history if event.event == "orphaned"}
    return {event.version: event for _, event in history if event.event == "published" and event.version not in gone}


def check_stored(store: Store, event: PolicyEvent) -> None:
    """Raises ConfigError for a version that the trainer removed, or that it needs to be rebuilt, see [keep]. Blocking."""
    try:
        chain = walk(store, read_manifest(store, event.manifest, event.manifest_sha256)[0])
        for source in (*(source for _, source in chain.steps), chain.anchor):
            for shard in source.shards if source else ():
                store.size(shard.key)
    except NotInStore as error:
        raise ConfigError(
            f"version: {event.version} of {event.policy} was published, but is not in the store any more (see [keep]); "
            f"expected a newer version: {error}"
        ) from error


def check_move(versions: Collection[int], stable: Stable, kind: PolicyEventKind, version: int) -> None:
    """Raises ConfigError for a version that is not there or that every role refused, and for a rollback to a newer one.
    versions: that may be served.
    """
    if version < 0:
        return
    if version not in versions:
        there = f"the newest is {max(versions)}" if versions else "none is"
        raise ConfigError(f"version {version}: never published; {there}")
    if kind == "rolled_back" and version >= stable.version:
        raise ConfigError(
            f"rollback: got version {version}, expected a version below the stable version {stable.version}"
        )


def stable_text(stable: Stable) -> str:
    if stable.version < 0:
        return "nothing was promoted yet"
    kept = "keeps a share" if stable.watched else "on trial"
    trial = f", version {stable.trial} {kept}" if stable.trial >= 0 else ""
    return f"version {stable.version}{' (pinned)' if stable.pinned else ''}{trial}"
