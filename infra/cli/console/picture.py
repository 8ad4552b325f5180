"""The picture of the flow: the figures of each part, and what runs between them. From `status` alone.

A figure that a role does not report is shown as "missing". Zero is shown only where the role said zero.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from infra.cli.console.charts import short
from infra.cli.look.expected import OVER
from infra.cli.look.status_screen import State
from infra.policies.channel import Stable

WIDE, HIGH = 220, 98  # of a box
ACROSS, DOWN = 276, 142  # from one box to the next
MISSING = "missing"

Point = tuple[float, float]


class Box(msgspec.Struct, frozen=True):
    """One box of the picture.

    name: of the part. x, y: of its top left corner. lines: up to three figures. version: that it has or serves. link: the
    page it leads to. state: "", "quiet" (no process runs) or "alarm". count: of its processes.

    Example: Box(name="Trainer", x=276, y=426, lines=("0.29 steps/s",), version="v7", link="/learning")
    """

    name: str
    x: int
    y: int
    lines: tuple[str, ...] = ()
    version: str = ""
    link: str = "/"
    state: str = ""
    count: int = 1

    @property
    def title(self) -> str:
        """Its name, with the number of its processes where there are several."""
        return f"{self.name} × {self.count}" if self.count > 1 else self.name


class Arrow(msgspec.Struct, frozen=True):
    """What runs from one box to another.

    source, target: names of boxes. label: what runs. points: of the line. at: where the label begins.

    Example: Arrow("Tasks", "Master", "tasks", points=((110, 98), (110, 142)), at=(118, 124))
    """

    source: str
    target: str
    label: str
    points: tuple[Point, ...]
    at: Point


ARROWS = (
    Arrow("Tasks", "Master", "tasks", ((110, 98), (110, 142)), (118, 124)),
    Arrow("Your agent", "Gateway", "requests", ((662, 98), (662, 142)), (670, 113)),
    Arrow("People", "Collect", "feedback", ((938, 98), (938, 306), (772, 306)), (946, 240)),
    Arrow("Master", "Explorers", "groups", ((220, 191), (276, 191)), (228, 185)),
    Arrow("Explorers", "Verify and score", "episodes", ((386, 240), (386, 284)), (330, 266)),
    Arrow("Gateway", "Verify and score", "answers", ((632, 240), (632, 262), (450, 262), (450, 284)), (520, 257)),
    Arrow("Verify and score", "Collect", "scored", ((496, 333), (552, 333)), (504, 327)),
    Arrow("Collect", "Trainer", "groups with rewards", ((662, 382), (662, 475), (496, 475)), (508, 469)),
    Arrow("Collect", "Master", "how groups ended", ((608, 382), (608, 404), (148, 404), (148, 240)), (156, 398)),
    Arrow("Trainer", "Master", "groups drawn", ((276, 475), (72, 475), (72, 240)), (80, 469)),
    Arrow("Trainer", "Versions", "weights", ((386, 524), (386, 546), (938, 546), (938, 468)), (600, 540)),
    Arrow("Versions", "Gateway", "hot reload", ((828, 419), (800, 419), (800, 191), (772, 191)), (806, 262)),
    Arrow("Versions", "Explorers", "hot reload", ((828, 419), (800, 419), (800, 120), (386, 120), (386, 142)), (420, 114)),
)  # fmt: skip


def boxes_of(state: State, stable: Stable, held: int = -1) -> list[Box]:
    """The boxes of the README's map, each with its figures. held: version that the newest decision held back, -1 for none."""
    lags: Mapping[str, int | None] = state["lags"]
    published = state["policies"]["published"]
    return [
        Box(
            "Tasks", 0, 0,
            (
                _rate(state, "process", "experiences_in{stage=tasks}", "tasks/s"), _wait([lags.get("taskset.raw")]),
                _number(state, "master", "tasks", "known"),
            ),
            link="/data",
        ),
        Box("Your agent", 2 * ACROSS, 0, (_rate(state, "serve", "requests", "requests/s"),), link="/answers?lane=live"),
        Box(
            "People", 3 * ACROSS, 0, (_rate(state, "process", "feedback_events", "events/s"),),
            link="/answers?said=yes",
        ),
        _role(
            state, "Master", "master", 0, 1,
            _rate(state, "master", "issued", "tasks issued/s"),
            _number(state, "master", "outstanding_groups", "groups outstanding"),
        ),
        _role(
            state, "Explorers", "explore", 1, 1,
            _rate(state, "explore", "tokens", "tokens/s"), _wait([lags.get("tasks")], "tasks wait"),
            _number(state, "explore", "episodes_in_flight", "episodes in flight"),
        ),
        _role(
            state, "Gateway", "serve", 2, 1,
            _rate(state, "serve", "answers", "answers/s"), _number(state, "serve", "answers_running", "running"),
            _number(state, "serve", "outbox_waiting", "wait for the log"),
        ),
        _role(
            state, "Verify and score", "process", 1, 2,
            _rate(state, "process", "experiences_in{stage=verify}", "answers/s"),
            _wait([lags.get("experiences"), lags.get("experts")]), link="/data",
        ),
        _role(
            state, "Collect", "process", 2, 2,
            _rate(state, "process", "closures", "groups/s"),
            f"{_wait([lags.get('verified')])}, {_number(state, 'process', 'groups_pending', 'groups open')}",
            f"{state['waiting']['answers']:,} answers wait for feedback" if state["waiting"] else "",
            link="/answers?fate=pending",
        ),
        _role(
            state, "Trainer", "train", 1, 3,
            _rate(state, "train", "steps", "steps/s"), _rate(state, "train", "experiences_trained", "answers/s"),
            _number(state, "train", "groups_waiting", "groups wait"), link="/learning",
        ),
        Box(
            "Versions", 3 * ACROSS, 370,
            (
                f"v{published} published" if published is not None else "none published",
                f"v{stable.version} {'pinned' if stable.pinned else 'stable'}" if stable.version >= 0 else "none stable",
                *([f"v{stable.trial} on trial"] if stable.trial >= 0 else [f"v{held} held back"] if held >= 0 else []),
            ),
            link="/versions", state="alarm" if state["policies"]["newest_refused"] else "",
        ),
    ]  # fmt: skip


def _role(state: State, name: str, role: str, column: int, row: int, *lines: str, link: str = "/answers") -> Box:
    """The box of a role. Where no process of it ever reported, the only line is "missing"."""
    heard = any(one["role"] == role for one in state["roles"])
    return Box(
        name,
        column * ACROSS,
        row * DOWN,
        tuple(line for line in lines if line) if heard else (MISSING,),
        "" if role == "process" or not heard else _versions(state, role),
        link,
        _state(state, role),
        len(_alive(state, role)),
    )


def _versions(state: State, role: str) -> str:
    """The version, or the range of versions, of all processes of a role."""
    found = sorted({one["version"] for one in _alive(state, role) if one["version"] >= 0})
    if not found:
        return "no version"
    return f"v{found[0]}" if len(found) == 1 else f"v{found[0]} to v{found[-1]}"


def _alive(state: State, role: str) -> Sequence[Mapping[str, Any]]:
    return [one for one in state["roles"] if one["role"] == role and not one["silent"]]


def _state(state: State, role: str) -> str:
    alive = _alive(state, role)
    if any(one["alarms"] or one["grown"] or one["failing"] or one["unread"] for one in alive):
        return "alarm"
    return "" if any(one["state"] not in OVER for one in alive) else "quiet"


def _rate(state: State, role: str, name: str, word: str) -> str:
    """The rate of a counter over all of its labels, or with the labels in `name`. word: its unit."""
    found = [
        rate
        for one in _alive(state, role)
        for counter, rate in one["rates"].items()
        if counter == name or counter.startswith(f"{name}{{")
    ]
    return f"{short(sum(found))} {word}" if found else f"{word}: {MISSING}"


def _number(state: State, role: str, name: str, word: str) -> str:
    found = [one["gauges"][name] for one in state["roles"] if one["role"] == role and name in one["gauges"]]
    return f"{sum(found):,.0f} {word}" if found else f"{word}: {MISSING}"


def _wait(lags: Sequence[int | None], word: str = "wait") -> str:
    known = [lag for lag in lags if lag is not None]
    return f"{sum(known):,} {word}" if known else f"lag: {MISSING}"
