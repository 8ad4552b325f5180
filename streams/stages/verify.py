"""Stage verify: a block of experiences goes through the chain; kept experiences become a block, the rest drop markers.

Guarantees: every experience of a readable block is either in the block that is published or has a drop marker with its reason,
so its group can complete (a duplicate has none: its original is there); eval answers go to `evals`, scored or with the cause of
their failure, and are never dropped.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from infra.chain.chain import ChainResult, ChainTurn, Context, Dropped, Step, new_memories, run_chain
from infra.chain.processor import Memory
from infra.chain.verdict import Recorded
from infra.log.bus import Partition
from infra.log.log import Log, LogMessage
from schemas import Block, DropMarker, Experience
from schemas.experience import emptied
from schemas.topics import EVALS, VERIFIED
from schemas.wire.block import split_blocks
from streams.processors.filter import DUPLICATE, dedupe_key
from streams.stages.driver import Moved, read_back
from streams.stages.stage import Handled, Output, count_faults, letter

STAGE = "verify"
DEDUPE = "dedupe"
REDELIVERED = "redelivered"  # Kafka header of a dead letter's second chance


class Verifier:
    """The chain of verify with its memories, one set per input partition."""

    def __init__(self, steps: Sequence[Step], recorded: Recorded | None = None) -> None:
        self._steps = steps
        self._recorded = recorded
        # Scores and filters behind the last step that remembers change no memory.
        self._remembering = steps[: max((index + 1 for index, step in enumerate(steps) if step.memory), default=0)]
        self._memories: dict[tuple[str, int], dict[str, Memory]] = {}

    def forget(self) -> None:
        self._memories.clear()

    async def recall(self, log: Log, at: Partition, before: int, moved: Moved) -> None:
        """Rebuild the memories, without output: pass the earlier records that they cover through the steps."""
        reach = max((step.memory for step in self._steps), default=0)
        async with aclosing(read_back(log, reach, at, before, moved)) as messages:
            async for message in messages:
                if isinstance(message.value, Block):
                    await self._run(self._remembering, message, message.value.experiences, None)

    async def handle(self, message: LogMessage, turn: ChainTurn | None = None) -> Handled:
        if message.error is not None:
            return Handled(then=(letter(message, STAGE, "bad frame", str(message.error)),), dropped={"bad frame": 1})
        block = message.value
        if not isinstance(block, Block):
            error = f"got {type(block).__name__}, expected a block of experiences"
            return Handled(then=(letter(message, STAGE, "unexpected record", error),), dropped={"unexpected record": 1})
        outcome = await self._run(self._steps, message, block.experiences, turn)
        return handled_from(block.experiences, outcome)

    def failed(self, message: LogMessage, reason: str, error: str) -> Handled:
        """Return a dead letter, drop markers for the members, and eval answers as failed, without content: it may not fit."""
        members = message.value.experiences if isinstance(message.value, Block) else ()
        gone = [Dropped(member, reason, error) for member in members if not member.suite]
        evals = [msgspec.structs.replace(emptied(member), failure=reason) for member in members if member.suite]
        outputs = [Output(VERIFIED, make_marker(drop)) for drop in gone]
        outputs += [Output(EVALS, block) for block in split_blocks(evals)]
        return Handled(
            then=(*outputs, letter(message, STAGE, reason, error)),
            dropped={reason: max(1, len(members))},
            num_in=len(members),
            num_out=len(evals),
        )

    async def _run(
        self, steps: Sequence[Step], message: LogMessage, experiences: Sequence[Experience], turn: ChainTurn | None
    ) -> ChainResult:
        where = (message.record.topic, message.record.partition)
        memories = self._memories.get(where)
        if memories is None:
            memories = self._memories[where] = new_memories(self._steps)
        if DEDUPE in memories and any(name == REDELIVERED for name, _ in message.record.headers):
            for experience in experiences:
                memories[DEDUPE].discard(dedupe_key(experience))
        context = Context(record_offset=message.record.offset, memories=memories, turn=turn, recorded=self._recorded)
        return await run_chain(steps, experiences, context)


def handled_from(experiences: Sequence[Experience], outcome: ChainResult) -> Handled:
    evals = [experience for experience in outcome.kept if experience.suite]
    failed = [drop for drop in outcome.dropped if drop.experience.suite]
    evals += [msgspec.structs.replace(drop.experience, scores=(), failure=drop.reason) for drop in failed]
    kept = [experience for experience in outcome.kept if not experience.suite]
    gone = [drop for drop in outcome.dropped if not drop.experience.suite]
    first = [Output(VERIFIED, block) for block in split_blocks(kept)]
    first += [Output(EVALS, block) for block in split_blocks(evals)]
    return Handled(
        first=tuple(first),
        # A duplicate has no drop marker: its original holds its place in the group.
        then=tuple(Output(VERIFIED, make_marker(drop)) for drop in gone if drop.reason != DUPLICATE),
        dropped=dict(Counter(drop.reason for drop in outcome.dropped)),
        num_in=len(experiences),
        num_out=len(kept) + len(evals),
        absent=outcome.absent,
        failed=count_faults((drop.reason, drop.processor) for drop in outcome.dropped),
    )


def make_marker(drop: Dropped) -> DropMarker:
    experience = drop.experience
    return DropMarker(
        id=experience.id,
        group=experience.group,
        episode=experience.episode,
        group_size=experience.group_size,
        reason=drop.reason,
        attempt=experience.attempt,
        part=experience.part,
        last=experience.last,
        lane=experience.lane,
        sequence=experience.sequence,
        stage=STAGE,
        processor=drop.processor,
        revision=experience.revision,
    )
