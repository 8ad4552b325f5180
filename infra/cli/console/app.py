"""The web application: its addresses, who may use each, and the headers of every response.

Guarantees: by these headers a browser runs only the one script, loads nothing from elsewhere, and shows no page in a frame.
Every page and every action is behind `ConsoleAccess`. A GET changes nothing.
"""

import logging
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.gateway.access.keys import Refused
from actors.gateway.access.keys import Scope as KeyScope
from infra.cli.console.access import ConsoleAccess, Forbidden, Viewer, check_origin
from infra.cli.console.actions import SCOPES, Refusal
from infra.cli.console.page import Pages
from infra.cli.console.pages_act import ACTIONS
from infra.cli.console.pages_look import LOOKS
from infra.cli.console.reading import NotReadYet
from schemas.errors import HeadraceError, NotInLog

HERE = Path(__file__).parent
MAX_BODY = 16 * 1024
MAX_FIELDS = 64
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
WHY = {
    "missing": "Sign in with a key that has the scope look, operate or unseal.",
    "wrong": "That key opens nothing here.",
    "revoked": "That key was revoked.",
    "expired": "That key has expired, or your session has ended.",
}
Look = Callable[[Pages, Request, Viewer], Awaitable[Response]]
Act = Callable[[Pages, Request, Viewer, str, Mapping[str, str]], Awaitable[Response]]

_log = logging.getLogger(__name__)


def make_app(pages: Pages, access: ConsoleAccess, *, hosts: tuple[str, ...], port: str, own: str) -> ASGIApp:
    """The console over one run. hosts: names a request may be for. port: that it listens on, which its cookie is named after.
    own: the origin of its pages behind TLS, "" without.
    """
    doors = Doors(pages, access, port, own)
    app = Starlette(
        routes=[
            Route("/enter", doors.enter, methods=["GET", "POST"]),
            Route("/leave", doors.leave, methods=["POST"]),
            Route("/actions/{action}", doors.act, methods=["POST"]),
            Mount("/assets", StaticFiles(directory=HERE / "assets")),
            *[Route(path, doors.looking(look), methods=["GET"]) for path, look in LOOKS.items()],
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[*hosts], www_redirect=False)],
        exception_handlers={404: doors.missing, 500: doors.broken},
    )
    return Headed(
        app
    )  # around all of it: Starlette answers for a page that broke outside of an application's middleware


class Doors:
    """Checks each request before its page or action."""

    def __init__(self, pages: Pages, access: ConsoleAccess, port: str, own: str) -> None:
        self._pages = pages
        self._access = access
        self._own = own
        # Of `__Host-` browsers take no cookie that came without TLS or was set by another host of the domain.
        self._cookie = f"__Host-headrace_{port}" if own else f"headrace_{port}"

    def looking(self, look: Look) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint of a page, for viewers who may look."""

        async def endpoint(request: Request) -> Response:
            try:
                viewer = await self._viewer(request)
            except Refused as error:
                return self._pages.sign_in(request, WHY[error.reason], 401)
            if not viewer.may("look"):
                return self._pages.sign_in(request, "That key may not look.", 403)
            return await self._answered(request, viewer, lambda: look(self._pages, request, viewer))

        return endpoint

    async def act(self, request: Request) -> Response:
        """An action, for viewers whose key has its scope, from a form of their own session."""
        action = str(request.path_params["action"])
        if action not in SCOPES:
            return self._pages.error(request, None, 404, "There is no such action.")
        do = ACTIONS[action]
        return await self._posted(
            request, SCOPES[action], lambda viewer, form: do(self._pages, request, viewer, action, form)
        )

    async def enter(self, request: Request) -> Response:
        """Sign in with a key, or with the link that was printed."""
        await self._access.refresh()
        try:
            if request.method == "POST":
                check_origin(request.headers, self._own)
                presented = (await form_of(request)).get("key", "").strip()
            else:
                presented = request.query_params.get("link", "")
                if not presented:
                    return self._pages.sign_in(request, "", 200)
            value = self._access.enter(presented)
        except Refused as error:
            return self._pages.sign_in(request, WHY[error.reason], 401)
        except Forbidden as error:
            return self._pages.sign_in(request, str(error), 403)
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(self._cookie, value, httponly=True, samesite="strict", secure=bool(self._own))
        return answer

    async def leave(self, request: Request) -> Response:
        """Sign out: end the viewer's session."""

        async def ended(viewer: Viewer, form: Mapping[str, str]) -> Response:
            self._access.leave(viewer)
            answer = RedirectResponse("/enter", status_code=303)
            answer.delete_cookie(self._cookie, httponly=True, samesite="strict", secure=bool(self._own))
            return answer

        return await self._posted(request, "look", ended)

    async def missing(self, request: Request, error: Exception) -> Response:
        """There is no such page."""
        return self._pages.error(request, None, 404, "There is no such page.")

    async def broken(self, request: Request, error: Exception) -> Response:
        """The page of an unexpected error. The log has the details."""
        _log.error("page_broke path=%s", request.url.path, exc_info=error)
        return self._pages.error(request, None, 500, "This page broke; the console's log says how.")

    async def _viewer(self, request: Request) -> Viewer:
        await self._access.refresh()
        return self._access.viewer(request.cookies.get(self._cookie, ""))

    async def _posted(
        self, request: Request, needed: KeyScope, done: Callable[[Viewer, Mapping[str, str]], Awaitable[Response]]
    ) -> Response:
        """Do it if the viewer's key has the scope and the form is of their session. Else the page says why not."""
        try:
            check_origin(request.headers, self._own)
            viewer = await self._viewer(request)
            form = await form_of(request)
            self._access.check_form(viewer, needed, form)
        except Refused as error:
            return self._pages.sign_in(request, WHY[error.reason], 401)
        except Forbidden as error:
            return self._pages.error(request, None, 403, str(error))
        return await self._answered(request, viewer, lambda: done(viewer, form))

    async def _answered(self, request: Request, viewer: Viewer, answer: Callable[[], Awaitable[Response]]) -> Response:
        try:
            return await answer()
        except NotInLog as error:
            return self._pages.error(request, viewer, 404, str(error))
        except NotReadYet as error:
            return self._pages.error(request, viewer, 503, str(error))
        except Refusal as error:
            return self._pages.error(request, viewer, 400, str(error))
        except sqlite3.OperationalError as error:
            _log.warning("index_not_read path=%s error=%s", request.url.path, error)
            return self._pages.error(request, viewer, 503, "The index is being built anew: look again in a moment.")
        except HeadraceError as error:
            _log.warning("page_failed path=%s error=%s", request.url.path, error)
            return self._pages.error(request, viewer, 503, str(error))


class Headed:
    """Puts HEADERS on every response. Browsers may keep the stylesheet and the script, for a minute."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                held = HEADERS | ({"Cache-Control": "max-age=60"} if scope["path"].startswith("/assets/") else {})
                names = {name.lower().encode() for name in held}
                kept = [pair for pair in message["headers"] if pair[0].lower() not in names]
                message["headers"] = kept + [(name.lower().encode(), value.encode()) for name, value in held.items()]
            await send(message)

        await self.app(scope, receive, headed if scope["type"] == "http" else send)


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form. Raises Forbidden where there are too many or the form is too long."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise Forbidden(f"the form is longer than {MAX_BODY:,} bytes")
    try:
        return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MAX_FIELDS))
    except ValueError as error:
        raise Forbidden(f"the form has more than {MAX_FIELDS} fields") from error
