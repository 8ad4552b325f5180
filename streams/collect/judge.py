"""How a group ends: its members get their credit, the chain judges them, a closure says what came of it."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from infra.chain.chain import ChainResult, Context
from schemas import Closure, Experience
from schemas.wire.block import blocks_of
from schemas.withdrawal import withdrawal_of
from streams.collect.credit import FeedbackRules, credited, with_edit
from streams.collect.decision import Decision, mean_reward, trial_of
from streams.collect.feedback import OpenText, edit_of, ratings, values_of
from streams.collect.group import Attempt, Group

Chain = Callable[[Sequence[Experience], Context], Awaitable[ChainResult]]


def learned(
    group: Group,
    member: Experience,
    sources: Mapping[str, FeedbackRules],
    waits: bool,
    open_text: OpenText | None,
    usual: Callable[[str], float],
) -> Experience:
    """The member with what counts of it. waits: its lane waits for feedback. open_text: None where edits teach nothing.

    usual: see `streams.collect.credit.returns`.
    """
    on_answer = group.feedback.get(member.id)
    scored = credited(member, on_answer, sources, waits, group.credits.values(), usual)
    return scored if open_text is None else with_edit(scored, on_answer, open_text)


def counted_of(group: Group, answer: str, open_text: OpenText | None) -> tuple[dict[str, float], str | None]:
    """What counts of one answer: values by source, and the newest edit."""
    on_answer = group.feedback.get(answer)
    return values_of(on_answer), None if on_answer is None or open_text is None else edit_of(on_answer, open_text)


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
    """What the chain makes of `given`, and the closure of `group`. members: all that were there, some may be lost.

    reason: of a closure that sends something on.
    """
    drops = Counter(attempt.drops())
    if not attempt.is_complete:
        drops["missing at deadline"] = attempt.group_size - attempt.num_done
    drops.update(member.lost for member in members if member.lost)
    outcome = ChainResult(kept=tuple(given), dropped=())
    # Demonstrations are what they are: nothing is compared, nothing is rewarded.
    if given and not all(member.is_given for member in given):
        outcome = await chain(given, context)
    drops.update(gone.reason for gone in outcome.dropped)
    own = [experience for experience in outcome.kept if experience.group == group.id]
    # Where the copy of before lies in another lane, it goes first: one of its own block, since a block has one lane.
    blocks = () if own and own[0].lane == group.lane else blocks_of(_taken_back(group, members))
    closure = Closure(
        group=group.id,
        outcome="buffered" if own else "dropped",
        reason=reason if own or not drops else max(drops, key=lambda label: drops[label]),
        attempt=attempt.number,
        revision=group.revision,
        sequence=attempt.sequence,
        lane=own[0].lane if own else attempt.lane,
        experiences=len(own),
        mean_reward=mean_reward((*own, *(gone.experience for gone in outcome.dropped))),
        drops=dict(drops),
        version=min((member.min_version for member in given), default=-1),
        trial=trial_of(given),
        ratings=ratings(group.feedback[member.id] for member in members if member.id in group.feedback),
        answered_ms=attempt.first_ms if attempt.lane == "live" else -1,
    )
    return Decision(closure, (*blocks, *blocks_of(outcome.kept)), outcome.dropped)


def _taken_back(group: Group, members: Sequence[Experience]) -> tuple[Experience, ...]:
    """What an older revision sent on, where this one sends nothing to its place."""
    if group.lane is None:
        return ()
    return (withdrawal_of(members[0], lane=group.lane, revision=group.revision),)
