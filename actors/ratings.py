"""What is known of how versions served: what people said of their answers, and how many failed or refused. Counts alone.

Guarantees: of one answer the newest revision counts, and one that was withdrawn counts for nothing; a record that comes
twice changes nothing; what gateways report only grows, so the largest report of each is what it served. Closures, reports
and moves of the channel may come in any order, so a restart that counts the log anew counts alike. Bounded: the word on
an answer that is older than `MAX_ANSWERS` others stands as it is, and pairs are kept of the newest `MAX_TRIALS` trials.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from schemas import Answered, Closure, Progress

BAD_BELOW = 0.5  # a reward below it is a complaint
MAX_ANSWERS = 100_000
MAX_TRIALS = 4
MAX_PAIRS = 5_000

Arm = tuple[int, int]  # the version that answered, and the version on trial when it was drawn (-1: none)


class Tally(msgspec.Struct):
    """What one version served. rated, bad: answers with a reward, and those of a low one. answers: all that were sampled.

    failed: the engine did not bring them to an end. refused: they began as a refusal.

    Example: Tally(rated=480, bad=31, answers=9200, failed=2, refused=40)
    """

    rated: int = 0
    bad: int = 0
    answers: int = 0
    failed: int = 0
    refused: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            *(a + b for a, b in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True))
        )


class Word(msgspec.Struct):
    """What stands about one answer. bad: None where nothing does."""

    arm: Arm
    revision: int
    bad: bool | None


class Ratings:
    """Counts what closures and gateways tell."""

    def __init__(self) -> None:
        self._words: OrderedDict[str, Word] = OrderedDict()
        self._rated: dict[Arm, Tally] = {}
        self._order: dict[Arm, dict[str, bool]] = {}  # of trials: answers in the order in which they were first rated
        self._served: dict[tuple[str, Arm], Answered] = {}

    def closure(self, closure: Closure) -> None:
        """An answer of production was closed with what was said of it, or revised, or what was said was taken back."""
        word = self._words.get(closure.group)
        if word is None:
            if closure.lane != "live" or closure.revision or closure.version < 0:
                return
            word = self._words[closure.group] = Word((closure.version, closure.trial), -1, None)
            if len(self._words) > MAX_ANSWERS:
                self._words.popitem(last=False)
        if closure.revision > word.revision:
            bad = None if closure.mean_reward is None else closure.mean_reward < BAD_BELOW
            self._change(closure.group, word, bad)
            word.revision, word.bad = closure.revision, bad

    def progress(self, progress: Progress) -> None:
        """A gateway told what it served."""
        for told in progress.answered:
            place = (progress.instance, (told.version, told.trial))
            known = self._served.get(place)
            if known is None or told.answers > known.answers:
                self._served[place] = told

    def of_version(self, version: int) -> Tally:
        """All that a version served, on trial or not."""
        return self._sum(lambda arm: arm[0] == version)

    def of_arm(self, version: int, trial: int) -> Tally:
        """What a version served while another (or itself) was on trial, of the sessions that were drawn."""
        return self._sum(lambda arm: arm == (version, trial))

    def in_order(self, version: int, trial: int) -> Sequence[bool]:
        """Whether each rated answer of one side of a trial is rated down, in the order of their first ratings."""
        return list(self._order.get((version, trial), {}).values())

    def forget(self, kept: set[int]) -> None:
        """Nothing is compared with versions other than these any more, nor with what is newer than they are."""
        newest = max(kept, default=-1)
        for arm in [arm for arm in self._rated if arm[0] not in kept and arm[0] < newest]:
            del self._rated[arm]
        for place in [place for place in self._served if place[1][0] not in kept and place[1][0] < newest]:
            del self._served[place]

    def _sum(self, wanted: Callable[[Arm], bool]) -> Tally:
        total = Tally()
        for arm, tally in self._rated.items():
            if wanted(arm):
                total += tally
        for (_, arm), told in self._served.items():
            if wanted(arm):
                total += Tally(answers=told.answers, failed=told.failed, refused=told.refused)
        return total

    def _change(self, group: str, word: Word, bad: bool | None) -> None:
        tally = self._rated.setdefault(word.arm, Tally())
        if word.bad is not None:
            tally.rated -= 1
            tally.bad -= word.bad
        if bad is not None:
            tally.rated += 1
            tally.bad += bad
        if word.arm[1] >= 0:
            self._order_of(word.arm, group, bad)

    def _order_of(self, arm: Arm, group: str, bad: bool | None) -> None:
        order = self._order.setdefault(arm, {})
        if bad is None:
            order.pop(group, None)
        elif group in order or len(order) < MAX_PAIRS:
            order[group] = bad
        trials = sorted({trial for _, trial in self._order})
        for old in [known for known in self._order if known[1] in trials[:-MAX_TRIALS]]:
            del self._order[old]
