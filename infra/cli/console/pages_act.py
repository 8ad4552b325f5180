"""The actions: each takes a checked form, writes one record to the log, and returns to a page."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from infra.cli.console import actions
from infra.cli.console.access import Viewer
from infra.cli.console.actions import MOVES, ORDERS, Refusal
from infra.cli.console.answers import shown
from infra.cli.console.letters import opened_letter
from infra.cli.console.page import Pages
from infra.cli.console.pages_look import letter_name, letter_place, show_answer, show_letter
from schemas.errors import BadFrame, Sealed

Form = Mapping[str, str]


async def move(pages: Pages, request: Request, viewer: Viewer, action: str, form: Form) -> Response:
    """promote, try, pin, unpin, rollback."""
    return _back("/versions", await actions.move(pages.reading, viewer, action, form))


async def order(pages: Pages, request: Request, viewer: Viewer, action: str, form: Form) -> Response:
    """pause, resume."""
    return _back("/versions", await actions.order(pages.reading, viewer, action, form))


async def redeliver(pages: Pages, request: Request, viewer: Viewer, action: str, form: Form) -> Response:
    """Deliver dead letters again."""
    return _back("/data", await actions.redeliver(pages.reading, viewer, form))


async def reprocess(pages: Pages, request: Request, viewer: Viewer, action: str, form: Form) -> Response:
    """What the rules of the settings file would change; one comparison at a time."""
    if not pages.command:
        raise Refusal("an archive has no settings of stages to run")
    if pages.busy:
        raise Refusal("a comparison runs already; wait for it")
    pages.busy = True
    try:
        report = await actions.reprocess(pages.command, form)
    finally:
        pages.busy = False
    return pages.show(request, viewer, "reprocess.html", report=report)


async def open_sealed(pages: Pages, request: Request, viewer: Viewer, action: str, form: Form) -> Response:
    """Show a sealed answer once, after the log has who opened it and why."""
    trace = await pages.reading.answer(form.get("answer", ""))
    if shown(trace, None, opened=False).shut == "forgotten":
        raise Refusal("its user was forgotten: it cannot be opened")
    await actions.open_sealed(pages.reading, viewer, trace.id, form)
    view = shown(trace, await pages.spell(), opened=True)
    return await show_answer(pages, request, viewer, trace, view, opened=True)


async def open_letter(pages: Pages, request: Request, viewer: Viewer, action: str, form: Form) -> Response:
    """Show a sealed letter once, after the log has who opened it and why."""
    place = letter_place(form.get("letter", "").split("/"))
    time_ms, found = await pages.reading.letter(*place)
    try:
        opened = await asyncio.to_thread(opened_letter, found, pages.reading.log.keys)
    except Sealed as error:
        raise Refusal("its user was forgotten: it cannot be opened") from error
    except BadFrame as error:
        raise Refusal(str(error)) from error
    await actions.open_sealed(pages.reading, viewer, letter_name(place), form)
    return await show_letter(pages, request, viewer, place, (time_ms, opened), opened=True)


def _back(path: str, done: str) -> Response:
    return RedirectResponse(f"{path}?{urlencode({'done': done})}", status_code=303)


ACTIONS: Mapping[str, Callable[[Pages, Request, Viewer, str, Form], Awaitable[Response]]] = {
    **dict.fromkeys(MOVES, move),
    **dict.fromkeys(ORDERS, order),
    "redeliver": redeliver,
    "reprocess": reprocess,
    "open": open_sealed,
    "open-letter": open_letter,
}
