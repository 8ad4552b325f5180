"""Loads tasks into `taskset.raw` and demonstrations into `experts`.

Guarantees: a second load of the same rows adds nothing (ids already in the log are left out, and counted); what the
file repeats is loaded once; a row that cannot be read stops the load with its file and line, and what was loaded before
stays. A demonstration or pair longer than the model's context is handed to `on_broken`, and the next one follows.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from actors.tasksets.files import Broken, OnBroken
from actors.tasksets.preferences import pair_block, pair_group
from actors.tasksets.taskset import Demonstration, Preference
from infra.log.log import Log
from infra.model.model import Tokenizer
from schemas import Block, Control, Experience, Message, Span, Task, make_experience
from schemas.experience import MAX_TOKENS
from schemas.ids import experience_id, group_id
from schemas.topics import EXPERTS, TASKSET_RAW, Topic

Row = TypeVar("Row")
Progress = Callable[[int], None]

ORIGIN = "load"
_BATCH = 512


class LoadResult(msgspec.Struct, frozen=True):
    """What a load did, in rows. loaded: published. repeated: by the source. known: to the log already."""

    loaded: int
    repeated: int
    known: int


async def load_tasks(log: Log, tasks: Iterable[Task], *, on_progress: Progress = lambda rows: None) -> LoadResult:
    """Publish the tasks; `on_progress` is called with the rows read so far. Raises ConfigError as the source does."""
    known = await _known(log, TASKSET_RAW)
    return await _load(log, TASKSET_RAW, tasks, lambda task: task.id, lambda task: task, known, on_progress)


async def load_experts(
    log: Log,
    rows: Iterable[Demonstration],
    tokenizer: Tokenizer,
    *,
    max_tokens: int = MAX_TOKENS,
    on_broken: OnBroken = lambda row: None,
    on_progress: Progress = lambda rows: None,
) -> LoadResult:
    """Publish the demonstrations as experiences of the expert lane, one to a group. max_tokens: of the model's context."""

    def block(row: Demonstration) -> Block | None:
        return _fitting(Block((expert(row, tokenizer),)), f"demonstration {row.id}", max_tokens, on_broken)

    known = await _known(log, EXPERTS)
    return await _load(log, EXPERTS, rows, lambda row: expert_group(row.id), block, known, on_progress)


async def load_preferences(
    log: Log,
    rows: Iterable[Preference],
    tokenizer: Tokenizer,
    *,
    max_tokens: int = MAX_TOKENS,
    on_broken: OnBroken = lambda row: None,
    on_progress: Progress = lambda rows: None,
) -> LoadResult:
    """Publish preference pairs, one to a group of the human lane. max_tokens: of the model's context."""

    def block(row: Preference) -> Block | None:
        return _fitting(pair_block(row, tokenizer), f"pair {row.id}", max_tokens, on_broken)

    return await _load(log, EXPERTS, rows, pair_group, block, await _known(log, EXPERTS), on_progress)


def _fitting(block: Block, where: str, max_tokens: int, on_broken: OnBroken) -> Block | None:
    """The block, or None where a member of it is too long, which is reported."""
    longest = max(one.num_tokens for one in block.experiences)
    if longest <= max_tokens:
        return block
    on_broken(Broken(where, f"got {longest} tokens, expected at most {max_tokens}, which is the model's context"))
    return None


def expert(row: Demonstration, tokenizer: Tokenizer) -> Experience:
    """A demonstration as an experience: its response, ended by the end token, counts as not sampled."""
    prompt = tokenizer.encode_chat(row.messages)
    tokens = [*prompt, *tokenizer.encode(row.response), tokenizer.eos_ids[0]]
    group = expert_group(row.id)
    return make_experience(
        tokens=tokens,
        logprobs=[0.0] * (len(tokens) - len(prompt)),
        messages=(*row.messages, Message(role="assistant", content=row.response)),
        id=experience_id(group, attempt=0, episode=0),
        group=group,
        episode=0,
        group_size=1,
        lane="expert",
        origin=ORIGIN,
        subject=row.subject,
        spans=(Span(start=len(prompt), stop=len(tokens), version=-1, ratio=False),),
        kind="demonstration",
        task=row.id,
        answer=row.answer,
        held_out=row.split == "validation",
        meta=row.meta,
    )


def expert_group(row: str) -> str:
    """Group of a demonstration; never that of a task's own episodes.

    >>> expert_group("add-3745")
    'expert-add-3745.0'
    """
    return group_id(f"expert-{row}", 0)


async def _known(log: Log, topic: Topic) -> set[str]:
    """Keys in the topic: task ids, or groups."""
    return {message.key.decode() async for message in log.read_all(topic)}


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
