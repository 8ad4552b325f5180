"""Shared parts of commands: the options that name the settings, and how a body's mistakes become one line and an exit code."""

import asyncio
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import msgspec
import typer

from infra.cli.exit_codes import DONE, FAILED, INTERRUPTED, exit_code

if TYPE_CHECKING:
    from infra.cli.settings import Settings

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
UMASK = "HEADRACE_UMASK"
OWNERS_ALONE = 0o077


class SettingsFile(msgspec.Struct, frozen=True):
    """The options that name the settings."""

    config: Annotated[
        Path,
        typer.Option(
            "--config", "-c", help="The TOML file.", show_default=True, metavar="FILE", rich_help_panel="Settings"
        ),
    ] = Path("headrace.toml")
    sets: Annotated[
        list[str],
        typer.Option("--set", help="Override one setting, as a.b=c.", metavar="A.B=C", rich_help_panel="Settings"),
    ] = []

    def load(self) -> "Settings":
        """Read and check them. Raises ConfigError."""
        from infra.cli.settings import load_settings

        return load_settings(self.config, self.sets)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments by which another process reads the same settings."""
        sets = (argument for each in self.sets for argument in ("--set", each))
        return ("--config", str(self.config.resolve()), *sets)


def file_umask(environment: Mapping[str, str]) -> int:
    """Umask of files that headrace makes: others may do nothing, unless HEADRACE_UMASK allows more (027 lets a group read).
    Secrets are private to their owner at any value of HEADRACE_UMASK.
    """
    mask = environment.get(UMASK, "")
    return int(mask, 8) if mask and len(mask) <= 4 and set(mask) <= set("01234567") else OWNERS_ALONE


def flags(body: Callable[..., Any]) -> Callable[..., Any]:
    """Replace each parameter that is a record by its fields, since Typer makes a flag of each parameter."""
    parameters: list[inspect.Parameter] = []
    records: dict[str, type[msgspec.Struct]] = {}
    for parameter in inspect.signature(body).parameters.values():
        if not (inspect.isclass(parameter.annotation) and issubclass(parameter.annotation, msgspec.Struct)):
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            continue
        records[parameter.name] = parameter.annotation
        hints = get_type_hints(parameter.annotation, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name,
                parameter.KEYWORD_ONLY,
                default=[] if field.default is msgspec.NODEFAULT else field.default,
                annotation=hints[field.name],
            )
            for field in msgspec.structs.fields(parameter.annotation)
        ]

    @functools.wraps(body)
    def run(**values: Any) -> Any:
        for name, record in records.items():
            values[name] = record(**{field: values.pop(field) for field in record.__struct_fields__})
        return body(**values)

    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


def command(body: Callable[..., Coroutine[Any, Any, int] | int]) -> Callable[..., None]:
    """A command of Typer from a function that returns its exit code; its mistakes become a line each, see `exit_with`."""

    @functools.wraps(body)
    def run(**values: Any) -> None:
        exit_with(lambda: body(**values))

    return flags(run)


def exit_with(
    body: Callable[[], Coroutine[Any, Any, int] | int],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run a command body; its mistakes become one line and an exit code of `infra.cli.exit_codes`."""
    try:
        result = body()
        if isinstance(result, int):
            code = result
        else:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                code = runner.run(result)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # `headrace peek … | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = DONE
    except Exception as error:
        code = _tell(error)
    raise typer.Exit(code)


def _tell(error: Exception) -> int:
    """Print each HeadraceError as one line, any other error with its traceback; returns the exit code."""
    from infra.cli.terminal import printable
    from schemas.errors import HeadraceError, causes

    errors = causes(error)
    if not all(isinstance(leaf, HeadraceError) for leaf in errors):
        print(printable("".join(traceback.format_exception(error))), file=sys.stderr, end="")
        return FAILED
    for line in dict.fromkeys(f"headrace: {leaf}" for leaf in errors):
        print(printable(line), file=sys.stderr)
    return exit_code(errors)
