"""`headrace trace`: the steps that trained on an answer, or the answers that a version learned from, for people."""

import asyncio
import signal
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from infra.cli.connect import connected, reading
from infra.cli.look.peek import cut
from infra.cli.look.waits import waits_for
from infra.cli.settings import Settings, load_settings
from infra.cli.terminal import Screen, clock, printable_json
from infra.ledger.index import FILE, LogIndex, follow
from infra.ledger.trace import AnswerTrace, PolicyTrace, trace_answer, trace_policy
from infra.local.idle_time import take_idle_time
from infra.log.memory import wall_ms
from infra.settings.config import duration_s
from schemas import Experience, Span
from schemas.errors import ConfigError

SHOWN_IDS = 10
PATIENCE_S = 30.0  # with a busy machine, whose keeper of the index runs in its idle time


async def run_trace(ref: str | None, policy: int | None, config: Path, sets: list[str], *, as_json: bool) -> int:
    """Print one trace."""
    if (ref is None) == (policy is None):
        raise ConfigError("trace: expected an answer id or --policy VERSION, one of them")
    settings = load_settings(config, sets)
    console = Screen(stderr=as_json, soft_wrap=True)
    index = open_index(settings)
    try:
        async with reading(settings) as log:
            with console.status("reading what has come since the last trace") as status:
                is_whole = await index.refresh(
                    log,
                    lambda topic, left: status.update(f"indexing {topic}: {left:,} records left"),
                    wait_s=PATIENCE_S,
                )
            if not is_whole:
                Screen(stderr=True).print("the index is behind the log: the newest records are missing here")
            if ref is not None:
                answer = await trace_answer(log, index, ref)
                waits = waits_for(answer, settings, wall_ms())
                print_json(answer_json(answer, waits)) if as_json else show_answer(console, answer, waits)
            elif policy is not None:
                made = await trace_policy(log, index, policy)
                print_json(msgspec.to_builtins(made)) if as_json else show_policy(console, made)
    finally:
        index.close()
    return 0


async def run_follow(config: Path, sets: list[str]) -> int:
    """Keep the index up to date in the machine's idle time, until SIGINT or SIGTERM."""
    settings = load_settings(config, sets)
    take_idle_time()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    index = open_index(settings, pages=settings.console.up)
    try:
        async with connected(settings) as log:
            await follow(log, index, stop)
    finally:
        index.close()
    return 0


def open_index(settings: Settings, folder: Path | None = None, *, pages: bool = False) -> LogIndex:
    """The index of a run, opened. folder: its place, the run's state by default. pages: with the tables of the console."""
    return LogIndex(
        (folder or settings.folder / "state") / FILE,
        run=settings.run or settings.app,
        policy=settings.policy.name,
        pages=pages,
        keep_ms=1000 * duration_s(settings.keep.replay),
    )


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    print(printable_json(msgspec.json.encode(value, enc_hook=str).decode()))


def answer_json(answer: AnswerTrace, waits: str) -> dict[str, object]:
    """The trace as plain data; experiences without their token arrays, and of its group the answer alone."""
    plain = {name: getattr(answer, name) for name in AnswerTrace.__struct_fields__ if name != "arrived"}
    return plain | {
        "waits": waits,
        "published": header(answer.published),
        "judged": header(answer.judged),
        "buffered": [(time_ms, header(copy)) for time_ms, copy in answer.buffered],
    }


def header(answer: Experience | None) -> dict[str, object] | None:
    """The header fields of an experience."""
    if answer is None:
        return None
    return {name: getattr(answer, name) for name in Experience.__struct_fields__ if name != "bulk"}


def show_answer(console: Console, answer: AnswerTrace, waits: str = "") -> None:
    """Print a trace in the order of time. waits: what the answer waits for (`infra.cli.look.waits`)."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim")
    rows.add_column()
    rows.add_column()
    first = answer.published or answer.judged or answer.buffered[0][1]
    question, response = ("", first.lost) if first.lost else texts(first)
    rows.add_row("", "asked", question)
    rows.add_row(clock(answer.published_ms), "answered", f"{response}  {spans(first)}  {first.end}")
    if answer.judged is not None:
        rows.add_row("", "judged", f"{scores(answer.judged)}  by {', '.join(answer.judged.stamps) or 'no score'}")
    if answer.dropped:
        rows.add_row("", "dropped", answer.dropped)
    for time_ms, feedback in answer.feedback:
        value = "" if feedback.value is None else f" {feedback.value:g}"
        shown = f"{feedback.source} {feedback.type}{value} {cut(feedback.text or '')}".rstrip()
        rows.add_row(clock(time_ms), "feedback", shown)
    for time_ms, closure in answer.closures:
        words = f"{closure.outcome} {closure.reason}".strip()
        rows.add_row(clock(time_ms), "group closed", f"attempt {closure.attempt}, revision {closure.revision}: {words}")
    for time_ms, copy in answer.buffered:
        advantage = "" if copy.advantage is None else f", advantage {copy.advantage:+.3f}"
        reward = "no reward" if copy.reward is None else f"reward {copy.reward:g}"
        rows.add_row(clock(time_ms), "buffered", f"revision {copy.revision}, lane {copy.lane}, {reward}{advantage}")
    for use in answer.uses:
        what = use.undone or f"advantage {use.advantage:+.3f}, weight {use.weight:g}, on version {use.version}"
        rows.add_row(clock(use.time_ms), "trained", f"step {use.step}, lane {use.lane}: {what}")
    console.print(answer.id, style="bold")
    console.print(rows)
    if answer.first_version is not None:
        since = answer.newest_version - answer.first_version
        console.print(
            f"learned in version {answer.first_version}; {since} versions since, the newest is {answer.newest_version}"
        )
    else:
        console.print(f"no published version has learned from it{': ' if waits else ''}{waits}", markup=False)


def show_policy(console: Console, made: PolicyTrace) -> None:
    """Print the steps of a version and what they trained on."""
    rows = Table(title=f"version {made.version}, from version {made.parent}", show_header=False)
    rows.add_column()
    rows.add_column(justify="right")
    for time_ms, event in made.events:
        rows.add_row(event.event, f"{clock(time_ms)} {event.reason}".strip())
    kept = [step for step in made.steps if not step.undone]
    rows.add_row(
        "steps", f"{kept[0].step} to {kept[-1].step}" if len(kept) > 1 else str(kept[0].step) if kept else "none"
    )
    for step in made.steps:
        if step.undone:
            rows.add_row(f"step {step.step}", step.undone)
    for lane, count in made.lanes.items():
        rows.add_row(f"trained in lane {lane}", f"{count:,}")
    for version, count in made.versions.items():
        rows.add_row(f"sampled by version {version}" if version >= 0 else "demonstrated", f"{count:,}")
    console.print(rows)
    if made.ids:
        more = f" and {len(made.ids) - SHOWN_IDS:,} more (--json lists all)" if len(made.ids) > SHOWN_IDS else ""
        console.print(f"{', '.join(made.ids[:SHOWN_IDS])}{more}", style="dim")


def texts(answer: Experience) -> tuple[str, str]:
    """Question and answer, cut."""
    return cut(" ".join(each.content for each in answer.messages if each.role != "assistant")), repr(
        cut(answer.response)
    )


def spans(answer: Experience) -> str:
    parts = [
        f"{span.stop - span.start} tokens of v{span.version}{age_of_keys(span)}" if span.version >= 0 else "shown"
        for span in answer.spans
    ]
    return ", ".join(parts)


def age_of_keys(span: Span) -> str:
    """The version of a span's oldest keys and values, where that is older than the span's; "" elsewhere.

    >>> age_of_keys(Span(6, 11, 12, kv=9))
    ' with keys and values from v9 on'
    """
    return f" with keys and values from v{span.kv} on" if span.kv >= 0 else ""


def scores(answer: Experience) -> str:
    """Every score."""
    return ", ".join(f"{score.name} {score.value:g}" for score in answer.scores) or "no scores"
