"""What is known of how versions served: what people said of their answers, and how many failed or refused. Counts alone.

People are counted, not ratings: of one person (a named rater, else a session) one rating counts in a trial, and one on a day:
that of the first of their answers which has one. It may be of any version, so the choice of people does not depend on the
version. So a person with many ratings does not decide, and ratings that are alike because one person gave them count
once.

Guarantees: of one answer the newest revision counts, and what was taken back counts for nothing; a rating that comes later
than `mature` after its answer counts for nothing, good or bad, so that how fast people praise or complain decides nothing;
a record that comes twice changes nothing; what gateways report only grows, so the largest report of each is what it served.
A restart that counts the log anew counts alike. Bounded: the ratings of an answer that is older than `MAX_ANSWERS` others
no longer change; of each of `MAX_TRIALS` trials and `MAX_DAYS` days `MAX_VOICES` people are kept, chosen by a hash.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any, ClassVar

import msgspec

from actors.config import PeopleConfig
from infra.settings.config import duration_s
from schemas import Answered, Client, Closure, Progress, Rating
from schemas.ids import session_of
from schemas.names import is_person, tenant_in

MAX_ANSWERS = 100_000
MAX_TRIALS = 4
MAX_DAYS = 10
MAX_VOICES = 10_000
LEAST_OF_TENANT = 5  # people that make a tenant one of several
DAY_MS = 86_400_000

Arm = tuple[int, int]  # the version that answered, and the version on trial when it was drawn (-1: none)


class Tally(msgspec.Struct):
    """What was served to one client: answers, one of each session where gateways say so.

    failed: the engine did not bring them to an end. refused: they began as a refusal. answers: how many.

    Example: Tally(answers=9200, failed=2, refused=40)
    """

    answers: int = 0
    failed: int = 0
    refused: int = 0


class Voice(msgspec.Struct):
    """One person's word. answered_ms: when the answer was given. group: the answer's. tenant: of the key. arm: what was
    served. bad: whether it is a complaint, None where it was taken back.
    """

    answered_ms: int
    group: str
    tenant: str
    arm: Arm
    bad: bool | None


class RatedAnswer(msgspec.Struct):
    """One answer. arm: what was served. answered_ms: when. revision: of the newest closure counted, -1 for none.
    people: who spoke of it in time. counts: bad and good ratings in time, bad and good ones that came late.
    """

    arm: Arm
    answered_ms: int
    revision: int = -1
    people: tuple[str, ...] = ()
    counts: tuple[int, int, int, int] = (0, 0, 0, 0)


class Voices(msgspec.Struct):
    """People of one trial or one day, by a hash the same ones in whatever order they come.

    _known: the word of each. _bits: who lies below 2 ** _bits is kept. counts: as in RatedAnswer, of all answers.
    """

    _known: dict[str, Voice] = {}
    _bits: int = 64
    counts: list[int] = msgspec.field(default_factory=lambda: [0, 0, 0, 0])

    def __iter__(self) -> Iterator[Voice]:
        return (voice for voice in self._known.values() if voice.bad is not None)

    def speak(self, person: str, voice: Voice) -> None:
        """What a person thinks of an answer now; of their answers the first one counts."""
        if place_of_person(person) >= 2**self._bits:
            return
        known = self._known.get(person)
        if known is None and voice.bad is None:
            return
        if known is None or (voice.answered_ms, voice.group) <= (known.answered_ms, known.group):
            self._known[person] = voice
        while len(self._known) > MAX_VOICES:
            self._bits -= 1
            self._known = {one: kept for one, kept in self._known.items() if place_of_person(one) < 2**self._bits}


class Ratings:
    """Counts what closures and gateways tell."""

    KEPT: ClassVar[dict[str, Any]] = {
        "_answers": dict[str, RatedAnswer], "_trials": dict[int, Voices], "_days": dict[int, Voices],
        "_served": dict[tuple[str, Arm], Answered],
    }  # fmt: skip

    def __init__(self, config: PeopleConfig | None = None) -> None:
        self._config = config or PeopleConfig()
        self.mature_ms = int(duration_s(self._config.mature or "0s") * 1000)
        self._answers: OrderedDict[str, RatedAnswer] = OrderedDict()
        self._trials: dict[int, Voices] = {}
        self._days: dict[int, Voices] = {}
        self._served: dict[tuple[str, Arm], Answered] = {}

    def closure(self, closure: Closure, at_ms: int) -> None:
        """An answer of production was closed with the ratings of it, or revised. at_ms: when that was logged."""
        answer = self._answers.get(closure.group)
        if answer is None:
            if closure.lane != "live" or closure.revision or closure.version < 0:
                return
            answered_ms = closure.answered_ms if closure.answered_ms >= 0 else at_ms
            answer = self._answers[closure.group] = RatedAnswer((closure.version, closure.trial), answered_ms)
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        if closure.revision > answer.revision:
            answer.revision = closure.revision
            self._change(closure.group, answer, ratings_of(closure, answer.answered_ms))

    def progress(self, progress: Progress) -> None:
        """A gateway reports what it served."""
        for answered in progress.answered:
            place = (progress.instance, (answered.version, answered.trial))
            known = self._served.get(place)
            if known is None or answered.answers > known.answers:
                self._served[place] = answered

    def of_trial(self, trial: int) -> Voices:
        """People whose sessions were drawn while a version was on trial."""
        return self._trials.get(trial) or Voices()

    def of_days(self) -> dict[int, Voices]:
        """People by day since the epoch."""
        return self._days

    def several(self) -> bool:
        """Whether people of more than one tenant are heard."""
        found: dict[str, set[str]] = {}
        for voices in self._days.values():
            for voice in voices:
                people = found.setdefault(voice.tenant, set())
                if len(people) < LEAST_OF_TENANT:
                    people.add(voice.group)
                if sum(len(one) >= LEAST_OF_TENANT for one in found.values()) > 1:
                    return True
        return False

    def of_version(self, version: int) -> dict[str, Tally]:
        """What a version served to each client, on trial or not."""
        return self._sum(lambda arm: arm[0] == version)

    def of_arm(self, version: int, trial: int) -> dict[str, Tally]:
        """What a version served to each client while another (or itself) was on trial, of the sessions that were drawn."""
        return self._sum(lambda arm: arm == (version, trial))

    def forget(self, kept: set[int]) -> None:
        """Nothing is compared with versions other than these any more, nor with what is newer than they are."""
        newest = max(kept, default=-1)
        for place in [place for place in self._served if place[1][0] not in kept and place[1][0] < newest]:
            del self._served[place]

    def _change(self, group: str, answer: RatedAnswer, ratings: tuple[Rating, ...]) -> None:
        deadline_ms = answer.answered_ms + self.mature_ms
        in_time = [one for one in ratings if one.time_ms <= deadline_ms]
        late = {person_of(group, one) for one in ratings if one.time_ms > deadline_ms}
        bad = {person_of(group, one): self._is_bad(one) for one in reversed(in_time)}
        # What is replaced after its time stays as it was; what is taken back is not there any more.
        gone = [person for person in answer.people if person not in bad and person not in late]
        answer.people = (*bad, *(person for person in answer.people if person in late and person not in bad))
        for voices in self._places(answer):
            for person, bad_one in [*bad.items(), *((one, None) for one in gone)]:
                voices.speak(person, Voice(answer.answered_ms, group, tenant_in(group), answer.arm, bad_one))
            counts = self._counts(ratings, deadline_ms)
            voices.counts = [
                all_ + new - old for all_, new, old in zip(voices.counts, counts, answer.counts, strict=True)
            ]
        answer.counts = self._counts(ratings, deadline_ms)

    def _counts(self, ratings: tuple[Rating, ...], deadline_ms: int) -> tuple[int, int, int, int]:
        found = [0, 0, 0, 0]
        for one in ratings:
            found[2 * (one.time_ms > deadline_ms) + (not self._is_bad(one))] += 1
        return found[0], found[1], found[2], found[3]

    def _is_bad(self, rating: Rating) -> bool:
        return rating.value < self._config.bad_below_of.get(rating.source, self._config.bad_below)

    def _places(self, answer: RatedAnswer) -> list[Voices]:
        """The day and the trial it belongs to; the oldest of them are let go."""
        found = [_newest(self._days, answer.answered_ms // DAY_MS, MAX_DAYS)]
        if answer.arm[1] >= 0:
            found.append(_newest(self._trials, answer.arm[1], MAX_TRIALS))
        return [one for one in found if one is not None]

    def _sum(self, wanted: Callable[[Arm], bool]) -> dict[str, Tally]:
        found: dict[str, Tally] = {}
        for (_, arm), answered in self._served.items():
            if not wanted(arm):
                continue
            whole = Client(client="", sessions=answered.answers, failed=answered.failed, refused=answered.refused)
            for one in answered.clients or (whole,):
                tally = found.setdefault(one.client, Tally())
                tally.answers += one.sessions
                tally.failed += one.failed
                tally.refused += one.refused
        return found


def ratings_of(closure: Closure, answered_ms: int) -> tuple[Rating, ...]:
    """What people said of an answer; in logs older than ratings what is credited to it is taken instead."""
    if closure.ratings is not None:
        return closure.ratings
    reward = closure.mean_reward
    return () if reward is None else (Rating(source="", value=reward, time_ms=answered_ms),)


def person_of(group: str, rating: Rating) -> str:
    """Who gave a rating, as far as it is known: a rater of a tenant, else the person behind the session."""
    return f"{tenant_in(group)}/{rating.rater}" if is_person(rating.rater) else session_of(group) or group


def place_of_person(person: str) -> int:
    """Where a person lies below 2 ** 64."""
    return int.from_bytes(blake2b(person.encode(), digest_size=8).digest(), "big")


def _newest(known: dict[int, Voices], number: int, most: int) -> Voices | None:
    """The one of that number among the `most` of the highest numbers, None where it is older than all of them."""
    if number not in known:
        if len(known) >= most and number < min(known):
            return None
        known[number] = Voices()
        if len(known) > most:
            del known[min(known)]
    return known[number]
