"""Throws altered frames at the decoder: it may refuse them, as BadFrame or UnknownMajor, and do nothing else.

    python -m tests.schemas.fuzz_frames --count 200000 --seed 1 [--minutes 5]

Alterations change bytes, the prefix, values in the header, lengths of sections, and content under a valid zstd frame.
"""

import argparse
import json
import math
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import zstandard

from schemas import BadFrame, Block, UnknownMajor, decode, encode, kafka_headers
from tests.schemas.record_samples import CONTROL_KINDS, example_of, group_block

PREFIX_BYTES = 8
INTEGERS = (
    0, 1, -1, 2, 63, 64, 65, 127, 128, 255, *(2**bits for bits in (15, 16, 24, 31, 53)), 2**24 - 1, 2**24 + 1, 2**32 - 1,
    2**63 - 1,
)  # fmt: skip
BYTES = (0x00, 0x01, 0x7F, 0x80, 0x90, 0x91, 0xA0, 0xC0, 0xC1, 0xC4, 0xC7, 0xCB, 0xD3, 0xD9, 0xDD, 0xDF, 0xFF)
ODD = (
    *INTEGERS, math.nan, math.inf, -math.inf, 0.5, "", "x", "x" * 300, "\ud7ff", b"", b"\xff" * 9, None, True, [], {},
    [0, 0], [[]], {"kind": "tick"}, {"a": {"b": [1]}}, msgspec.msgpack.Ext(5, b"x"),
)  # fmt: skip

Change = Callable[[random.Random, bytes], bytes]


def valid_frames() -> list[bytes]:
    """A frame of every record, and blocks of several shapes."""
    shapes = [
        group_block(1),
        group_block(3),
        group_block(8, num_prompt=40, num_response=30),
        group_block(2, num_response=0),
    ]
    return [encode(example_of(kind)) for kind in CONTROL_KINDS] + [encode(one) for one in shapes]


def use(data: bytes) -> None:
    """All a reader may do with bytes from outside."""
    record = decode(data)
    if isinstance(record, Block):
        record.validate()
        for experience in record.experiences:
            assert len(experience.tokens) == experience.num_tokens
            assert len(experience.logprobs) == experience.num_sampled
            assert isinstance(experience.response, str)
        kafka_headers(record)
        assert decode(encode(record)) == record


def change_bytes(chosen: random.Random, frame: bytes) -> bytes:
    """A few bytes become others."""
    altered = bytearray(frame)
    for _ in range(chosen.randint(1, 4)):
        altered[chosen.randrange(len(altered))] = (
            chosen.choice(BYTES) if chosen.random() < 0.5 else chosen.randrange(256)
        )
    return bytes(altered)


def flip_bit(chosen: random.Random, frame: bytes) -> bytes:
    """One bit, as a bad disk would."""
    altered = bytearray(frame)
    altered[chosen.randrange(len(altered))] ^= 1 << chosen.randrange(8)
    return bytes(altered)


def cut(chosen: random.Random, frame: bytes) -> bytes:
    """An end, a beginning or a middle is missing."""
    start, stop = sorted(chosen.choices(range(len(frame) + 1), k=2))
    return chosen.choice((frame[:start], frame[start:], frame[:start] + frame[stop:]))


def repeat(chosen: random.Random, frame: bytes) -> bytes:
    """A piece comes twice, or bytes come from nowhere."""
    start, stop = sorted(chosen.choices(range(len(frame) + 1), k=2))
    piece = frame[start:stop] if chosen.random() < 0.5 else chosen.randbytes(chosen.randint(1, 40))
    return frame[:stop] + piece + frame[stop:]


def change_prefix(chosen: random.Random, frame: bytes) -> bytes:
    """Another magic, format, set of flags or header length."""
    magic, major, flags, length = struct.unpack_from("<2sBBI", frame)
    kind = chosen.randrange(4)
    if kind == 0:
        major = chosen.choice((0, 2, 255))
    elif kind == 1:
        flags = chosen.randrange(256)
    elif kind == 2:
        length = chosen.choice(INTEGERS) & 0xFFFFFFFF
    else:
        magic = chosen.choice((b"HC", b"hr", b"\0\0"))
    return struct.pack("<2sBBI", magic, major, flags, length) + frame[PREFIX_BYTES:]


def change_header(chosen: random.Random, frame: bytes) -> bytes:
    """One value inside the header becomes another, in an envelope that is right again."""
    length = struct.unpack_from("<I", frame, 4)[0]
    tree = msgspec.msgpack.decode(frame[PREFIX_BYTES : PREFIX_BYTES + length])
    for _ in range(chosen.choice((1, 1, 1, 2, 3))):
        tree = replaced(chosen, tree)
    header = msgspec.msgpack.encode(tree)
    return frame[:4] + struct.pack("<I", len(header)) + header + frame[PREFIX_BYTES + length :]


def replaced(chosen: random.Random, tree: object) -> object:
    """The tree with one value, somewhere in it, altered, removed, doubled or exchanged."""
    if isinstance(tree, list) and tree and chosen.random() < 0.95:
        at = chosen.randrange(len(tree))
        dice = chosen.random()
        if dice < 0.85:
            return [*tree[:at], replaced(chosen, tree[at]), *tree[at + 1 :]]
        if dice < 0.90:
            return tree[:at] + tree[at + 1 :]
        if dice < 0.95:
            return tree[:at] + [tree[at]] * chosen.choice((2, 3, 70)) + tree[at + 1 :]
        return chosen.sample(tree, len(tree))
    if isinstance(tree, dict) and tree and chosen.random() < 0.95:
        key = chosen.choice(list(tree))
        if chosen.random() < 0.1:
            return {name: value for name, value in tree.items() if name != key}
        return {**tree, key: replaced(chosen, tree[key])}
    if isinstance(tree, int) and not isinstance(tree, bool) and chosen.random() < 0.5:
        return max(-(2**63), min(2**64 - 1, tree + chosen.choice((-2, -1, 1, 2, 1000))))
    return chosen.choice(ODD)


def change_lengths(chosen: random.Random, frame: bytes) -> bytes:
    """Announce wrong lengths in the table of sections, or move bytes from a section to the next."""
    start, lengths = sections_of(frame)
    if not lengths:
        return change_prefix(chosen, frame)
    at, other = chosen.randrange(len(lengths)), chosen.randrange(len(lengths))
    moved = chosen.choice((1, 4, chosen.choice(INTEGERS)))
    lengths[at] = (lengths[at] + moved) & 0xFFFFFFFF
    if chosen.random() < 0.7:
        lengths[other] = (lengths[other] - moved) & 0xFFFFFFFF
    table = struct.pack(f"<{len(lengths)}I", *lengths)
    return frame[:start] + table + frame[start + len(table) :]


def change_section(chosen: random.Random, frame: bytes) -> bytes:
    """Alter the contents of a section, under a zstd frame that is right for it (or nearly)."""
    start, lengths = sections_of(frame)
    if not lengths:
        return change_header(chosen, frame)
    begin = start + 4 * len(lengths)
    bodies = []
    for length in lengths:
        bodies.append(frame[begin : begin + length])
        begin += length
    at = chosen.randrange(len(bodies))
    raw = zstandard.ZstdDecompressor().decompress(bodies[at])
    raw = chosen.choice((change_bytes, flip_bit, change_bytes, repeat, cut))(chosen, raw) if raw else b"\x90"
    compressor = zstandard.ZstdCompressor(
        level=1, write_checksum=chosen.random() < 0.95, write_content_size=chosen.random() < 0.95
    )
    bodies[at] = compressor.compress(raw)
    if chosen.random() < 0.1:
        bodies[at] += chosen.choice((b"\0", bodies[at]))
    return frame[:start] + struct.pack(f"<{len(bodies)}I", *map(len, bodies)) + b"".join(bodies)


def sections_of(frame: bytes) -> tuple[int, list[int]]:
    """Start of the table of section lengths, and the lengths; none for a control record."""
    length = struct.unpack_from("<I", frame, 4)[0]
    start = PREFIX_BYTES + length
    if frame[3] & 0x80:
        return start, []
    columns = msgspec.msgpack.decode(frame[PREFIX_BYTES:start])[0]
    return start, list(struct.unpack_from(f"<{len(columns)}I", frame, start))


# Those that reach deepest come most often.
CHANGES: tuple[Change, ...] = (
    change_bytes, flip_bit, cut, repeat, change_prefix, change_lengths, change_section, change_section, change_header,
    change_header, change_header, change_header,
)  # fmt: skip


def fuzz(count: int, seed: int, minutes: float) -> dict[str, object]:
    """Alter and decode; what was raised by name. Anything else than the two errors is in `foreign`."""
    chosen = random.Random(seed)
    frames = valid_frames()
    outcomes: Counter[str] = Counter()
    foreign: dict[str, str] = {}
    slowest_s = 0.0
    started_s = time.monotonic()
    for done in range(count):
        frame = chosen.choice(CHANGES)(chosen, chosen.choice(frames))
        if chosen.random() < 0.1:
            frame = change_bytes(chosen, frame or b"HR")
        begin_s = time.process_time()  # what else the machine does is not the decoder's
        try:
            use(frame)
            outcomes["valid"] += 1
        except (BadFrame, UnknownMajor) as error:
            outcomes[type(error).__name__] += 1
        except BaseException as error:
            outcomes["foreign"] += 1
            foreign.setdefault(f"{type(error).__name__}: {error}"[:200], frame.hex())
        slowest_s = max(slowest_s, time.process_time() - begin_s)
        if done % 1000 == 0 and time.monotonic() - started_s > minutes * 60:
            break
    return {
        "frames": sum(outcomes.values()), "seed": seed, **outcomes, "seconds": round(time.monotonic() - started_s, 1),
        "slowest_cpu_ms": round(slowest_s * 1000, 1), "errors": foreign,
        "peak_rss_mb": peak_rss_mb(),
    }  # fmt: skip


def peak_rss_mb() -> int:
    """Peak resident memory of this program; getrusage also counts the process that it was forked from."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


def main() -> int:
    """Exit code 1 where the decoder raised anything else."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf)
    options = parser.parse_args()
    report = fuzz(options.count, options.seed, options.minutes)
    print(json.dumps(report))
    return 1 if report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
