"""The pages: each reads the values of its template and changes nothing."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from infra.cli.console import data, learning, versions
from infra.cli.console.access import Viewer
from infra.cli.console.answers import Spell, beside, list_scores, shown
from infra.cli.console.flow import MAX_ALARMS, alarms, figures, sentence
from infra.cli.console.reading import PAGE_S, NotReadYet, Reading, has_answer
from infra.cli.console.search import Query, choices, parse_query, search
from infra.cli.look.status import shown_rates
from infra.ledger.index_fold import MAX_TEXT
from infra.ledger.trace import AnswerTrace
from schemas import Directive, topics
from schemas.errors import NotInLog
from schemas.ids import ANSWER_PREFIX, experience_group, session_of

BEING_READ = "The log is being read. This page shows the run afterwards."
NOT_HEARD = "The log could not be read yet. This page retries."
FLOW_S = 0.5  # wait for the log; afterwards the first page reports the reading, and retries
DRAWN_S = 10.0  # reuse of a chart, since a chart of thousands of versions takes time to read
SHOWN = 20  # answers on the page of the version that was trained on them
MAX_WHY = 500

Values = dict[str, Any]


class Console:
    """A run for the pages. command: the arguments that name it for a command. load_spell: loads a
    function from token ids to texts, None where there is no tokenizer; blocks.
    """

    def __init__(
        self, reading: Reading, command: Sequence[str] = (), load_spell: Callable[[], Spell | None] = lambda: None
    ) -> None:
        self.reading = reading
        self.command = tuple(command)
        self._load_spell = load_spell
        self._spell: tuple[Spell | None] | None = None

    async def spell(self) -> Spell | None:
        """A function from token ids to texts. The first answer loads the tokenizer, so that no other page waits for it."""
        if self._spell is None:
            self._spell = (await asyncio.to_thread(self._load_spell),)
        return self._spell[0]


async def flow(console: Console, request: Request) -> Values:
    """The state of the system, or the progress of the first reading."""
    reading = console.reading
    try:
        state, history = await asyncio.gather(reading.status(FLOW_S), reading.history(FLOW_S))
    except NotReadYet:
        return {"state": None, "sentence": NOT_HEARD if (await reading.look(FLOW_S)).fault else BEING_READ}
    found, words, newest = alarms(state), sentence(state, time.time()), history.decisions[-1:]
    if (await reading.look(FLOW_S)).fault:
        words = f"The log cannot be read now. {words}"
    return {
        "state": state, "sentence": words, "alarms": found[:MAX_ALARMS], "num_alarms": len(found),
        "figures": figures(state, history.stable, newest[0].version if newest and newest[0].event == "held" else -1),
        "roles": [(role, shown_rates(role)) for role in state["roles"]],
    }  # fmt: skip


async def learn(console: Console, request: Request) -> Values:
    reading = console.reading
    app = reading.settings.app

    def charts(database: Any) -> list[Values]:
        return [*learning.charts(app, database), learning.fates_chart(database)]

    return {"charts": await reading.held("charts", lambda: reading.rows(charts), held_s=DRAWN_S)}


async def answers(console: Console, request: Request) -> Values | Response:
    """The search. The id of an answer in the index leads to the page of that answer."""
    asked, reading = dict(request.query_params), console.reading
    text = asked.get("text", "").strip()
    if await reading.rows(has_answer, text.removeprefix(ANSWER_PREFIX)):
        return RedirectResponse(f"/answers/{quote(text)}", status_code=303)
    query, faults = parse_query(asked)
    began_s = time.perf_counter()
    page = await reading.rows(search, query)
    further = {name: value for name, value in asked.items() if value and name != "before"} | {
        "before": page.further or 0
    }
    return {
        "query": query, "faults": faults, "page": page, "further": urlencode(further), "max_text": MAX_TEXT,
        "choices": await reading.held("choices", lambda: reading.rows(choices), held_s=DRAWN_S),
        "took_ms": round(1000 * (time.perf_counter() - began_s)), "narrowed": query != Query(before=query.before),
    }  # fmt: skip


async def answer(console: Console, request: Request) -> Values:
    return await answer_values(console, await console.reading.answer(str(request.path_params["ref"])))


async def answer_values(console: Console, trace: AnswerTrace, *, opened: bool = False) -> Values:
    """The page of one answer. opened: True to show its sealed texts, for this view."""
    group, rows = experience_group(trace.id), console.reading.rows
    return {
        "trace": trace, "view": shown(trace, await console.spell(), opened=opened), "opened": opened,
        "scores": list_scores(trace), "beside": await rows(beside, trace.id), "openings": await rows(data.openings, trace.id),
        "fate": await rows(data.fate, trace.id), "group": group, "in_session": bool(session_of(group)),
    }  # fmt: skip


class Refusal(Exception):
    """The action is impossible. The page shows the message."""


async def open_answer(console: Console, viewer: Viewer, form: Mapping[str, str]) -> Values:
    """The page of a sealed answer, opened for one view once the log has the viewer and the reason. Raises Refusal."""
    trace = await console.reading.answer(form.get("answer", ""))
    values = await answer_values(console, trace, opened=True)
    if values["view"]["shut"] == "forgotten":
        raise Refusal("its user was forgotten: it cannot be opened")
    why = " ".join(form.get("why", "").split())[:MAX_WHY]
    if not why:
        raise Refusal("the reason is empty: enter a reason, the log keeps it with the opening")
    record = Directive(order="open", owner=viewer.name, about=trace.id, reason=why)
    await console.reading.log.publish(topics.POLICIES, record)
    return values


async def all_versions(console: Console, request: Request) -> Values:
    reading = console.reading
    history = await reading.history(PAGE_S)
    query, _ = parse_query(dict(request.query_params))
    every = request.query_params.get("all") == "1"
    rows = versions.version_rows(history, await reading.rows(versions.evals), query.before, every=every)
    return {
        "rows": rows, "history": history, "stable": history.stable, "timeline": versions.timeline(history), "every": every,
        "decisions": history.decisions[-30:][::-1], "is_whole": history.is_whole,
        "learning": (await reading.status(PAGE_S))["learning"],
        "more": rows[-1]["version"] if len(rows) == versions.SHOWN else None,
    }  # fmt: skip


async def version(console: Console, request: Request) -> Values:
    reading = console.reading
    text = str(request.path_params["version"])
    number = parse_query({"version": text})[0].version
    if number is None or number < 0:
        raise NotInLog(f"got {text[:40]!r}, expected a version")
    history = await reading.history_since(number, PAGE_S)
    events = [(time_ms, event) for time_ms, event in history.events if event.version == number]
    if not events:
        raise NotInLog(f"version {number} was never published")
    try:
        made = await reading.learned(number)
    except NotInLog:
        made = None
    found = (await reading.rows(versions.evals)).get(number, ())
    learned = await reading.rows(search, Query(learned=number))
    gate = reading.settings.master.gate
    return {
        "number": number, "events": events, "made": made, "decision_numbers": versions.decision_numbers,
        "decided": [each for each in history.decisions if each.version == number], "evals": found, "stable": history.stable,
        "learned": learned.rows[:SHOWN], "has_gate": bool(gate.suites), "command": " ".join(console.command[:2]),
    }  # fmt: skip


async def all_data(console: Console, request: Request) -> Values:
    asked, rows = request.query_params, console.reading.rows
    before, reason = parse_query({"before": asked.get("before", "")})[0].before, asked.get("reason", "")[:200]
    letters, older = await rows(data.letters, reason, before)
    return {"reason": reason, "letters": letters, "older": older, "counts": await rows(data.letter_counts)}


async def letter(console: Console, request: Request) -> Values:
    place = [str(request.path_params[name]) for name in ("partition", "offset")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= 18 for part in place):
        raise NotInLog(f"got {'/'.join(place)[:80]!r}, expected a partition and an offset")
    partition, offset = map(int, place)
    time_ms, found = await console.reading.letter(partition, offset)
    mark = await console.reading.rows(data.mark, partition, offset)
    return {"letter": found, "time_ms": time_ms, "mark": mark, "view": data.shown_letter(found)}


async def privacy(console: Console, request: Request) -> Values:
    return await console.reading.rows(data.privacy)


# Every address with its template and the function that reads its values.
PAGES: Mapping[str, tuple[str, Callable[[Console, Request], Awaitable[Values | Response]]]] = {
    "/": ("flow.html", flow),
    "/flow": ("flow_live.html", flow),  # the part of the first page that is asked for again
    "/learning": ("learning.html", learn),
    "/answers": ("answers.html", answers),
    "/answers/{ref:path}": ("answer.html", answer),  # an id may hold "/", as those of some benchmarks do
    "/versions": ("versions.html", all_versions),
    "/versions/{version}": ("version.html", version),
    "/data": ("data.html", all_data),
    "/data/letters/{partition}/{offset}": ("letter.html", letter),
    "/privacy": ("privacy.html", privacy),
}
