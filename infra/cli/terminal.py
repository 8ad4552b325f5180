"""Foreign text on a terminal and in logs: prompts, answers, names, errors and all else that others wrote.

Guarantee: text is text. Escape sequences, cursor moves, bidirectional overrides and lone surrogates are shown as `\\x1b`,
markup unchanged; only the styles of our own code reach the terminal. Every command prints through `Screen` or
`printable`; a log record is one line, but for its traceback.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

# C0 but for tab and line feed, DEL and C1, marks of text direction, line separators, halves of characters.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_IN_JSON = re.compile(
    "[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)  # the rest is escaped there


def printable(text: str) -> str:
    r"""The text with control characters of terminals as escapes; tabs and line feeds stay.

    >>> printable("a\x1b]52;c;aGk=\x07b")
    'a\\x1b]52;c;aGk=\\x07b'
    """
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


def printable_json(text: str) -> str:
    """The same JSON value, with the unsafe characters that JSON allows written as escapes."""
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class Screen(Console):
    """A console for foreign text: no markup, and nothing but its own styles moves the terminal."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False, **options: Any) -> None:
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def two_columns(title: str, rows: Iterable[tuple[str, ...]], *, numbers: bool = True) -> Table:
    """A table of names and values without a header. rows: Name, value, and a style where the row has one."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right" if numbers else "left")
    for name, value, *style in rows:
        table.add_row(name, value, style=style[0] if style else None)
    return table


@contextmanager
def bar(console: Console, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that the given function moves on by a number; more than `total` makes it grow."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=total)
        done = 0

        def moved(count: int) -> None:
            nonlocal done
            done += count
            progress.update(task, completed=done, total=max(total, done))

        yield moved


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    print(printable_json(msgspec.json.encode(value, enc_hook=str).decode()))


class LineFormatter(logging.Formatter):
    """Log records of one line each, printable."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class JsonFormatter(logging.Formatter):
    """Log records as one JSON object a line: time (UTC), level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{second}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return printable_json(json.dumps(fields, ensure_ascii=False))


def clock(time_ms: float | None) -> str:
    """Local time of a log-append time in milliseconds, "" for none.

    >>> clock(0), clock(None), len(clock(1_763_715_600_000))
    ('', '', 14)
    """
    return time.strftime("%m-%d %H:%M:%S", time.localtime(time_ms / 1000)) if time_ms else ""


def span(seconds: float) -> str:
    """A duration in its largest fitting unit.

    >>> span(84_000), span(90), span(0.4)
    ('23 h', '2 min', '0 s')
    """
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
