"""One answer as its page shows it: conversation, tokens with log-probability and version, scores, neighbours.

Guarantee: a sealed text is shown only to a viewer whose key may open it, for one page, once the log has a record of that.
"""

import math
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infra.ledger.index_fold import number
from infra.ledger.trace import AnswerTrace
from schemas import Experience
from schemas.errors import BadFrame
from schemas.ids import experience_group, session_of

MAX_SHOWN = 200_000  # characters of a message
MAX_TOKENS = 3000
MAX_BESIDE = 64
LEVELS = 6  # of how likely a token was
Spell = Callable[[Sequence[int]], list[str]]


def shown(trace: AnswerTrace, spell: Spell | None, *, opened: bool) -> dict[str, Any]:
    """The part of an answer that may be shown: `answer` (the experience), `versions` that sampled it, `shut` (why its texts
    are not shown, "" if they are), `messages`, `tokens` and the number of tokens `left_out`.

    opened: it was unsealed for this viewer. spell: tokens → texts.
    """
    answer = trace.published or trace.judged or trace.buffered[0][1]
    view: dict[str, Any] = {
        "answer": answer, "versions": sorted({span.version for span in answer.spans}), "shut": "", "messages": [],
        "tokens": [], "left_out": 0,
    }  # fmt: skip
    if answer.key_id and (answer.lost or not opened):
        return view | {"shut": "forgotten" if answer.lost else "sealed"}
    if answer.lost:
        return view | {"shut": answer.lost}
    try:
        messages = [
            {
                "role": each.role, "text": each.content[:MAX_SHOWN], "cut": max(0, len(each.content) - MAX_SHOWN),
                "images": len(each.images),
            }
            for each in answer.messages
        ]  # fmt: skip
        tokens, left_out = _tokens(answer, spell)
    except BadFrame as error:
        return view | {"shut": str(error)}
    return view | {"messages": messages, "tokens": tokens, "left_out": left_out}


def _tokens(answer: Experience, spell: Spell | None) -> tuple[list[dict[str, Any]], int]:
    """The sampled tokens, as text where there is a tokenizer: `text`, `level`, `odd` (changes with the version) and `title`."""
    found: list[dict[str, Any]] = []
    ids, logprobs = answer.tokens, answer.logprobs
    at, odd, before = 0, False, None
    for span in answer.spans:
        odd ^= before is not None and span.version != before
        before = span.version
        count = min(span.stop - span.start, MAX_TOKENS - at)
        wanted = [int(token) for token in ids[span.start : span.start + count]]
        texts = spell(wanted) if spell is not None else [f"{token} " for token in wanted]
        chances: list[str] = []
        worst = 0.0
        for index, (token, text) in enumerate(zip(wanted, texts, strict=True)):
            value = float(logprobs[at + index])
            worst = min(worst, value)
            chances.append(f"{token}: {math.exp(value):.1%}")
            if text or index == len(wanted) - 1:
                title = ", ".join(chances) + (f", v{span.version}" if span.version >= 0 else "")
                title += f", keys and values from v{span.kv} on" if span.kv >= 0 else ""
                found.append({"text": text or "�", "level": token_level(worst), "odd": odd, "title": title})
                chances, worst = [], 0.0
        at += count
        if at >= MAX_TOKENS:
            break
    return found, answer.num_sampled - at


def token_level(logprob: float) -> int:
    """Level of a token's improbability: each has half the chance of the one before, 5 is for all that are less likely.

    >>> [token_level(math.log(share)) for share in (1.0, 0.6, 0.3, 0.01)]
    [0, 1, 2, 5]
    """
    return min(LEVELS - 1, max(0, math.ceil(-logprob / math.log(2) - 1e-3)))


def beside(database: sqlite3.Connection, ref: str) -> list[Mapping[str, Any]]:
    """The members of the answer's group; of a session the turns around it, at most MAX_BESIDE."""
    group = experience_group(ref)
    session = session_of(group)
    where, value = ("session = ? AND session != ''", session) if session else ("grp = ?", number(group))
    (at,) = database.execute("SELECT max(n) FROM answers WHERE key = ?", (number(ref),)).fetchone()

    def some(side: str) -> list[sqlite3.Row]:
        return database.execute(
            "SELECT answers.*, asked, answered FROM answers LEFT JOIN texts ON texts.n = answers.n"
            f" WHERE {where} AND answers.n {side} LIMIT {MAX_BESIDE // 2}",
            (value, at or 0),
        ).fetchall()

    before, after = some("<= ? ORDER BY answers.n DESC"), some("> ? ORDER BY answers.n")
    return [dict(row) for row in (*reversed(before), *after)]


def list_scores(trace: AnswerTrace) -> list[tuple[str, float, str, str]]:
    """Every score: name, value, place, and version of the processor that gave it."""
    judged = trace.judged or (trace.buffered[-1][1] if trace.buffered else None)
    found = []
    for score in judged.scores if judged else ():
        where = "the whole answer" if score.at is None else f"token {score.at}"
        found.append((score.name, score.value, where, f"version {score.version}" if score.version else ""))
    return found
