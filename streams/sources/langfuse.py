"""Feedback from Langfuse scores, polled through GET /api/public/v3/scores, newest first, page by page.

    [read to − overlap, now) ─> the pages ─> new ones, oldest first ─> publish (confirmed) ─> state saved ─> wait

Delivery: at least once. The position is in a file, saved after publication. The source reads scores younger than `overlap`
again, because Langfuse shows some late; a changed score has another id and is an event of its own. Order: by the scores'
timestamps. While Langfuse fails, the source retries with growing waits and skips nothing. Several machines read the same
scores; ids remove the duplicates.
"""

import asyncio
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec

from infra.chain.processor import feedback
from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.settings.config import duration_s
from infra.settings.outside import AnswerRefused, bounded_answer
from infra.settings.plugin import describe
from infra.settings.secret import read_secret
from schemas import Feedback
from schemas.ids import ANSWER_PREFIX
from streams.config import LangfuseConfig
from streams.sources.event import Event, EventSource, publish_events
from streams.sources.file import load_state, save_state, take_lock

PAGE = 100  # the most that Langfuse gives
MAX_PAGES = 100  # of one request: of more, an older part of the interval is read first
LAST_PAGES = 1000  # of the shortest interval, which cannot be cut
MAX_PAGE_BYTES = 16 * 1024 * 1024
MAX_BYTES = 64 * 1024 * 1024  # of all pages of an interval
MAX_SEEN = 100_000
SHORTEST_MS = 1000
LONGEST_WAIT_S = 300.0
TIMEOUT_S = 30.0
LANGFUSE = "langfuse:"  # prefix of its events' topic
ANSWER_NAMES = ("answer_id", "gen_ai.response.id")
logger = logging.getLogger(__name__)


class LangfuseState(msgspec.Struct, frozen=True):
    read_to_ms: int = 0
    seen: dict[str, int] = {}


class LangfuseAway(Exception):
    """It cannot be read now. wait_s: how long it asks us to wait, 0 where it does not say."""

    def __init__(self, message: str, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.reason, self.wait_s = reason, wait_s


@feedback(version=1)
def langfuse_score(
    score: dict[str, Any], *, lowest: float = 0.0, highest: float = 1.0, categories: dict[str, float] | None = None
) -> Feedback | None:
    """Langfuse score that names an answer: in its metadata (`answer_id` or `gen_ai.response.id`), or as a score of a session or
    observation with the answer's id. Scores without an answer are ignored.

    lowest: Value of a numeric score that becomes 0. highest: Value of a numeric score that becomes 1. categories: Values of a
    categorical score's categories; a category that is missing here becomes a label.
    """
    if not isinstance(score.get("id"), str):
        raise ValueError("id: expected a text")
    answer = find_answer(score)
    if answer is None:
        return None
    kind, value = score.get("dataType"), score["value"]
    said: dict[str, Any]
    if kind in ("CORRECTION", "TEXT"):
        said = {"type": "correction", "text": value} if kind == "CORRECTION" and value else {}
    elif kind == "CATEGORICAL" and value not in (categories or {}):
        said = {"type": "label", "text": value}
    elif kind == "CATEGORICAL":
        said = {"value": (categories or {})[value]}
    else:
        said = {"value": (float(value) - lowest) / (highest - lowest)}
    return Feedback(ref=answer, id=score_key(score), rater=score.get("authorUserId") or "", **said) if said else None


def find_answer(score: Mapping[str, Any]) -> str | None:
    metadata = score.get("metadata")
    found = [metadata.get(name) for name in ANSWER_NAMES] if isinstance(metadata, dict) else []
    subject = score.get("subject")
    if isinstance(subject, dict):
        found.append(subject.get("id"))
    return next((name for name in found if isinstance(name, str) and name.startswith(ANSWER_PREFIX)), None)


def score_key(score: Mapping[str, Any]) -> str:
    return f"{score.get('id')}@{score.get('updatedAt') or score.get('timestamp') or ''}"


async def run_langfuse(source: EventSource, log: Log, metrics: Metrics, state: Path) -> None:
    """Ask until cancelled; `state` names the files of state and lock. Raises ConfigError where there are no keys."""
    assert source.langfuse is not None
    config = source.langfuse
    auth = read_keys(source)
    state.parent.mkdir(parents=True, exist_ok=True)
    with state.with_suffix(".lock").open("a") as lock:
        await take_lock(lock)
        known = load_state(state.with_suffix(".json"), LangfuseState)
        every_s = wait_s = duration_s(config.every)
        async with httpx.AsyncClient(auth=auth, timeout=TIMEOUT_S) as client:
            while True:
                try:
                    known = await take_round(source, client, known, log, metrics, state)
                    wait_s = every_s
                except LangfuseAway as error:
                    metrics.counter("feedback_polls_failed", source=source.name, reason=error.reason).inc()
                    logger.warning("langfuse_away source=%s reason=%s %s", source.name, error.reason, error)
                    wait_s = min(max(2 * wait_s, error.wait_s), LONGEST_WAIT_S)
                await asyncio.sleep(wait_s)


async def take_round(
    source: EventSource, client: httpx.AsyncClient, known: LangfuseState, log: Log, metrics: Metrics, state: Path
) -> LangfuseState:
    """Publish new scores, save how far they were read, and return that. Raises LangfuseAway."""
    assert source.langfuse is not None
    overlap_ms = int(1000 * duration_s(source.langfuse.overlap))
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    since_ms = now_ms - int(1000 * duration_s(source.langfuse.since))
    from_ms = known.read_to_ms - overlap_ms if known.read_to_ms else since_ms
    end_ms = to_ms = max(now_ms, from_ms + SHORTEST_MS)
    read = known
    while True:  # the overlap alone may hold more than a request gives
        while (scores := await _scores(client, source.langfuse, from_ms, to_ms)) is None:
            to_ms = from_ms + max(SHORTEST_MS, (to_ms - from_ms) // 2)
        found = [(_ms(score, to_ms), score_key(score), score) for score in scores]
        new = sorted((entry for entry in found if entry[1] not in read.seen), key=lambda entry: entry[:2])
        events = [Event(msgspec.json.encode(score), f"{LANGFUSE}{source.name}", 0, at_ms) for at_ms, _, score in new]
        if events:
            await publish_events(source, events, log, metrics)
        read_to_ms = max(read.read_to_ms, to_ms)
        metrics.gauge("feedback_read_to_timestamp_s", source=source.name).set(read_to_ms / 1000)
        young = {named: at_ms for named, at_ms in read.seen.items() if at_ms >= read_to_ms - overlap_ms}
        young |= {named: at_ms for at_ms, named, _ in new}
        read = LangfuseState(read_to_ms=read_to_ms, seen=dict(list(young.items())[-MAX_SEEN:]))
        await save_state(source, state.with_suffix(".json"), read, metrics)
        if to_ms == end_ms or to_ms > known.read_to_ms:
            return read
        from_ms, to_ms = to_ms, min(to_ms + 2 * (to_ms - from_ms), end_ms)


async def _scores(
    client: httpx.AsyncClient, config: LangfuseConfig, from_ms: int, to_ms: int
) -> list[dict[str, Any]] | None:
    """Return all scores of an interval; None for more than MAX_PAGES of an interval that can be cut. Raises LangfuseAway."""
    asked = {
        "name": config.score, "fields": "details,subject,annotation", "limit": str(PAGE),
        "fromTimestamp": _iso(from_ms), "toTimestamp": _iso(to_ms),
    }  # fmt: skip
    scores: list[dict[str, Any]] = []
    is_shortest = to_ms - from_ms <= SHORTEST_MS
    num_bytes = 0
    for _ in range(LAST_PAGES if is_shortest else MAX_PAGES):
        page, cursor, page_bytes = await _page(client, f"{config.url.rstrip('/')}/api/public/v3/scores", asked)
        num_bytes += page_bytes
        if num_bytes > MAX_BYTES:
            break
        scores += page
        if not cursor:
            return scores
        asked = {**asked, "cursor": cursor}
    if is_shortest:
        limits = f"{LAST_PAGES} pages or {MAX_BYTES} bytes"
        raise LangfuseAway(f"{config.url}: {asked['fromTimestamp']} has more scores than {limits}", "no last page")
    return None


async def _page(client: httpx.AsyncClient, url: str, asked: Mapping[str, str]) -> tuple[list[dict[str, Any]], str, int]:
    """Return a page, the cursor of the next page ("" for none) and the size of the page in bytes. Raises LangfuseAway."""
    try:
        response, content = await bounded_answer(client, "GET", url, MAX_PAGE_BYTES, params=dict(asked))
    except AnswerRefused as error:
        raise LangfuseAway(f"{url}: {error}", "page refused") from error
    except httpx.HTTPError as error:
        raise LangfuseAway(f"{url}: {describe(error)}", "unreachable") from error
    if response.status_code != 200:
        after = response.headers.get("retry-after", "")
        reason = {401: "keys refused", 403: "keys refused", 429: "too often"}.get(response.status_code, "refused")
        wait_s = float(after) if after.isdecimal() else 0.0
        raise LangfuseAway(f"{url}: answered {response.status_code}, expected 200", reason, wait_s)
    try:
        body = msgspec.json.decode(content, type=_Page)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LangfuseAway(f"{url}: {error}; expected scores of version 3 as JSON", "no scores") from error
    return body.data, body.meta.cursor or "", len(content)


class _Meta(msgspec.Struct):
    cursor: str | None = None


class _Page(msgspec.Struct):
    data: list[dict[str, Any]]
    meta: _Meta


def _ms(score: Mapping[str, Any], otherwise_ms: int) -> int:
    try:
        return int(datetime.fromisoformat(score["timestamp"]).timestamp() * 1000)
    except (KeyError, TypeError, ValueError, OverflowError):
        return otherwise_ms


def _iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_keys(source: EventSource) -> httpx.BasicAuth:
    assert source.langfuse is not None
    config, at = source.langfuse, f'feedback "{source.name}": langfuse.'
    return httpx.BasicAuth(
        read_secret(f"{at}public_key", config.public_key_env, config.public_key_file, source.folder),
        read_secret(f"{at}secret_key", config.secret_key_env, config.secret_key_file, source.folder),
    )
