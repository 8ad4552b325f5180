"""Versions: when each was published, what the gate decided on which numbers, and two of them side by side."""

import difflib
import re
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from markupsafe import Markup

from infra.cli.console.charts import Scale, interval, safe
from infra.cli.console.index import MAX_TEXT
from infra.cli.console.reading import History
from infra.cli.console.search import score_names
from infra.cli.govern.channel import ChannelDecision

SHOWN = 60
MAX_TASKS = 200
MAX_COMPARED = 50_000  # answers of a version to a suite
MAX_PAIRED = 20_000  # pairs of equal pieces of two answers that are compared; a page may take ten times that
STABLE = "stable/"  # what the gate puts before a suite's name for the figure of the stable version
_PIECE = re.compile(r"\s+|\w+|[^\w\s]", re.UNICODE)
WORDS = {"promoted": "promoted", "held": "held back", "pinned": "pinned", "rolled_back": "rolled back"}


class VersionRow(msgspec.Struct, frozen=True):
    """One line of the timeline.

    version: of the policy. time_ms: when it was published. step: the last one in it. parent: the version it was trained
    from. said: the newest decision about it, "" for none. by: who decided. why: their reason. is_stable: customers get it.
    on_trial: some of them do. evals: suite, score and the score as it is shown.
    """

    version: int
    time_ms: int
    step: int
    parent: int
    said: str
    by: str
    why: str
    is_stable: bool
    on_trial: bool
    evals: Sequence[tuple[str, float, Markup]] = ()


def rows_of(
    history: History, evals: Mapping[int, Sequence[sqlite3.Row]], before: int | None, *, every: bool
) -> list[VersionRow]:
    """The newest versions first, at most SHOWN, below `before`; unless `every`, those that were decided or evaluated, and the
    newest.
    """
    newest: dict[int, ChannelDecision] = {}
    for one in history.decisions:
        if one.version >= 0:
            newest[one.version] = one
    published = {event.version: (time_ms, event) for time_ms, event in history.events if event.event == "published"}
    highest = max(published, default=-1)
    found = []
    for version in sorted(published, reverse=True):
        is_newest = before is None and version == highest
        if (before is not None and version >= before) or not (
            every or is_newest or version in newest or version in evals
        ):
            continue
        time_ms, event = published[version]
        said = newest.get(version)
        found.append(
            VersionRow(
                version=version,
                time_ms=time_ms,
                step=event.step,
                parent=event.parent,
                said=word(said) if said else "",
                by=said.by if said else "",
                why=said.reason if said else "",
                is_stable=version == history.stable.version,
                on_trial=version == history.stable.trial,
                evals=[
                    (
                        row["suite"],
                        row["right"] / max(1, row["asked"]),
                        interval(row["right"] / max(1, row["asked"]), row["low"], row["high"]),
                    )
                    for row in evals.get(version, ())
                ],
            )
        )
        if len(found) == SHOWN:
            break
    return found


def held_of(history: History) -> int:
    """The version that the newest decision held back, -1 where it was another decision."""
    newest = history.decisions[-1] if history.decisions else None
    return newest.version if newest is not None and newest.event == "held" else -1


def word(one: ChannelDecision) -> str:
    """A decision in a word or two."""
    if one.channel == "canary" and one.event == "promoted":
        return "on trial"
    if one.event == "pinned" and one.version < 0:
        return "unpinned"
    return {"pause": "learning paused", "continue": "learning resumed", "drain": "drained"}.get(
        one.event, WORDS.get(one.event, one.event)
    )


def numbers_of(numbers: Mapping[str, float]) -> list[tuple[str, float | None, float | None]]:
    """The numbers of a decision: what was measured, its value for the version, and for the one that was stable then (None:
    the record has no such number).

    >>> numbers_of({"dev": 0.5, "stable/dev": 0.667, "trial/rated_down": 31.0})
    [('dev', 0.5, 0.667), ('trial: rated down', 31.0, None)]
    """
    names = dict.fromkeys(name.removeprefix(STABLE) for name in sorted(numbers))
    return [
        (name.replace("/", ": ").replace("_", " "), numbers.get(name), numbers.get(f"{STABLE}{name}")) for name in names
    ]


def evals_of(database: sqlite3.Connection) -> dict[int, list[sqlite3.Row]]:
    """Every evaluation, by version."""
    found: dict[int, list[sqlite3.Row]] = {}
    for row in database.execute("SELECT * FROM evals ORDER BY version, suite"):
        found.setdefault(row["version"], []).append(row)
    return found


def timeline(history: History) -> Markup:
    """Published, gate, canary and stable over time, as one picture."""
    moments = [time_ms for time_ms, _ in history.events] + [one.time_ms for one in history.decisions]
    if not moments:
        return Markup('<p class="none">no version was published yet</p>')
    xs = Scale(min(moments), max(moments), 92, 948)
    lanes = {"published": 22, "gate": 58, "canary": 94, "stable": 130}
    parts = [
        f'<text class="tick end" x="82" y="{y + 4}">{name}</text><line class="grid" x1="92" x2="948" y1="{y}" y2="{y}"/>'
        for name, y in lanes.items()
    ]
    published = [(time_ms, one.version) for time_ms, one in history.events if one.event == "published"]
    for time_ms, version in published[:: max(1, len(published) // 400)]:
        parts.append(_tick(xs(time_ms), f"v{version} published"))
    stable: list[tuple[float, int]] = []
    for one in history.decisions[-400:]:
        if one.version >= 0:
            x = xs(one.time_ms)
            parts.append(_dot(one, x, lanes["canary" if one.channel == "canary" else "gate"]))
            if one.channel == "stable" and one.event != "held":
                stable.append((x, one.version))
    for index, (x, version) in enumerate(stable):
        end = stable[index + 1][0] if index + 1 < len(stable) else 948.0
        parts.append(_bar(x, end, version, "good" if index % 2 else "s0"))
    label = f"{len(published)} versions published; {len(history.decisions)} decisions"
    return Markup(
        f'<svg class="timeline" viewBox="0 0 960 150" role="group" aria-label="{label}">{"".join(parts)}</svg>'
    )


def _tick(x: float, title: str) -> str:
    return f'<line class="stroke s0" x1="{x}" x2="{x}" y1="15" y2="29"><title>{title}</title></line>'


def _dot(one: ChannelDecision, x: float, y: int) -> str:
    kind = {"held": "bad", "rolled_back": "bad", "promoted": "good"}.get(one.event, "s0")
    title = safe(f"v{one.version} {word(one)} by {one.by}: {one.reason}")
    circle = f'<circle class="dot {kind}" cx="{x}" cy="{y}" r="5"><title>{title}</title></circle>'
    return f'<a href="/versions/{one.version}" aria-label="{title}">{circle}</a>'


def _bar(x: float, end: float, version: int, shade: str) -> str:
    title = f"<title>v{version} is stable</title>"
    bar = f'<rect class="bar {shade}" x="{x}" y="123" width="{max(1.0, end - x):.1f}" height="14">{title}</rect>'
    return bar + (
        f'<text class="tick mid on" x="{(x + end) / 2:.1f}" y="134">v{version}</text>' if end - x > 34 else ""
    )


class Pair(msgspec.Struct, frozen=True):
    """One recorded prompt and what two versions said, as far as the index holds it.

    task: its id. asked: the prompt. left, right: with the differences marked. left_id, right_id: of the answers.
    left_score, right_score: None for none. behind: number of characters of the longer one that the index does not hold.
    differs_behind: whether they differ only in these.
    """

    task: str
    asked: str
    left: Markup
    right: Markup
    left_id: str
    right_id: str
    left_score: float | None
    right_score: float | None
    behind: int = 0
    differs_behind: bool = False


def pairs_of(
    database: sqlite3.Connection, suite: str, left: int, right: int, *, all_of_them: bool
) -> tuple[list[Pair], dict[str, int]]:
    """What two versions answered to the tasks of a suite, different scores first, and counts of these pairs.

    Counts: same, differ, better, worse, of whole answers. unshown: pairs beyond MAX_TASKS. further: answers that are not
    compared, since there is one to the same task or more than MAX_COMPARED. unread: pairs with one that is not readable.
    """
    (one, rest), (other, more) = _answers(database, suite, left), _answers(database, suite, right)
    counts = {"same": 0, "differ": 0, "better": 0, "worse": 0, "unread": 0, "unshown": 0, "further": rest + more}
    found = []
    for task in one.keys() & other.keys():
        a, b = one[task], other[task]
        if a["digest"] is None or b["digest"] is None:
            counts["unread"] += 1
            continue
        differs = a["digest"] != b["digest"]
        counts["differ" if differs else "same"] += 1
        low, high = a["score"], b["score"]
        if low is not None and high is not None and low != high:
            counts["better" if high > low else "worse"] += 1
        if differs or all_of_them:
            found.append((low == high, task, a, b))
    found.sort(key=lambda pair: (pair[0], pair[1]))
    counts["unshown"] = max(0, len(found) - MAX_TASKS)
    budget = Budget(10 * MAX_PAIRED)
    return [_pair(database, task, a, b, budget) for _, task, a, b in found[:MAX_TASKS]], counts


def suites_both(database: sqlite3.Connection, left: int, right: int) -> list[str]:
    """Suites that both versions answered."""
    rows = database.execute(
        "SELECT suite FROM evals WHERE version = ? INTERSECT SELECT suite FROM evals WHERE version = ?", (left, right)
    )
    return [row[0] for row in rows]


def _answers(database: sqlite3.Connection, suite: str, version: int) -> tuple[dict[str, dict[str, Any]], int]:
    """The first answer of a version to each task of a suite, without its texts; and how many more there are."""
    names = score_names(database)
    where = "suite = ? AND suite != '' AND hi = ? AND task != ''"
    rows = database.execute(
        "SELECT answers.n, task, id, size, digest,"
        f" (SELECT avg(value) FROM scores WHERE name IN ({', '.join('?' * len(names))}) AND scores.n = answers.n) AS score"
        f" FROM answers LEFT JOIN texts ON texts.n = answers.n WHERE {where} LIMIT {MAX_COMPARED}",
        (*names, suite, version),
    ).fetchall()
    (count,) = database.execute(f"SELECT count(*) FROM answers WHERE {where}", (suite, version)).fetchone()
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["id"]):
        found.setdefault(row["task"], dict(row))
    return found, count - len(found)


def _pair(
    database: sqlite3.Connection, task: str, a: Mapping[str, Any], b: Mapping[str, Any], budget: "Budget"
) -> Pair:
    held = [database.execute("SELECT asked, answered FROM texts WHERE n = ?", (one["n"],)).fetchone() for one in (a, b)]
    (asked, said), (_, other) = held
    left, right = marked(said, other, budget)
    behind = max(0, max(a["size"], b["size"]) - MAX_TEXT)
    differs = said == other and a["digest"] != b["digest"]
    return Pair(task, asked, left, right, a["id"], b["id"], a["score"], b["score"], behind, differs)


class Budget:
    """How many pairs of pieces may still be compared for one page."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, cost: int) -> bool:
        """Spend `cost` if so much is left; returns whether it was."""
        if cost > self.left:
            return False
        self.left -= cost
        return True


def marked(left: str, right: str, budget: Budget) -> tuple[Markup, Markup]:
    """Two texts with their differences marked: piece by piece where that is cheap, else all between their common beginning and
    end. It is cheap where few pairs of pieces are equal; a text that repeats itself has as many as its length squared.

    >>> marked("a b", "a c", Budget(100))
    (Markup('a <del>b</del>'), Markup('a <ins>c</ins>'))
    """
    one, other = (_PIECE.findall(text) for text in (left, right))
    head = _num_equal(one, other)
    tail = _num_equal(one[head:][::-1], other[head:][::-1])
    inner = one[head : len(one) - tail], other[head : len(other) - tail]
    found: tuple[list[str], list[str]] = ([], [])
    for kind, a, b in (
        ("equal", one[:head], other[:head]),
        *_runs(*inner, budget),
        ("equal", one[len(one) - tail :], []),
    ):
        texts = ("".join(a), "".join(a if kind == "equal" else b))
        for side, text, tag in zip(found, texts, ("del", "ins"), strict=True):
            if text:
                side.append(str(safe(text)) if kind == "equal" else f"<{tag}>{safe(text)}</{tag}>")
    return Markup("".join(found[0])), Markup("".join(found[1]))


def _num_equal(one: Sequence[str], other: Sequence[str]) -> int:
    """How many pieces at the beginning of two texts are equal."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _runs(one: list[str], other: list[str], budget: Budget) -> Sequence[tuple[str, list[str], list[str]]]:
    """Runs of pieces of both texts, each equal or different."""
    counts = Counter(piece for piece in other if not piece.isspace())
    cost = sum(counts[piece] for piece in one) + len(one) + len(other)
    if cost > MAX_PAIRED or not budget.take(cost):
        return [("replace", one, other)]
    found = difflib.SequenceMatcher(str.isspace, one, other, autojunk=False).get_opcodes()
    return [(kind, one[a:b], other[c:d]) for kind, a, b, c, d in found]
