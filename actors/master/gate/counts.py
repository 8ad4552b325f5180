"""Counts of ratings by version, and of sessions with a failed or refused answer.

Sums by block of time and tenant, for each pair of an answering version and the version of the canaries at that time.

Guarantees: a person (a named rater, else a session) has one rating in a comparison: the rating of their first rated answer. The
newest revision of an answer counts; a withdrawn rating does not count. A rating later than `rating_window` after its answer
does not count, so the speed of praise and complaints has no influence. A repeated record changes nothing, and a recount of the
log gives the same counts. Bounded: ratings of answers older than the newest MAX_ANSWERS no longer change, a person counts again
after MAX_PEOPLE others, and only MAX_COMPARISONS comparisons (the running one, the time without one, and the newest others) and
MAX_STRATA sums of each are kept.
"""

from collections import OrderedDict
from typing import Any, ClassVar

import msgspec

from actors.config import PeopleConfig
from infra.settings.config import duration_s
from schemas import Closure, Progress, Rating
from schemas.ids import is_person, session_of, tenant_in

MAX_ANSWERS = 100_000
MAX_PEOPLE = 100_000
MAX_COMPARISONS = 4
MAX_STRATA = 100_000

Place = tuple[str, int]  # tenant, and the block of time


class Word(msgspec.Struct):
    """A person's rating in a comparison, of the first answer that they rated.

    answered_ms, group, version: of the answer. bad: whether it is a complaint, None if it was withdrawn.
    """

    answered_ms: int
    group: str
    version: int
    bad: bool | None


class RatedAnswer(msgspec.Struct):
    """An answer in production.

    version: version that answered. trial: version that canaries served then. answered_ms: time of the answer. revision: of the
    newest counted closure, -1 for none. people: its raters in time.
    """

    version: int
    trial: int
    answered_ms: int
    revision: int = -1
    people: tuple[str, ...] = ()


class Comparison(msgspec.Struct):
    """Sums of the time while canaries served one version.

    words: by person. rated: people and complaints. served: sessions, those with a failed answer, and with a refused one; none
    while canaries served no version, since nothing is compared then.
    """

    words: dict[str, Word] = {}
    rated: dict[int, dict[Place, list[int]]] = {}
    served: dict[int, dict[Place, list[int]]] = {}

    def restart(self, at_ms: int, at_block: int) -> None:
        """Forget answers before a time, since an earlier comparison of the same version counted them."""
        self.words = {person: word for person, word in self.words.items() if word.answered_ms >= at_ms}
        for sums in (*self.rated.values(), *self.served.values()):
            for place in [place for place in sums if place[1] < at_block]:
                del sums[place]

    def add(self, version: int, place: Place, more: tuple[int, ...], *, rated: bool) -> None:
        """Add to the sums of a version."""
        sums = (self.rated if rated else self.served).setdefault(version, {})
        known = sums.setdefault(place, [0] * len(more))
        known[:] = [old + new for old, new in zip(known, more, strict=True)]
        if len(sums) > MAX_STRATA:
            del sums[next(iter(sums))]


class Counts:
    """Counts the ratings in closures and the sessions in gateways' reports. clock_ms: the newest time in the log."""

    KEPT: ClassVar[dict[str, Any]] = {
        "clock_ms": int, "_answers": dict[str, RatedAnswer], "_comparisons": dict[int, Comparison],
        "_reported": dict[tuple[str, int, int, str], tuple[int, int, int]],
    }  # fmt: skip

    def __init__(self, config: PeopleConfig) -> None:
        self._config = config
        self._window_ms = int(duration_s(config.rating_window or "0s") * 1000)
        self._block_ms = int(duration_s(config.block) * 1000)
        self.clock_ms = 0
        self._answers: OrderedDict[str, RatedAnswer] = OrderedDict()
        self._comparisons: dict[int, Comparison] = {}
        self._reported: dict[tuple[str, int, int, str], tuple[int, int, int]] = {}

    def tick(self, at_ms: int | None) -> int:
        """The time of a record; without one, the newest."""
        self.clock_ms = max(self.clock_ms, at_ms or 0)
        return self.clock_ms if at_ms is None else at_ms

    def closure(self, closure: Closure, at_ms: int, running: int = -1) -> None:
        """An answer of production was closed with the ratings of it, or revised. running: the trial now."""
        answer = self._answers.get(closure.group)
        if answer is None:
            if closure.lane != "live" or closure.revision or closure.version < 0:
                return
            answered_ms = closure.answered_ms if closure.answered_ms >= 0 else at_ms
            answer = self._answers[closure.group] = RatedAnswer(closure.version, closure.trial, answered_ms)
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        if closure.revision > answer.revision and closure.ratings is not None:
            answer.revision = closure.revision
            self._revise(closure.group, answer, closure.ratings, running)

    def progress(self, progress: Progress, at_ms: int, running: int = -1) -> None:
        """Take a gateway's counts since its start. It reports past trials, too, so only growth makes a comparison."""
        for answered in progress.answered:
            for client in answered.clients if answered.trial >= 0 else ():
                key = (progress.instance, answered.trial, answered.version, client.client)
                known = self._reported.pop(key, (0, 0, 0))
                self._reported[key] = now = max(known, (client.sessions, client.failed, client.refused))
                if len(self._reported) > MAX_STRATA:
                    del self._reported[next(iter(self._reported))]
                if now != known:
                    more = tuple(new - old for new, old in zip(now, known, strict=True))
                    place = client.client, self.block(at_ms)
                    self._stored(answered.trial, running).add(answered.version, place, more, rated=False)

    def comparison(self, trial: int) -> Comparison:
        """The comparison while canaries served that version; -1 for the time while they served none."""
        return self._comparisons.get(trial) or Comparison()

    def forget(self, kept: set[int]) -> None:
        """Forget versions other than these, of the time without a comparison."""
        past = self.comparison(-1)
        past.rated = {version: sums for version, sums in past.rated.items() if version in kept}

    def block(self, at_ms: int) -> int:
        return at_ms // self._block_ms

    @property
    def rated_up_to(self) -> int:
        """The first block whose answers may still be rated."""
        return self.block(self.clock_ms - self._window_ms)

    def _stored(self, trial: int, running: int) -> Comparison:
        if trial not in self._comparisons:
            self._comparisons[trial] = Comparison()
            if len(self._comparisons) > MAX_COMPARISONS:
                del self._comparisons[next(old for old in self._comparisons if old not in (-1, running))]
        return self._comparisons[trial]

    def _revise(self, group: str, answer: RatedAnswer, ratings: tuple[Rating, ...], running: int) -> None:
        comparison = self._stored(answer.trial, running)
        deadline_ms = answer.answered_ms + self._window_ms
        bad = {
            identify_person(group, rating): self._is_bad(rating)
            for rating in reversed(ratings)
            if rating.time_ms <= deadline_ms
        }
        # A rating replaced after the deadline stays; a withdrawn rating does not count.
        late = {identify_person(group, rating) for rating in ratings if rating.time_ms > deadline_ms}
        stays = late - bad.keys()
        gone = [person for person in answer.people if person not in bad and person not in stays]
        answer.people = (*bad, *(person for person in answer.people if person in stays))
        for person, said in [*bad.items(), *((person, None) for person in gone)]:
            # Outside of comparisons nothing is tested, and every answer counts.
            who = person if answer.trial >= 0 else f"{group}/{person}"
            self._speak(comparison, who, Word(answer.answered_ms, group, answer.version, said))

    def _speak(self, comparison: Comparison, person: str, word: Word) -> None:
        known = comparison.words.get(person)
        if known is None and word.bad is None:
            return
        if known is not None and (word.answered_ms, word.group) > (known.answered_ms, known.group):
            return
        for said, sign in ((known, -1), (word, 1)):
            if said is not None and said.bad is not None:
                place = tenant_in(said.group), self.block(said.answered_ms)
                comparison.add(said.version, place, (sign, sign * said.bad), rated=True)
        comparison.words[person] = word
        if len(comparison.words) > MAX_PEOPLE:
            del comparison.words[next(iter(comparison.words))]

    def _is_bad(self, rating: Rating) -> bool:
        return rating.value < self._config.bad_below_by_source.get(rating.source, self._config.bad_below)


def identify_person(group: str, rating: Rating) -> str:
    """The person behind a rating: a tenant's named rater, else the session."""
    return f"{tenant_in(group)}/{rating.rater}" if is_person(rating.rater) else session_of(group) or group
