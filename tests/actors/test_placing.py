"""Who gets the next group: the one with the least to do. A fleet in simulated time, by the real plan and schedulers."""

import heapq
import itertools
import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from actors.config import MasterConfig
from actors.master.placing import SILENT_MS, Placing
from actors.master.plan import NOTHING, Plan
from actors.rollout.scheduler import Scheduler, issued_of
from infra.log.placing import key_of, partition_for
from infra.roles.process import MISSING_S
from infra.settings.config import Pacing
from schemas import Closure, Drawn, Message, Progress, Task
from schemas.topics import TASKS

EXPLORERS, GROUPS = 64, 96
REPORT_S = 10


def placing(*partitions: tuple[int, ...]) -> Placing:
    made = Placing()
    for at, held in enumerate(partitions):
        made.heard(f"e{at}", held, 0)
    return made


class Fleet:
    """A master and as many explorers as partitions, each with one; a group that ends is drawn at once. by_load: as the master
    places groups, else by the hash of their key."""

    def __init__(self, *, by_load: bool, seed: int = 1) -> None:
        self.by_load = by_load
        self.random = Random(seed)
        self.now_s, self.idle_s = 0.0, 0.0
        self.events: list[tuple[float, int, int, Task | None]] = []
        self.order = itertools.count()
        self.schedulers = [Scheduler(max_episodes=10**6) for _ in range(EXPLORERS)]
        self.plan = Plan(
            MasterConfig(num_episodes=1), Pacing(groups_per_step=1, groups_in_flight=GROUPS), policy="main"
        )  # fmt: skip
        self.plan.task(Task(id="task", messages=(Message(role="user", content="?"),)))
        self.draws = 0

    def at(self, time_s: float, explorer: int, ended: Task | None) -> None:
        heapq.heappush(self.events, (time_s, next(self.order), explorer, ended))

    def run(self, until_s: float) -> float:
        """Share of the explorers' time in which they had nothing to do."""
        for explorer in range(EXPLORERS):
            self.report(explorer)
        self.issue()
        while True:
            time_s, _, explorer, ended = heapq.heappop(self.events)
            if time_s > until_s:
                return self.idle_s / (until_s * EXPLORERS)
            self.idle_s += (time_s - self.now_s) * sum(one.num_groups == 0 for one in self.schedulers)
            self.now_s = time_s
            if ended is None:
                self.report(explorer)
            else:
                self.end(explorer, ended)
            self.issue()

    def report(self, explorer: int) -> None:
        now_ms = 1 + int(1000 * self.now_s)
        self.plan.tick(now_ms)
        self.plan.progress(
            Progress(
                role="explore", instance=f"explore-{explorer}", life="working", partitions={TASKS.name: (explorer,)},
                holds=self.schedulers[explorer].holds(1000),
            ),
            now_ms,
        )  # fmt: skip
        self.at(self.now_s + REPORT_S, explorer, None)

    def issue(self) -> None:
        while (decisions := self.plan.decide()) != NOTHING:
            self.plan.apply(decisions)
            for task in decisions.rollouts:
                placed = self.plan.place(task) if self.by_load else None
                at = partition_for(key_of(TASKS, task), EXPLORERS) if placed is None else placed
                self.schedulers[at].waiting.add(task)
                while (begun := self.schedulers[at].take(0)) is not None:
                    self.at(self.now_s + 1800 * math.exp(self.random.gauss(0.0, 0.5)), at, begun)

    def end(self, explorer: int, task: Task) -> None:
        issued = issued_of(task)
        self.schedulers[explorer].end(task)
        self.plan.tick(1 + int(1000 * self.now_s))
        self.plan.closure(Closure(group=issued.group, outcome="buffered", sequence=issued.sequence))
        self.plan.drawn(Drawn(token=1, step=self.draws, version=0, groups=(issued.group,)))
        self.draws += 1


@pytest.mark.full
def test_of_64_explorers_with_96_groups_none_is_idle_for_more_than_3_percent_of_the_time() -> None:
    assert Fleet(by_load=True).run(3 * 3600) <= 0.03
    assert Fleet(by_load=False).run(3 * 3600) == pytest.approx(0.22, abs=0.03), "by the hash of the key"


@given(st.lists(st.one_of(st.just(-1), st.integers(1, 9)), max_size=60), st.integers(1, 6))
def test_loads_differ_by_no_more_than_one_group_and_none_is_forgotten(actions: list[int], explorers: int) -> None:
    """While groups only come, the fullest has at most the largest group more than the emptiest."""
    made = placing(*((at,) for at in range(explorers)))
    running: dict[str, int] = {}
    for number, episodes in enumerate(actions):
        if episodes > 0:
            at = made.place(f"g{number}", episodes, 0, counts=True)
            assert at in range(explorers)
            running[f"g{number}"] = episodes
        elif running:
            made.ended(gone := next(iter(running)))
            del running[gone]
        if -1 not in actions:
            loads = [made.loads().get(f"e{one}", 0) for one in range(explorers)]
            assert max(loads) - min(loads) <= max(actions)
    assert sum(made.loads().values()) == sum(running.values())
    assert all(made.loads().values())


def test_an_explorer_of_two_partitions_has_no_more_to_do_than_one_of_one() -> None:
    made = placing((0, 2), (1,))
    sent = Counter(made.place(f"g{at}", 4, 0, counts=True) for at in range(10))
    assert sent == {0: 5, 1: 5}


def test_evals_go_to_one_explorer_after_the_other_and_count_for_nobody() -> None:
    made = placing((0,), (1,), (2,))
    assert Counter(made.place(f"eval-{at}", 1, 0, counts=False) for at in range(9)) == {0: 3, 1: 3, 2: 3}
    assert made.loads() == {}


def test_who_is_silent_or_has_ended_or_reads_nothing_gets_nothing() -> None:
    made = placing((0,), (1,), (2,), ())
    made.heard("e1", (1,), SILENT_MS)
    made.left("e2")
    assert {made.place(f"g{at}", 1, SILENT_MS, counts=True) for at in range(4)} == {1}
    made.left("e1")
    assert made.place("g9", 1, SILENT_MS, counts=True) is None, "by its key"


def test_while_one_explorer_does_not_say_what_it_reads_groups_go_by_their_key() -> None:
    made = placing((0,), (1,))
    made.heard("older", None, 0)
    assert made.place("g0", 1, 0, counts=True) is None
    made.left("older")
    assert made.place("g0", 1, 0, counts=True) in (0, 1)


def test_a_group_counts_where_it_is_said_to_run_and_once() -> None:
    made = placing((0,), (1,))
    assert made.place("g0", 4, 0, counts=True) == 0
    made.has("e1", "g0", 4)
    made.has("e1", "g0", 4)
    assert made.loads() == {"e1": 4}
    made.has("e0", "of a master before", 2)
    assert made.loads() == {"e1": 4, "e0": 2}
    assert made.place("g0", 4, 0, counts=True) == 0, "issued again: it is where it is sent to"
    assert made.loads() == {"e0": 6}


def test_more_explorers_than_partitions_is_an_alarm_that_says_what_to_do_and_is_over_when_it_is() -> None:
    made = placing((0,), (1,), ())

    def look(at_s: float, *held: tuple[int, ...]) -> bool:
        for at, partitions in enumerate(held):
            made.heard(f"e{at}", partitions, int(1000 * at_s))
        return made.look(int(1000 * at_s))

    assert not look(1, (0,), (1,), ())
    assert made.alarms(1000) == []
    assert look(1 + MISSING_S, (0,), (1,), ())
    (alarm,) = made.alarms(int(1000 * (1 + MISSING_S)))
    assert alarm.startswith("1 of 3 explorers read no partition of tasks and do nothing, such as e2:")
    assert "kafka.partitions" in alarm
    assert not look(40, (0,), (1,), (2,)) and made.alarms(40_000) == []


def test_a_plan_that_is_replayed_counts_what_runs_again() -> None:
    plan = Plan(MasterConfig(num_episodes=4), Pacing(groups_per_step=2), policy="main")
    plan.tick(1)
    plan.task(Task(id="task", messages=(Message(role="user", content="?"),)))
    decisions = plan.decide()
    plan.apply(decisions)
    first, second = (issued_of(one).group for one in decisions.rollouts[:2])
    report = Progress(role="explore", instance="e", life="working", partitions={TASKS.name: (0,)})
    plan.progress(replace(report, holds={first: 0, second: 0, "never issued.0": 0}), 1)
    assert plan.placing.loads() == {"e": 8}
    plan.closure(Closure(group=first, outcome="buffered", sequence=0))
    plan.progress(replace(report, holds={first: 0, second: 0}), 2)
    assert plan.placing.loads() == {"e": 4}, "what is buffered runs no more, whatever was said before that was read"
    plan.drawn(Drawn(token=1, step=0, version=0, groups=(), dropped={second: "stale"}))
    plan.progress(replace(report, life="ended"), 3)
    assert plan.placing.loads() == {} and plan.place(decisions.rollouts[0]) is None
