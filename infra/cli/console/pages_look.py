"""The pages to look at: each reads and fills a template. None changes anything."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from infra.cli.console import data, learning, versions
from infra.cli.console.access import Viewer
from infra.cli.console.alarms import MAX_SHOWN, alarms_of
from infra.cli.console.answers import ShownAnswer, beside, scores_of, shown
from infra.cli.console.charts import interval, spark
from infra.cli.console.flow import sentence
from infra.cli.console.index import MAX_TEXT, lists
from infra.cli.console.letters import shown_letter
from infra.cli.console.page import Pages
from infra.cli.console.picture import ARROWS, HIGH, WIDE, boxes_of
from infra.cli.console.rates import IN_PULSE, IN_TABLE, doings, together
from infra.cli.console.reading import NotReadYet
from infra.cli.console.search import Query, choices, query_of, search
from infra.cli.look.console_bounds import bounds_of, ended_bound, sizes
from infra.cli.look.status_screen import State
from infra.ledger.trace import AnswerTrace
from infra.observe.alarms import anchor
from schemas import DeadLetter
from schemas.errors import NotInLog
from schemas.ids import ANSWER_PREFIX, group_of, session_of
from schemas.topics import DEAD_LETTERS

HELP = (
    "see-what-happened",
    "decide-what-customers-get",
    "run-a-cluster",
    "send-feedback",
    "try-other-rules",
    "runbook",
)
HOWTO = Path(__file__).resolve().parents[2] / "docs" / "howto"
BEING_READ = "The log is being read. This page shows it once that is done."
NOT_HEARD = "The log was not read yet. This page tries again."
ARCHIVED = (
    "This is an archive. It holds no reports of roles: see Versions for decisions and Learning for what was measured."
)
FLOW_S = 0.5  # wait for the log: then the first page says that it is being read, and asks again
PAGE_S = 5.0  # wait for the log on the other pages: then they say that it is being read
DRAWN_S = 10.0  # a chart is shown again for so long, since one of thousands of versions takes time to draw
COUNTED_S = 60.0  # numbers of rows are shown again for so long
SHOWN = 20  # answers on the page of the version that learned from them


async def flow(pages: Pages, request: Request, viewer: Viewer) -> Response:
    """The system as it is; before the first reading has ended, that the log is being read."""
    is_live, reading = bool(request.query_params.get("fragment")), pages.reading
    try:
        state, history = await asyncio.gather(reading.status(FLOW_S), reading.history(FLOW_S))
    except NotReadYet:
        live, words = "flow_wait.html", NOT_HEARD if reading.kept.fault else BEING_READ
        return pages.show(request, viewer, live if is_live else "flow.html", live=live, sentence=words)
    live, alarms, words = "flow_live.html", alarms_of(state, state["seen"]), sentence(state, time.time())
    if not state["roles"] and not pages.command:
        alarms, words = [], ARCHIVED
    if reading.kept.fault:
        words = f"The log cannot be read now. {words}"
    return pages.show(
        request, viewer, live if is_live else "flow.html", live=live, arrows=ARROWS,
        boxes=boxes_of(state, history.stable, versions.held_of(history)),
        alarms=alarms[:MAX_SHOWN], num_alarms=len(alarms), sentence=words, state=state,
        roles=[(role, *doings(role["role"], role["rates"], IN_TABLE)) for role in state["roles"]],
        wide=WIDE, high=HIGH, **pulse_of(state, reading.pulse),
    )  # fmt: skip


def pulse_of(state: State, pulse: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What each kind of role counts a second, with a line of the last minutes, and the number of counters left out."""
    rows, more = [], 0
    for role, rates in sorted(together(state["roles"]).items()):
        found, left = doings(role, rates, IN_PULSE)
        more += left
        for one in found:
            line = spark(list(pulse.get(f"{role}/{one.name}", ())), f"{role}: {one.words}, over the last minutes")
            rows.append((role, one, line))
    return {"pulse": rows, "more_pulse": more}


async def learn(pages: Pages, request: Request, viewer: Viewer) -> Response:
    """Curves over versions or time."""
    by_time = request.query_params.get("over") == "time"
    app, held, ask = pages.reading.settings.app, pages.reading.held, pages.reading.ask
    over = "time" if by_time else "version"
    charts = await held(
        f"charts over {over}",
        lambda: ask(lambda one: learning.charts_of([(app, one), *pages.beside], by_time=by_time)),
        held_s=DRAWN_S,
    )
    legend, fates = await held(
        f"fates over {over}", lambda: ask(lambda one: learning.fates_chart(one, by_time=by_time)), held_s=DRAWN_S
    )
    return pages.show(
        request, viewer, "learning.html", charts=charts, fates=fates, fates_legend=legend, by_time=by_time,
        runs=[app, *(name for name, _ in pages.beside)],
    )  # fmt: skip


async def answers(pages: Pages, request: Request, viewer: Viewer) -> Response:
    """The search. The id of an answer in the index leads to the page of that answer."""
    asked = dict(request.query_params)
    text = asked.get("text", "").strip()
    is_listed = await pages.reading.ask(lambda one: lists(one, text.removeprefix(ANSWER_PREFIX)))
    if is_listed:
        return RedirectResponse(f"/answers/{quote(text)}", status_code=303)
    query, faults = query_of(asked)
    began_s = time.perf_counter()
    page = await pages.reading.ask(lambda one: search(one, query))
    offered = await pages.reading.held("choices", lambda: pages.reading.ask(choices), held_s=10.0)
    further = urlencode(
        {**{name: value for name, value in asked.items() if value and name != "before"}, "before": page.further or 0}
    )
    return pages.show(
        request, viewer, "answers.html", query=query, faults=faults, page=page, choices=offered, further=further,
        took_ms=round(1000 * (time.perf_counter() - began_s)), narrowed=query != Query(before=query.before),
        max_text=MAX_TEXT,
    )  # fmt: skip


async def answer(pages: Pages, request: Request, viewer: Viewer) -> Response:
    """One answer and everything that happened to it."""
    trace = await pages.reading.answer(str(request.path_params["ref"]))
    whole = request.query_params.get("whole") == "1"
    return await show_answer(
        pages, request, viewer, trace, shown(trace, await pages.spell(), opened=False, whole=whole)
    )


async def show_answer(
    pages: Pages, request: Request, viewer: Viewer, trace: AnswerTrace, view: ShownAnswer, *, opened: bool = False
) -> Response:
    """The page of one answer. opened: its sealed texts are shown, for this look only."""
    neighbours = await pages.reading.ask(lambda one: beside(one, trace.id))
    fate = await pages.reading.ask(lambda one: data.fate_of(one, trace.id))
    openings = await pages.reading.ask(lambda one: data.openings_of(one, trace.id))
    return pages.show(
        request, viewer, "answer.html", trace=trace, view=view, one=view.one, scores=scores_of(trace), opened=opened,
        judged=trace.judged, beside=neighbours, openings=openings, group=group_of(trace.id), whole_limit=1,
        may_open=viewer.may("unseal"), fate=fate, in_session=bool(session_of(group_of(trace.id))),
    )  # fmt: skip


async def all_versions(pages: Pages, request: Request, viewer: Viewer) -> Response:
    """The timeline, and the versions with the decisions about them."""
    history = await pages.reading.history(PAGE_S)
    query, _ = query_of(dict(request.query_params))
    evals = await pages.reading.ask(versions.evals_of)
    every = request.query_params.get("all") == "1"
    rows = versions.rows_of(history, evals, query.before, every=every)
    state = await pages.reading.status(PAGE_S)
    return pages.show(
        request, viewer, "versions.html", rows=rows, stable=history.stable, timeline=versions.timeline(history),
        decisions=history.decisions[-30:][::-1], word=versions.word, learning=state["learning"], every=every,
        more=rows[-1].version if len(rows) == versions.SHOWN else None, is_whole=history.is_whole,
    )  # fmt: skip


async def version(pages: Pages, request: Request, viewer: Viewer) -> Response:
    """One version: the decisions about it with their reasons, and the answers it learned from."""
    number = _number(str(request.path_params["version"]))
    history = await pages.reading.history_of(number, PAGE_S)
    events = [(time_ms, one) for time_ms, one in history.events if one.version == number]
    if not events:
        raise NotInLog(f"version {number} was never published")
    try:
        made = await pages.reading.learned(number)
    except NotInLog:
        made = None
    evals = await pages.reading.ask(lambda one: versions.evals_of(one))
    learned = await pages.reading.ask(lambda one: search(one, Query(learned=number)))
    said = [one for one in history.decisions if one.version == number]
    before = [one.version for one in history.decisions if one.event == "promoted" and one.version < number]
    return pages.show(
        request, viewer, "version.html", number=number, events=events, made=made, decided=said, word=versions.word,
        numbers_of=versions.numbers_of, evals=evals.get(number, ()), stable=history.stable, learned=learned.rows[:SHOWN],
        rival=before[-1] if before else max(0, number - 1), interval=interval,
    )  # fmt: skip


async def compare(pages: Pages, request: Request, viewer: Viewer) -> Response:
    """Two versions on the recorded prompts that both answered."""
    asked = request.query_params
    evaluated = await pages.reading.ask(versions.evals_of)
    numbers = sorted(evaluated)
    left = _number(asked.get("a") or str(numbers[0] if numbers else 0))
    right = _number(asked.get("b") or str(numbers[-1] if numbers else 0))
    suites = await pages.reading.ask(lambda one: versions.suites_both(one, left, right))
    suite = asked.get("suite") or (suites[0] if suites else "")
    everything = asked.get("all") == "1"
    pairs, counts = await pages.reading.ask(
        lambda one: versions.pairs_of(one, suite, left, right, all_of_them=everything)
    )
    return pages.show(
        request, viewer, "compare.html", left=left, right=right, suites=suites, suite=suite, pairs=pairs, counts=counts,
        everything=everything, numbers=numbers,
    )  # fmt: skip


async def all_data(pages: Pages, request: Request, viewer: Viewer) -> Response:
    """Dead letters, tasks, and what was made."""
    asked = request.query_params
    before = query_of({"before": asked.get("before", "")})[0].before
    reason, order, named = asked.get("reason", "")[:200], asked.get("order", ""), asked.get("task", "")[:200]
    ask = pages.reading.ask
    letters, older = await ask(lambda one: data.letters(one, reason, before))
    tenths = await pages.reading.held("tenths", lambda: ask(data.task_shares), held_s=DRAWN_S)
    rows = await pages.reading.held("sizes", lambda: ask(sizes), held_s=COUNTED_S)
    return pages.show(
        request, viewer, "data.html", reason=reason, order=order, named=named, letters=letters, older=older,
        counts=await ask(data.letter_counts), tasks=await ask(lambda one: data.tasks(one, order, named)),
        tenths=tenths, rows=rows, bounds=bounds_of(pages.reading.settings.keep.replay), max_named=data.MAX_NAMED,
        made=await ask(data.made), busy=pages.busy, has_rules=bool(pages.command),
        num_ended=pages.access.num_ended, ended_bound=ended_bound(),
    )  # fmt: skip


async def letter(pages: Pages, request: Request, viewer: Viewer) -> Response:
    """One dead letter, and what it holds."""
    place = letter_place([str(request.path_params[name]) for name in ("partition", "offset")])
    time_ms, found = await pages.reading.letter(*place)
    return await show_letter(pages, request, viewer, place, (time_ms, found))


async def show_letter(
    pages: Pages,
    request: Request,
    viewer: Viewer,
    place: tuple[int, int],
    found: tuple[int, DeadLetter],
    *,
    opened: bool = False,
) -> Response:
    """The page of one letter. found: its time in ms, and the letter. opened: its sealed texts are shown, for this look only."""
    time_ms, letter = found
    mark = await pages.reading.ask(lambda one: data.mark_of(one, *place))
    openings = await pages.reading.ask(lambda one: data.openings_of(one, letter_name(place)))
    return pages.show(
        request, viewer, "letter.html", letter=letter, time_ms=time_ms, mark=mark, view=shown_letter(letter), opened=opened,
        openings=openings, place="/".join(map(str, place)), may_open=viewer.may("unseal"),
    )  # fmt: skip


def letter_place(place: Sequence[str]) -> tuple[int, int]:
    """Partition and offset of a letter. Raises NotInLog."""
    if len(place) != 2 or not all(one.isascii() and one.isdecimal() and len(one) <= 18 for one in place):
        raise NotInLog(f"got {'/'.join(place)[:80]!r}, expected a partition and an offset")
    return int(place[0]), int(place[1])


def letter_name(place: tuple[int, int]) -> str:
    """The name of a letter in the record of its opening.

    >>> letter_name((0, 12))
    'dead-letters/0@12'
    """
    return f"{DEAD_LETTERS.name}/{place[0]}@{place[1]}"


async def privacy(pages: Pages, request: Request, viewer: Viewer) -> Response:
    """What is sealed, who was forgotten, and what was opened by whom."""
    found = await pages.reading.ask(data.privacy)
    return pages.show(request, viewer, "privacy.html", 200, **found)


async def help_page(pages: Pages, request: Request, viewer: Viewer) -> Response:
    """A page of the documentation as plain text, section by section."""
    name = str(request.path_params["name"])
    if name not in HELP:
        raise NotInLog(f"there is no page {name}")
    parts = (HOWTO / f"{name}.md").read_text(encoding="utf-8").split("\n## ")
    sections = [(anchor(text.partition("\n")[0]), f"## {text}") for text in parts[1:]]
    return pages.show(request, viewer, "help.html", name=name, text=parts[0], sections=sections)


def _number(text: str) -> int:
    """The number of a version in an address or a form. Raises NotInLog."""
    digits = text.removeprefix("v")
    if not digits.isdecimal() or len(digits) > 15:
        raise NotInLog(f"got {text[:40]!r}, expected a version")
    return int(digits)


LOOKS: Mapping[str, Callable[[Pages, Request, Viewer], Awaitable[Response]]] = {
    "/": flow,
    "/learning": learn,
    "/answers": answers,
    "/answers/{ref:path}": answer,  # an id may hold "/", as those of some benchmarks do
    "/versions": all_versions,
    "/versions/compare": compare,
    "/versions/{version}": version,
    "/data": all_data,
    "/data/letters/{partition}/{offset}": letter,
    "/privacy": privacy,
    "/help/{name}": help_page,
}
