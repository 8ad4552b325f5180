"""`headrace peek`: any record reads as a line, and what cannot be read says so."""

import contextlib
import io
import json

import msgspec
import pytest
from hypothesis import given, settings
from rich.console import Console

from infra.cli.look.peek import one_line, show
from infra.log.bus import Record
from infra.log.log import LogMessage
from schemas import Batch, BatchItem, Block, Control, DeadLetter, Tick, decode, encode
from schemas.errors import BadFrame
from tests.schemas.record_samples import CONTROL_KINDS, blocks, controls, example_of, group_block


def message(record: Control | Block) -> LogMessage:
    data = encode(record)
    return LogMessage(Record("t.x", 3, 77, 1_763_715_600_000, b"", data), value=decode(data))


def shown(one: LogMessage) -> str:
    console = Console(file=io.StringIO(), width=80, soft_wrap=True)
    show(console, one, as_json=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("kind", CONTROL_KINDS, ids=lambda kind: kind.__name__)
def test_every_record_is_one_line_that_says_where_it_lies(kind: type) -> None:
    record = example_of(kind)
    (line,) = shown(message(record)).splitlines()
    assert line.startswith("3/77 ")
    written = msgspec.to_builtins(record)  # without what has its default
    facts = [
        value
        for name, value in written.items()
        if isinstance(value, str) and name not in ("kind", "role", "run", "value")
    ]
    for fact in facts:
        assert fact in line, f"{fact} is not in {line}"


def test_a_block_shows_its_question_once_and_a_line_per_answer() -> None:
    head, *answers = shown(message(group_block(10))).splitlines()
    assert "add-3745.2" in head and "You add. 37+45=" in head and "10 of 10" in head
    assert len(answers) == 9 and answers[-1].strip() == "… and 2 more"
    assert all("v12" in line and "exact 1" in line and "5 tokens" in line for line in answers[:8])


def test_a_dead_letter_says_what_it_held() -> None:
    letter = DeadLetter(
        topic="experiences", partition=2, offset=77, stage="verify", reason="too large", error="12 MB",
        value=encode(group_block(2)),
    )  # fmt: skip
    line = one_line(letter)
    assert "experiences 2/77" in line and "verify: too large: 12 MB" in line and "held a block of add-3745.2" in line
    assert "held tick partition=1" in one_line(
        msgspec.structs.replace(letter, value=encode(Tick(partition=1, due_ms=5)))
    )
    assert r"held 4 bytes b'\x00\xff\x01\x02'" in one_line(msgspec.structs.replace(letter, value=b"\x00\xff\x01\x02"))


def test_a_batch_is_counted_not_listed() -> None:
    items = tuple(
        BatchItem(id=f"i{at}", partition=0, offset=0, index=at, lane="usual" if at else "expert") for at in range(5)
    )
    line = one_line(msgspec.structs.replace(example_of(Batch), items=items, drops={"stale": 3}))
    assert line == "batch step=40 version=40 phase=train token=17 expert=1 usual=4 dropped[stale]=3"


def test_bytes_that_are_no_record_are_shown_with_the_reason() -> None:
    bad = LogMessage(Record("t.x", 3, 77, 0, b"", b"junk"), error=BadFrame("magic: got b'ju'"))
    assert "unreadable: magic: got b'ju'" in shown(bad)


def test_a_block_whose_text_is_damaged_is_shown_as_unreadable() -> None:
    data = bytearray(encode(group_block(2)))
    data[-3] ^= 0xFF  # the last section is the text
    damaged = LogMessage(Record("t.x", 3, 77, 0, b"", bytes(data)), value=decode(bytes(data)))
    assert "unreadable:" in shown(damaged)


@settings(max_examples=60)
@given(controls() | blocks())
def test_whatever_a_record_holds_it_can_be_shown_and_is_json(record: Control | Block) -> None:
    one = message(record)
    assert shown(one).startswith("3/77 ")
    console = Console(file=io.StringIO())
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        show(console, one, as_json=True)
    (line,) = out.getvalue().rstrip("\n").split("\n")
    assert json.loads(line)["offset"] == 77
