"""What can be done from the pages. Each action writes the record of its command, with the viewer's key as its owner.

An action is refused before anything is written unless the viewer's key has its scope. The log has who did it and why.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from actors.gateway.access.keys import Scope
from infra.cli.console.access import Viewer
from infra.cli.console.reading import Reading
from infra.cli.govern.channel import check_move, versions_and_stable
from infra.policies.channel import MASTERS
from schemas import Directive, PolicyEvent, topics
from schemas.errors import BadFrame, ConfigError
from schemas.fields import Channel, DirectiveKind, PolicyEventKind

MOVES: Mapping[str, tuple[PolicyEventKind, Channel]] = {
    "promote": ("promoted", "stable"),
    "try": ("promoted", "canary"),
    "pin": ("pinned", "stable"),
    "unpin": ("pinned", "stable"),
    "rollback": ("rolled_back", "stable"),
}
ORDERS: Mapping[str, DirectiveKind] = {"pause": "pause", "resume": "continue"}
# Every action with the scope it takes; what is not here does not exist.
SCOPES: Mapping[str, Scope] = {
    **dict.fromkeys((*MOVES, *ORDERS, "redeliver", "reprocess"), "operate"),
    **dict.fromkeys(("open", "open-letter"), "unseal"),
}
STAGES = ("tasks", "verify", "collect")
MAX_WHY = 500
REPROCESS_S = 600.0
MAX_REPORT = 4 * 1024 * 1024


class Refusal(Exception):
    """The action cannot be done. The message says why, for the page."""


def reason_of(form: Mapping[str, str]) -> str:
    """The reason in a form, as it is written to the log. Raises Refusal for an empty one."""
    why = " ".join(form.get("why", "").split())[:MAX_WHY]
    if not why:
        raise Refusal("say why: it is kept with the decision")
    return why


async def move(reading: Reading, viewer: Viewer, action: str, form: Mapping[str, str]) -> str:
    """Move a channel, as `headrace promote`, `pin`, `unpin` and `rollback` do. Returns in words what was done."""
    kind, channel = MOVES[action]
    assert viewer.name not in MASTERS, "a key is never called as a master is"
    try:
        version = -1 if action == "unpin" else int(form.get("version", "").removeprefix("v"))
    except ValueError as error:
        raise Refusal(f'got "{form.get("version", "")[:40]}", expected a published version') from error
    if action != "unpin" and version < 0:
        raise Refusal(f"got version {version}, expected a published one")
    why = reason_of(form)
    versions, stable = await versions_and_stable(reading.log, reading.settings.policy.name, version)
    try:
        check_move(versions, stable, kind, version)
    except ConfigError as error:
        raise Refusal(str(error)) from error
    event = PolicyEvent(
        event=kind, policy=reading.settings.policy.name, version=version, channel=channel, reason=why, owner=viewer.name
    )
    await reading.log.publish(topics.POLICIES, event)
    reading.forget_fresh()
    return f"{action}: done" if version < 0 else f"{action} version {version}: done"


async def order(reading: Reading, viewer: Viewer, action: str, form: Mapping[str, str]) -> str:
    """Pause or resume learning, as the commands do."""
    why = reason_of(form)
    await reading.log.publish(topics.POLICIES, Directive(order=ORDERS[action], owner=viewer.name, reason=why))
    reading.forget_fresh()
    return "learning is paused" if action == "pause" else "learning goes on"


async def open_sealed(reading: Reading, viewer: Viewer, about: str, form: Mapping[str, str]) -> None:
    """Write to the log that this viewer opens this answer or letter. It must not be shown before."""
    record = Directive(order="open", owner=viewer.name, about=about, reason=reason_of(form))
    await reading.log.publish(topics.POLICIES, record)


async def redeliver(reading: Reading, viewer: Viewer, form: Mapping[str, str]) -> str:
    """Deliver again the dead letters that can be decoded, as `headrace reprocess dead-letters` does. Noted: who, why."""
    from streams.reprocess.letters import redeliver as deliver
    from streams.reprocess.run import ReprocessOrder, plan

    by = f"{viewer.name}: {reason_of(form)}"
    ranges = await plan(reading.log, ReprocessOrder(stage="dead-letters"))
    report = await deliver(reading.log, ranges, lambda count: None, by=by)
    went = ", ".join(f"{count:,} to {topic}" for topic, count in sorted(report.delivered.items())) or "none"
    left = ", ".join(f"{count:,} {why}" for why, count in sorted(report.refused.items()))
    return f"delivered again: {went}" + (f"; left: {left}" if left else "")


async def reprocess(command: Sequence[str], form: Mapping[str, str]) -> dict[str, Any]:
    """The report of `headrace reprocess STAGE --diff`. It runs as a process of its own, since rules may take much memory.
    command: the arguments that name the run."""
    stage, begin = form.get("stage", ""), form.get("from", "").strip() or "beginning"
    if stage not in STAGES:
        raise Refusal(f'got stage "{stage[:40]}", expected one of {", ".join(STAGES)}')
    if len(begin) > 80 or begin.startswith("-"):
        raise Refusal(f'got "{begin[:80]}", expected a place such as beginning, 2:1000 or 2026-11-21T12:00')
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "infra.cli.main", "reprocess", stage, "--diff", "--json", "--from", begin, *command,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(REPROCESS_S):
            out, words = await process.communicate()
    except TimeoutError as error:
        raise Refusal(f"it took longer than {REPROCESS_S:.0f} s; begin later, or use the command") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        said = words.decode(errors="replace").strip().splitlines()
        raise Refusal(said[-1] if said else f"it ended with {process.returncode}")
    if len(out) > MAX_REPORT:
        raise Refusal("its report is too long for a page; use the command")
    try:
        report: dict[str, Any] = msgspec.json.decode(out)
    except msgspec.DecodeError as error:
        raise BadFrame(f"reprocess: {error}") from error
    return report
