"""Loads tasks into `taskset.raw` and demonstrations into `experts`.

Guarantees: a second load of the same rows adds nothing: the loader skips and counts ids that the log has. It loads a repeated
row once. An unreadable row stops the load with its file and line; earlier rows stay loaded. The loader hands a task that is too
large for a record, and a demonstration or pair longer than the model's context, to `on_broken`, and continues. It loads a row
with images only once the store has each of them with the named hash and a readable format.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from actors.tasksets.files import Broken, OnBroken, Row, raise_broken
from actors.tasksets.taskset import VALIDATION, Demonstration, Preference
from infra.log.log import Log
from infra.model.model import Tokenizer
from infra.store.images import deposit_image, images_of
from infra.store.store import BLOBS, Store
from schemas import Block, Control, Image, Message, Span, Task, encode, make_experience
from schemas.errors import BadImage, NotInStore
from schemas.experience import CHOSEN, MAX_TOKENS, REJECTED
from schemas.fields import Kind, Lane
from schemas.ids import experience_id, group_id
from schemas.topics import EXPERTS, MAX_RECORD_BYTES, TASKSET_RAW, Topic

Progress = Callable[[int], None]
Example = TypeVar("Example", Demonstration, Preference)

ORIGIN = "load"
MAX_TASK_BYTES = MAX_RECORD_BYTES - 65_536  # its issue has an order and headers too
_BATCH = 512


class LoadResult(msgspec.Struct, frozen=True):
    """Rows of a load. loaded: published. repeated: by the source. known: to the log already."""

    loaded: int
    repeated: int
    known: int


async def load_tasks(
    log: Log, tasks: Iterable[Task], *, on_broken: OnBroken = raise_broken, on_progress: Progress = lambda rows: None
) -> LoadResult:
    """Publish the tasks; `on_progress` is called with the rows read so far. Raises ConfigError as the source does."""

    def checked(task: Task) -> Task | None:
        try:
            if (size := len(encode(task))) <= MAX_TASK_BYTES:
                return task
            why = f"got {size:,} bytes, expected at most {MAX_TASK_BYTES:,}"
        except ValueError as error:
            why = str(error)
        on_broken(Broken(f"task {task.id}", why))
        return None

    known = await _known(log, TASKSET_RAW)
    return await _load(log, TASKSET_RAW, tasks, lambda task: task.id, checked, known, on_progress)


async def load_examples(
    log: Log,
    rows: Iterable[Example],
    tokenizer: Tokenizer,
    *,
    max_tokens: int = MAX_TOKENS,
    on_broken: OnBroken = lambda row: None,
    on_progress: Progress = lambda rows: None,
) -> LoadResult:
    """Publish demonstrations and preference pairs, each a group of its own. max_tokens: of the model's context."""

    def block(row: Example) -> Block | None:
        made = example_block(row, tokenizer)
        longest = max(member.num_tokens for member in made.experiences)
        if longest <= max_tokens:
            return made
        why = f"got {longest} tokens, expected at most {max_tokens}, which is the model's context"
        on_broken(Broken(f"{'pair' if isinstance(row, Preference) else 'demonstration'} {row.id}", why))
        return None

    return await _load(log, EXPERTS, rows, example_group, block, await _known(log, EXPERTS), on_progress)


def example_block(row: Demonstration | Preference, tokenizer: Tokenizer) -> Block:
    """A demonstration for the expert lane, or both sides of a pair for the human lane: ended by the end token, not sampled."""
    lane: Lane
    sides: dict[Kind, str]
    if isinstance(row, Preference):
        lane, answer, held_out, sides = "human", None, False, {CHOSEN: row.chosen, REJECTED: row.rejected}
    else:
        lane, answer, held_out = "expert", row.answer, row.split == VALIDATION
        sides = {"demonstration": row.response}
    prompt, group = tokenizer.encode_chat(row.messages), example_group(row)
    members = []
    for episode, (kind, text) in enumerate(sides.items()):
        tokens = [*prompt, *tokenizer.encode(text), tokenizer.eos_ids[0]]
        member = make_experience(
            tokens=tokens,
            logprobs=[0.0] * (len(tokens) - len(prompt)),
            messages=(*row.messages, Message(role="assistant", content=text)),
            id=experience_id(group, attempt=0, episode=episode),
            group=group,
            episode=episode,
            group_size=len(sides),
            lane=lane,
            origin=ORIGIN,
            subject=row.subject,
            spans=(Span(start=len(prompt), stop=len(tokens), version=-1, ratio=False),),
            kind=kind,
            task=row.id,
            answer=answer,
            held_out=held_out,
            meta=row.meta,
        )
        members.append(member)
    return Block(tuple(members))


def example_group(row: Demonstration | Preference) -> str:
    """Group of a demonstration, or of a pair: two pairs of one prompt have each their own. Never that of a task's episodes."""
    if isinstance(row, Demonstration):
        return group_id(f"expert-{row.id}", 0)
    sides = hashlib.blake2b(f"{row.chosen}\x00{row.rejected}".encode(), digest_size=6).hexdigest()
    return group_id(f"pair-{row.id}-{sides}", 0)


async def _known(log: Log, topic: Topic) -> set[str]:
    return {message.key.decode() async for message in log.scan(topic)}


async def _load(
    log: Log,
    topic: Topic,
    rows: Iterable[Row],
    name: Callable[[Row], str],
    record: Callable[[Row], Control | Block | None],
    known: set[str],
    on_progress: Progress,
) -> LoadResult:
    seen: set[str] = set()
    loaded = repeated = old = 0
    for batch in _batches(rows):
        fresh: list[Control | Block] = []
        for row in batch:
            key = name(row)
            repeated += key in seen
            old += key in known and key not in seen
            if key not in seen and key not in known and (made := record(row)) is not None:
                fresh.append(made)
            seen.add(key)
        await log.publish_all(topic, fresh)
        loaded += len(fresh)
        on_progress(loaded + repeated + old)
    return LoadResult(loaded=loaded, repeated=repeated, known=old)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


FOLDER = "images"  # beside the file: one file for each image, named by its sha256


def with_images(rows: Iterable[Row], file: Path, store: Store, on_broken: OnBroken) -> Iterator[Row]:
    """The rows of `file` whose images are in the store, put there from its `images` folder. Blocking."""
    known: set[Image] = set()
    for row in rows:
        try:
            for image in images_of(row.messages):
                if image not in known:
                    _bring(image, file.parent / FOLDER, store)
                    known.add(image)
        except BadImage as error:
            on_broken(Broken(f"{file}: {row.id}", str(error)))
        else:
            yield row


def _bring(image: Image, folder: Path, store: Store) -> None:
    path = folder / image.sha256
    try:
        deposit_image(store, image, path.read_bytes())
    except OSError as error:
        try:
            size = store.size(BLOBS + image.sha256)
        except NotInStore:
            size = -1
        if size != image.size:
            raise BadImage(
                "missing", f"{path} cannot be read ({error.strerror}), and the store has no such image"
            ) from error
