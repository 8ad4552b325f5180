"""The web application: its addresses, the scope of each, and the headers of every response.

Guarantees: by these headers a browser runs only the console's own scripts, loads nothing from elsewhere, and shows no page in a
frame. Every page is behind `ConsoleAccess`. A GET changes nothing. Each value that a template shows went
through `printable` and was escaped.
"""

import logging
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.gateway.access.keys import Refused
from infra.cli.console.access import LIVES_S, ConsoleAccess, Forbidden, Viewer, check_form, check_origin
from infra.cli.console.flow import short
from infra.cli.console.pages import PAGES, Console, Refusal, open_answer
from infra.cli.console.reading import NotReadYet
from infra.cli.terminal import clock, printable
from schemas.errors import HeadraceError, NotInLog

HERE = Path(__file__).parent
MAX_BODY = 16 * 1024
MAX_FIELDS = 64
BRIEF = 140  # characters of a text in a list
LOOK_S = 0.5  # for the log, to say how far the index is
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
NAV = (
    ("/", "Flow"), ("/learning", "Learning"), ("/answers", "Answers"), ("/versions", "Versions"), ("/data", "Data"),
    ("/privacy", "Privacy"),
)  # fmt: skip
WHY = {
    "missing": "Sign in with a key that has the scope look or unseal.",
    "wrong": "The key is unknown to this console.",
    "revoked": "That key was revoked.",
    "expired": "That key has expired, or your session has ended.",
}
# Status of an error's page, by the first class that matches.
FAULTS: tuple[tuple[type[Exception], int], ...] = (
    (Forbidden, 403), (NotInLog, 404), (NotReadYet, 503), (Refusal, 400), (HeadraceError, 503),
)  # fmt: skip

_log = logging.getLogger(__name__)


def make_app(console: Console, access: ConsoleAccess, *, hosts: tuple[str, ...], port: str, own: str) -> ASGIApp:
    """The console over a run. hosts: allowed names in the Host header. port: port it listens on, part of the name of its
    cookie. own: the origin of its pages behind TLS, "" without.
    """
    site = _Site(console, access, own)
    app = Starlette(
        routes=[
            Route("/enter", site.enter, methods=["GET", "POST"]),
            Route("/leave", site.leave, methods=["POST"]),
            Route("/open", site.open, methods=["POST"]),
            Mount("/assets", StaticFiles(directory=HERE / "assets")),
            *[Route(path, site.page(path), methods=["GET"]) for path in PAGES],
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=[*hosts], www_redirect=False),
            Middleware(
                SessionMiddleware, secret_key=secrets.token_hex(32), max_age=LIVES_S, same_site="strict", https_only=bool(own),
                # Browsers reject a cookie named `__Host-…` without TLS or from another host of the domain.
                session_cookie=f"__Host-headrace_{port}" if own else f"headrace_{port}",
            ),
        ],
        exception_handlers={404: site.missing, 500: site.broken},
    )  # fmt: skip
    # Outside of everything: Starlette answers for a failed page outside of an application's middleware.
    return SecurityHeaders(app)


class SecurityHeaders:
    """Puts HEADERS on every response. Browsers may keep the assets for a minute."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = HEADERS | ({"Cache-Control": "max-age=60"} if scope.get("path", "").startswith("/assets/") else {})
        own = {name.lower().encode(): value.encode() for name, value in held.items()}

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message["headers"] if pair[0].lower() not in own] + [
                    *own.items()
                ]
            await send(message)

        await self.app(scope, receive, add if scope["type"] == "http" else send)


class _Site:
    def __init__(self, console: Console, access: ConsoleAccess, own: str) -> None:
        self._console = console
        self._access = access
        self._own = own
        self._templates = Environment(
            loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, finalize=_safe,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self._templates.filters |= {
            "clock": clock, "iso": iso, "brief": brief, "short": short, "share": share, "signed": signed,
        }  # fmt: skip

    def page(self, path: str) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint of a page, for viewers with a scope of the console."""
        template, read = PAGES[path]

        async def answer(request: Request) -> Response:
            return await self._checked(request, lambda viewer: read(self._console, request), template)

        return answer

    async def open(self, request: Request) -> Response:
        """A sealed answer, for viewers whose key may unseal, from a form of their own session."""

        async def opened(viewer: Viewer) -> dict[str, Any]:
            form = await read_form(request)
            check_form(viewer, "unseal", form)
            return await open_answer(self._console, viewer, form)

        return await self._checked(request, opened, "answer.html")

    async def enter(self, request: Request) -> Response:
        await self._access.refresh()
        try:
            if request.method == "POST":
                check_origin(request.headers, self._own)
                presented = (await read_form(request)).get("key", "").strip()
            else:
                presented = request.query_params.get("link", "")
                if not presented:
                    return await self._show(request, None, "enter.html", 200, why="")
            self._access.enter(presented, request.session)
        except Refused as error:
            return await self._show(request, None, "enter.html", 401, why=WHY[error.reason])
        except Forbidden as error:
            return await self._show(request, None, "enter.html", 403, why=str(error))
        return RedirectResponse("/", status_code=303)

    async def leave(self, request: Request) -> Response:
        async def ended(viewer: Viewer) -> Response:
            check_form(viewer, "look", await read_form(request))
            self._access.leave(request.session)
            return RedirectResponse("/enter", status_code=303)

        return await self._checked(request, ended)

    async def missing(self, request: Request, error: Exception) -> Response:
        return await self._error(request, None, 404, "Unknown page.")

    async def broken(self, request: Request, error: Exception) -> Response:
        """The page of an unexpected error. The log has the details."""
        _log.error("page_broke path=%s", request.url.path, exc_info=error)
        return await self._error(request, None, 500, "The page failed; the console's log has the error.")

    async def _checked(
        self, request: Request, read: Callable[[Viewer], Awaitable[dict[str, Any] | Response]], template: str = ""
    ) -> Response:
        """The rendered result of `read` if the viewer has access, else a page with the reason."""
        viewer = None
        try:
            if request.method == "POST":
                check_origin(request.headers, self._own)
            await self._access.refresh()
            viewer = self._access.viewer(request.session)
            if not viewer.may("look"):
                return await self._show(request, None, "enter.html", 403, why="The key has no scope of the console.")
            found = await read(viewer)
            if isinstance(found, Response):
                return found
            return await self._show(request, viewer, template, **found)
        except Refused as error:
            return await self._show(request, None, "enter.html", 401, why=WHY[error.reason])
        except sqlite3.OperationalError as error:
            _log.warning("index_not_read path=%s error=%s", request.url.path, error)
            return await self._error(request, viewer, 503, "The index is being rebuilt: reload the page in a moment.")
        except (Forbidden, Refusal, HeadraceError) as error:
            status = next(status for kind, status in FAULTS if isinstance(error, kind))
            if status == 503:
                _log.warning("page_failed path=%s error=%s", request.url.path, error)
            return await self._error(request, None if status == 403 else viewer, status, str(error))

    async def _error(self, request: Request, viewer: Viewer | None, status: int, why: str) -> HTMLResponse:
        return await self._show(request, viewer, "error.html", status, why=why)

    async def _show(
        self, request: Request, viewer: Viewer | None, template: str, status: int = 200, **values: Any
    ) -> HTMLResponse:
        known = await self._console.reading.look(LOOK_S) if viewer else None
        about = {
            "app": self._console.reading.settings.app,
            "path": request.url.path,
            "nav": NAV,
            "status": status,
            "viewer": viewer,
            "token": viewer.token if viewer else "",
            "fault": known.fault if known else "",
            "building": known.building if known else "",
            "unread": known.unread if known else "",
            "may_open": bool(viewer and viewer.may("unseal")),
        }
        text = self._templates.get_template(template).render(about | values)
        return HTMLResponse(text.encode("utf-8", "replace"), status_code=status)


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form. Raises Forbidden for too many fields or a form that is too long."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise Forbidden(f"the form is longer than {MAX_BODY:,} bytes")
    try:
        return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MAX_FIELDS))
    except ValueError as error:
        raise Forbidden(f"the form has more than {MAX_FIELDS} fields") from error


def _safe(value: object) -> object:
    """Foreign text with its control characters made visible; markup of the templates is unchanged."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def iso(time_ms: float | None) -> str:
    """A time in UTC in ISO 8601; "" for none."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_ms / 1000)) if time_ms else ""


def brief(text: str | None) -> str:
    """The beginning of a text on one line."""
    words = " ".join((text or "")[: 4 * BRIEF].split())
    return words if len(words) <= BRIEF else words[: BRIEF - 1] + "…"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3g}"
