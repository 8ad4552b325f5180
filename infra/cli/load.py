"""`headrace load tasks|experts`: rows of a file, or of a taskset, into the log, with a progress bar."""

import asyncio
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from infra.cli.connect import connected
from infra.cli.roles import model_folder
from infra.cli.settings import load_settings
from infra.plugin import add_plugin_folders, load
from schemas.errors import ConfigError


async def run_load_tasks(file: Path | None, use: str, options: list[str], config: Path, sets: list[str]) -> int:
    """Load the tasks of a file or of the taskset `use`, and say how many were new, repeated, or there already."""
    from actors.loader import load_tasks
    from actors.tasksets.jsonl import jsonl

    if (file is None) == (not use):
        raise ConfigError("load tasks: got both or neither, expected a FILE or --use module:name")
    settings = load_settings(config, sets)
    add_plugin_folders(settings.folder, settings.plugins)
    taskset = load(use, taskset_options(options), "--use") if use else None
    total = None if file is None else count_lines(file)
    async with connected(settings) as log:
        with progress_bar(f"tasks from {use or file}", total) as on_progress:
            rows = taskset() if taskset is not None else jsonl(path=str(file))
            done = await load_tasks(log, rows, on_progress=on_progress)
    tell("tasks", done)
    return 0


async def run_load_experts(file: Path, config: Path, sets: list[str]) -> int:
    """Load the demonstrations of a file."""
    from actors.loader import load_experts
    from actors.tasksets.jsonl import demonstrations
    from infra.model import load_tokenizer

    settings = load_settings(config, sets)
    total = count_lines(file)
    async with connected(settings) as log:
        tokenizer = await asyncio.to_thread(load_tokenizer, model_folder(settings))
        with progress_bar(f"demonstrations from {file}", total) as on_progress:
            done = await load_experts(log, demonstrations(path=str(file)), tokenizer, on_progress=on_progress)
    tell("experts", done)
    return 0


def taskset_options(options: list[str]) -> dict[str, Any]:
    """`name=value` pairs: TOML values, bare strings allowed. Raises ConfigError."""
    found: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or not name:
            raise ConfigError(f"--option {option}: expected name=value")
        try:
            found[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = text
    return found


def count_lines(file: Path) -> int:
    """Lines that hold something. Raises ConfigError for a file that cannot be read."""
    try:
        with file.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); expected a JSONL file") from error


@contextmanager
def progress_bar(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, and the function that moves it to a number of rows."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda rows: bar.update(task, completed=rows)


def tell(kind: str, done: Any) -> None:
    """One line of counts."""
    console = Console(stderr=True, highlight=False)
    console.print(f"{done.loaded} {kind} loaded, {done.repeated} repeated, {done.known} there already")
