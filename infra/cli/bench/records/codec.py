"""Benchmark of the block codec beside what people carry experiences in, side by side in one run.

Round trip: token ids and logprobs as Python lists, conversation as text, to bytes, and back to numpy arrays and
messages. Texts are real prose and code, logprobs have the shape of a language model's. The honest rival is msgspec with packed
bytes in one zstd frame; then msgspec lists in one, pickle and orjson as they are, protobuf in a zstd frame.
Ratios are what counts: of CPU time, which a busy machine disturbs least; `_wall` are of wall time. Each contestant runs in turn
within each round; its best round and its median round (`_median`) are kept.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from msgspec import structs

from infra.cli.bench.beside import Spent
from infra.cli.bench.common.texts import RawAnswer, samples
from infra.cli.bench.records.codec_rivals import MsgpackRival, OpenedMember, header, missing, rivals
from schemas import Block, Experience, decode, encode, make_experience

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
SHORT = ("1 x (100 + 200)", "16 x (6 + 5)")  # shapes without a target beside lists


def targets_of(shape: str) -> dict[str, float]:
    """The least that is aimed at, by figure, for one shape."""
    return {
        figure: low for figure, low in TARGETS.items() if not (shape in SHORT and figure == "round_trip_over_lists")
    }


def pack_block(group: Sequence[RawAnswer]) -> bytes:
    """Lists to a block frame."""
    members = []
    for episode, sample in enumerate(group):
        members.append(
            make_experience(
                tokens=sample.prompt + sample.response,
                logprobs=sample.logprobs,
                messages=sample.messages,
                **header(sample, episode, len(group)),  # type: ignore[typeddict-item]
            )
        )
    return encode(Block(tuple(members)))


def open_block(frame: bytes) -> list[OpenedMember]:
    """A block frame to arrays and messages."""
    block = decode(frame)
    assert isinstance(block, Block)
    return [(member.tokens, member.logprobs, member.messages) for member in block.experiences]


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


def spent_each(contestants: dict[str, Callable[[], object]], rounds: int, budget_s: float) -> dict[str, list[Spent]]:
    """What a call of each took, one figure a round, taken in turn within each round."""
    found: dict[str, list[Spent]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            calls, start_s, begin = 0, time.process_time(), time.perf_counter()
            while (cpu_s := time.process_time() - start_s) < budget_s or not calls:
                contestant()
                calls += 1
            found[name].append(Spent(cpu_s / calls, (time.perf_counter() - begin) / calls))
    return found


def measure(num_episodes: int, num_prompt: int, num_response: int, *, rounds: int, budget_s: float) -> dict[str, float]:
    """CPU times in µs of the best rounds, sizes in bytes, ratios of one shape of group; see the module for their endings."""
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
        contestants |= {f"{name}_pack": partial(rival.pack, group), f"{name}_open": partial(rival.open, packed[name])}
        if isinstance(rival, MsgpackRival):
            contestants[f"{name}_edit"] = partial(rival.edit, packed[name])
    spent = spent_each(contestants, rounds, budget_s)
    times = {name: min(one.cpu_s for one in each) for name, each in spent.items()}
    found = {f"{name}_us": 1e6 * value for name, value in times.items()} | {"block_bytes": float(len(frame))}
    for name, data in packed.items():
        found |= {
            f"{name}_bytes": float(len(data)),
            **{f"round_trip_over_{name}{end}": value for end, value in _ratios(spent, name).items()},
            f"size_over_{name}": len(data) / len(frame),
            f"header_edit_over_{name}": (times[f"{name}_pack"] + times[f"{name}_open"]) / times["header_edit"],
        }
    return found | {"header_edit_over_whole": times["whole_edit"] / times["header_edit"]}


def _ratios(spent: dict[str, list[Spent]], name: str) -> dict[str, float]:
    """How many times as long as ours the round trip of a rival took."""
    found = {}
    for clock, end in (("cpu_s", ""), ("wall_s", "_wall")):
        for pick, which in ((min, ""), (statistics.median, "_median")):
            theirs, ours = (
                sum(pick([getattr(one, clock) for one in spent[f"{who}_{half}"]]) for half in ("pack", "open"))
                for who in (name, "block")
            )
            found[f"{end}{which}"] = theirs / ours
    return found


def check_same(ours: Sequence[OpenedMember], theirs: Sequence[OpenedMember], name: str) -> None:
    """Raises RuntimeError where a rival gives back other values."""
    same = all(
        np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1]) and one[2] == other[2]
        for one, other in zip(ours, theirs, strict=True)
    )
    if not same:
        raise RuntimeError(f"bench codec: {name} gives back other values than the block")


def run(
    say: Callable[[str], None] = lambda line: None,
    *,
    rounds: int = 7,
    budget_s: float = 0.03,
    shapes: dict[str, tuple[int, int, int]] = SHAPES,
) -> dict[str, dict[str, float]]:
    """Shape of group to its numbers: short answers of the demo, chat, long prompts, long traces, large groups. Rivals that are
    missing are said.
    """
    for name in missing():
        say(f"codec: {name} is left out: it is not installed (`make bench-deps`)")
    found = {}
    for name, shape in shapes.items():
        found[name] = measure(*shape, rounds=rounds, budget_s=budget_s)
        say(f"codec: {name}: {rounds} rounds")
    return found


def rows(result: dict[str, dict[str, float]]) -> list[tuple[str, ...]]:
    """The result as table rows, names first."""
    table = [("", *result)]
    for name in next(iter(result.values())):
        aimed = [name in targets_of(shape) for shape in result]
        which = "" if all(aimed) else " but for short blocks"
        target = f" (target {TARGETS[name]:g}{which})" if any(aimed) else ""
        table.append((name + target, *(f"{numbers[name]:,.2f}" for numbers in result.values())))
    return table
