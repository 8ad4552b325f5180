"""Actions of the pages. Each action writes the record of its command, with the viewer's key as its owner.

An action is refused before anything is written unless the viewer's key has its scope. The log has who did it and why.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec
from starlette.responses import RedirectResponse, Response

from actors.gateway.access.keys import Scope
from infra.cli.console.access import Viewer
from infra.cli.console.pages import Console, answer_values
from infra.cli.govern.channel import check_move, versions_and_stable
from infra.policies.fold import MASTERS
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
STAGES = ("tasks", "verify", "collect")
MAX_WHY = 500
REPROCESS_S = 600.0
MAX_REPORT = 4 * 1024 * 1024

Form = Mapping[str, str]
Done = tuple[str, dict[str, Any]] | Response
"""A template with its values, or another response."""


class Refusal(Exception):
    """The action is impossible. The page shows the message."""


def reason_in(form: Form) -> str:
    """The reason in a form, in its form for the log. Raises Refusal for an empty one."""
    why = " ".join(form.get("why", "").split())[:MAX_WHY]
    if not why:
        raise Refusal("the reason is empty: enter a reason, the log keeps it with the decision")
    return why


async def move(console: Console, viewer: Viewer, action: str, form: Form) -> Done:
    kind, channel = MOVES[action]
    assert viewer.name not in MASTERS, "a key is never called as a master is"
    try:
        version = -1 if action == "unpin" else int(form.get("version", "").removeprefix("v"))
    except ValueError as error:
        raise Refusal(f'got "{form.get("version", "")[:40]}", expected a published version') from error
    if action != "unpin" and version < 0:
        raise Refusal(f"got version {version}, expected a published version")
    why = reason_in(form)
    log, policy = console.reading.log, console.reading.settings.policy.name
    versions, stable = await versions_and_stable(log, policy, version)
    try:
        check_move(versions, stable, kind, version)
    except ConfigError as error:
        raise Refusal(str(error)) from error
    event = PolicyEvent(event=kind, policy=policy, version=version, channel=channel, reason=why, owner=viewer.name)
    await log.publish(topics.POLICIES, event)
    console.reading.forget_fresh()
    return _back("/versions", f"{action}: done" if version < 0 else f"{action} version {version}: done")


async def order(console: Console, viewer: Viewer, action: str, form: Form) -> Done:
    record = Directive(order=ORDERS[action], owner=viewer.name, reason=reason_in(form))
    await console.reading.log.publish(topics.POLICIES, record)
    console.reading.forget_fresh()
    return _back("/versions", "learning is paused" if action == "pause" else "learning continues")


async def redeliver(console: Console, viewer: Viewer, action: str, form: Form) -> Done:
    """Redeliver decodable dead letters, as `headrace reprocess dead-letters` does. The log records viewer and reason."""
    from streams.reprocess.letters import redeliver as deliver
    from streams.reprocess.run import ReprocessOrder, plan

    by, log = f"{viewer.name}: {reason_in(form)}", console.reading.log
    report = await deliver(log, await plan(log, ReprocessOrder(stage="dead-letters")), lambda count: None, by=by)
    went = ", ".join(f"{count:,} to {topic}" for topic, count in sorted(report.delivered.items())) or "none"
    left = ", ".join(f"{count:,} {why}" for why, count in sorted(report.refused.items()))
    return _back("/data", f"delivered again: {went}" + (f"; left: {left}" if left else ""))


async def reprocess(console: Console, viewer: Viewer, action: str, form: Form) -> Done:
    """Compare the recorded decisions with the rules of the settings file; one comparison at a time."""
    if not console.command:
        raise Refusal("an archive has no settings of stages to run")
    if console.is_comparing:
        raise Refusal("another comparison is running: wait until it ends")
    console.is_comparing = True
    try:
        return "reprocess.html", {"report": await compared(console.command, form)}
    finally:
        console.is_comparing = False


async def compared(command: Sequence[str], form: Form) -> dict[str, Any]:
    """The report of `headrace reprocess STAGE --diff`. It runs in its own process, since rules may take much memory.
    command: the arguments that name the run.
    """
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
        raise Refusal(
            f"longer than {REPROCESS_S:.0f} s: start from a later position, or use headrace reprocess"
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = words.decode(errors="replace").strip().splitlines()
        raise Refusal(lines[-1] if lines else f"it ended with {process.returncode}")
    if len(out) > MAX_REPORT:
        raise Refusal("the report is too long for a page: use headrace reprocess")
    try:
        report: dict[str, Any] = msgspec.json.decode(out)
    except msgspec.DecodeError as error:
        raise BadFrame(f"reprocess: {error}") from error
    return report


async def open_answer(console: Console, viewer: Viewer, action: str, form: Form) -> Done:
    """Show a sealed answer once, after the log has the viewer and the reason."""
    trace = await console.reading.answer(form.get("answer", ""))
    values = await answer_values(console, trace, opened=True)
    if values["view"]["shut"] == "forgotten":
        raise Refusal("its user was forgotten: it cannot be opened")
    record = Directive(order="open", owner=viewer.name, about=trace.id, reason=reason_in(form))
    await console.reading.log.publish(topics.POLICIES, record)
    return "answer.html", values


def _back(path: str, done: str) -> Response:
    return RedirectResponse(f"{path}?{urlencode({'done': done})}", status_code=303)


# Every action with its scope.
ACTIONS: Mapping[str, tuple[Scope, Callable[[Console, Viewer, str, Form], Awaitable[Done]]]] = {
    **{name: ("operate", move) for name in MOVES},
    **{name: ("operate", order) for name in ORDERS},
    "redeliver": ("operate", redeliver),
    "reprocess": ("operate", reprocess),
    "open": ("unseal", open_answer),
}
