"""Feedback from a JSONL file that grows: one JSON object per line.

Delivery: at least once; the position is saved after the events before it are published. On a full disk it is not saved, which
is counted, and reading continues; a restart then publishes again, and ids absorb it. A line counts once its line end is there.
A file that was replaced or cut is read from its beginning; a file that cannot be read is counted, and tried again. One process
of a machine per file: the others wait for its lock.
"""

import asyncio
import fcntl
import logging
import os
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from infra.files import replace_file
from infra.log.log import Log
from infra.observe.metrics import Metrics
from streams.sources.event import Event, EventSource, publish_events

POLL_S = 0.5
LOCK_POLL_S = 5.0
LONGEST_WAIT_S = 30.0
MAX_CHUNK_BYTES = 1024 * 1024  # a longer line is invalid
logger = logging.getLogger(__name__)
State = TypeVar("State", bound=msgspec.Struct)


class FilePosition(msgspec.Struct, frozen=True):
    inode: int = 0
    offset: int = 0


async def run_file(source: EventSource, log: Log, metrics: Metrics, state: Path) -> None:
    """Follow the source's file until cancelled; `state` names the files of position and lock."""
    state.parent.mkdir(parents=True, exist_ok=True)
    with state.with_suffix(".lock").open("a") as lock:
        await take_lock(lock)
        position = load_state(state.with_suffix(".json"), FilePosition)
        wait_s = POLL_S
        while True:
            try:
                moved = await take_once(source, position, log, metrics, state)
                wait_s = POLL_S
            except OSError as error:
                metrics.counter("feedback_polls_failed", source=source.name, reason=str(error.strerror)).inc()
                logger.warning("feedback_file_unreadable path=%s error=%s", source.file, error.strerror)
                moved, wait_s = position, min(2 * wait_s, LONGEST_WAIT_S)
            if moved == position:
                await asyncio.sleep(wait_s)
            position = moved


async def take_lock(lock: IO[str]) -> None:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(LOCK_POLL_S)
        else:
            return


async def take_once(
    source: EventSource, position: FilePosition, log: Log, metrics: Metrics, state: Path
) -> FilePosition:
    """Publish the lines that are new and save the position behind them, if there is room; it is returned."""
    assert source.file is not None
    moved, lines = await asyncio.to_thread(read_lines, source.file, position)
    if moved == position:
        return position
    events = [Event(line, f"file:{source.file.name}", 0, offset) for offset, line in lines if line.strip()]
    if events:
        await publish_events(source, events, log, metrics)
    await save_state(source, state.with_suffix(".json"), moved, metrics)
    return moved


def read_lines(path: Path, position: FilePosition) -> tuple[FilePosition, list[tuple[int, bytes]]]:
    """Whole lines behind `position`, at most about 1 MB of them, with their offsets; none while the file is absent."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return position, []
    with file:
        status = os.fstat(file.fileno())
        start = position.offset
        if position.inode not in (0, status.st_ino) or status.st_size < start:
            logger.warning("feedback_file_replaced path=%s was_at=%d", path, start)
            start = 0
        file.seek(start)
        chunk = file.read(MAX_CHUNK_BYTES)
    end = chunk.rfind(b"\n") + 1
    if end == 0:
        if len(chunk) < MAX_CHUNK_BYTES:
            return FilePosition(status.st_ino, start) if start != position.offset else position, []
        end = len(chunk)
    lines, offset = [], start
    for line in chunk[:end].removesuffix(b"\n").split(b"\n"):
        lines.append((offset, line))
        offset += len(line) + 1
    return FilePosition(status.st_ino, start + end), lines


def load_state(path: Path, kind: type[State]) -> State:
    """The saved state of a source; an empty one where none was saved. Raises msgspec.DecodeError for a damaged file.

    Before the first save, the newest state in a worker's folder counts.
    """
    earlier = [] if path.exists() else path.parent.parent.glob(f"worker-*/{path.name}")
    saved = max(earlier, key=lambda place: place.stat().st_mtime_ns, default=path)
    return msgspec.json.decode(saved.read_bytes(), type=kind) if saved.exists() else kind()


async def save_state(source: EventSource, path: Path, state: msgspec.Struct, metrics: Metrics) -> None:
    """Save the state of a source. On a full disk it stays as it was, which is counted: a restart publishes again."""
    try:
        await asyncio.to_thread(replace_file, path, msgspec.json.encode(state))
    except OSError as error:
        metrics.counter("feedback_position_not_saved", source=source.name).inc()
        logger.warning("feedback_position_not_saved source=%s error=%s", source.name, error.strerror)
