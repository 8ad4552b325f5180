"""`headrace load prompts`: what customers asked lately becomes an eval suite, for the gate to compare answers on.

Only what was recorded can be taken: with consent, and redacted as it was. Guarantee: what is sealed is left out, and counted: a
task lies open in the log, and is asked of every version, so it could not be forgotten with its user.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from infra.cli.connect import connected
from infra.cli.data.load import progress_bar, tell
from infra.cli.settings import load_settings
from infra.log.log import Log
from schemas import Block, Experience, Task, topics
from schemas.errors import BadFrame


async def run_load_prompts(count: int, suite: str, config: Path, sets: list[str]) -> int:
    """Load the newest `count` different prompts of production as tasks of `suite`."""
    from actors.tasksets.loader import load_tasks

    settings = load_settings(config, sets)
    async with connected(settings) as log:
        found = await recorded(log)
        sealed = sum(bool(one.key_id) for _, one in found)
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
            found += [(message.timestamp_ms, one) for one in message.value.experiences if one.lane == "live"]
    return found


def newest_prompts(found: list[tuple[int, Experience]], suite: str) -> Iterator[Task]:
    """Tasks of different prompts, the newest first; those that are sealed or cannot be read are passed over."""
    seen: set[str] = set()
    for _, one in sorted(found, key=lambda pair: pair[0], reverse=True):
        if one.key_id:
            continue
        try:
            prompt = one.messages[:-1]
        except BadFrame:
            continue
        name = hashlib.blake2b(json.dumps(msgspec.to_builtins(prompt)).encode(), digest_size=8).hexdigest()
        if prompt and name not in seen:
            seen.add(name)
            yield Task(
                id=f"{suite}-{name}",
                messages=prompt,
                split=suite,
                meta={"experience": one.id},
            )
