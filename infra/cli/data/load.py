"""`headrace load tasks|experts|pairs`: rows of a file, or of a taskset, into the log, with a progress bar."""

import asyncio
import hashlib
import json
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from rich.markup import escape
from rich.progress import Progress, TaskID

from infra.cli.connect import app_store, connected
from infra.cli.run.roles import model_folder
from infra.cli.settings import load_settings
from infra.cli.terminal import Screen, printable
from infra.log.log import Log
from infra.settings.plugin import add_plugin_folders, load
from schemas import Block, Experience, Task, topics
from schemas.errors import BadFrame, ConfigError
from schemas.experience import MAX_TOKENS

if TYPE_CHECKING:
    from actors.tasksets.files import Broken
    from actors.tasksets.loader import LoadResult

FIELDS = (
    "id",
    "messages",
    "prompt",
    "answer",
    "response",
    "chosen",
    "rejected",
    "workflow",
    "difficulty",
    "split",
    "subject",
    "parent",
    "meta",
)
MAX_NAMED = 20


async def run_load_tasks(
    file: Path | None,
    use: str,
    options: list[str],
    config: Path,
    sets: list[str],
    *,
    fields: list[str] | None = None,
    split: str = "",
    rates_from: str = "",
) -> int:
    """Load the tasks of a file or of the taskset `use`, and say how many were new, repeated, or there already.

    rates_from: app whose log tells how often they succeeded there.
    """
    from actors.tasksets.files import count_rows, read_rows
    from actors.tasksets.loader import load_tasks, rated, with_images

    if (file is None) == (not use):
        raise ConfigError("load tasks: got both or neither, expected a FILE or --use module:name")
    renamed = field_map(fields or [])
    settings = load_settings(config, sets)
    add_plugin_folders(settings.folder, settings.plugins)
    taskset = load(use, taskset_options(options), "--use") if use else None
    total = None if file is None else count_rows(file)
    async with connected(settings) as log:
        rates = await read_rates(log, rates_from) if rates_from else {}
        with progress_bar(f"tasks from {use or file}", total) as bar:
            if file is not None:
                read = read_rows(file, Task, fields=renamed, split=split, on_broken=bar.broken)
                rows = with_images(read, file, app_store(settings), bar.broken)
            else:
                assert taskset is not None
                rows = taskset()
            rows = rated(rows, rates, settings.tasks.difficulty.field)
            done = await load_tasks(log, rows, on_progress=bar.moved)
    return tell("tasks", done, bar)


async def read_rates(log: Log, app: str) -> dict[str, float]:
    """Success rates that another app of the broker recorded. Raises ConfigError where it has no topics."""
    from actors.tasksets.loader import recorded_rates

    other = Log(log.bus, app)
    await other.require_topics()
    return await recorded_rates(other)


async def run_load_answers(
    kind: Literal["experts", "pairs"],
    file: Path,
    config: Path,
    sets: list[str],
    *,
    fields: list[str] | None = None,
    split: str = "",
) -> int:
    """Load the demonstrations, or the preference pairs, of a file. split: of demonstrations."""
    from actors.tasksets.files import count_rows, read_rows
    from actors.tasksets.loader import different, load_experts, load_preferences, with_images
    from actors.tasksets.taskset import Demonstration, Preference
    from infra.model.model import context_tokens, load_tokenizer

    renamed = field_map(fields or [])
    settings = load_settings(config, sets)
    total = count_rows(file)
    async with connected(settings) as log:
        tokenizer = await asyncio.to_thread(load_tokenizer, model_folder(settings), settings.policy.template)
        max_tokens, store = context_tokens(settings.model_path) or MAX_TOKENS, app_store(settings)
        with progress_bar(f"{kind} from {file}", total) as bar:
            if kind == "experts":
                shown = read_rows(file, Demonstration, fields=renamed, split=split, on_broken=bar.broken)
                into = partial(load_experts, log, with_images(shown, file, store, bar.broken))
            else:
                pairs = read_rows(file, Preference, fields=renamed, on_broken=bar.broken)
                rows = different(with_images(pairs, file, store, bar.broken), bar.broken)
                into = partial(load_preferences, log, rows)
            done = await into(tokenizer, max_tokens=max_tokens, on_broken=bar.broken, on_progress=bar.moved)
    return tell(kind, done, bar)


def field_map(pairs: list[str]) -> dict[str, str]:
    """`field=column` pairs. Raises ConfigError.

    >>> field_map(["prompt=question", "meta.level=level"])
    {'prompt': 'question', 'meta.level': 'level'}
    """
    found: dict[str, str] = {}
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        if not (equals and ours and theirs):
            raise ConfigError(f"--map {pair}: expected field=column")
        if ours.partition(".")[0] not in FIELDS:
            raise ConfigError(f"--map {pair}: no field {ours!r}; expected one of {', '.join(FIELDS)} or meta.<name>")
        found[ours] = theirs
    return found


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


class Bar:
    """A progress bar on stderr; rows that cannot be read are named above it, the first few of them."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self.num_broken = 0
        self._progress = progress
        self._task = task

    def moved(self, rows: int) -> None:
        """Count the rows that were read."""
        self._progress.update(self._task, completed=rows + self.num_broken)

    def broken(self, row: "Broken") -> None:
        """A row that is passed over."""
        self.num_broken += 1
        if self.num_broken <= MAX_NAMED:
            self._progress.console.print(f"{row.where}: {row.reason}", style="yellow", markup=False)


@contextmanager
def progress_bar(title: str, total: int | None) -> Iterator[Bar]:
    """A bar for as long as the block takes."""
    with Progress(console=Screen(stderr=True, soft_wrap=True), transient=True) as bar:
        yield Bar(bar, bar.add_task(escape(printable(title)), total=total))


def tell(kind: str, done: "LoadResult", bar: Bar) -> int:
    """One line of counts; returns the exit code. Raises ConfigError where no row could be read."""
    if bar.num_broken and not (done.loaded or done.repeated or done.known):
        raise ConfigError(
            f"none of {bar.num_broken} rows could be read as {kind}; see above, and try --map field=column"
        )
    console = Screen(stderr=True)
    broken = f", {bar.num_broken} broken and passed over" if bar.num_broken else ""
    console.print(f"{done.loaded} {kind} loaded, {done.repeated} repeated, {done.known} there already{broken}")
    return 0


async def run_load_prompts(count: int, suite: str, config: Path, sets: list[str]) -> int:
    """Load the newest `count` different prompts of production as tasks of `suite`."""
    from actors.tasksets.loader import load_tasks

    settings = load_settings(config, sets)
    async with connected(settings) as log:
        found = await recorded(log)
        sealed = sum(bool(experience.key_id) for _, experience in found)
        tasks = list(islice(newest_prompts(found, suite), count))
        with progress_bar("recorded prompts", len(tasks)) as bar:
            done = await load_tasks(log, tasks, on_progress=bar.moved)
    if sealed:
        print(
            f"{sealed} answers were given to named users: what they asked is left out, for they may be forgotten",
            file=sys.stderr,
        )
    return tell("prompts", done, bar)


async def recorded(log: Log) -> list[tuple[int, Experience]]:
    """Production answers in the log with their times, ms."""
    found = []
    async for message in log.read_all(topics.EXPERIENCES):
        if isinstance(message.value, Block):
            found += [
                (message.timestamp_ms, experience)
                for experience in message.value.experiences
                if experience.lane == "live"
            ]
    return found


def newest_prompts(found: list[tuple[int, Experience]], suite: str) -> Iterator[Task]:
    """Tasks of different prompts, the newest first; those that are sealed or cannot be read are passed over."""
    seen: set[str] = set()
    for _, experience in sorted(found, key=lambda pair: pair[0], reverse=True):
        if experience.key_id:
            continue
        try:
            prompt = experience.messages[:-1]
        except BadFrame:
            continue
        name = hashlib.blake2b(json.dumps(msgspec.to_builtins(prompt)).encode(), digest_size=8).hexdigest()
        if prompt and name not in seen:
            seen.add(name)
            yield Task(
                id=f"{suite}-{name}",
                messages=prompt,
                split=suite,
                meta={"experience": experience.id},
            )
