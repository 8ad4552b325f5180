"""Decisions of a fold: ends of attempts, blocks for the buffer, and drops with their reasons."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from infra.chain.chain import ChainResult, Context, Dropped
from infra.log.log import letter_at
from schemas import Block, Closure, DeadLetter, Experience
from schemas.experience import withdrawal_of
from schemas.wire.block import split_blocks
from streams.collect.feedback import FeedbackRules, OpenText, credited, mean_values, newest_edit, ratings, with_edit
from streams.collect.state import Attempt, Group

TOO_LARGE = "larger than a block"


class Decision(msgspec.Struct, frozen=True):
    """The end of one attempt, and the blocks that it sends to the buffer.

    closure: for `progress`. blocks: for `buffer`, published before the closure. dropped: members that the chain dropped.
    """

    closure: Closure
    blocks: tuple[Block, ...] = ()
    dropped: tuple[Dropped, ...] = ()


class Folded(msgspec.Struct):
    """The result of folding one record.

    decisions: in the order in which they are published. letters: records that cannot be processed. dropped: reason to count.
    closed_early: sessions that were closed before their time, since too many turns waited.
    """

    decisions: list[Decision] = []
    letters: list[DeadLetter] = []
    dropped: dict[str, int] = {}
    closed_early: int = 0

    def drop(self, reason: str, count: int = 1) -> None:
        if reason and count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count


def dead_letter(partition: int, offset: int, reason: str, error: str, value: bytes) -> DeadLetter:
    return letter_at(("verified", partition, offset), stage="collect", reason=reason, error=error, value=value)


def mean_reward(experiences: Sequence[Experience]) -> float | None:
    rewards = [experience.reward for experience in experiences if experience.last and experience.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


Chain = Callable[[Sequence[Experience], Context], Awaitable[ChainResult]]


def learned(
    group: Group,
    member: Experience,
    sources: Mapping[str, FeedbackRules],
    waits: bool,
    open_text: OpenText | None,
    usual: Callable[[str], float],
) -> Experience:
    """Return the member with the scores and the edit of its feedback. waits: its lane waits for feedback. open_text: None where
    edits teach nothing.

    usual: see `streams.collect.feedback.returns`.
    """
    on_answer = group.feedback.get(member.id)
    scored = credited(member, on_answer, sources, waits, group.credits.values(), usual)
    return scored if open_text is None else with_edit(scored, on_answer, open_text)


def counted_feedback(group: Group, answer: str, open_text: OpenText | None) -> tuple[dict[str, float], str | None]:
    on_answer = group.feedback.get(answer)
    return mean_values(on_answer), None if on_answer is None or open_text is None else newest_edit(on_answer, open_text)


async def judged(
    group: Group,
    attempt: Attempt,
    members: Sequence[Experience],
    given: Sequence[Experience],
    reason: str,
    *,
    chain: Chain,
    context: Context,
) -> Decision:
    """Run the chain over `given` and make the closure of `group`. members: all that were there, some may be lost.

    reason: of a closure that sends something on.
    """
    drops = attempt.drops()
    if not attempt.is_complete:
        drops["missing at deadline"] = attempt.group_size - attempt.num_done
    drops.update(member.lost for member in members if member.lost)
    outcome = ChainResult(kept=tuple(given), dropped=())
    # The chain neither compares nor rewards demonstrations.
    if given and not all(member.is_given for member in given):
        outcome = await chain(given, context)
    kept: Sequence[Experience] = outcome.kept
    if group.retrained:  # after the chain, which compares an answer with others of the lane that served it
        kept = [
            msgspec.structs.replace(member, lane="human") if member.lane == attempt.lane else member for member in kept
        ]
    blocks, larger = _in_blocks(kept)
    dropped = (*outcome.dropped, *larger)
    drops.update(gone.reason for gone in dropped)
    own = [experience for block in blocks if block.group == group.id for experience in block.experiences]
    # If the earlier copy is in another lane, its withdrawal goes first, in its own block: a block has one lane.
    before: tuple[Block, ...] = ()
    if group.lane is not None and not (own and own[0].lane == group.lane):
        before = (Block((withdrawal_of(members[0], lane=group.lane, revision=group.revision),)),)
    closure = Closure(
        group=group.id,
        outcome="buffered" if own else "dropped",
        reason=reason if own or not drops else max(drops, key=lambda label: drops[label]),
        attempt=attempt.number,
        revision=group.revision,
        sequence=attempt.sequence,
        lane=own[0].lane if own else attempt.lane,
        experiences=len(own),
        mean_reward=mean_reward((*own, *(gone.experience for gone in dropped))),
        drops=dict(drops),
        version=min((member.min_version for member in given), default=-1),
        trial=given[0].trial if given else -1,
        ratings=ratings(group.feedback[member.id] for member in members if member.id in group.feedback),
        answered_ms=attempt.first_ms if attempt.lane == "live" else -1,
    )
    return Decision(closure, (*before, *blocks), dropped)


def _in_blocks(kept: Sequence[Experience]) -> tuple[tuple[Block, ...], tuple[Dropped, ...]]:
    """Return a block for each group, and the members of groups that need several: the trainer takes one block of a group."""
    blocks = split_blocks(kept)
    count = Counter(block.group for block in blocks)
    larger = [member for block in blocks if count[block.group] > 1 for member in block.experiences]
    return (
        tuple(block for block in blocks if count[block.group] == 1),
        tuple(Dropped(member, TOO_LARGE) for member in larger),
    )
