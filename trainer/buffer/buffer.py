"""Buffer in memory: compressed blocks by offset, with their headers as candidates. A draw decodes its blocks.

Guarantees: a group is trained at most `max_uses` times per lane, counted by (group, lane) across restarts, and as often again
per retraining. A duplicate delivery of a block changes nothing. A revision replaces a waiting copy and leaves a trained copy
unchanged; a withdrawal removes the waiting copy. Use counts stay while their group is held or can be delivered again, so they
are bounded by the kept horizon. Reading a journaled block that retention deleted, or that does not decode, raises an error with
its offset.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from infra.log.blobs import is_claim
from infra.log.log import Log, LogMessage
from schemas import Block, Lane, decode, encode, topics
from schemas.bulk import FindSeal
from schemas.errors import BadFrame, OffsetOutOfRange
from schemas.experience import MAX_TOKENS, WITHDRAWN, is_withdrawal, pair_fault, pair_side
from schemas.wire.teacher import is_taught
from trainer.buffer.draw import Awaited
from trainer.buffer.pool import Candidate, LaneRows, Pool, make_pool


class Stored(msgspec.Struct, frozen=True):
    """A block of `buffer`. block: decoded. frame: bytes to keep in memory. digest: digest of the record, as in the journal."""

    block: Block
    frame: bytes
    digest: bytes


def record_digest(message: LogMessage) -> bytes:
    """Return the BLAKE2b-128 of a record; for a claim check it covers the hash of the claimed frame."""
    return hashlib.blake2b(message.record.value, digest_size=16).digest()


def block_frame(message: LogMessage, block: Block) -> bytes:
    """Return the frame to keep in memory; a block from the object store is encoded again."""
    return encode(block) if is_claim(message.record.value) else message.record.value


def stored(message: LogMessage) -> Stored:
    """The block of a record of `buffer`; BadFrame naming its offset if it holds something else."""
    if not isinstance(message.value, Block):
        raise BadFrame(f"buffer offset {message.offset}: {message.error or 'not a block'}")
    return Stored(message.value, block_frame(message, message.value), record_digest(message))


async def read_blocks(log: Log, offsets: Iterable[int]) -> dict[int, Stored]:
    """Read blocks at these offsets of `buffer`. Raises OffsetOutOfRange or BadFrame naming the offset."""
    wanted = set(offsets)
    messages = await log.messages_at(topics.BUFFER, 0, wanted)
    if lost := wanted - messages.keys():
        raise OffsetOutOfRange(f"{log.name(topics.BUFFER)}/0: offset {min(lost)} is not kept, and the journal names it")
    return {offset: stored(message) for offset, message in messages.items()}


KEY_BYTES = 16


def use_key(group: str, retrained: int, lane: str) -> bytes:
    """16 bytes by which uses are counted. retrained: how often a late verdict sent the group to be trained again."""
    return hashlib.blake2b(f"{group}\x00{retrained}\x00{lane}".encode(), digest_size=KEY_BYTES).digest()


class Known(msgspec.Struct, frozen=True, gc=False):
    """Uses of a key.

    count: of uses. offset: the newest of `buffer` at which its group was delivered.
    """

    count: int
    offset: int


class Uses:
    """Key → times trained, and where it was last delivered. One consumer; not thread-safe."""

    def __init__(self, known: Mapping[bytes, Known] = {}) -> None:
        self._known = dict(known)

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[tuple[bytes, Known]]:
        return iter(self._known.items())

    def copy(self) -> "Uses":
        return Uses(self._known)

    def put(self, key: bytes, known: Known) -> None:
        self._known[key] = known

    def delivered(self, key: bytes, offset: int) -> int:
        """Remember a delivery at `offset`; returns the number of uses of its group."""
        if (known := self._known.get(key)) is None:
            return 0
        self.put(key, Known(known.count, max(offset, known.offset)))
        return known.count

    def add(self, key: bytes, offset: int) -> None:
        """Count a use of the experience at `offset`."""
        known = self._known.get(key, Known(0, 0))
        self.put(key, Known(known.count + 1, max(offset, known.offset)))

    def forget_below(self, offset: int, held: Collection[bytes]) -> int:
        """Forget counts last delivered below `offset` and not held any more; return their number."""
        gone = [key for key, known in self._known.items() if known.offset < offset and key not in held]
        for key in gone:
            del self._known[key]
        return len(gone)


class Buffer:
    """Groups that may still be trained. Single consumer; not thread-safe.

    uses: use counts over the kept horizon. max_uses: limit per lane. find_seal: keys of sealed blocks. max_tokens: limit of a
    sequence, 0 for none.
    """

    def __init__(
        self,
        max_uses: Mapping[Lane, int],
        uses: Uses | None = None,
        find_seal: FindSeal | None = None,
        max_tokens: int = 0,
    ) -> None:
        self._max_uses = dict(max_uses)
        self.uses = Uses() if uses is None else uses.copy()
        self._find_seal = find_seal
        self._max_tokens = max_tokens or MAX_TOKENS
        self._frames: dict[int, bytes] = {}
        self._candidates = {lane: LaneRows() for lane in max_uses}
        self._held: dict[tuple[str, str], int] = {}  # (group, lane) → offset
        self._validation: dict[int, Block] | None = {}
        self._awaited = Awaited()
        self.used_up: Counter[str] = Counter()  # experiences by lane

    def add(self, offset: int, frame: bytes, block: Block, digest: bytes = b"") -> str:
        """Add a block; return "" or the reason of its refusal. digest: digest of its record, for the journal."""
        first = block.experiences[0]
        self._awaited.heard(first)
        if first.lost:
            return first.lost
        if first.lane not in self._max_uses:
            return "lane not trained"
        if any(experience.lane != first.lane for experience in block.experiences):
            return "block mixes lanes"
        if any(experience.num_tokens > self._max_tokens for experience in block.experiences):
            return "longer than the context"
        if is_withdrawal(first):
            held = self._held.get((block.group, first.lane))
            if held is not None and self._candidates[first.lane][held].revision < first.revision:
                self.discard(held, first.lane)
            return WITHDRAWN
        if any(not experience.spans or experience.num_prompt < 1 for experience in block.experiences):
            return "nothing to train"
        if fault := pair_fault(block.experiences):
            return fault
        if first.held_out:
            if first.sequence >= 0:  # the master waits for it, and it is never drawn here
                return "held out"
            if self._validation is not None:
                self._validation[offset] = block
            return ""
        used = self.uses.delivered(use_key(block.group, first.retrained, first.lane), offset)
        if used >= self._max_uses[first.lane]:
            self.used_up[first.lane] += len(block.experiences)
            return "already trained"
        held = self._held.get((block.group, first.lane))
        if held is not None:
            if self._candidates[first.lane][held].revision >= first.revision:
                return "" if held == offset else "duplicate"
            self.discard(held, first.lane)
        self._frames[offset] = frame
        self._held[block.group, first.lane] = offset
        self._candidates[first.lane].put(make_candidate(offset, block, used, digest))
        return ""

    def candidates(self, lane: Lane) -> list[Candidate]:
        """The candidates of a lane, in order of arrival."""
        return list(self._candidates.get(lane, ()))

    def pool(self, lane: Lane) -> Pool:
        """The candidates of a lane for a draw, in order of arrival."""
        return self._candidates[lane].pool() if lane in self._candidates else make_pool(())

    def drawable(self, lane: Lane) -> Pool:
        """The pool of a lane without joins that more turns are awaited for."""
        pool = self.pool(lane)
        joined = np.flatnonzero(pool.column("is_joined"))
        kept_N = np.ones(len(pool), bool)
        kept_N[joined] = [candidate.join not in self._awaited for candidate in pool.chosen(joined)]
        return pool if kept_N.all() else pool.chosen(kept_N)

    def await_no_more(self) -> None:
        """Await no more turns of any join: they came before, or cannot be read."""
        self._awaited.clear()

    def holds(self, candidate: Candidate) -> bool:
        """True while a group may be drawn; a newer revision takes its place."""
        return candidate.offset in self._candidates.get(candidate.lane, ())

    def look_at(self, candidates: Iterable[Candidate]) -> list[Block]:
        """Decode groups without using them."""
        blocks = []
        for candidate in candidates:
            block = decode(self._frames[candidate.offset], self._find_seal)
            if not isinstance(block, Block):
                raise BadFrame(f"buffer offset {candidate.offset}: got {type(block).__name__}, expected Block")
            blocks.append(block)
        return blocks

    def lost(self, candidates: Iterable[Candidate]) -> list[tuple[Candidate, str]]:
        """Candidates that can no longer be decrypted, with the reason. Blocks where a key has to be looked up."""
        if self._find_seal is None:
            return []
        return [
            (candidate, fault)
            for candidate in candidates
            if candidate.key_id and (fault := self._find_seal(candidate.key_id).fault)
        ]

    def take(self, drawn: Sequence[Candidate]) -> list[Block]:
        """Decode the drawn groups and count their use; a group with uses left stays."""
        blocks = self.look_at(drawn)
        for candidate in drawn:
            self.count_use(candidate)
        return blocks

    def count_use(self, candidate: Candidate) -> None:
        """One more use of a group, drawn now or re-executed from the journal, which may name another revision."""
        self.uses.add(use_key(candidate.group, candidate.retrained, candidate.lane), candidate.offset)
        offset = self._held.get((candidate.group, candidate.lane))
        if offset is None or (held := self._candidates[candidate.lane][offset]).retrained != candidate.retrained:
            return
        if held.uses + 1 >= self._max_uses[candidate.lane]:
            self.discard(offset, candidate.lane)
            self.used_up[candidate.lane] += held.num_experiences
        else:
            self._candidates[candidate.lane].put(msgspec.structs.replace(held, uses=held.uses + 1))

    def forget_uses(self, below: int) -> int:
        """Forget the uses of groups that were last delivered below an offset and are not held; return their number."""
        held = [candidate for rows in self._candidates.values() for candidate in rows if candidate.uses]
        return self.uses.forget_below(below, {use_key(each.group, each.retrained, each.lane) for each in held})

    def discard(self, offset: int, lane: Lane) -> None:
        gone = self._candidates[lane].pop(offset)
        self._frames.pop(offset)
        self._held.pop((gone.group, lane))

    def references(self) -> list[int]:
        """Return the offsets of all held blocks, ascending, which a resume must read again."""
        return sorted({*self._frames, *(self._validation or ())})

    def validation(self) -> list[Block]:
        """Blocks that are never trained, in log order."""
        return [block for _, block in sorted((self._validation or {}).items())]

    def end_validation(self) -> None:
        """Drop the blocks that are never trained, and hold no further ones: only the warm-up reads them."""
        self._validation = None

    def num_waiting(self) -> int:
        return len(self._frames)

    def num_groups(self, lane: Lane) -> int:
        return len(self._candidates.get(lane, ()))

    def num_heard(self, lane: Lane) -> int:
        """Number of experiences held in a lane, plus former experiences of the lane without a use left."""
        return sum(candidate.num_experiences for candidate in self.candidates(lane)) + self.used_up[lane]


def make_candidate(offset: int, block: Block, uses: int, digest: bytes = b"") -> Candidate:
    """A block's header as the draw sees it."""
    first = block.experiences[0]
    spans = [span for experience in block.experiences for span in experience.spans]
    return Candidate(
        group=block.group,
        lane=first.lane,
        offset=offset,
        num_experiences=len(block.experiences),
        sequence=first.sequence,
        revision=first.revision,
        retrained=first.retrained,
        num_tokens=sum(span.stop - span.start for span in spans),
        tenant=first.tenant,
        subject=first.subject,
        has_signal=any(experience.advantage != 0.0 for experience in block.experiences),
        min_version=min((span.version for span in spans), default=-1),
        max_version=max((span.version for span in spans), default=-1),
        priority=max(experience.priority for experience in block.experiences),
        uses=uses,
        has_ratio=bool(spans) and all(span.ratio for span in spans),
        has_reward=all(experience.reward is not None for experience in block.experiences),
        digest=digest,
        is_pair=bool(pair_side(first)),
        key_id=first.key_id if first.is_sealed else "",
        join="" if first.join is None else first.join.name,
        is_taught=all(is_taught(experience) for experience in block.experiences),
    )
