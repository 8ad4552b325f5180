"""Where an assumption of the test fails, or no test can be made: a sentence each for an operator, with what to do. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from actors.config import CanaryConfig
from actors.master.evaluation import wilson
from actors.master.gate.counts import Comparison
from actors.master.gate.trial import CLUMPED, SOLE_TENANT, Strata, clumping
from infra.policies.fold import Stable

MANY = 200  # ratings, or people, of which something can be said
CROWDED = 5.0  # ratings of one person, on average, above which there are few people
LATE = 0.2  # share of ratings that come too late to count


def comparison_alarms(comparison: Comparison, measures: Mapping[str, Strata]) -> list[str]:
    """Alarms of a comparison that runs."""
    found = [
        f'people are "{measure}" in clumps of one version ({gap:.1f} standard deviations): they do not decide by themselves, '
        "or an engine failed for a while; the test takes people for independent, so look before you trust it"
        for measure, strata in measures.items()
        if (gap := clumping(strata)) >= CLUMPED
    ]
    ratings, people = comparison.counts[0], sum(word.bad is not None for word in comparison.words.values())
    if ratings >= MANY and ratings >= CROWDED * people:
        found.append(
            f"{ratings} ratings are of {people} people, and one word of each counts: name raters one by one in feedback "
            "(`rater`), or give a trial a larger share of the sessions"
        )
    return found + late_ratings(comparison.counts) + sole_tenant(comparison)


def late_ratings(counts: Sequence[int]) -> list[str]:
    """Ratings that come too late to count. counts: as in Comparison."""
    in_time, late_bad, late_good = counts
    late = late_bad + late_good
    if in_time + late < MANY or late < LATE * (in_time + late):
        return []
    return [
        f"{late_bad} complaints and {late_good} words of praise, of {in_time + late} ratings, come later than "
        "[master.gate.people] rating_window after their answer and do not count: make it longer"
    ]


def sole_tenant(comparison: Comparison) -> list[str]:
    """A tenant that is nearly all of the people, and so decides by itself."""
    count: dict[str, int] = {}
    for sums in comparison.rated.values():
        for (tenant, _), (people, _) in sums.items():
            count[tenant] = count.get(tenant, 0) + people
    tenant, most = max(count.items(), key=lambda known: known[1], default=("", 0))
    if len(count) < 2 or (total := sum(count.values())) < MANY or most < SOLE_TENANT * total:
        return []
    return [
        f"{most} of {total} people heard are of tenant {tenant}, which decides by itself: the others are too few to count"
    ]


def history_alarms(config: CanaryConfig, past: Comparison, stable: Stable) -> list[str]:
    """Complaints rose with a promotion while nothing ran beside it. That may be the version or the time, so nothing is taken
    back. Compared are the ends of 99.9 % intervals, and the margin.
    """
    bad, people = _total(past.rated.get(stable.version, {}).values())
    bad_before, people_before = _total(past.rated.get(stable.before, {}).values())
    if stable.before < 0 or not people or not people_before:
        return []
    high = wilson(bad_before, people_before, 3.29)[1]
    if wilson(bad, people, 3.29)[0] <= max(high + config.margin, high * (1.0 + config.relative_margin)):
        return []
    return [
        f"version {stable.version} is rated down {bad} of {people} times, version {stable.before} {bad_before} of "
        f"{people_before} times before, and customers stay with it: nothing ran beside it that tells version from time. "
        f"Look, and `headrace rollback {stable.before}`; [master.gate.canary] with a canary gateway compares at the same time"
    ]


def _total(sums: Iterable[Sequence[int]]) -> tuple[int, int]:
    known = list(sums)
    return sum(bad for _, bad in known), sum(people for people, _ in known)
