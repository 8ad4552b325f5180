"""`headrace trace`: the way of an answer to the steps that trained on it, its next event, and the answers of a version."""

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from infra.cli.connect import connected, reading
from infra.cli.look.peek import cut, header
from infra.cli.options import JsonOption, SettingsFile, command
from infra.cli.settings import Settings
from infra.cli.terminal import Screen, clock, print_json, two_columns
from infra.ledger.index import FILE, LogIndex, follow
from infra.ledger.trace import AnswerTrace, PolicyTrace, trace_answer, trace_policy
from infra.local.process import give_way
from infra.settings.config import duration_s
from schemas import Experience
from schemas.errors import ConfigError
from trainer.batch.assemble import PACED

SHOWN_IDS = 10
PATIENCE_S = 30.0  # with a busy machine, whose keeper of the index runs in its idle time


@command
async def trace(
    chosen: SettingsFile,
    answer: Annotated[str | None, typer.Argument(help="Answer id (hr-…) or experience id.")] = None,
    policy: Annotated[int | None, typer.Option(help="Version whose answers to show.")] = None,
    keep_up: Annotated[
        bool, typer.Option("--keep-up", help="Only keep the index up to date until stopped, as `up` does.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Follow an answer to the steps that trained on it, or a policy back to its answers.

    It shows the version that sampled the answer, the result of every processor and score, the feedback and its time, the end of
    the group, the steps that trained on the answer with their advantages, and the first version that learned from it, or what
    the answer waits for. An index next to the TOML has the offsets of the records;
    `headrace up` keeps it up to date. Without it the first trace reads the whole log, later traces only new records.

    Example: [cyan]headrace trace hr-add-37-45.2.0-7-0[/], [cyan]headrace trace --policy 40[/]
    """
    settings = chosen.load()
    if keep_up:
        return await _keep_up(settings)
    if (answer is None) == (policy is None):
        raise ConfigError("trace: expected an answer id or --policy VERSION, one of them")
    console = Screen(stderr=as_json, soft_wrap=True)
    index = open_index(settings)
    try:
        async with reading(settings) as log:
            with console.status("reading the records since the last trace") as status:
                is_whole = await index.refresh(
                    log,
                    lambda topic, left: status.update(f"indexing {topic}: {left:,} records left"),
                    wait_s=PATIENCE_S,
                )
            if not is_whole:
                Screen(stderr=True).print("the index is behind the log: the newest records are missing here")
            if answer is not None:
                found = await trace_answer(log, index, answer)
                waits = waits_for(found, settings)
                print_json(answer_json(found, waits)) if as_json else show_answer(console, found, waits)
            elif policy is not None:
                made = await trace_policy(log, index, policy)
                print_json(msgspec.to_builtins(made)) if as_json else show_policy(console, made)
    finally:
        index.close()
    return 0


async def _keep_up(settings: Settings) -> int:
    """In the machine's idle time, until SIGINT or SIGTERM."""
    give_way(19)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    index = open_index(settings)
    try:
        async with connected(settings) as log:
            await follow(log, index, stop)
    finally:
        index.close()
    return 0


def open_index(settings: Settings, folder: Path | None = None) -> LogIndex:
    """The index of a run, opened. folder: its place, the run's state by default."""
    return LogIndex(
        (folder or settings.folder / "state") / FILE,
        run=settings.run or settings.app,
        policy=settings.policy.name,
        keep_ms=1000 * duration_s(settings.keep.replay),
    )


def answer_json(answer: AnswerTrace, waits: str) -> dict[str, object]:
    """The trace as plain data; experiences without their token arrays."""
    return {name: getattr(answer, name) for name in AnswerTrace.__struct_fields__} | {
        "waits": waits,
        "published": answer.published and header(answer.published),
        "judged": answer.judged and header(answer.judged),
        "buffered": [(time_ms, header(copy)) for time_ms, copy in answer.buffered],
    }


def show_answer(console: Console, answer: AnswerTrace, waits: str = "") -> None:
    """Print a trace in the order of time. waits: see `waits_for`."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim")
    rows.add_column()
    rows.add_column()
    first = answer.published or answer.judged or answer.buffered[0][1]
    asked = " ".join(each.content for each in first.messages if each.role != "assistant") if not first.lost else ""
    rows.add_row("", "asked", cut(asked))
    response = first.lost or repr(cut(first.response))
    rows.add_row(clock(answer.published_ms), "answered", f"{response}  {spans(first)}  {first.end}")
    if answer.judged is not None:
        scores = ", ".join(f"{score.name} {score.value:g}" for score in answer.judged.scores) or "no scores"
        rows.add_row("", "judged", f"{scores}  by {', '.join(answer.judged.stamps) or 'no score'}")
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
    rows: list[tuple[str, ...]] = [
        (event.event, f"{clock(time_ms)} {event.reason}".strip()) for time_ms, event in made.events
    ]
    kept = [str(step.step) for step in made.steps if not step.undone]
    rows.append(("steps", " to ".join(dict.fromkeys((kept[0], kept[-1]))) if kept else "none"))
    rows += [(f"step {step.step}", step.undone) for step in made.steps if step.undone]
    rows += [(f"trained in lane {lane}", f"{count:,}") for lane, count in made.lanes.items()]
    for version, count in made.versions.items():
        rows.append((f"sampled by version {version}" if version >= 0 else "demonstrated", f"{count:,}"))
    console.print(two_columns(f"version {made.version}, from version {made.parent}", rows))
    if made.ids:
        more = f" and {len(made.ids) - SHOWN_IDS:,} more (--json lists all)" if len(made.ids) > SHOWN_IDS else ""
        console.print(f"{', '.join(made.ids[:SHOWN_IDS])}{more}", style="dim")


def spans(answer: Experience) -> str:
    parts = []
    for span in answer.spans:
        kept = f" with keys and values from v{span.kv} on" if span.kv >= 0 else ""  # older than the span
        parts.append(f"{span.stop - span.start} tokens of v{span.version}{kept}" if span.version >= 0 else "shown")
    return ", ".join(parts)


def waits_for(answer: AnswerTrace, settings: Settings) -> str:
    """A clause about the next event of an answer that no published version has learned from; "" where none follows."""
    lasting = [use for use in answer.uses if not use.undone]
    if answer.first_version is not None or answer.dropped:
        return ""
    if lasting:
        return f"the version behind step {lasting[-1].step} is not published yet"
    if answer.given_up:
        return f"the trainer took it out: {answer.given_up}"
    ended = [closure for _, closure in answer.closures if closure.outcome != "superseded"]
    if ended:
        return waits_for_step(answer, settings) if ended[-1].outcome == "buffered" and answer.buffered else ""
    if answer.judged is None:
        return "it waits to be verified and scored by process"
    if any(closure.attempt == answer.judged.attempt for _, closure in answer.closures):
        return ""
    return (
        "it waits to be closed by process: for feedback until its window ends, or for the rest of its group or session"
    )


def waits_for_step(answer: AnswerTrace, settings: Settings) -> str:
    lane, lanes = answer.buffered[-1][1].lane, settings.trainer.lanes
    if lane not in lanes or lanes[lane].weight == 0.0:
        return f"no lane takes it: [trainer.lanes] has {', '.join(lanes)}, and it is of lane {lane}"
    least = settings.trainer.min_sequences(lane)
    of = f" of {least} answers or more" if least > 1 and PACED not in lanes else ""
    return f"it waits in the trainer's buffer for a step of lane {lane}{of}"
