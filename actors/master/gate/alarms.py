"""Where an assumption of the test fails, or no test can be made: a sentence each for an operator, with what to do. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from actors.config import CanaryConfig
from actors.master.evaluation import wilson
from actors.master.gate.counts import Comparison
from actors.master.gate.trial import CLUMPED, Strata, clumping
from infra.policies.fold import Stable


def clump_alarms(measures: Mapping[str, Strata]) -> list[str]:
    """Measures whose bad words do not look independent in a comparison that runs."""
    return [
        f'people are "{measure}" in clumps of one version ({gap:.1f} standard deviations): they do not decide by themselves, '
        "or an engine failed for a while; the test takes people for independent, so look before you trust it"
        for measure, strata in measures.items()
        if (gap := clumping(strata)) >= CLUMPED
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
