"""Marks of older frames are read as fields, and nothing of a frame of today is read as a mark."""

import struct
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from record_samples import group_block

from schemas import Block, Experience, decode, encode

FIELDS = Experience.__struct_fields__[Experience.__struct_fields__.index("bulk") + 1 :]
MARKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"withdrawn": True}, {"kind": "withdrawal"}),
    ({"withdrawn": 1}, {}),
    ({"pair": "chosen"}, {"kind": "chosen"}),
    ({"pair": "rejected"}, {"kind": "rejected"}),
    ({"pair": "best"}, {}),
    ({"split": "validation"}, {"held_out": True}),
    ({"split": "train"}, {}),
    ({"answer": "280", "task": "add-3745"}, {"answer": "280", "task": "add-3745"}),
    ({"answer": None, "task": 7}, {}),
    ({"session": True, "messages": 3, "turn": 1, "finish": "length"}, {"turn": 3, "truncated": "length"}),
    ({"session": False, "messages": 3, "turn": 0, "finish": "stop"}, {}),
    ({"session": True, "messages": -3}, {}),
    ({"trial": 7}, {"trial": 7}),
    ({"trial": True}, {}),
    ({"trial": "7"}, {}),
    ({"parent": "add-3745.2.0-7-0"}, {"parent": "add-3745.2.0-7-0"}),
    ({"failure": "gone", "part_reason": "history rewritten"}, {"failure": "gone", "part_reason": "history rewritten"}),
    ({"truncated": "max_turns"}, {"truncated": "max_turns"}),
    ({"batch.weight": 50.0, "correction": "281", "edits": 2, "level": "easy"}, {}),
]


def older(frame: bytes) -> bytes:
    """The frame as it was written before: format 1, and no field behind the bulk."""
    end = 8 + int.from_bytes(frame[4:8], "little")
    columns, members, ranges = msgspec.msgpack.decode(frame[8:end])
    body = msgspec.msgpack.encode([columns, [member[: -len(FIELDS)] for member in members], ranges])
    return b"HR\x01\x00" + struct.pack("<I", len(body)) + body + frame[end:]


def only(frame: bytes) -> Experience:
    block = decode(frame)
    assert isinstance(block, Block)
    return block.experiences[0]


def said(experience: Experience) -> dict[str, Any]:
    unsaid = group_block(1).experiences[0]
    return {name: value for name in FIELDS if (value := getattr(experience, name)) != getattr(unsaid, name)}


@pytest.mark.parametrize(("meta", "fields"), MARKS)
def test_a_mark_of_an_older_frame_is_a_field_and_its_meta_stays(meta: dict[str, Any], fields: dict[str, Any]) -> None:
    one = replace(group_block(1).experiences[0], group_size=1, meta=meta)
    found = only(older(encode(Block((one,)))))
    assert said(found) == fields
    assert found.meta == meta and found.tokens.tolist() == one.tokens.tolist()
    assert only(encode(Block((found,)))) == found


@pytest.mark.parametrize("meta", [meta for meta, _ in MARKS])
def test_the_meta_of_a_frame_of_today_says_nothing(meta: dict[str, Any]) -> None:
    one = replace(group_block(1).experiences[0], group_size=1, meta=meta)
    found = only(encode(Block((one,))))
    assert said(found) == {} and found == one


def test_what_an_older_frame_has_in_the_expert_lane_is_a_demonstration() -> None:
    one = replace(group_block(1).experiences[0], lane="expert", meta={})
    assert only(older(encode(Block((one,))))).kind == "demonstration"
    assert only(older(encode(Block((replace(one, meta={"pair": "chosen"}),))))).kind == "chosen"


def test_turns_of_an_older_gateway_say_how_many_they_go_on_from() -> None:
    one = replace(group_block(1).experiences[0], lane="live", meta={"session": True, "messages": 3, "turn": 1})
    assert only(older(encode(Block((one,))))).carried == 1
