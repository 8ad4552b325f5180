"""The production guard: whether the newest stable version serves people worse than the days before it. Pure.

Four things are tested: complaints at the same hour of the day, complaints at any hour, answers that failed, and answers
refused. Each test may be looked at as often as one likes and sounds a false alarm with probability `alpha` / 4 at most
(`actors.master.gate.evidence`); the second and the failures take the upper end of what was measured before for what is
usual, since it is itself a sample. It is a function of counts alone: a restart that counts the log anew decides alike.

Assumptions: at one hour of the day people complain alike on the days before and after the promotion, but for the version.
Where the days before differ among themselves, that fails: the first test then waits (`unrest`), and it is an alarm
(`actors.master.gate.people`). The second needs only that the rate does not rise by more than `swing` by itself.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from actors.config import GateGuardConfig, PeopleConfig
from actors.master.gate.evidence import against, log_odds_ratio, log_share_ratio, wilson
from actors.master.gate.ratings import Ratings, Tally

NUM_TESTS = 4  # which share alpha
NUM_TRIAL_TESTS = 3  # of a trial: what people say, failures, refusals
LEAST_ANSWERS = 5  # that make a client one of several
HOUR_MS = 3_600_000
WINDOW_HOURS = 6  # of a day, within which days are compared with each other
RESTLESS = 2.5  # standard deviations of unrest above which the days before do not say what to expect


class Breach(msgspec.Struct, frozen=True):
    """Customers go back from a version that is served.

    version: that is taken back. before: that they get instead. reason: for people. numbers: what it was decided on.

    Example: Breach(version=44, before=40, reason="rated down by 31 of 80 people, 52 of 600 before", numbers={...})
    """

    version: int
    before: int
    reason: str
    numbers: dict[str, float]


class Hour(msgspec.Struct, frozen=True):
    """People of one tenant in one hour.

    tenant: of the keys. hour: since the epoch. people: who rated an answer. bad: how many of them complained.

    Example: Hour(tenant="mddrffqv", hour=489922, people=48, bad=5)
    """

    tenant: str
    hour: int
    people: int
    bad: int


class Before(msgspec.Struct, frozen=True):
    """What was said on the days before. unrest: by how many standard deviations they differ from each other more than
    chance explains. of_hour: people, and complaints, of each tenant and hour of the day. people, bad: raters of those
    days, and how many complained. days: with a rating.
    """

    people: int
    bad: int
    days: int
    unrest: float
    of_hour: dict[tuple[str, int], tuple[int, int]]


class GuardEvidence(msgspec.Struct, frozen=True):
    """What people say of a stable version, against what they said before.

    people, bad: raters, and how many complained. people_before, bad_before: the same of the days before. same_hour,
    whatever_hour: log ratios. unrest: as in Before.
    """

    people: int = 0
    bad: int = 0
    people_before: int = 0
    bad_before: int = 0
    same_hour: float = 0.0
    whatever_hour: float = 0.0
    unrest: float = 0.0


class GuardedRate(msgspec.Struct, frozen=True):
    """One thing that may happen to an answer. name: as in Answered. more: by how much more often is too much.

    Example: GuardedRate(name="failed", more=0.05)
    """

    name: str
    more: float


class Fault(msgspec.Struct, frozen=True):
    """Something that happens too often. reason: how often; before: and how often before. numbers: what it was found by.

    Example: Fault(reason="failed 25 of 100 times", before="0 of 900", numbers={...})
    """

    reason: str
    before: str
    numbers: dict[str, float]


def breach(
    config: GateGuardConfig,
    people: PeopleConfig,
    versions: tuple[int, int],
    evidence: GuardEvidence,
    new: Mapping[str, Tally],
    old: Mapping[str, Tally],
) -> Breach | None:
    """Whether a version is to give way to the one before. versions: both. new, old: what they served, by client."""
    version, before = versions
    if version < 0 or before < 0 or version == before:
        return None
    bound = math.log(NUM_TESTS / config.alpha)
    if is_worse(config, evidence):
        numbers = {f"guard/{name}": float(value) for name, value in msgspec.structs.asdict(evidence).items()}
        reason = evidence_text(evidence)
        return Breach(version, before, reason, numbers)
    fault = harmed(failures(config.more_failed), bound, config.least, people.tenant_share, new, old)
    if fault is None:
        return None
    return Breach(version, before, f"{fault.reason}, version {before} {fault.before}", fault.numbers)


def is_worse(config: GateGuardConfig, evidence: GuardEvidence) -> bool:
    """Whether people complain more than before."""
    return max(evidence.same_hour, evidence.whatever_hour) >= math.log(NUM_TESTS / config.alpha)


def evidence_text(evidence: GuardEvidence) -> str:
    """How often people complain, and did before."""
    return f"rated down by {evidence.bad} of {evidence.people} people, {evidence.bad_before} of {evidence.people_before} before"


def hours_of(
    ratings: Ratings, version: int, promoted_ms: int, before_ms: int, gone: Collection[int] = ()
) -> tuple[list[Hour], list[Hour]]:
    """What was said of a version since it is stable, of answers before a time, and of stable versions until then.

    gone: versions that customers were taken back from, which say nothing of what is usual.
    """
    counts: tuple[dict[tuple[str, int], list[int]], ...] = ({}, {})
    for voices in ratings.of_days().values():
        for voice in voices:
            if is_new := voice.answered_ms >= promoted_ms:
                is_counted = voice.arm[0] == version and voice.answered_ms < before_ms
            else:
                is_counted = voice.arm[0] != voice.arm[1] and voice.arm[0] not in gone
            if is_counted:
                place = voice.tenant, voice.answered_ms // HOUR_MS
                found = counts[0 if is_new else 1].setdefault(place, [0, 0])
                found[0] += 1
                found[1] += bool(voice.bad)
    new, old = ([Hour(*place, *found[place]) for place in sorted(found)] for found in counts)
    return new, old


def before_of(hours: Sequence[Hour]) -> Before:
    """What is known of the days before."""
    return Before(
        people=sum(one.people for one in hours),
        bad=sum(one.bad for one in hours),
        days=len({one.hour // 24 for one in hours}),
        unrest=unrest(hours),
        of_hour=_by_hour(hours),
    )


def compared(
    config: GateGuardConfig, people: PeopleConfig, new: Sequence[Hour], before: Before, *, several: bool
) -> GuardEvidence:
    """The evidence of what people say. several: there is more than one tenant."""
    found = GuardEvidence(
        people=sum(one.people for one in new),
        bad=sum(one.bad for one in new),
        people_before=before.people,
        bad_before=before.bad,
        unrest=before.unrest,
    )
    if not found.people or before.people < config.least:
        return found
    share = people.tenant_share if several else 1.0
    bound = math.log(NUM_TESTS / config.alpha)
    highest = wilson(before.bad, before.people)[1] + config.swing
    gross = against(_whatever_hour(config, new, highest), bound, share)
    same = 0.0
    if before.days > 1 and before.unrest < RESTLESS:
        same = against(_same_hour(odds_of(config, before.bad / before.people), new, before), bound, share)
    return msgspec.structs.replace(found, same_hour=same, whatever_hour=gross)


def odds_of(config: GateGuardConfig, share: float) -> float:
    """How many times the odds are too many, where this share complains: `odds`, or fewer where `harm` more is less."""
    worse, usual = min(share + config.harm, 1.0 - 1e-6), max(share, 1e-6)
    return min(config.odds, worse / (1.0 - worse) * (1.0 - usual) / usual)


def unrest(hours: Sequence[Hour]) -> float:
    """By how many standard deviations the days differ from each other at the same hours more than chance explains.

    Pearson's statistic of each quarter of each day, against the mean of that hour over the days; 0 for one day alone.
    """
    of_hour = _by_hour(hours)
    cells: dict[tuple[int, int], list[float]] = {}
    days_of: dict[int, set[int]] = {}
    for one in hours:
        num, bad = of_hour[one.tenant, one.hour % 24]
        spread = one.people * bad / num * (1 - bad / num) * (1 - one.people / num)
        day, quarter = one.hour // 24, one.hour % 24 // WINDOW_HOURS
        cell = cells.setdefault((day, quarter), [0.0, 0.0])
        cell[0] += one.bad - one.people * bad / num
        cell[1] += spread
        if spread:
            days_of.setdefault(quarter, set()).add(day)
    known = [(quarter, gap * gap / spread) for (_, quarter), (gap, spread) in cells.items() if spread > 0.5]
    variance = sum(2.0 * len(days_of[quarter]) / max(1, len(days_of[quarter]) - 1) for quarter, _ in known)
    return math.fsum(value - 1.0 for _, value in known) / math.sqrt(variance) if variance else 0.0


def failures(more: float) -> tuple[GuardedRate, GuardedRate]:
    """What gateways count of all answers, rated or not."""
    return GuardedRate("failed", more), GuardedRate("refused", more)


def harmed(
    measures: Sequence[GuardedRate],
    bound: float,
    least: int,
    share: float,
    new: Mapping[str, Tally],
    old: Mapping[str, Tally],
) -> Fault | None:
    """The first of these that happens too often. share: of the bound that one client gives, where there are several."""
    of, of_before = _total(new.values(), "answers"), _total(old.values(), "answers")
    if of_before < least:
        return None
    clients = {*new, *old}
    several = sum(any(side[one].answers >= LEAST_ANSWERS for side in (new, old) if one in side) for one in clients) > 1
    for measure in measures:
        happened, before = _total(new.values(), measure.name), _total(old.values(), measure.name)
        usual = wilson(before, of_before)[1]
        logs = [
            log_share_ratio(getattr(one, measure.name), one.answers, usual, usual + measure.more)
            for one in new.values()
        ]
        evidence = against(logs, bound, share if several else 1.0)
        if evidence < bound:
            continue
        numbers = {
            "guard/answers": float(of), f"guard/{measure.name}": float(happened),
            "guard/before/answers": float(of_before), f"guard/before/{measure.name}": float(before),
            "guard/log_ratio": evidence, "guard/before/highest": usual,
        }  # fmt: skip
        return Fault(f"{measure.name} {happened} of {of} times", f"{before} of {of_before}", numbers)
    return None


def _same_hour(odds: float, new: Sequence[Hour], before: Before) -> Collection[float]:
    """The evidence of each tenant, hour of the day by hour of the day."""
    logs: dict[str, float] = {}
    for place, (num, bad) in _by_hour(new).items():
        more = log_odds_ratio(num, bad, *before.of_hour.get(place, (0, 0)), odds)
        logs[place[0]] = logs.get(place[0], 0.0) + more
    return logs.values()


def _whatever_hour(config: GateGuardConfig, new: Sequence[Hour], highest: float) -> Collection[float]:
    """The evidence of each tenant against the highest share that there may be."""
    if highest + config.harm >= 1.0:
        return []
    logs: dict[str, float] = {}
    for one in new:
        more = log_share_ratio(one.bad, one.people, highest, highest + config.harm)
        logs[one.tenant] = logs.get(one.tenant, 0.0) + more
    return logs.values()


def _by_hour(hours: Sequence[Hour]) -> dict[tuple[str, int], tuple[int, int]]:
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for one in hours:
        num, bad = found.get((one.tenant, one.hour % 24), (0, 0))
        found[one.tenant, one.hour % 24] = (num + one.people, bad + one.bad)
    return found


def _total(tallies: Iterable[Tally], name: str) -> int:
    return sum(getattr(one, name) for one in tallies)
