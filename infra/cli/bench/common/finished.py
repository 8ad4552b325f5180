"""Runs of a sweep, kept in a file as they finish, so that an interrupted sweep continues where it stopped."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from schemas.errors import ConfigError

Run = TypeVar("Run")


class FinishedRuns(msgspec.Struct, frozen=True):
    """The file. settings: what its runs have in common, as JSON has it. runs: in the order they finished in."""

    settings: dict[str, object]
    runs: list[object]


def read_finished(file: Path | None, plan: msgspec.Struct, varied: Sequence[str], kind: type[Run]) -> list[Run]:
    """The runs in `file`, none where there is no file. Raises ConfigError if they were made under another plan.

    varied: fields of the plan that say which runs there are, not what one is.
    """
    if file is None or not file.is_file():
        return []
    try:
        found = msgspec.json.decode(file.read_bytes(), type=FinishedRuns)
        runs: list[Run] = [msgspec.convert(run, kind) for run in found.runs]
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{file}: got a file that is not a sweep ({error}), expected one; give another --out"
        ) from error
    asked = settings(plan, varied)
    if odd := [name for name in sorted({*asked, *found.settings}) if asked.get(name) != found.settings.get(name)]:
        raise ConfigError(f"{file}: got runs with other {', '.join(odd)}, expected the same; give another --out")
    return runs


def write_finished(file: Path, plan: msgspec.Struct, varied: Sequence[str], runs: Sequence[object]) -> None:
    """Replace the file, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    held = FinishedRuns(settings=settings(plan, varied), runs=msgspec.to_builtins(runs))
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(held), indent=1))
    temporary.replace(file)


def settings(plan: msgspec.Struct, varied: Sequence[str]) -> dict[str, object]:
    """What every run of a plan has in common, as JSON has it."""
    every: dict[str, object] = msgspec.json.decode(msgspec.json.encode(plan))
    return {name: value for name, value in every.items() if name not in varied}
