"""`headrace load tasks|experts FILE`: rows of a file into the log, with a progress bar."""

import asyncio
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import Progress

from infra.cli.connect import connected
from infra.cli.roles import model_folder
from infra.cli.settings import load_settings
from schemas.errors import ConfigError


async def run_load(kind: Literal["tasks", "experts"], file: Path, config: Path, sets: list[str]) -> int:
    """Load a file and say how many rows were new, repeated, or there already."""
    from actors.loader import load_experts, load_tasks
    from actors.tasksets.jsonl import demonstrations, jsonl
    from infra.model import load_tokenizer

    settings = load_settings(config, sets)
    console = Console(stderr=True, highlight=False)
    try:
        with file.open("rb") as lines:
            total = sum(1 for line in lines if line.strip())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); expected a JSONL file") from error
    async with connected(settings) as log:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(f"{kind} from {file.name}", total=total)

            def on_progress(rows: int) -> None:
                bar.update(task, completed=rows)

            if kind == "tasks":
                done = await load_tasks(log, jsonl(path=str(file)), on_progress=on_progress)
            else:
                tokenizer = await asyncio.to_thread(load_tokenizer, model_folder(settings))
                done = await load_experts(log, demonstrations(path=str(file)), tokenizer, on_progress=on_progress)
    console.print(f"{done.loaded} {kind} loaded, {done.repeated} repeated in the file, {done.known} there already")
    return 0
