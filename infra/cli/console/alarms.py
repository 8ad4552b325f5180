"""Alarms as a page shows them: name, subject, since when, how often, and the section of the help that says what to do."""

import re
from collections.abc import Mapping, Sequence

import msgspec

from infra.cli.console.rates import label_words, name_and_labels
from infra.cli.look.status import grown_line
from infra.cli.look.status_screen import State
from infra.observe.alarms import alarm_of, anchor
from infra.observe.measures import MEASURES

MAX_SHOWN = 30
OF_STEP = "alarms"  # the trainer's counter of values outside their range: its label is <lane>/<value>
_NUMBER = re.compile(r"\d[\d.,]*")


class ShownAlarm(msgspec.Struct, frozen=True):
    """One alarm. name: the title of its section, "" for one that a plugin says. about: what raised it. page: of the
    help, with the section. since_ms: 0 where it is not known. times: how often since then, 0 for one that lasts. lately:
    how often in the last minute, likewise. is_looked: since_ms is when this console first saw it, and it may be older.

    Example: ShownAlarm(name="A value of a step is unhealthy", about="chi2 of lane live, at train/1", page="runbook#…",
                        since_ms=1763715600000, times=3, lately=1)
    """

    name: str
    about: str
    page: str
    since_ms: float = 0.0
    times: float = 0.0
    lately: float = 0.0
    is_looked: bool = False


def alarms_of(state: State, seen: Mapping[str, float]) -> list[ShownAlarm]:
    """Every alarm of `status`, in its order. seen: when each was first seen, seconds by `kind_of` its line."""
    counted = {
        grown_line(role["instance"], name, more): (role, name, more)
        for role in state["roles"]
        for name, more in role["grown"].items()
    }
    return [_counted(line, *counted[line]) if line in counted else _lasting(line, seen) for line in state["alarms"]]


def kind_of(line: str) -> str:
    """An alarm's line without its numbers, which change from one reading to the next.

    >>> kind_of("verified: 12,300 records wait, expected at most 10,000")
    'verified: # records wait, expected at most #'
    """
    return _NUMBER.sub("#", line)


def noted(seen: Mapping[str, float], lines: Sequence[str], now_s: float) -> dict[str, float]:
    """When each present alarm was first seen. Alarms that ended are forgotten."""
    return {kind: seen.get(kind, now_s) for kind in map(kind_of, lines)}


def _lasting(line: str, seen: Mapping[str, float]) -> ShownAlarm:
    return ShownAlarm(_name(line), line, _page(line), 1000 * seen.get(kind_of(line), 0.0), is_looked=True)


def _counted(line: str, role: State, counter: str, more: float) -> ShownAlarm:
    at_s, times = role["grown_at"][counter]
    name, labels = name_and_labels(counter)
    what = label_words(labels)
    if name == OF_STEP and labels:
        what = value_words(labels.partition("=")[2])
    about = f"{what}, at {role['instance']}" if what else f"at {role['instance']}"
    return ShownAlarm(_name(line), about, _page(line), 1000 * at_s, times, more)


def value_words(value: str) -> str:
    """The name of a step's value in words, with its meaning.

    >>> value_words("live/chi2"), value_words("reward_collapse")
    ('chi2 of lane live (estimate of χ²(π‖μ))', 'reward collapse')
    """
    lane, _, name = value.rpartition("/")
    if not lane:
        return name.replace("_", " ")
    # The table has the values of one lane for all.
    meaning = next((one.meaning for one in MEASURES if one.name == f"usual/{name}"), "")
    return f"{name} of lane {lane}" + (f" ({meaning})" if meaning else "")


def _name(line: str) -> str:
    alarm = alarm_of(line)
    return "" if alarm is None else alarm.title


def _page(line: str) -> str:
    alarm = alarm_of(line)
    return "runbook" if alarm is None else f"runbook#{anchor(alarm.title)}"
