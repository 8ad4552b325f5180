"""What people carry experiences in instead of blocks: each packs a group of lists and text, and gives back arrays and texts."""

import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import zstandard
from msgspec import structs

from infra.cli.bench.common.bench_env import find_orjson
from infra.cli.bench.common.texts import RawAnswer
from infra.cli.bench.peers.pickled import opened, packed
from schemas import Message, Score, Span

OpenedMember = tuple[Any, Any, tuple[Message, ...]]  # tokens, logprobs, messages


class Rival(Protocol):
    """A codec of groups."""

    def pack(self, group: Sequence[RawAnswer]) -> bytes:
        """Lists to bytes."""

    def open(self, data: bytes) -> list[OpenedMember]:
        """Bytes to arrays and messages."""


class PackedBulk(msgspec.Struct, frozen=True, array_like=True):
    """Bulk as the bytes of arrays.

    id, group, episode, group_size, messages, spans, scores, reward, advantage, priority, stamps, answer: as in an
    experience. tokens, logprobs: of prompt and answer, as uint32 and float32.
    """

    id: str
    group: str
    episode: int
    group_size: int
    tokens: bytes
    logprobs: bytes
    messages: tuple[Message, ...]
    spans: tuple[Span, ...]
    scores: tuple[Score, ...]
    reward: float | None
    advantage: float | None
    priority: float
    stamps: tuple[str, ...]
    answer: str


class ListedBulk(msgspec.Struct, frozen=True, array_like=True):
    """Bulk as plain lists.

    id, group, episode, group_size, messages, spans, scores, reward, advantage, priority, stamps, answer: as in an
    experience. tokens, logprobs: of prompt and answer.
    """

    id: str
    group: str
    episode: int
    group_size: int
    tokens: list[int]
    logprobs: list[float]
    messages: tuple[Message, ...]
    spans: tuple[Span, ...]
    scores: tuple[Score, ...]
    reward: float | None
    advantage: float | None
    priority: float
    stamps: tuple[str, ...]
    answer: str


def header(sample: RawAnswer, episode: int, size: int) -> dict[str, Any]:
    """The fields of an experience besides its bulk."""
    start = len(sample.prompt)
    return {
        "id": sample.id,
        "group": "task-1.0",
        "episode": episode,
        "group_size": size,
        "spans": (Span(start, start + len(sample.response), 12),),
        "scores": (Score("exact", 1.0),),
        "stamps": ("validate@1", "dedupe@1", "filter@1"),
        "answer": "280",
    }


def plain_header(sample: RawAnswer, episode: int, size: int) -> dict[str, Any]:
    """The same in builtins."""
    found: dict[str, Any] = msgspec.to_builtins(header(sample, episode, size))
    return {
        **found,
        "spans": [(span.start, span.stop, span.version) for span in header(sample, episode, size)["spans"]],
        "scores": [("exact", 1.0)],
        "reward": None,
        "advantage": None,
        "priority": 1.0,
        "messages": [(message.role, message.content) for message in sample.messages],
    }


class MsgpackRival:
    """One msgpack blob of `kind`, one zstd frame. tokens, logprobs: lists as it holds them."""

    def __init__(
        self,
        kind: Any,
        tokens: Callable[[list[int]], object],
        logprobs: Callable[[list[float]], object],
        array: Callable[[Any, Any], object],
    ) -> None:
        self.kind = kind
        self.tokens = tokens
        self.logprobs = logprobs
        self.array = array
        self.encoder = msgspec.msgpack.Encoder()
        self.decoder = msgspec.msgpack.Decoder(list[kind])
        self.compressor = zstandard.ZstdCompressor(level=1, write_checksum=True)
        self.decompressor = zstandard.ZstdDecompressor()

    def pack(self, group: Sequence[RawAnswer]) -> bytes:
        """See Rival."""
        members = []
        for episode, sample in enumerate(group):
            members.append(
                self.kind(
                    tokens=self.tokens(sample.prompt + sample.response),
                    logprobs=self.logprobs(sample.logprobs),
                    messages=sample.messages,
                    reward=None,
                    advantage=None,
                    priority=1.0,
                    **header(sample, episode, len(group)),
                )
            )
        return self.compressor.compress(self.encoder.encode(members))

    def open(self, data: bytes) -> list[OpenedMember]:
        """See Rival."""
        members = self.decoder.decode(self.decompressor.decompress(data))
        return [
            (self.array(member.tokens, np.uint32), self.array(member.logprobs, np.float32), member.messages)
            for member in members
        ]

    def edit(self, data: bytes) -> bytes:
        """A reward set on every member, the way this format needs it: decode, edit, encode."""
        members = self.decoder.decode(self.decompressor.decompress(data))
        return self.compressor.compress(
            self.encoder.encode([structs.replace(member, reward=1.0) for member in members])
        )


class PlainRival:
    """Builtins through a codec that takes them as they are: pickle, orjson."""

    def __init__(self, dumps: Callable[[Any], bytes], loads: Callable[[bytes], Any]) -> None:
        self.dumps = dumps
        self.loads = loads

    def pack(self, group: Sequence[RawAnswer]) -> bytes:
        """See Rival."""
        return self.dumps(
            [
                {
                    **plain_header(sample, episode, len(group)),
                    "tokens": sample.prompt + sample.response,
                    "logprobs": sample.logprobs,
                }
                for episode, sample in enumerate(group)
            ]
        )

    def open(self, data: bytes) -> list[OpenedMember]:
        """See Rival."""
        return [
            (
                np.array(one["tokens"], np.uint32),
                np.array(one["logprobs"], np.float32),
                tuple(Message(role, content) for role, content in one["messages"]),
            )
            for one in self.loads(data)
        ]


class ProtobufRival:
    """A message of packed repeated fields, one zstd frame. kind: the class of a group."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.compressor = zstandard.ZstdCompressor(level=1, write_checksum=True)
        self.decompressor = zstandard.ZstdDecompressor()

    def pack(self, group: Sequence[RawAnswer]) -> bytes:
        """See Rival."""
        made = self.kind()
        for episode, sample in enumerate(group):
            start = len(sample.prompt)
            one = made.members.add(
                id=sample.id, group="task-1.0", episode=episode, group_size=len(group), priority=1.0, answer="280",
                stamps=("validate@1", "dedupe@1", "filter@1"), tokens=sample.prompt + sample.response,
                logprobs=sample.logprobs,
            )  # fmt: skip
            one.spans.extend((start, start + len(sample.response), 12))
            one.scores.add(name="exact", value=1.0)
            for message in sample.messages:
                one.messages.add(role=message.role, content=message.content)
        return self.compressor.compress(made.SerializeToString())

    def open(self, data: bytes) -> list[OpenedMember]:
        """See Rival."""
        made = self.kind.FromString(self.decompressor.decompress(data))
        return [
            (
                np.array(one.tokens, np.uint32),
                np.array(one.logprobs, np.float32),
                tuple(Message(message.role, message.content) for message in one.messages),
            )
            for one in made.members
        ]


def rivals() -> dict[str, Rival]:
    """Those that are here, by name."""
    found: dict[str, Rival] = {
        "packed": MsgpackRival(
            PackedBulk,
            lambda tokens: struct.pack(f"={len(tokens)}I", *tokens),
            lambda logprobs: struct.pack(f"={len(logprobs)}f", *logprobs),
            np.frombuffer,
        ),
        "lists": MsgpackRival(ListedBulk, lambda tokens: tokens, lambda logprobs: logprobs, np.array),
        "pickle": PlainRival(packed, opened),
    }
    if (orjson := find_orjson()) is not None:
        found["orjson"] = PlainRival(orjson.dumps, orjson.loads)
    if (kind := _group_message()) is not None:
        found["protobuf"] = ProtobufRival(kind)
    return found


def missing() -> list[str]:
    """Rivals that are not here."""
    return [name for name in ("orjson", "protobuf") if name not in rivals()]


FIELDS = {  # of protobuf messages: name, type of descriptor.proto, whether it repeats
    "Message": (("role", 9, False), ("content", 9, False)),
    "Score": (("name", 9, False), ("value", 1, False)),
    "Member": (
        ("id", 9, False), ("group", 9, False), ("episode", 13, False), ("group_size", 13, False), ("tokens", 13, True),
        ("logprobs", 2, True), ("messages", "Message", True), ("spans", 13, True), ("scores", "Score", True),
        ("reward", 1, False), ("advantage", 1, False), ("priority", 1, False), ("stamps", 9, True), ("answer", 9, False),
    ),
    "Group": (("members", "Member", True),),
}  # fmt: skip


def _group_message() -> Any:
    """The class of a group, without a compiler; None where there is no protobuf."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        return None
    file = descriptor_pb2.FileDescriptorProto(name="bench.proto", package="bench", syntax="proto3")
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for number, (field, kind, repeats) in enumerate(fields, 1):
            made = message.field.add(name=field, number=number, label=3 if repeats else 1)
            if isinstance(kind, str):
                made.type, made.type_name = 11, f".bench.{kind}"
            else:
                made.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Group"))
