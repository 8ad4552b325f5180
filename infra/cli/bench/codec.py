"""Benchmark of the block codec against msgspec and zstd level 1, of packed bytes and of lists, side by side in one run.

Round trip: token ids and logprobs as Python lists, conversation as text, to bytes, and back to numpy arrays and
messages. Text is real (docstrings of Python's own library), logprobs have the shape of a language model's.
Ratios are what counts: of CPU time, which a busy machine disturbs least. Each contestant runs in turn within each round;
its best round and its median round are kept.
"""

import inspect
import re
import statistics
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import zstandard
from msgspec import structs

from schemas import Block, Experience, Message, Score, Span, decode, encode, make_experience

VOCABULARY = 151_643
OpenedMember = tuple[Any, Any, tuple[Message, ...]]  # tokens, logprobs, messages
SHAPES = {  # episodes, tokens of the prompt, tokens of each response
    "1 x (100 + 200)": (1, 100, 200),
    "16 x (6 + 5)": (16, 6, 5),
    "16 x (200 + 500)": (16, 200, 500),
    "16 x (1500 + 500)": (16, 1500, 500),
    "16 x (500 + 4000)": (16, 500, 4000),
    "64 x (2000 + 2000)": (64, 2000, 2000),
}
TARGETS = {
    "round_trip_over_packed": 1.0, "size_over_packed": 1.05, "header_edit_over_packed": 20.0, "round_trip_over_lists": 3.0,
}  # fmt: skip


class CodecSample(msgspec.Struct, frozen=True):
    """One experience as an engine hands it over: lists and text."""

    id: str
    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    messages: tuple[Message, ...]


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """A contestant: the same fields, bulk as the bytes of arrays, the prompt in each."""

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


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """A contestant: the same fields, bulk as plain lists, the prompt in each."""

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


def samples(num_episodes: int, num_prompt: int, num_response: int, seed: int = 0) -> list[CodecSample]:
    """A group: one prompt, `num_episodes` responses, all cut from real text."""
    pieces, ids = _corpus()
    random = np.random.default_rng(seed)

    def passage(length: int) -> tuple[list[int], str]:
        start = int(random.integers(0, len(pieces) - length))
        part = pieces[start : start + length]
        return [ids[piece] for piece in part], "".join(part)

    prompt, question = passage(num_prompt)
    group = []
    for episode in range(num_episodes):
        response, answer = passage(num_response)
        logprobs = _sampled_logprobs(num_response, random)
        messages = (Message("user", question), Message("assistant", answer))
        group.append(CodecSample(f"task-1.0.0-{episode}-0", prompt, response, logprobs, messages))
    return group


def _sampled_logprobs(count: int, random: np.random.Generator) -> list[float]:
    """Logprobs as an engine has them: a float32 log-softmax, of which the sampled entry is taken.

    The best token leads by max(0, N(8, 5)), which leaves a little over half of all tokens above p = 0.99.
    """
    logits = random.normal(0, 2, (count, 256)).astype(np.float32)
    logits[:, 0] = logits.max(axis=1) + np.maximum(random.normal(8, 5, count), 0)
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    chosen = (logprobs + random.gumbel(size=logprobs.shape)).argmax(axis=1)
    sampled: list[float] = logprobs[np.arange(count), chosen].tolist()
    return sampled


def _corpus() -> tuple[list[str], dict[str, int]]:
    """Real text in word pieces, and an id for each: frequent ones low, as a trained vocabulary has them."""
    modules = [sys.modules[name] for name in sorted(sys.modules) if name in sys.stdlib_module_names]
    texts = []
    for module in modules:
        texts.append(module.__doc__ or "")
        for _, member in inspect.getmembers(module, inspect.isroutine):
            texts.append(inspect.getdoc(member) or "")
    pieces = re.findall(r" ?\w{1,7}|\s+|[^\w\s]", "\n\n".join(texts))
    ranks = {piece: rank for rank, (piece, _) in enumerate(Counter(pieces).most_common())}
    spread = VOCABULARY / (len(ranks) + 1) ** 2
    return pieces, {piece: rank + int(spread * rank * rank) for piece, rank in ranks.items()}


def _header(sample: CodecSample, episode: int, size: int) -> dict[str, object]:
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


def pack_block(group: Sequence[CodecSample]) -> bytes:
    """Lists to a block frame."""
    members = []
    for episode, sample in enumerate(group):
        header = _header(sample, episode, len(group))
        members.append(
            make_experience(
                tokens=sample.prompt + sample.response,
                logprobs=sample.logprobs,
                messages=sample.messages,
                **header,  # type: ignore[arg-type]
            )
        )
    return encode(Block(tuple(members)))


def open_block(frame: bytes) -> list[OpenedMember]:
    """A block frame to arrays and messages."""
    block = decode(frame)
    assert isinstance(block, Block)
    return [(member.tokens, member.logprobs, member.messages) for member in block.experiences]


class Rival:
    """A contestant's codec: one msgpack blob of `kind`, one zstd frame. tokens, logprobs: lists as it holds them."""

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

    def pack(self, group: Sequence[CodecSample]) -> bytes:
        """Lists to bytes."""
        members = []
        for episode, sample in enumerate(group):
            header = _header(sample, episode, len(group))
            members.append(
                self.kind(
                    tokens=self.tokens(sample.prompt + sample.response),
                    logprobs=self.logprobs(sample.logprobs),
                    messages=sample.messages,
                    reward=None,
                    advantage=None,
                    priority=1.0,
                    **header,  # type: ignore[arg-type]
                )
            )
        return self.compressor.compress(self.encoder.encode(members))

    def open(self, data: bytes) -> list[OpenedMember]:
        """Bytes to arrays and messages."""
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


def rivals() -> dict[str, Rival]:
    """The contestants by name."""
    return {
        "packed": Rival(
            Packed,
            lambda tokens: struct.pack(f"={len(tokens)}I", *tokens),
            lambda logprobs: struct.pack(f"={len(logprobs)}f", *logprobs),
            np.frombuffer,
        ),
        "lists": Rival(Listed, lambda tokens: tokens, lambda logprobs: logprobs, np.array),
    }


def edit_header(frame: bytes) -> bytes:
    """A reward set on every member of a block frame; sections stay as they are."""
    block = decode(frame)
    assert isinstance(block, Block)
    return encode(Block(tuple([structs.replace(member, reward=1.0) for member in block.experiences])))


def edit_whole(frame: bytes) -> bytes:
    """The same edit by decoding everything and encoding it anew."""
    block = decode(frame)
    assert isinstance(block, Block)
    return encode(Block(tuple([_remade(member) for member in block.experiences])))


def _remade(member: Experience) -> Experience:
    edited = member.with_bulk(tokens=member.tokens, logprobs=member.logprobs, messages=member.messages)
    return structs.replace(edited, reward=1.0)


def cpu_times(contestants: dict[str, Callable[[], object]], rounds: int, budget_s: float) -> dict[str, list[float]]:
    """CPU seconds per call of each, one figure a round, taken in turn within each round."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            calls, start = 0, time.process_time()
            while (spent := time.process_time() - start) < budget_s or not calls:
                contestant()
                calls += 1
            found[name].append(spent / calls)
    return found


def measure(num_episodes: int, num_prompt: int, num_response: int, *, rounds: int, budget_s: float) -> dict[str, float]:
    """CPU times in µs of the best rounds, sizes in bytes, ratios of one shape of group; `_median` is of the median rounds."""
    group = samples(num_episodes, num_prompt, num_response)
    frame = pack_block(group)
    contestants: dict[str, Callable[[], object]] = {
        "block_pack": lambda: pack_block(group),
        "block_open": lambda: open_block(frame),
        "header_edit": lambda: edit_header(frame),
        "whole_edit": lambda: edit_whole(frame),
    }
    packed: dict[str, bytes] = {}
    for name, rival in rivals().items():
        packed[name] = rival.pack(group)
        check_same(open_block(frame), rival.open(packed[name]), name)
        contestants |= {
            f"{name}_pack": partial(rival.pack, group),
            f"{name}_open": partial(rival.open, packed[name]),
            f"{name}_edit": partial(rival.edit, packed[name]),
        }
    rounds_of = cpu_times(contestants, rounds, budget_s)
    times = {name: min(spent) for name, spent in rounds_of.items()}
    medians = {name: statistics.median(spent) for name, spent in rounds_of.items()}
    block_s = times["block_pack"] + times["block_open"]
    median_s = medians["block_pack"] + medians["block_open"]
    found = {f"{name}_us": 1e6 * value for name, value in times.items()} | {"block_bytes": float(len(frame))}
    for name, data in packed.items():
        rival_s = times[f"{name}_pack"] + times[f"{name}_open"]
        found |= {
            f"{name}_bytes": float(len(data)),
            f"round_trip_over_{name}": rival_s / block_s,
            f"round_trip_over_{name}_median": (medians[f"{name}_pack"] + medians[f"{name}_open"]) / median_s,
            f"size_over_{name}": len(data) / len(frame),
            f"header_edit_over_{name}": rival_s / times["header_edit"],
        }
    return found | {"header_edit_over_whole": times["whole_edit"] / times["header_edit"]}


def check_same(ours: Sequence[OpenedMember], theirs: Sequence[OpenedMember], name: str) -> None:
    """Raises RuntimeError where a rival gives back other values."""
    same = all(
        np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1]) and one[2] == other[2]
        for one, other in zip(ours, theirs, strict=True)
    )
    if not same:
        raise RuntimeError(f"bench codec: {name} gives back other values than the block")


def run(*, rounds: int = 7, budget_s: float = 0.03) -> dict[str, dict[str, float]]:
    """Shape of group to its numbers: short answers of the demo, chat, long prompts, long traces, large groups."""
    return {name: measure(*shape, rounds=rounds, budget_s=budget_s) for name, shape in SHAPES.items()}


def rows(result: dict[str, dict[str, float]]) -> list[tuple[str, ...]]:
    """The result as table rows, names first."""
    table = [("", *result)]
    for name in next(iter(result.values())):
        target = f" (target {TARGETS[name]:g})" if name in TARGETS else ""
        table.append((name + target, *(f"{numbers[name]:,.2f}" for numbers in result.values())))
    return table


def main() -> None:
    """Prints the table."""
    for name, *values in rows(run()):
        print(f"{name:<40}" + "".join(f"{value:>22}" for value in values))


if __name__ == "__main__":
    main()
