"""Foreign text never moves the operator's terminal: escape sequences and markup are shown, whatever command prints them."""

import asyncio
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from infra.cli.data import forget, keys, load
from infra.cli.look import peek, status, trace
from infra.cli.look.reader import newest
from infra.cli.main import app
from infra.cli.options import exit_with
from infra.cli.terminal import JsonFormatter, LineFormatter, Screen, printable, printable_json
from infra.ledger.forget import ForgetReport
from infra.ledger.trace import AnswerTrace, PolicyTrace
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from schemas import (
    Block,
    Closure,
    DeadLetter,
    Directive,
    Experience,
    Feedback,
    Message,
    PolicyEvent,
    Progress,
    Task,
    topics,
)
from schemas.errors import BrokerUnavailable, ConfigError, FencedOut
from tests.schemas.record_samples import group_block

HOSTILE = "\x1b]52;c;cm0gLXJmIC8=\x07\x1b[2A\x1b[31m\x9b2J\r\x00\u202eevil[/i][bold]x[/]\ud800"


def screen() -> tuple[Console, Callable[[], str]]:
    """A terminal that has colours, and what was written to it."""
    written = io.StringIO()
    return Screen(soft_wrap=True, file=written, force_terminal=False, width=400), written.getvalue


def harmless(text: str) -> bool:
    return printable(text) == text


def hostile_answer() -> Experience:
    base = group_block(1).experiences[0]
    messages = (Message(role="user", content=HOSTILE), Message(role="assistant", content=HOSTILE))
    return replace(base.with_bulk(messages=messages), lane="live", tenant=HOSTILE.replace("\ud800", ""))


CLEAN = HOSTILE.replace("\ud800", "")  # what UTF-8, and so a record, can hold
RECORDS = [
    Block(
        (
            replace(
                hostile_answer().with_bulk(messages=(Message("user", CLEAN), Message("assistant", CLEAN))), tenant="t"
            ),
        )
    ),
    Task(id="t", messages=(Message(role="user", content=CLEAN),), answer=CLEAN, split=CLEAN),
    DeadLetter(
        topic="experiences", partition=0, offset=0, stage=CLEAN, reason=CLEAN, error=CLEAN, value=CLEAN.encode()
    ),
    Progress(role=CLEAN, instance=CLEAN, state=CLEAN, counters={CLEAN: 1.0}, chains={CLEAN: CLEAN}),
    PolicyEvent(event="refused", policy=CLEAN, version=3, owner=CLEAN, reason=CLEAN),
    Directive(order="pause", owner=CLEAN, reason=CLEAN),
    Feedback(ref="hr-a1b2.0-3-0", id=CLEAN, text=CLEAN, source=CLEAN, rater=CLEAN),
    Closure(group="g", outcome="dropped", reason=CLEAN),
]
HOMES = {
    kind: next(topic for topic in topics.ALL if kind in topic.holds) for kind in {type(one).__name__ for one in RECORDS}
}


@given(st.text())
def test_what_is_printable_moves_nothing_and_is_left_as_it_is(text: str) -> None:
    shown = printable(text)
    assert harmless(shown) and not set(shown) & set("\x1b\x9b\x07\r\x00\u202e\ud800")
    assert shown == text or not harmless(text)
    assert json.loads(printable_json(json.dumps({"x": text}, ensure_ascii=False))) == {"x": text}


@given(st.text(), st.booleans())
def test_a_screen_prints_any_text_as_text_in_tables_too(text: str, in_table: bool) -> None:
    console, written = screen()
    if in_table:
        table = Table("x")
        table.add_row(text)
        console.print(table)
    else:
        console.print(text, style="red")
    assert harmless(written().replace("\n", ""))


def test_peek_shows_every_kind_of_record_without_obeying_it(capsys: pytest.CaptureFixture[str]) -> None:
    async def check() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await log.create_topics(partitions=1, keep_ms=-1)
        for record in RECORDS:
            await log.publish(HOMES[type(record).__name__], record, key="k")  # type: ignore[arg-type]
        console, written = screen()
        for topic in set(HOMES.values()):
            for message in await newest(log, topic, 50):
                peek.show(console, message, as_json=False)
                peek.show(console, message, as_json=True)
        assert "evil[/i][bold]x[/]" in written() and "\\x1b]52" in written() and harmless(written())
        assert harmless(capsys.readouterr().out)

    asyncio.run(check())


def test_trace_shows_an_answer_and_what_was_said_without_obeying_it(capsys: pytest.CaptureFixture[str]) -> None:
    console, written = screen()
    said = Feedback(ref="hr-a1b2.0-3-0", id="x", text=HOSTILE, source="csat", type="label", rater="r")
    closure = Closure(group="g", outcome="dropped", reason=HOSTILE)
    one = hostile_answer()
    answer = AnswerTrace(
        id=HOSTILE, published=one, judged=one, dropped=HOSTILE, feedback=((1, said),), closures=((1, closure),)
    )
    trace.show_answer(console, answer)
    event = PolicyEvent(event="refused", policy="main", version=3, reason=HOSTILE)
    made = PolicyTrace(
        version=3, parent=2, events=((1, event),), steps=(), lanes={HOSTILE: 1}, versions={}, ids=(HOSTILE,)
    )
    trace.show_policy(console, made)
    assert written().count("evil[/i][bold]x[/]") >= 6 and harmless(written())
    trace.print_json({"x": CLEAN})
    assert harmless(capsys.readouterr().out)


def test_status_forget_keys_and_load_obey_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def state() -> status.State:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await log.create_topics(partitions=1, keep_ms=-1)
        for record in RECORDS:
            await log.publish(HOMES[type(record).__name__], record, key="k")  # type: ignore[arg-type]
        return await status.read_status(log, now_s=1e10, max_lag=0)

    console, written = screen()
    status.show(console, asyncio.run(state()))
    forget.show(console, ForgetReport(about=HOSTILE, keys=("k",), steps=(1,), first_version=2))
    assert "evil[/i]" in written() and harmless(written())
    store = tmp_path / "headrace.toml"
    store.write_text('app = "bot"\n')
    keys.run_create(store, [], CLEAN, "serve", "no", 0, 0, "")
    keys.run_list(store, [], as_json=False)
    keys.run_list(store, [], as_json=True)
    with load.progress_bar(HOSTILE, 1) as bar:
        bar.broken(load_broken())
    said = capsys.readouterr()
    assert "evil" in said.out and "evil" in said.err and harmless(said.out) and harmless(said.err)


def load_broken() -> "load.Broken":
    from actors.tasksets.files import Broken

    return Broken(f"rows.jsonl:1 {HOSTILE}", HOSTILE)


@pytest.mark.parametrize("error", [ConfigError(f"got {HOSTILE}"), RuntimeError(HOSTILE)], ids=["ours", "anybody's"])
def test_an_error_is_told_without_obeying_it(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> int:
        raise error

    with pytest.raises(typer.Exit):
        exit_with(body)
    told = capsys.readouterr().err
    assert "\\x1b]52" in told and "evil[/i]" in told and harmless(told)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a"), 2),
        (BrokerUnavailable("b"), 1),
        (FencedOut("c"), 3),
        (ExceptionGroup("loops", [BrokerUnavailable("d"), ExceptionGroup("of a role", [FencedOut("e")])]), 3),
        (RuntimeError("f"), 1),
    ],
)
def test_a_role_that_another_process_has_taken_over_ends_with_a_code_of_its_own(error: Exception, code: int) -> None:
    def body() -> int:
        raise error

    with pytest.raises(typer.Exit) as ended:
        exit_with(body)
    assert ended.value.exit_code == code


def test_a_log_record_is_one_line_that_moves_nothing_and_its_traceback_stays_readable() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(LineFormatter())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("error=%s", f"{HOSTILE}\n2026-01-01 INFO forged line")
    assert written.getvalue().count("\n") == 1 and harmless(written.getvalue())
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("failed")
    assert "Traceback" in written.getvalue() and written.getvalue().count("\n") > 4 and harmless(written.getvalue())


def test_a_note_of_check_shows_its_brackets(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('app = "bot"\n[reward]\nrequire = ["usr"]\n')
    told = CliRunner().invoke(app, ["check", "-c", str(file)]).stdout
    assert "no [[score]] or [[feedback]] is called" in told


def test_a_log_record_as_json_is_one_line_that_says_it_all() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        record = logging.LogRecord(
            "infra.cli", logging.WARNING, "x.py", 1, "said %s", (HOSTILE,), (type(error), error, error.__traceback__)
        )
    line = JsonFormatter().format(record)
    assert "\n" not in line and harmless(line)
    told = json.loads(line)
    assert told["message"] == f"said {HOSTILE}" and told["level"] == "warning" and told["logger"] == "infra.cli"
    assert told["time"].endswith("Z") and "ValueError" in told["traceback"]
