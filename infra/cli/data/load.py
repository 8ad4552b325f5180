"""`headrace load tasks|experts|pairs`: rows of a file, or of a taskset, into the log, with a progress bar."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.markup import escape
from rich.progress import Progress, TaskID

from infra.chain.processor import Drop
from infra.cli.connect import app_store, connected
from infra.cli.exit_codes import DONE, FAILED
from infra.cli.options import SettingsFile, command
from infra.cli.run.roles import model_folder
from infra.cli.terminal import Screen, printable
from infra.settings.config import apply_set
from infra.settings.plugin import add_plugin_folders, load
from schemas import Task
from schemas.errors import ConfigError
from schemas.experience import MAX_TOKENS

if TYPE_CHECKING:
    from actors.tasksets.files import Broken, OnBroken
    from actors.tasksets.loader import LoadResult
    from infra.cli.settings import Settings

FIELDS = (
    "id", "messages", "prompt", "answer", "response", "chosen", "rejected", "workflow", "difficulty", "split", "subject",
    "parent", "meta",
)  # fmt: skip
MAX_NAMED = 20


FileArgument = Annotated[Path, typer.Argument(help="JSONL or Parquet.")]
MapOption = Annotated[list[str], typer.Option("--map", help="Column of a field, as field=column; also for meta.name.")]
SplitOption = Annotated[str, typer.Option(help="Split of rows without a split.")]


class TaskSource(msgspec.Struct, frozen=True):
    """The options that say where tasks come from."""

    file: Annotated[Path | None, typer.Argument(help="JSONL or Parquet.")] = None
    dataset: Annotated[str, typer.Option(help="Hugging Face data set, as owner/name or owner/name:configuration.")] = ""
    use: Annotated[str, typer.Option(help="Taskset, as module:name.")] = ""
    options: Annotated[list[str], typer.Option("--option", help="Option of the taskset, as name=value.")] = []
    fields: MapOption = []
    split: SplitOption = ""

    @property
    def shown(self) -> str:
        """Name of the source."""
        return self.dataset or self.use or str(self.file)

    def open(self, settings: "Settings") -> tuple[int | None, Callable[["OnBroken"], Iterable[Task]]]:
        """The number of rows, None where it is unknown, and a function that reads them as tasks. Raises ConfigError."""
        from actors.tasksets.files import as_rows, read_rows
        from actors.tasksets.hub import HubRows
        from actors.tasksets.loader import with_images

        if (self.file is not None) + bool(self.use) + bool(self.dataset) != 1:
            raise ConfigError("load tasks: expected one of a FILE, --dataset owner/name and --use module:name")
        fields = field_map(self.fields)
        if self.dataset:
            found = HubRows(self.dataset, self.split)
            return len(found), lambda broken: as_rows(
                found.cells(), Task, fields=fields, split=self.split, on_broken=broken
            )
        if self.use:
            options: dict[str, Any] = {}
            for option in self.options:
                apply_set(options, option, "--option")
            taskset = load(self.use, options, "--use")
            return None, lambda broken: taskset()
        file = self.file
        assert file is not None
        return None, lambda broken: with_images(
            read_rows(file, Task, fields=fields, split=self.split, on_broken=broken), file, app_store(settings), broken
        )


@command
async def tasks(
    chosen: SettingsFile,
    source: TaskSource,
    validate: Annotated[
        bool, typer.Option("--validate", help="Load nothing; list tasks whose own answer scores below 1.0.")
    ] = False,
) -> int:
    """Load tasks of a file, of a data set or of a taskset: {"id": …, "messages": […] or "prompt": …, "answer": …} per row.

    The command reports and skips broken rows. After an interruption, run it again to continue. --validate scores each task's
    own answer with the scores of the settings; exit code 1: a score is below 1.0, so no answer can earn the full reward.

    Example: [cyan]headrace load tasks gsm8k.parquet --map prompt=question[/],
    [cyan]headrace load tasks --dataset openai/gsm8k:main --split train --map prompt=question[/] or
    [cyan]headrace load tasks --use actors.tasksets.reasoning_gym:reasoning_gym --option generator=chain_sum[/]
    """
    from actors.tasksets.loader import load_tasks

    settings = chosen.load()
    add_plugin_folders(settings.folder, settings.plugins)
    total, read = await asyncio.to_thread(source.open, settings)
    with progress_bar(f"tasks from {source.shown}", total) as bar:
        if validate:
            return await validated(settings, read(bar.broken), bar)
        async with connected(settings) as log:
            done = await load_tasks(log, read(bar.broken), on_broken=bar.broken, on_progress=bar.moved)
    return tell("tasks", done, bar)


async def validated(settings: "Settings", rows: Iterable[Task], bar: "Bar") -> int:
    """Put each task's own answer before the scores; returns the exit code. Raises ConfigError without a score."""
    from streams.stages.chain_builder import verifiable

    names = settings.tasks.filter.scores or tuple(score.name for score in settings.score)
    if not names:
        raise ConfigError("load tasks --validate: got settings without [[score]], expected at least one")
    check = verifiable(settings.streams(), names)
    num_tasks = num_rejected = 0
    for task in rows:
        verdict = await check(task)
        num_tasks += 1
        if isinstance(verdict, Drop):
            num_rejected += 1
            if num_rejected <= MAX_NAMED:
                bar.say(verdict.detail)
        bar.moved(num_tasks)
    by = ", ".join(names)
    bar.say(
        f"{num_tasks - num_rejected} of {num_tasks} tasks: their own answer gets 1.0 by {by}; {bar.num_broken} rows broken"
    )
    return FAILED if num_rejected or not num_tasks else DONE


@command
async def experts(
    chosen: SettingsFile,
    file: FileArgument,
    fields: MapOption = [],  # noqa: B006
    split: SplitOption = "",
) -> int:
    """Load demonstrations: {"id": …, "messages": […] or "prompt": …, "response": …}, tokenized with the model's tokenizer.

    Example: [cyan]headrace load experts worked.jsonl[/]
    """
    return await _load_answers("experts", chosen, file, fields, split)


@command
async def pairs(chosen: SettingsFile, file: FileArgument, fields: MapOption = []) -> int:  # noqa: B006
    """Load preference pairs: {"id": …, "messages": […] or "prompt": …, "chosen": …, "rejected": …}, for a lane with dpo.

    Example: [cyan]headrace load pairs preferences.jsonl[/]
    """
    return await _load_answers("pairs", chosen, file, fields)


async def _load_answers(kind: str, chosen: SettingsFile, file: Path, fields: list[str], split: str = "") -> int:
    from actors.tasksets.files import read_rows
    from actors.tasksets.loader import load_examples, with_images
    from actors.tasksets.taskset import Demonstration, Preference
    from infra.model.model import context_tokens, load_tokenizer

    renamed = field_map(fields)
    settings = chosen.load()
    async with connected(settings) as log:
        tokenizer = await asyncio.to_thread(load_tokenizer, model_folder(settings), settings.policy.template)
        max_tokens, store = context_tokens(settings.model_path) or MAX_TOKENS, app_store(settings)
        with progress_bar(f"{kind} from {file}", None) as bar:
            example: type[Any] = Demonstration if kind == "experts" else Preference
            rows = read_rows(file, example, fields=renamed, split=split, on_broken=bar.broken)
            pictured = with_images(rows, file, store, bar.broken)
            done = await load_examples(
                log, pictured, tokenizer, max_tokens=max_tokens, on_broken=bar.broken, on_progress=bar.moved
            )
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


class Bar:
    """A progress bar on stderr; rows that cannot be read are named above it, the first few of them."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self.num_broken = 0
        self._progress = progress
        self._task = task

    def moved(self, rows: int) -> None:
        self._progress.update(self._task, completed=rows + self.num_broken)

    def broken(self, row: "Broken") -> None:
        self.num_broken += 1
        if self.num_broken <= MAX_NAMED:
            self.say(f"{row.where}: {row.reason}")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(printable(line), style="yellow", markup=False)


@contextmanager
def progress_bar(title: str, total: int | None) -> Iterator[Bar]:
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
