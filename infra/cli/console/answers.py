"""One answer as its page shows it: conversation, tokens with log-probability and version, scores, feedback, steps.

Guarantee: a sealed text is shown only to a viewer whose key may open it, for one page, once the log has a record of that.
"""

import math
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from infra.cli.console.index import key_of
from infra.ledger.rows import number
from infra.ledger.trace import AnswerTrace
from schemas import Experience
from schemas.errors import BadFrame
from schemas.ids import group_of, session_of

MAX_SHOWN = 20_000  # characters of a message, unless all is asked for
MAX_WHOLE = 2_000_000
MAX_TOKENS = 3000
MAX_BESIDE = 64
LEVELS = 6  # of how likely a token was
Spell = Callable[[Sequence[int]], list[str]]


class ShownMessage(msgspec.Struct, frozen=True):
    """One message. role: who speaks. text: its beginning, as much as is shown. cut: number of characters that are not
    shown. images: how many belong to it.
    """

    role: str
    text: str
    cut: int = 0
    images: int = 0


class ShownToken(msgspec.Struct, frozen=True):
    """One or more sampled tokens that make a piece of text. text: that piece. level: 0 (certain) to 5. version: that
    sampled them. odd: whether it is underlined, which changes at each reload. title: id and chance of each token.
    """

    text: str
    level: int
    version: int
    odd: bool
    title: str


class ShownAnswer(msgspec.Struct, frozen=True):
    """What a page shows of an answer.

    id: as a client has it. one: the experience. shut: why its texts are not shown, "" if they are. messages: of the
    prompt. tokens: of the answer. left_out: tokens not shown. versions: that sampled it.
    """

    id: str
    one: Experience
    shut: str
    messages: Sequence[ShownMessage] = ()
    tokens: Sequence[ShownToken] = ()
    left_out: int = 0
    versions: Sequence[int] = ()


def shown(trace: AnswerTrace, spell: Spell | None, *, opened: bool, whole: bool = False) -> ShownAnswer:
    """What may be shown of the answer. opened: it was unsealed for this viewer, and the log says so. spell: tokens → texts."""
    one = trace.published or trace.judged or trace.buffered[0][1]
    versions = sorted({span.version for span in one.spans})
    if one.key_id and not opened:
        return ShownAnswer(trace.id, one, "forgotten" if one.lost else "sealed", versions=versions)
    if one.lost:
        return ShownAnswer(trace.id, one, one.lost, versions=versions)
    try:
        messages = [_message(each.role, each.content, len(each.images), whole) for each in one.messages]
        tokens, left_out = _tokens(one, spell)
    except BadFrame as error:
        return ShownAnswer(trace.id, one, str(error), versions=versions)
    return ShownAnswer(trace.id, one, "", messages, tokens, left_out, versions)


def _message(role: str, text: str, images: int, whole: bool) -> ShownMessage:
    limit = MAX_WHOLE if whole else MAX_SHOWN
    return ShownMessage(role, text[:limit], max(0, len(text) - limit), images)


def _tokens(one: Experience, spell: Spell | None) -> tuple[list[ShownToken], int]:
    """The sampled tokens, as text where there is a tokenizer."""
    found: list[ShownToken] = []
    ids, logprobs = one.tokens, one.logprobs
    at, odd, before = 0, False, None
    for span in one.spans:
        if before is not None and span.version != before:
            odd = not odd
        before = span.version
        count = min(span.stop - span.start, MAX_TOKENS - at)
        wanted = [int(token) for token in ids[span.start : span.start + count]]
        texts = spell(wanted) if spell is not None else [f"{token} " for token in wanted]
        numbers: list[str] = []
        worst = 0.0
        for index, (token, text) in enumerate(zip(wanted, texts, strict=True)):
            value = float(logprobs[at + index])
            worst = min(worst, value)
            numbers.append(f"{token}: {math.exp(value):.1%}")
            if text or index == len(wanted) - 1:
                words = f"{', '.join(numbers)}, v{span.version}" if span.version >= 0 else ", ".join(numbers)
                words += f", keys and values from v{span.kv} on" if span.kv >= 0 else ""
                found.append(ShownToken(text or "�", level_of(worst), span.version, odd, words))
                numbers, worst = [], 0.0
        at += count
        if at >= MAX_TOKENS:
            break
    return found, one.num_sampled - at


def level_of(logprob: float) -> int:
    """How unlikely a token was, 0 to 5. Each level has half the chance of the one before; 5 is for all that are less likely.

    >>> [level_of(math.log(share)) for share in (1.0, 0.6, 0.3, 0.01)]
    [0, 1, 2, 5]
    """
    return min(LEVELS - 1, max(0, math.ceil(-logprob / math.log(2) - 1e-3)))


def beside(database: sqlite3.Connection, ref: str) -> list[Mapping[str, Any]]:
    """The other members of the answer's group; of a session the turns around it, at most MAX_BESIDE."""
    group = group_of(ref)
    session = session_of(group)
    where, value = ("session = ? AND session != ''", session) if session else ("grp = ?", number(group))
    (at,) = database.execute("SELECT max(n) FROM answers WHERE key = ?", (key_of(ref),)).fetchone()
    place = at or 0

    def some(side: str) -> list[sqlite3.Row]:
        return database.execute(
            "SELECT answers.n, id, time_ms, hi, reward, advantage, fate, suite, said, rated, sealed, asked, answered"
            " FROM answers"
            f" LEFT JOIN texts ON texts.n = answers.n WHERE {where} AND answers.n {side} LIMIT {MAX_BESIDE // 2}",
            (value, place),
        ).fetchall()

    before, after = some("<= ? ORDER BY answers.n DESC"), some("> ? ORDER BY answers.n")
    return [dict(row) for row in (*reversed(before), *after)]


def scores_of(trace: AnswerTrace) -> list[tuple[str, float, str, str]]:
    """Every score: name, value, place, and version of the processor that gave it, with what it cost."""
    judged = trace.judged or (trace.buffered[-1][1] if trace.buffered else None)
    found = []
    for score in judged.scores if judged else ():
        where = "the whole answer" if score.at is None else f"token {score.at}"
        cost = f", {score.cost_usd:g} USD" if score.cost_usd else ""
        found.append((score.name, score.value, where, (f"version {score.version}" if score.version else "") + cost))
    return found
