"""The command line: help, mistakes in one line, exit codes, and foreign text that stays text."""

import asyncio
import io
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner, Result

from actors.tasksets.files import Broken
from infra.cli.data import forget, load
from infra.cli.docs import command_tree
from infra.cli.look import peek, status, trace
from infra.cli.look.audit import operator
from infra.cli.look.reader import newest
from infra.cli.main import app
from infra.cli.options import exit_with
from infra.cli.terminal import JsonFormatter, LineFormatter, Screen, print_json, printable, printable_json
from infra.ledger.forget import ForgetReport
from infra.ledger.trace import AnswerTrace, PolicyTrace
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.release import full_release
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

SETTINGS = 'app = "bot"\n[kafka]\nbootstrap_servers = "127.0.0.1:1"\ndeadline_s = 0.3\n'
NEEDS_CONFIG = (
    ["up"], ["check"], ["master"], ["explore"], ["process"], ["train"], ["load", "tasks", "f"], ["load", "experts", "f"],
    ["status"], ["peek", "buffer"], ["audit"], ["audit", "--drain"], ["reprocess", "verify"],
)  # fmt: skip


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


def told(result: Result, code: int) -> str:
    """The one line of a mistake; anything else would be a traceback."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    (line,) = result.stderr.splitlines()
    return line.removeprefix("headrace: ")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "headrace.toml"
    file.write_text(SETTINGS)
    return file


def commands(group: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every command below a group, which has `commands`, with what is typed for it."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, command in group.commands.items():
        found.append(((*path, name), command))
        if hasattr(command, "commands"):
            found += commands(command, (*path, name))
    return found


def test_every_command_explains_itself_and_its_options() -> None:
    for path, command in commands(command_tree()):
        assert command.help and len(command.help) > 30, path
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{path}: {parameter.name} has no help"
        result = call(*path, "--help")
        assert result.exit_code == 0 and command.help.split()[0] in result.output


@pytest.mark.parametrize("arguments", NEEDS_CONFIG, ids=" ".join)
def test_a_missing_config_is_one_line_that_says_what_is_expected(arguments: list[str], tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    line = told(call(*arguments, "--config", str(missing)), 2)
    assert line == f"{missing}: no such file; expected a headrace.toml here, or --config FILE"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('app = "bot"\n[trainer]\nlerning_rate = 1\n', ['trainer.lerning_rate', 'did you mean "learning_rate"?']),
        ('app = "bot"\n[pacing]\nmax_staleness = "two"\n', ["pacing.max_staleness", "got 'two'", "expected a whole number"]),
        ('app = "bot"\n[kafka]\ntiered = true\n', ["kafka.tiered", "unknown key"]),
        ('app = "bot"\n[kafka]\npartitions = 0\n', ["kafka.partitions", "got 0", "1 or more"]),
        ("[kafka]\n", ["app", "missing"]),
        ('app = "bot"\nplugins = [\n', ["not valid TOML", "at end of document"]),
        ('app = "bot"\n[[score]]\nname = "x"\nuse = "nowhere"\n', ["score[0].use", "nowhere", "module:name"]),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_one_line_with_what_got_expected_where(
    text: str, words: list[str], tmp_path: Path
) -> None:
    config = tmp_path / "bot.toml"
    config.write_text(text)
    line = told(call("status", "-c", str(config)), 2)
    assert line.startswith(str(config)) and all(word in line for word in words), line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status", "--set", "trainer.max_steps"], ["got no '='", "a.b=value"]),
        (["status", "--set", "trainer.max_step=3"], ["trainer.max_step", 'did you mean "max_steps"?']),
        (["status", "--set", "trainer.max_steps=many"], ["trainer.max_steps", "got 'many'"]),
        (["peek", "bot.bufer"], ["'bufer'", "buffer", "dead-letters"]),
        (["peek", ""], ["''", "buffer", "dead-letters"]),
        (["reprocess", "buffer"], ["got 'buffer', expected one of verify, collect, dead-letters"]),
        (["reprocess", "dead-letters", "--diff"], ["takes no --diff"]),
        (["audit", "--drain", "--timeout", "soon"], ['got "soon", expected a duration']),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(arguments: list[str], words: list[str], config: Path) -> None:
    line = told(call(*arguments, "-c", str(config)), 2)
    assert all(word in line for word in words), line


@pytest.mark.parametrize("arguments", [["status"], ["peek", "bot.buffer"], ["audit"]], ids=" ".join)
def test_a_broker_that_is_not_there_is_one_line_with_its_address(arguments: list[str], config: Path) -> None:
    line = told(call(*arguments, "-c", str(config)), 1)
    assert line.startswith("Kafka at 127.0.0.1:1 is not reachable") and "0.3 s" in line


def test_a_person_without_an_entry_among_the_machines_users_is_named_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert operator() == f"{os.getuid()}@{socket.gethostname()}"


@pytest.mark.parametrize("role", ["train", "explore"])
def test_a_role_without_a_model_says_which_setting_is_missing(role: str, config: Path) -> None:
    command = [sys.executable, "-m", "infra.cli.main", role, "-c", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (started,) = [line for line in done.stderr.splitlines() if f"started role={role}" in line]
    assert started.endswith(f" release={full_release()}")
    assert done.stderr.splitlines()[-1].endswith(
        "policy.model: missing, expected a model folder or a Hugging Face name"
    )


HOSTILE = "\x1b]52;c;cm0gLXJmIC8=\x07\x1b[2A\x1b[31m\x9b2J\r\x00\u202eevil[/i][bold]x[/]\ud800"


def screen() -> tuple[Console, Callable[[], str]]:
    """A terminal that has colours, and what was written to it."""
    written = io.StringIO()
    return Screen(soft_wrap=True, file=written, force_terminal=False, width=400), written.getvalue


def harmless(text: str) -> bool:
    return printable(text) == text


CLEAN = HOSTILE.replace("\ud800", "")  # what UTF-8, and so a record, can hold


def hostile_answer(text: str) -> Experience:
    messages = (Message(role="user", content=text), Message(role="assistant", content=text))
    return replace(group_block(1).experiences[0].with_bulk(messages=messages), lane="live", tenant=CLEAN)


RECORDS = [
    Block((replace(hostile_answer(CLEAN), tenant="t"),)),
    Task(id="t", messages=(Message(role="user", content=CLEAN),), answer=CLEAN, split=CLEAN),
    DeadLetter(
        topic="experiences", partition=0, offset=0, stage=CLEAN, reason=CLEAN, error=CLEAN, value=CLEAN.encode()
    ),
    Progress(role=CLEAN, instance=CLEAN, state=CLEAN, counters={CLEAN: 1.0}, chains={CLEAN: CLEAN}, refused={3: CLEAN}),
    PolicyEvent(event="held", policy=CLEAN, version=3, owner=CLEAN, reason=CLEAN),
    Directive(order="pause", owner=CLEAN, reason=CLEAN),
    Feedback(ref="hr-a1b2.0-3-0", id=CLEAN, text=CLEAN, source=CLEAN, rater=CLEAN),
    Closure(group="g", outcome="dropped", reason=CLEAN),
]
HOMES = {
    kind: next(topic for topic in topics.ALL if kind in topic.holds)
    for kind in {type(record).__name__ for record in RECORDS}
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


def test_the_help_of_peek_names_every_topic() -> None:
    assert not [topic.name for topic in topics.ALL if topic.name not in str(peek.peek.__doc__)]


async def test_peek_shows_every_kind_of_record_without_obeying_it(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_trace_shows_an_answer_and_what_was_said_without_obeying_it(capsys: pytest.CaptureFixture[str]) -> None:
    console, written = screen()
    said = Feedback(ref="hr-a1b2.0-3-0", id="x", text=HOSTILE, source="csat", type="label", rater="r")
    closure = Closure(group="g", outcome="dropped", reason=HOSTILE)
    hostile, feedback, closures = hostile_answer(HOSTILE), ((1, said),), ((1, closure),)
    answer = AnswerTrace(
        id=HOSTILE, published=hostile, judged=hostile, dropped=HOSTILE, feedback=feedback, closures=closures
    )
    trace.show_answer(console, answer)
    event = PolicyEvent(event="held", policy="main", version=3, reason=HOSTILE)
    made = PolicyTrace(
        version=3, parent=2, events=((1, event),), steps=(), lanes={HOSTILE: 1}, versions={}, ids=(HOSTILE,)
    )
    trace.show_policy(console, made)
    assert written().count("evil[/i][bold]x[/]") >= 6 and harmless(written())
    print_json({"x": CLEAN})
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
    said = call("keys", "create", "--tenant", CLEAN.replace("\0", ""), "-c", str(store)).output
    for option in ([], ["--json"]):
        listed = call("keys", "list", "-c", str(store), *option).output
        assert harmless(said + listed) and ("evil" in listed or not option)
    with load.progress_bar(HOSTILE, 1) as bar:
        bar.broken(Broken(f"rows.jsonl:1 {HOSTILE}", HOSTILE))
    told = capsys.readouterr()
    assert "evil" in told.err and harmless(told.err)


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
