"""Block: 1 to 256 experiences of one group in a Kafka record, their shared prompt and equal texts stored once; its bytes.

Guarantee: sections that came in a frame leave as the same bytes while the members use at least half of them, so that a stage
that edits headers neither decompresses nor compresses. Decoding checks the header whole; bulk is checked on first use (or by
`validate`). This module can read every block that it writes. Sections that came sealed never leave unsealed. Text and unknown
sections that came in a frame are copied as bytes, so that fields of a newer headrace survive an older one.

    body     header · section_len u32 x k · sections
    header   msgpack [columns, experiences, ranges]; ranges hold, per experience and column, start and stop of each run
             of items whose concatenation is the experience's
    sections tokens u32 LE · logprobs f32 LE of sampled tokens · text: each run a msgpack list of messages · any others;
             in a sealed block each as the key of all its members sealed it
"""

import struct
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta as Bounds
from msgspec import structs

from schemas.bulk import (
    LOGPROBS,
    MAX_SECTION_BYTES,
    MAX_SECTIONS,
    TEXT,
    WIDTHS,
    Bulk,
    Column,
    FindSeal,
    Ranges,
    Seal,
    Sections,
    compress,
)
from schemas.errors import BadFrame
from schemas.experience import (
    MAX_MEMBERS,
    MAX_MEMBERS_BYTES,
    Experience,
    Experiences,
    checked_num_sampled,
    encode_headers,
    encoder,
    with_field,
)
from schemas.records import Message


class Block(msgspec.Struct, frozen=True):
    """1 to 256 experiences of one group; ValueError otherwise.

    experiences: the members, in the order of the frame.
    """

    experiences: tuple[Experience, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.experiences) <= MAX_MEMBERS:
            raise ValueError(f"block of {len(self.experiences)} experiences, expected 1 to {MAX_MEMBERS}")
        group = self.experiences[0].group
        for experience in self.experiences:
            if experience.group != group:
                raise ValueError(f"block of groups {group} and {experience.group}, expected one group")

    @property
    def group(self) -> str:
        return self.experiences[0].group

    def validate(self) -> None:
        """Decodes and checks the bulk of every member; raises BadFrame naming the first bad experience and field."""
        for experience in self.experiences:
            experience.check_bulk()


def split_blocks(experiences: Sequence[Experience]) -> tuple[Block, ...]:
    """Blocks of one group each, in order of first appearance, as few as hold them: MAX_MEMBERS each, MAX_MEMBERS_BYTES of
    headers and MAX_SECTION_BYTES of every section. A larger experience gets a block alone, which the encoder refuses.
    """
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(experience.group, []).append(experience)
    return tuple(Block(tuple(members)) for group in groups.values() for members in _cut(group))


def _cut(group: Sequence[Experience]) -> Iterator[Sequence[Experience]]:
    while group:
        members = group[:MAX_MEMBERS]
        if not _fit(members):
            fewer = [members[:count] for count in range(2, len(members))]
            members = members[: 1 + bisect_left(fewer, True, key=lambda some: not _fit(some))]
        yield members
        group = group[len(members) :]


def _fit(members: Sequence[Experience]) -> bool:
    """True if nothing in their block is too large. Equal prompts and texts count once, which only a look at them tells."""
    if len(encoder.encode(members)) > MAX_MEMBERS_BYTES:
        return False
    bulks = [member.held() for member in members]
    if _shared(bulks) is not None:
        return True
    most = sum((Counter(bulk.sizes()) for bulk in bulks), Counter[str]())
    return max(most.values(), default=0) <= MAX_SECTION_BYTES or all(
        len(raw) <= MAX_SECTION_BYTES for raw in _lay_out(members, bulks)[2]
    )


class _Header(msgspec.Struct, array_like=True, frozen=True):
    columns: Annotated[tuple[Column, ...], Bounds(max_length=MAX_SECTIONS)]
    experiences: Experiences
    ranges: Annotated[
        tuple[Annotated[tuple[Ranges, ...], Bounds(max_length=MAX_SECTIONS)], ...], Bounds(max_length=MAX_MEMBERS)
    ]


_header_decoder = msgspec.msgpack.Decoder(_Header)

_LENGTHS = [struct.Struct(f"<{count}I") for count in range(MAX_SECTIONS + 1)]


def decode_block(
    header: bytes | memoryview, tail: memoryview, *, sealed: bool = False, find: FindSeal | None = None
) -> Block:
    """A block from its header and the bytes after it; raises BadFrame, and the errors of `find`."""
    try:
        decoded = _header_decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise BadFrame(f"header: {with_field(str(error), '[1]')}") from error
    columns, experiences = decoded.columns, decoded.experiences
    key_id = _only_key(experiences) if sealed else ""
    if sealed and not key_id:
        raise BadFrame("header: the members of a sealed block name different keys, expected a single key_id")
    seal = find(key_id) if key_id and find is not None else None
    sections = Sections(columns, _bodies(columns, tail), tail, len(experiences), key_id, seal)
    if [len(ranges) for ranges in decoded.ranges] != [len(columns)] * len(experiences):
        raise BadFrame(f"header: expected ranges of {len(experiences)} experiences in {len(columns)} sections")
    try:
        for position, experience in enumerate(experiences):
            lengths = (experience.num_tokens, checked_num_sampled(experience))
            structs.force_setattr(experience, "bulk", Bulk(sections, decoded.ranges[position], lengths, experience.id))
        return Block(experiences)
    except ValueError as error:
        raise BadFrame(f"header: {error}") from error


def _bodies(columns: tuple[Column, ...], tail: memoryview) -> tuple[memoryview, ...]:
    """Compressed sections, cut by the lengths before them; nothing may be left over."""
    table = _LENGTHS[len(columns)]
    if len(tail) < table.size:
        raise BadFrame(f"sections: got {len(tail)} bytes, expected {len(columns)} lengths")
    lengths = table.unpack_from(tail)
    position = table.size
    if sum(lengths) != len(tail) - position:
        raise BadFrame(f"sections: got {len(tail) - position} bytes, expected {sum(lengths)} as announced")
    widths = {column.name: column.width for column in columns}
    if len(widths) != len(columns) or list(widths)[: len(WIDTHS)] != list(WIDTHS):
        raise BadFrame(f"sections: got {list(widths)}, expected {list(WIDTHS)} and others, each once")
    bodies = []
    for column, length in zip(columns, lengths, strict=True):
        if column.width * column.items > MAX_SECTION_BYTES or column.width != WIDTHS.get(column.name, column.width):
            raise BadFrame(
                f"section {column.name}: got {column.items} items of {column.width} bytes, expected at most"
                f" {MAX_SECTION_BYTES} bytes in all, and the width of its name"
            )
        bodies.append(tail[position : position + length])
        position += length
    return tuple(bodies)


def encode_block(block: Block, find: FindSeal | None = None) -> tuple[bytes, bytes | memoryview, bool]:
    """Header bytes, the section lengths and bodies, and whether these are sealed.

    They are sealed where `find` is given and the members name a key, and where any member came sealed. Raises ValueError for
    a block that could not be read back, Sealed where the key is gone, and the errors of `find`.
    """
    experiences = encode_headers(block.experiences)
    bulks = [experience.held() for experience in block.experiences]
    sections = _shared(bulks)
    key_id = _key_to_seal_under(block, bulks, find)
    if sections is not None:
        columns = sections.columns
        ranges: Sequence[Sequence[Ranges]] = [bulk.ranges for bulk in bulks]
        if sections.sealed_under == key_id:
            return _header(columns, experiences, ranges), sections.tail, bool(key_id)
        bodies = [bytes(body) for body in sections.bodies]
    else:
        columns, ranges, bodies = build(block.experiences, bulks)
    if key_id:
        seal = _block_seal(key_id, bulks, find)
        bodies = [seal.close(column.name, body) for column, body in zip(columns, bodies, strict=True)]
    tail = b"".join((_LENGTHS[len(columns)].pack(*[len(body) for body in bodies]), *bodies))
    return _header(columns, experiences, ranges), tail, bool(key_id)


def _header(columns: tuple[Column, ...], experiences: bytes, ranges: Sequence[Sequence[Ranges]]) -> bytes:
    return b"".join((b"\x93", encoder.encode(columns), experiences, encoder.encode(ranges)))


def _only_key(experiences: Sequence[Experience]) -> str:
    """The key that all members name, "" where they do not agree."""
    named = {experience.key_id for experience in experiences}
    return named.pop() if len(named) == 1 else ""


def _key_to_seal_under(block: Block, bulks: Sequence[Bulk], find: FindSeal | None) -> str:
    """The key the sections are to be sealed under, "" for none; ValueError where a member would be without its own."""
    came_under = {bulk.sections.sealed_under for bulk in bulks if bulk.sections is not None} - {""}
    if not came_under and (find is None or not any(experience.key_id for experience in block.experiences)):
        return ""
    key_id = _only_key(block.experiences)
    if not key_id or came_under - {key_id}:
        named = sorted({experience.key_id for experience in block.experiences} | came_under)
        raise ValueError(f"group {block.group}: key_id: got {named}, expected one key of all members in a sealed block")
    return key_id


def _block_seal(key_id: str, bulks: Sequence[Bulk], find: FindSeal | None) -> Seal:
    """The key itself: found, or the one that a member was opened with."""
    if find is not None:
        return find(key_id)
    for bulk in bulks:
        if bulk.sections is not None and bulk.sections.seal is not None:
            return bulk.sections.seal
    raise ValueError(f"key_id: {key_id} is to be sealed under, and this writer looks for no keys")


def _shared(bulks: Sequence[Bulk]) -> Sections | None:
    sections = bulks[0].sections
    if sections is None or any(bulk.sections is not sections for bulk in bulks):
        return None
    if len(bulks) < sections.num_members:
        used = sum(bulk.lengths[LOGPROBS] for bulk in bulks)
        if 2 * used < sections.columns[LOGPROBS].items:
            return None
    return sections


_TOKEN, _LOGPROB = np.dtype("<u4"), np.dtype("<f4")


def build(
    experiences: Sequence[Experience], bulks: Sequence[Bulk]
) -> tuple[tuple[Column, ...], list[list[Ranges]], list[bytes]]:
    """Columns, ranges per experience and column, and compressed bodies, for members from anywhere.

    Raises ValueError where a section would be larger than readers accept.
    """
    columns, ranges, raws = _lay_out(experiences, bulks)
    if len(columns) > MAX_SECTIONS:
        raise ValueError(f"block of sections {[column.name for column in columns]}, expected at most {MAX_SECTIONS}")
    for column, raw in zip(columns, raws, strict=True):
        if len(raw) > MAX_SECTION_BYTES:
            raise ValueError(
                f"section {column.name}: got {len(raw)} bytes, expected at most {MAX_SECTION_BYTES}:"
                " put fewer experiences in the block"
            )
    return tuple(columns), ranges, [compress(raw) for raw in raws]


def _lay_out(
    experiences: Sequence[Experience], bulks: Sequence[Bulk]
) -> tuple[list[Column], list[list[Ranges]], list[bytes]]:
    tokens, token_ranges = _tokens(experiences, bulks)
    logprobs, logprob_ranges = _logprobs(bulks)
    text, text_ranges = _texts(bulks)
    raws = [tokens, logprobs, text]
    columns = [Column(name, width, len(raw) // width) for (name, width), raw in zip(WIDTHS.items(), raws, strict=True)]
    ranges: list[list[Ranges]] = [list(parts) for parts in zip(token_ranges, logprob_ranges, text_ranges, strict=True)]
    if any(bulk.extras or (bulk.sections and len(bulk.sections.columns) > len(WIDTHS)) for bulk in bulks):
        _carry_extras(bulks, columns, raws, ranges)
    return columns, ranges, raws


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
    bounds = accumulate([len(bulk.logprobs) for bulk in bulks], initial=0)
    return b"".join([np.asarray(bulk.logprobs, _LOGPROB).tobytes() for bulk in bulks]), list(pairwise(bounds))


def _texts(bulks: Sequence[Bulk]) -> tuple[bytes, list[Ranges]]:
    """Encoded lists of messages: the common beginning of all members made in this process, and the rest of each."""
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
        if any(messages[position] is not message and messages[position] != message for messages in made):
            return shortest[:position]
    return shortest


def _encoded(messages: tuple[Message, ...]) -> list[bytes]:
    return [encoder.encode(messages)] if messages else []


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
