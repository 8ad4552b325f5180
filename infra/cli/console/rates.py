"""What roles count a second, in words. Labels are added up, and the largest is named. From `status` alone."""

import re
from collections.abc import Mapping, Sequence

import msgspec

from infra.cli.console.charts import short
from infra.cli.look.expected import OVER
from infra.cli.look.status_screen import State
from infra.observe.measures import MEASURES, Measure

IN_TABLE = 16  # counters of one process
IN_PULSE = 6  # of all of one kind
_LABEL = re.compile(r"(^|,)(\w+)=")

Rates = Mapping[str, float]
"""A counter's whole name, such as `answers{end=whole}` → rate a second."""


class Doing(msgspec.Struct, frozen=True):
    """One counter over all of its labels. name: of the metric. meaning: in a line, "" for a counter of a plugin. per_s: how
    fast it grows. of: its labels; of several, the one that grows fastest.

    Example: Doing(name="answers", meaning="answers given, whole or broken off", per_s=2.25, of="most end whole, 2")
    """

    name: str
    meaning: str
    per_s: float
    of: str = ""

    @property
    def words(self) -> str:
        """Its name as people read it.

        >>> Doing("experiences_in", "", 1.0).words
        'experiences in'
        """
        return self.name.replace("_", " ")


def by_labels(rates: Rates) -> dict[str, dict[str, float]]:
    """Counter → labels ("" for none) → rate a second. Counters of seconds are left out: theirs is a share of time.

    >>> by_labels({"steps": 0.5, "answers{end=whole}": 2.0, "step_seconds": 0.9})
    {'steps': {'': 0.5}, 'answers': {'end=whole': 2.0}}
    """
    found: dict[str, dict[str, float]] = {}
    for whole, rate in rates.items():
        name, labels = name_and_labels(whole)
        if "seconds" not in name:
            found.setdefault(name, {})[labels] = rate
    return found


def name_and_labels(whole: str) -> tuple[str, str]:
    """A counter's whole name in two.

    >>> name_and_labels("answers{end=whole}"), name_and_labels("steps")
    (('answers', 'end=whole'), ('steps', ''))
    """
    name, _, labels = whole.partition("{")
    return name, labels.removesuffix("}")


def doings(role: str, rates: Rates, at_most: int) -> tuple[list[Doing], int]:
    """The counters that grew, and how many are left out. This role's own come first, then in the order of the table."""
    known = {one.name: (one.roles != role, at, one) for at, one in enumerate(MEASURES)}
    last: tuple[bool, int, Measure | None] = (True, len(MEASURES), None)
    grown = {name: labels for name, labels in by_labels(rates).items() if sum(labels.values()) > 0}
    names = sorted(grown, key=lambda name: (*known.get(name, last)[:2], name))
    found = []
    for name in names[:at_most]:
        measure = known.get(name, last)[2]
        found.append(Doing(name, measure.meaning if measure else "", sum(grown[name].values()), _of(grown[name])))
    return found, max(0, len(names) - at_most)


def together(roles: Sequence[State]) -> dict[str, dict[str, float]]:
    """Role → counter → rate a second, added up over its processes that run."""
    found: dict[str, dict[str, float]] = {}
    for one in roles:
        if not one["silent"] and one["state"] not in OVER:
            sums = found.setdefault(one["role"], {})
            for name, rate in one["rates"].items():
                sums[name] = sums.get(name, 0.0) + rate
    return found


def label_words(labels: str) -> str:
    """Labels of a counter as people read them.

    >>> label_words("outcome=kept,source=gateway")
    'outcome kept, source gateway'
    """
    return _LABEL.sub(lambda found: f"{', ' if found[1] else ''}{found[2].replace('_', ' ')} ", labels)


def _of(labels: Mapping[str, float]) -> str:
    largest = max(labels, key=lambda one: labels[one])
    if not largest:
        return ""
    words = label_words(largest)
    return words if len(labels) == 1 else f"most {words}, {short(labels[largest])}"
