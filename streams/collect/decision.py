"""What folding a record leads to: how attempts ended, the blocks that go on, what was dropped and why."""

from collections.abc import Sequence

import msgspec

from infra.chain.chain import Dropped
from infra.log.letters import letter_at
from schemas import Block, Closure, DeadLetter, Experience


class Decision(msgspec.Struct, frozen=True):
    """How one attempt ended, and what is sent to the buffer because of it.

    closure: for `progress`. blocks: for `buffer`, published before the closure. dropped: members that the chain dropped.

    Example: Decision(Closure(group="add-3745.2", outcome="superseded", attempt=1), ())
    """

    closure: Closure
    blocks: tuple[Block, ...] = ()
    dropped: tuple[Dropped, ...] = ()


class Folded(msgspec.Struct):
    """What one record led to.

    decisions: in the order in which they are published. letters: records that cannot be processed. dropped: reason to count.
    closed_early: sessions that were closed before their time, since too many turns waited.
    """

    decisions: list[Decision] = []
    letters: list[DeadLetter] = []
    dropped: dict[str, int] = {}
    closed_early: int = 0

    def drop(self, reason: str, count: int = 1) -> None:
        """Count `count` under `reason`; "" is nothing."""
        if reason and count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count


def dead_letter(partition: int, offset: int, reason: str, error: str, value: bytes) -> DeadLetter:
    """A record of `verified` that nothing can be done with."""
    return letter_at(("verified", partition, offset), stage="collect", reason=reason, error=error, value=value)


def mean_reward(experiences: Sequence[Experience]) -> float | None:
    """Mean over the episodes that have a reward, which their last parts carry."""
    rewards = [experience.reward for experience in experiences if experience.last and experience.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def trial_of(experiences: Sequence[Experience]) -> int:
    """The version that was on trial when these were answered, -1 for none."""
    return experiences[0].trial if experiences else -1
