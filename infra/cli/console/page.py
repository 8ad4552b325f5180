"""Pages from templates: the values that every page gets, and how foreign text is made safe.

Guarantee: each value that a template shows went through `printable` and was escaped. Only our own code makes markup.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from infra.cli.console.access import ConsoleAccess, Viewer
from infra.cli.console.answers import Spell
from infra.cli.console.charts import short
from infra.cli.console.learning import Run
from infra.cli.console.reading import Reading
from infra.cli.terminal import printable
from infra.cli.times import clock

NAV = (
    ("/", "Flow"), ("/learning", "Learning"), ("/answers", "Answers"), ("/versions", "Versions"), ("/data", "Data"),
    ("/privacy", "Privacy"),
)  # fmt: skip
SHORT = 140


class Pages:
    """The templates of one run. command: the arguments that name the run for a command, none for an archive. beside: indexes
    of other runs. load_spell: loads a function from token ids to texts, None where there is no tokenizer; blocks.
    """

    def __init__(
        self, reading: Reading, access: ConsoleAccess, command: Sequence[str], beside: Sequence[Run] = ()
    ) -> None:
        self.reading = reading
        self.access = access
        self.command = tuple(command)
        self.beside = beside
        self.load_spell: Callable[[], Spell | None] = lambda: None
        self._spell: Spell | None = None
        self._is_spelled = False
        self.busy = False  # whether a reprocess runs
        self._environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined,
            finalize=_safe, trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self._environment.filters |= {
            "clock": clock, "iso": iso, "brief": brief, "short": short, "share": share, "signed": signed,
        }  # fmt: skip

    async def spell(self) -> Spell | None:
        """A function from token ids to texts. The first answer loads the tokenizer, so that no other page waits for it."""
        if not self._is_spelled:
            self._spell = await asyncio.to_thread(self.load_spell)
            self._is_spelled = True
        return self._spell

    def show(
        self, request: Request, viewer: Viewer | None, template: str, status: int = 200, **values: Any
    ) -> HTMLResponse:
        """Render a template as a response. viewer: None before signing in. values: for the template."""
        about = {
            "app": self.reading.settings.app,
            "path": request.url.path,
            "nav": NAV,
            "status": status,
            "viewer": viewer,
            "token": self.access.form_token(viewer) if viewer else "",
            "fault": self.reading.kept.fault if viewer else "",
            "folding": self.reading.folding if viewer else "",
            "unread": self.reading.unread if viewer else "",
            "can_act": bool(viewer and viewer.may("operate")),
            "done": request.query_params.get("done", "")[:200] if viewer else "",
        }
        text = self._environment.get_template(template).render(about | values)
        return HTMLResponse(text.encode("utf-8", "replace"), status_code=status)

    def sign_in(self, request: Request, why: str, status: int) -> HTMLResponse:
        """The sign-in page, with why it is shown."""
        return self.show(request, None, "enter.html", status, why=why)

    def error(self, request: Request, viewer: Viewer | None, status: int, why: str) -> HTMLResponse:
        """A page that says what is wrong."""
        return self.show(request, viewer, "error.html", status, why=why)


def _safe(value: object) -> object:
    """Foreign text with its control characters made visible; our own markup as it is."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


def iso(time_ms: float | None) -> str:
    """A time in UTC as machines read it; "" for none."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_ms / 1000)) if time_ms else ""


def brief(text: str | None) -> str:
    """The beginning of a text on one line."""
    words = " ".join((text or "")[: 4 * SHORT].split())
    return words if len(words) <= SHORT else words[: SHORT - 1] + "…"


def share(value: float | None) -> str:
    """A share in percent; a dash for none."""
    return "–" if value is None else f"{value:.1%}"


def signed(value: float | None) -> str:
    """A number with its sign; a dash for none."""
    return "–" if value is None else f"{value:+.3g}"
