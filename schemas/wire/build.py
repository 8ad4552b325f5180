"""Building the sections of a block: a shared prompt once, equal texts once, sections of unknown names carried along.

Guarantee: text that came in a frame is copied as bytes, so that fields of a newer headrace survive an older one.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from schemas.bulk.bulk import Bulk
from schemas.bulk.sections import MAX_SECTION_BYTES, MAX_SECTIONS, TEXT, WIDTHS, Column, Ranges, compress
from schemas.experience import Experience
from schemas.records import Message

_encoder = msgspec.msgpack.Encoder()
_TOKEN, _LOGPROB = np.dtype("<u4"), np.dtype("<f4")


def build(
    experiences: Sequence[Experience], bulks: Sequence[Bulk]
) -> tuple[tuple[Column, ...], list[list[Ranges]], list[bytes]]:
    """Columns, ranges per experience and column, and compressed bodies, for members from anywhere.

    Raises ValueError where a section would be larger than readers accept.
    """
    tokens, token_ranges = _tokens(experiences, bulks)
    logprobs, logprob_ranges = _logprobs(bulks)
    text, text_ranges = _texts(bulks)
    columns = [
        Column("tokens", 4, len(tokens) // 4),
        Column("logprobs", 4, len(logprobs) // 4),
        Column("text", 1, len(text)),
    ]
    raws = [tokens, logprobs, text]
    ranges: list[list[Ranges]] = [list(parts) for parts in zip(token_ranges, logprob_ranges, text_ranges, strict=True)]
    if any(bulk.extras or (bulk.sections and len(bulk.sections.columns) > len(WIDTHS)) for bulk in bulks):
        _carry_extras(bulks, columns, raws, ranges)
    if len(columns) > MAX_SECTIONS:
        raise ValueError(f"block of sections {[column.name for column in columns]}, expected at most {MAX_SECTIONS}")
    for column, raw in zip(columns, raws, strict=True):
        if len(raw) > MAX_SECTION_BYTES:
            raise ValueError(
                f"section {column.name}: got {len(raw)} bytes, expected at most {MAX_SECTION_BYTES}:"
                " put fewer experiences in the block"
            )
    return tuple(columns), ranges, [compress(raw) for raw in raws]


def _tokens(experiences: Sequence[Experience], bulks: Sequence[Bulk]) -> tuple[bytes, list[Ranges]]:
    chunks: list[bytes] = []
    ranges: list[Ranges] = []
    prompts: dict[bytes, tuple[int, int]] = {}
    end = 0
    for experience, bulk in zip(experiences, bulks, strict=True):
        raw = np.asarray(bulk.tokens, _TOKEN).tobytes()
        cut = experience.num_prompt
        prompt = raw[: 4 * cut]
        found = prompts.get(prompt)
        if found is None:
            # One run for prompt and response, so that a reader gets a view instead of a copy.
            prompts[prompt] = (end, end + cut)
            chunks.append(raw)
            ranges.append((end, end + experience.num_tokens))
            end += experience.num_tokens
        else:
            chunks.append(raw[4 * cut :])
            stop = end + experience.num_tokens - cut
            ranges.append((*found, end, stop) if cut else (end, stop))
            end = stop
    return b"".join(chunks), ranges


def _logprobs(bulks: Sequence[Bulk]) -> tuple[bytes, list[Ranges]]:
    ranges: list[Ranges] = []
    end = 0
    for bulk in bulks:
        stop = end + len(bulk.logprobs)
        ranges.append((end, stop))
        end = stop
    return b"".join([np.asarray(bulk.logprobs, _LOGPROB).tobytes() for bulk in bulks]), ranges


def _texts(bulks: Sequence[Bulk]) -> tuple[bytes, list[Ranges]]:
    """Encoded lists of messages: what all members made in this process begin with, and the rest of each."""
    common = _common_messages(bulks)
    prefix = _encoded(common)
    chunks: list[bytes] = []
    ranges: list[Ranges] = []
    known: dict[bytes, tuple[int, int]] = {}
    end = 0
    for bulk in bulks:
        runs: Ranges = ()
        for chunk in _text_chunks(bulk) if bulk.sections else prefix + _encoded(bulk.messages[len(common) :]):
            found = known.get(chunk)
            if found is None:
                found = known[chunk] = (end, end + len(chunk))
                chunks.append(chunk)
                end = found[1]
            runs += found
        ranges.append(runs)
    return b"".join(chunks), ranges


def _common_messages(bulks: Sequence[Bulk]) -> tuple[Message, ...]:
    made = [bulk.messages for bulk in bulks if bulk.sections is None]
    if not made:
        return ()
    shortest = min(made, key=len)
    for position, message in enumerate(shortest):
        for messages in made:
            if messages[position] is not message and messages[position] != message:
                return shortest[:position]
    return shortest


def _encoded(messages: tuple[Message, ...]) -> list[bytes]:
    return [_encoder.encode(messages)] if messages else []


def _text_chunks(bulk: Bulk) -> list[bytes]:
    assert bulk.sections is not None
    pairs = iter(bulk.ranges[TEXT])
    return [bulk.sections.cut(TEXT, (start, next(pairs, -1))) for start in pairs]


def _carry_extras(bulks: Sequence[Bulk], columns: list[Column], raws: list[bytes], ranges: list[list[Ranges]]) -> None:
    """Adds a column for each section of a name we do not know; members without it get no items, equal ones share theirs."""
    names = sorted({name for bulk in bulks for name in bulk.extra_sections()})
    for name in names:
        chunks: list[bytes] = []
        known: dict[bytes, tuple[int, int]] = {}
        width = end = 0
        for bulk, parts in zip(bulks, ranges, strict=True):
            own, raw = bulk.extra_sections().get(name, (width, b""))
            if width and own != width:
                raise ValueError(f"section {name}: members with items of {width} and of {own} bytes")
            width = own
            if raw not in known:
                known[raw] = (end, end + (len(raw) // width if width else 0))
                chunks.append(raw)
                end = known[raw][1]
            parts.append(known[raw])
        columns.append(Column(name, width, end))
        raws.append(b"".join(chunks))
