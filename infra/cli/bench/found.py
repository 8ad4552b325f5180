"""What all benchmarks share: their finds, and how a command prints these. Which there are: `infra.cli.commands.measure`."""

import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import msgspec

from infra.cli.options import JsonOption, exit_with

if TYPE_CHECKING:
    from rich.console import RenderableType

    from infra.cli.bench.beside import Beside

STDOUT, STDERR = 1, 2  # descriptors


class Found(msgspec.Struct, frozen=True):
    """What a benchmark found. figures: as JSON has them. shown: what a person reads instead, by default the figures beside
    their targets; width: of that, in columns. code: the exit code.
    """

    figures: Any
    shown: "Callable[[], Sequence[RenderableType]] | None" = None
    width: int | None = None
    code: int = 0


def command(name: str, bench: Callable[..., Found | list[Found]]) -> Callable[..., None]:
    """What prints the finds of a benchmark, and has its options and `--json`."""

    def run(as_json: bool, **asked: Any) -> None:
        exit_with(lambda: show(name, measured(lambda: bench(**asked), as_json), as_json))

    json_flag = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption)
    taken = (*inspect.signature(bench).parameters.values(), json_flag)
    run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in taken}
    run.__doc__ = bench.__doc__
    return run


def measured(bench: Callable[[], Found | list[Found]], as_json: bool) -> Found | list[Found]:
    """What it finds. as_json: what libraries and processes print meanwhile goes to stderr, so that stdout is JSON only."""
    if not as_json:
        return bench()
    sys.stdout.flush()
    kept = os.dup(STDOUT)
    try:
        os.dup2(STDERR, STDOUT)
        with redirect_stdout(sys.stderr):
            return bench()
    finally:
        os.dup2(kept, STDOUT)
        os.close(kept)


def show(name: str, found: Found | list[Found], as_json: bool) -> int:
    """Print it; the exit code. Targets are shown, never asserted."""
    from infra.cli.bench.tables import figures_table
    from infra.cli.terminal import Screen

    several = found if isinstance(found, list) else [found]
    for one in several:
        if as_json:
            print(json.dumps(one.figures))
            continue
        for piece in one.shown() if one.shown else [figures_table(name, one.figures)]:
            Screen(width=one.width).print(piece)
    return max(one.code for one in several)


def tell(line: str) -> None:
    """Progress goes to stderr, a line each whatever reads it."""
    from infra.cli.terminal import Screen

    Screen(stderr=True, soft_wrap=True).print(line)


def some_of(option: str, asked: str, known: Collection[str]) -> list[str]:
    """Names by commas. Raises ConfigError for one that is not known."""
    from schemas.errors import ConfigError

    wanted = [name for name in asked.split(",") if name]
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"{option}: got {unknown[0]!r}, expected some of {', '.join(known)}")
    return wanted


def one_of(option: str, asked: str, known: Collection[str]) -> str:
    """The name. Raises ConfigError where it is not known."""
    from schemas.errors import ConfigError

    if asked not in known:
        raise ConfigError(f"{option}: got {asked!r}, expected {' or '.join(known)}")
    return asked


def beside(name: str, found: "Sequence[Beside]") -> Found:
    """Ours and its peers, as one table."""
    from infra.cli.bench.tables import beside_table

    return Found(msgspec.to_builtins(found), lambda: [beside_table(name, found)], width=130)
