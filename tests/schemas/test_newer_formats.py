"""Records of a later release: more fields are read without them; a higher format number is refused in a line."""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from infra.cli.settings import load_settings
from infra.ledger.archive import unpack, writing
from infra.ledger.bundle import FORMAT, Bundle
from infra.log.blobs import deposit, read_claim
from infra.observe.release import release
from infra.policies.manifest import decode_manifest
from infra.store.memory import MemoryStore
from schemas import Task, decode, encode
from schemas.errors import BadFrame, ConfigError, UnknownMajor
from schemas.records import Message
from schemas.wire.frame import SEALED_FORMAT

TASK = Task(id="q", messages=(Message("user", "1+1"),), answer="2")


def newer_frame(folder: Path) -> object:
    frame = encode(TASK)
    return decode(frame[:2] + bytes((SEALED_FORMAT + 1,)) + frame[3:])


def newer_claim(folder: Path) -> object:
    claim = deposit(MemoryStore(), b"HR")
    return read_claim(claim[:2] + bytes((claim[2] + 1,)) + claim[3:])


def newer_archive(folder: Path) -> object:
    with writing(folder / "run") as archive:
        archive.finish(Bundle(app="t", format=FORMAT + 1))
    return unpack(folder / "run", folder / "out")


def newer_settings(folder: Path) -> object:
    (folder / "headrace.toml").write_text('app = "t"\n[pacing]\nmax_stalenes = 2\n')
    return load_settings(folder / "headrace.toml")


@pytest.mark.parametrize(
    ("newer", "error", "message"),
    [
        (newer_frame, UnknownMajor, "format"),
        (newer_claim, UnknownMajor, "format"),
        (lambda folder: decode_manifest(b'{"format": 99}'), ValueError, "format 99"),
        (newer_archive, BadFrame, "format"),
        (newer_settings, ConfigError, f"max_stalenes.*max_staleness.*this is release {re.escape(release())}"),
    ],
    ids=["frame", "claim", "manifest", "archive", "settings"],
)
def test_a_higher_format_number_is_refused_in_a_line_that_names_the_fix(
    newer: Callable[[Path], object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        newer(tmp_path)


def test_a_record_of_a_later_release_with_more_fields_is_read_without_them() -> None:
    frame = encode(TASK)
    body = msgspec.msgpack.encode({**msgspec.msgpack.decode(frame[8:]), "mood": "calm"})
    assert decode(frame[:4] + len(body).to_bytes(4, "little") + body) == TASK
