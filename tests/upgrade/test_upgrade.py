"""What earlier releases wrote is read by every later commit, with the values it had."""

import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infra.cli.settings import load_settings
from infra.ledger.archive import FORMAT, ArchiveHead, unpack, writing
from infra.log.blobs import deposit, read_claim
from infra.observe.release import release
from infra.policies.manifest import decode_manifest
from infra.store.memory import MemoryStore
from schemas import Task, decode, encode
from schemas.errors import BadFrame, ConfigError, UnknownMajor
from schemas.records import Message
from schemas.wire.frame import SEALED_FORMAT
from streams.collect.group import Group
from streams.collect.pending import LEANING, PendingFile
from tests.upgrade.parts import PARTS, UpgradePart
from tests.upgrade.plain import differences, plain
from tests.upgrade.write_release import RELEASES, keep, reading

KEPT = [(folder.parent.name, folder.name) for folder in sorted(RELEASES.glob("*/*")) if folder.is_dir()]


@pytest.mark.parametrize(("name", "part"), KEPT)
def test_what_a_release_wrote_is_read_with_the_values_it_had(name: str, part: str) -> None:
    folder = RELEASES / name
    told = json.loads((folder / f"{part}.json").read_text())
    assert differences(told, reading(folder / part, PARTS[part])) == []


def test_this_release_has_left_every_part() -> None:
    """After the version in pyproject.toml was raised: `python -m tests.upgrade.write_release`."""
    assert {part for name, part in KEPT if name == release()} == set(PARTS)


def test_what_a_release_left_is_never_written_again(tmp_path: Path) -> None:
    def part(text: str) -> UpgradePart:
        def write(folder: Path) -> None:
            folder.mkdir()
            (folder / "bytes").write_text(text)

        return UpgradePart(write, lambda folder: (folder / "bytes").read_text())

    assert keep(tmp_path / "1.0", {"one": part("first")}) == ["one"]
    assert keep(tmp_path / "1.0", {"one": part("second"), "two": part("new")}) == ["two"]
    assert (tmp_path / "1.0" / "one" / "bytes").read_text() == "first"
    assert json.loads((tmp_path / "1.0" / "one.json").read_text()) == "first"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"answer": "3"}, "$.answer: read '3', was '2'"),
        ({"answer": None}, "$.answer: read None, was '2'"),
        ({"messages": []}, "$.messages: read [], was"),
        ({"meta": {"level": "easy", "more": 1}}, "$.meta.more: was not there"),
        ({"meta": {}}, "$.meta.level: not read any more"),
        ({"meta": {"level": 1.0}}, "$.meta.level: read 1.0, was 'easy'"),
    ],
)
def test_a_value_that_is_read_otherwise_is_named(change: dict[str, Any], told: str) -> None:
    before = plain(Task(id="q", messages=(Message("user", "1+1"),), answer="2", meta={"level": "easy"}))
    assert differences(before, before) == []
    (line,) = differences(before, {**before, **change})
    assert line.startswith(told)


def test_a_field_that_a_later_release_added_is_no_difference_and_one_it_removed_is() -> None:
    before = plain(Message("user", "1+1"))
    assert differences(before, {**before, "mood": "calm"}) == []
    assert differences(before, {name: value for name, value in before.items() if name != "role"}) == [
        "$.role: not read any more"
    ]


def newer_frame(folder: Path) -> object:
    frame = encode(Task(id="q", messages=(Message("user", "1+1"),), answer="2"))
    return decode(frame[:2] + bytes((SEALED_FORMAT + 1,)) + frame[3:])


def newer_claim(folder: Path) -> object:
    claim = deposit(MemoryStore(), b"HR")
    return read_claim(claim[:2] + bytes((claim[2] + 1,)) + claim[3:])


def newer_archive(folder: Path) -> object:
    with writing(folder / "run") as archive:
        about = ArchiveHead(format=FORMAT + 1, settings={}, topics=())
        archive.add("headrace.json", msgspec.json.encode(about))
        archive.close()
    return unpack(folder / "run", folder / "out")


def newer_settings(folder: Path) -> object:
    (folder / "headrace.toml").write_text('app = "t"\n[pacing]\nmax_stalenes = 2\n')
    return load_settings(folder / "headrace.toml")


@pytest.mark.parametrize(
    ("newer", "error", "told"),
    [
        (newer_frame, UnknownMajor, "frame of format 5.*upgrade"),
        (newer_claim, UnknownMajor, "claim of format 2.*upgrade"),
        (lambda folder: decode_manifest(b'{"format": 5}'), ValueError, "format 5.*upgrade"),
        (newer_archive, BadFrame, "format 2.*upgrade"),
        (newer_settings, ConfigError, f"max_stalenes.*max_staleness.*this is release {re.escape(release())}"),
    ],
    ids=["frame", "claim", "manifest", "archive", "settings"],
)
def test_what_a_later_release_may_write_is_refused_in_a_line_that_says_so(
    newer: Callable[[Path], object], error: type[Exception], told: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=told):
        newer(tmp_path)


def test_a_partitions_file_of_a_later_release_is_put_aside_and_made_again_from_the_log(tmp_path: Path) -> None:
    path = tmp_path / "collect-0.sqlite"
    PendingFile(path).close()
    with sqlite3.connect(path) as file:
        file.execute(f"PRAGMA user_version = {LEANING + 1}")
    file.close()
    pending = PendingFile(path)
    assert pending.load({}).next_offset == 0 and path.with_suffix(".damaged").exists()
    pending.close()


def test_a_record_of_a_later_release_with_more_fields_is_read_without_them() -> None:
    task = Task(id="q", messages=(Message("user", "1+1"),), answer="2")
    frame = encode(task)
    body = msgspec.msgpack.encode({**msgspec.msgpack.decode(frame[8:]), "mood": "calm"})
    assert decode(frame[:4] + len(body).to_bytes(4, "little") + body) == task
    group = Group(id="t.0")
    longer = msgspec.msgpack.encode([*msgspec.msgpack.decode(msgspec.msgpack.encode(group)), "more"])
    assert msgspec.msgpack.decode(longer, type=Group) == group
