"""The plan of the master from records alone, and its task book."""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from actors.config import EvalSuite, MasterConfig, StopRule
from actors.master.admission import Admission, AdmissionLimits
from actors.master.evaluation import parse_eval_group
from actors.master.plan import NOTHING, Plan
from actors.master.taskbook import chosen
from actors.rollout.scheduler import require_issued
from infra.settings.config import Pacing
from schemas import Closure, Directive, Drawn, EvalResult, Issued, Message, PolicyEvent, Progress, Task
from tests.actors.rig import eval_tasks, reissues, rollouts

PACING = Pacing(groups_per_step=2, max_staleness=1, steps_per_version=1, reissue_s=10.0)


def task(name: str, split: str = "train") -> Task:
    return Task(id=name, messages=(Message(role="user", content=name),), answer="1", split=split)


def plan(config: MasterConfig | None = None, *, train: int = 5, dev: int = 3) -> Plan:
    made = Plan(config or MasterConfig(), PACING, policy="main")
    made.tick(1_000_000)
    for index in range(train):
        made.task(task(f"task-{index}"))
    for index in range(dev):
        made.task(task(f"dev-{index}", "dev"))
    return made


def publish(made: Plan, version: int) -> None:
    made.policy(
        PolicyEvent(event="published", policy="main", version=version, token=1, manifest=f"m/{version}"), version
    )


def explorer_reports(made: Plan, start_ms: int, seconds: int) -> None:
    for second in range(seconds + 1):
        made.progress(Progress(role="explore", instance="e", life="working"), start_ms + second * 1000)


def test_groups_are_issued_up_to_the_bound_with_rising_sequences_and_new_rounds() -> None:
    made = plan(train=1)
    issued = [require_issued(rollout) for rollout in rollouts(made)]
    assert [issue.sequence for issue in issued] == [0, 1, 2, 3]
    assert [issue.group for issue in issued] == [f"task-0.{round}" for round in range(4)]
    assert rollouts(made) == []
    made.drawn(Drawn(token=1, step=0, version=0, groups=(issued[0].group, issued[1].group)))
    assert [require_issued(rollout).sequence for rollout in rollouts(made)] == [4, 5]


def test_what_nobody_finished_is_issued_again_as_another_attempt() -> None:
    made = plan()
    first = rollouts(made)
    explorer_reports(made, 1_000_000, 9)
    assert reissues(made) == []
    explorer_reports(made, 1_009_000, 1)
    again = reissues(made)
    assert [require_issued(item).group for item in again] == [require_issued(item).group for item in first]
    assert {require_issued(item).attempt for item in again} == {1}
    assert [require_issued(item).sequence for item in again] == [0, 1, 2, 3]
    assert reissues(made) == []


def test_nothing_is_overdue_while_no_explorer_reports() -> None:
    made = plan()
    rollouts(made)
    explorer_reports(made, 1_000_000, 0)
    explorer_reports(made, 1_600_000, 0)
    assert reissues(made) == []


def test_a_reissue_never_waits_for_a_version_that_is_not_there() -> None:
    made = plan()
    first = [require_issued(rollout).group for rollout in rollouts(made)]
    for step in range(2):  # two steps at version 0, and no version 1: something is wrong with the trainer
        made.drawn(Drawn(token=1, step=step, version=0, groups=tuple(first[2 * step : 2 * step + 2])))
    assert {require_issued(rollout).min_version for rollout in rollouts(made)} == {0, 1}
    explorer_reports(made, 1_000_000, 10)
    assert {require_issued(reissue).min_version for reissue in reissues(made)} == {0}


def test_a_restart_issues_only_what_is_missing() -> None:
    made = plan()
    issued = [require_issued(rollout) for rollout in rollouts(made)]
    made.closure(Closure(group=issued[0].group, outcome="dropped", reason="all rewards equal"))
    again = plan()
    for issue in issued:
        again.issued(issue)
    again.closure(Closure(group=issued[0].group, outcome="dropped", reason="all rewards equal"))
    again.caught_up()
    assert [require_issued(rollout) for rollout in rollouts(again)] == [
        require_issued(rollout) for rollout in rollouts(made)
    ]


def test_waiting_begins_anew_at_a_restart() -> None:
    made = plan()
    issued = [require_issued(rollout) for rollout in rollouts(made)]
    again = plan()
    for issue in issued:
        again.issued(issue)
    explorer_reports(again, 1_000_000, 60)
    again.caught_up()
    assert reissues(again) == []
    explorer_reports(again, 1_060_000, 10)
    assert len(reissues(again)) == len(issued)


def dev_config(**settings: object) -> MasterConfig:
    base = MasterConfig(evals=(EvalSuite(suite="dev", every=5, tasks=3),), eval_lead=2)
    return replace(base, **settings)


def test_evals_are_issued_whole_and_once() -> None:
    made = plan(dev_config())
    tasks = eval_tasks(made)
    assert [parse_eval_group(require_issued(item).group) for item in tasks] == [("dev", 0, index) for index in range(3)]
    assert {
        (require_issued(item).temperature, require_issued(item).version, require_issued(item).num_episodes)
        for item in tasks
    } == {(0.0, 0, 1)}
    assert eval_tasks(made) == []


def test_a_task_with_a_name_like_that_of_an_eval_is_issued_held_and_ended_like_any_other() -> None:
    made, again = plan(dev_config(), train=0), plan(dev_config(), train=0)
    for each in (made, again):
        each.task(task("eval-dev-17"))
    first, *rest = [require_issued(rollout) for rollout in rollouts(made)]
    assert first.group == "eval-dev-17.0" and len(rest) == 3 and rollouts(made) == []
    again.issued_since([first, *rest])
    again.closure(Closure(group=first.group, outcome="dropped", sequence=0))
    explorer_reports(again, 1_000_000, 9)
    again.progress(Progress(role="explore", instance="e", life="working", holds={rest[0].group: 0}), 1_009_000)
    explorer_reports(again, 1_009_000, 1)
    assert [require_issued(item).group for item in reissues(again)] == [item.group for item in rest[1:]]
    assert [require_issued(rollout).sequence for rollout in rollouts(again)] == [4]


def test_a_request_cut_short_by_a_restart_is_completed() -> None:
    made = plan(dev_config())
    first, *rest = eval_tasks(made)
    again = plan(dev_config())
    again.issued(require_issued(first))
    again.caught_up()
    assert eval_tasks(again) == rest


def test_the_stop_rule_drains_then_evaluates_the_last_version_then_is_done() -> None:
    made = plan(dev_config(stop=StopRule(suite="dev", at=0.9)))
    groups = [require_issued(rollout).group for rollout in rollouts(made)]
    eval_tasks(made)
    made.result(EvalResult(policy="main", version=0, suite="dev", num_tasks=3, num_correct=3))
    made.tick(1_000_001)
    assert made.stopped
    assert rollouts(made) == []
    assert made.state == "draining"
    made.drawn(Drawn(token=1, step=0, version=0, groups=tuple(groups)))
    made.tick(1_006_000)
    made.progress(Progress(role="train", instance="t", trains=True), 1_006_000)
    assert made.state == "draining" and eval_tasks(made) == [], "the step of these groups makes one more version"
    publish(made, 1)
    made.tick(1_009_000)
    assert made.state == "evaluating"
    finals = eval_tasks(made)
    assert {require_issued(final).version for final in finals} == {1}
    made.result(EvalResult(policy="main", version=1, suite="dev", num_tasks=3, num_correct=3))
    assert made.state == "done"


def test_the_last_evaluation_goes_on_while_answers_arrive() -> None:
    made = plan(dev_config(stop=StopRule(suite="dev", at=0.9), drain="60s"))
    made.result(EvalResult(policy="main", version=0, suite="dev", num_tasks=3, num_correct=3))
    publish(made, 1)
    made.tick(1_000_000)
    made.tick(1_005_000)
    *finals, _ = eval_tasks(made)
    for second, final in ((60, finals[0]), (119, finals[1])):
        made.tick(1_000_000 + second * 1000)
        made.closure(Closure(group=require_issued(final).group, outcome="dropped"))
    made.tick(1_178_000)
    assert made.state == "evaluating"
    made.tick(1_179_000)
    assert made.state == "done", "nothing came for a minute"


def test_a_paused_master_issues_nothing_and_the_newest_word_holds() -> None:
    made = plan()
    made.directive(Directive(order="pause", owner="ann"), 3)
    assert rollouts(made) == [] and made.state == "paused"
    made.directive(Directive(order="forget", about="9f"), 3)
    assert rollouts(made) == [] and made.state == "paused"
    made.directive(Directive(order="drain", owner="ann"), 4)
    assert rollouts(made) == [] and made.state != "paused"
    made.directive(Directive(order="continue", owner="ann"), 5)
    assert rollouts(made) and made.state == "issuing"


def test_issuing_stops_after_its_groups_versions_or_time() -> None:
    assert len(rollouts(plan(MasterConfig(stop=StopRule(groups=3))))) == 3
    by_version = plan(MasterConfig(stop=StopRule(versions=2)))
    publish(by_version, 2)
    assert rollouts(by_version) == []
    by_time = plan(MasterConfig(stop=StopRule(after="5s")))
    assert rollouts(by_time)
    for second in (1, 2, 3, 4):
        by_time.tick(1_000_000 + second * 1000)
    assert not by_time.stopped
    by_time.tick(1_005_000)
    assert by_time.stopped


def test_what_is_applied_is_not_decided_again_and_read_back_from_the_log_it_changes_nothing() -> None:
    made = plan(dev_config())
    first = made.decide()
    assert first.rollouts and first.evals and made.decide() == first
    made.apply(first)
    assert made.decide() == NOTHING
    for tasks in first.tasks.values():
        for item in tasks:
            made.issued(require_issued(item))
    assert made.decide() == NOTHING and made.admission.next_sequence == len(first.rollouts)


def test_groups_in_flight_are_a_setting_and_what_begins_then_waits_for_no_version() -> None:
    made = Plan(MasterConfig(), replace(PACING, groups_in_flight=20), policy="main")
    made.tick(1_000_000)
    made.task(task("task"))
    issued = [require_issued(rollout) for rollout in rollouts(made)]
    assert len(issued) == 20 and {issue.min_version for issue in issued} == {0}, "4 by the bound alone"
    for version in range(1, 9):
        made.drawn(Drawn(token=1, step=version, version=version, groups=(issued[version].group,)))
    assert {require_issued(rollout).min_version for rollout in rollouts(made)} == {7}, "8, less the bound of 1"


def test_fewer_groups_in_flight_than_the_bound_allows_keep_it_and_fewer_than_a_step_are_refused() -> None:
    made = Plan(MasterConfig(), replace(PACING, groups_in_flight=3), policy="main")
    made.task(task("task"))
    assert len(rollouts(made)) == 3, "4 by the bound"
    with pytest.raises(ValueError, match="got groups_in_flight = 1, expected groups_per_step = 2 or more"):
        replace(PACING, groups_in_flight=1).__post_init__()


def draws(priorities: Sequence[float], num: int, *, seed: int = 0) -> Counter[str]:
    """Number of draws of each task in the first `num` groups, by its index as a name."""
    tasks = [Task(id=name, messages=(Message(role="user", content=name),)) for name in map(str, range(len(priorities)))]
    pool = tasks, list(accumulate(priorities))
    found = [chosen(pool, seed=seed, sequence=sequence) for sequence in range(num)]
    return Counter("nothing" if task is None else task.id for task in found)


def test_every_task_comes_once_a_pass_and_none_of_priority_0() -> None:
    assert draws([1.0] * 6, 6000) == {str(index): 1000 for index in range(6)}
    assert set(draws([1.0] * 64, 64, seed=3).values()) == {1}
    counts = draws([1.0, 3.0, 0.0, 4.0], 8000)
    assert [counts[name] / 8000 for name in "0123"] == pytest.approx([1 / 8, 3 / 8, 0.0, 4 / 8], abs=0.03)
    assert draws([0.0, 0.0], 3) == {"nothing": 3}


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(any), st.integers(0, 99))
def test_a_pass_holds_tasks_by_priority_as_evenly_as_whole_numbers_can(priorities: list[int], seed: int) -> None:
    num = len(priorities)
    counts = draws([float(value) for value in priorities], num, seed=seed)
    for index, priority in enumerate(priorities):
        assert abs(counts[str(index)] - num * priority / sum(priorities)) < 2


def issued(sequence: int, *, attempt: int = 0, min_version: int = 0) -> Issued:
    return Issued(
        group=f"task.{sequence}",
        attempt=attempt,
        num_episodes=4,
        max_tokens=8,
        sequence=sequence,
        min_version=min_version,
    )


def closure(sequence: int, outcome: str, *, attempt: int = 0) -> Closure:
    return Closure(group=f"task.{sequence}", outcome=outcome, attempt=attempt, sequence=sequence)  # type: ignore[arg-type]


def drawn(step: int, version: int, *sequences: int, token: int = 1, dropped: tuple[int, ...] = ()) -> Drawn:
    groups = tuple(f"task.{sequence}" for sequence in sequences)
    return Drawn(
        token=token, step=step, version=version, groups=groups, dropped={f"task.{s}": "stale" for s in dropped}
    )


def admission(groups: int = 2, staleness: int = 2, steps: int = 1, first: int = 0) -> Admission:
    return Admission(
        AdmissionLimits(groups_per_step=groups, max_staleness=staleness, steps_per_version=steps, first_version=first)
    )


def test_a_dropped_old_attempt_does_not_end_a_group_that_was_issued_again() -> None:
    state = admission()
    state.issued(issued(0), 0.0)
    state.issued(issued(0, attempt=1), 5.0)
    assert not state.closed(closure(0, "dropped", attempt=0))
    assert state.room == 5
    assert state.closed(closure(0, "dropped", attempt=1))
    assert state.room == 6 and not state.outstanding, "another may be issued in its place"


def test_a_fenced_trainers_draws_count_for_nothing() -> None:
    state = admission()
    for sequence in range(4):
        state.issued(issued(sequence), 0.0)
    assert state.drawn(drawn(0, 0, 0, 1, token=0)) == 2, "the first lease may be the log's first record"
    assert state.drawn(drawn(1, 0, 2, token=5)) == 1
    assert state.drawn(drawn(2, 1, 3, token=4)) == 0
    assert len(state.outstanding) == 1


def test_min_version_is_that_of_the_step_that_will_draw_less_the_bound() -> None:
    state = admission(groups=2, staleness=1, steps=1)
    for sequence in range(4):
        assert state.min_version() == 0  # drawn at steps 0 and 1: versions 0 and 1
        state.issued(issued(sequence), 0.0)
    state.drawn(drawn(0, 0, 0, 1))
    # One group step is outstanding (drawn at version 1), so the next is drawn at step 2, version 2.
    assert state.min_version() == 1
    assert state.min_version(ahead=0) == 0


class World:
    """A master, an engine and a trainer that follow the rules but are slow in any order; the log between them is delayed."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.master = Admission(limits)
        self.unread: deque[Closure | Drawn] = deque()
        self.log: list[Issued | Closure | Drawn] = []
        self.version = limits.first_version  # the trainer's
        self.engine = limits.first_version
        self.held: deque[Issued] = deque()
        self.sampled: dict[int, int] = {}
        self.open: set[int] = set()
        self.step = 0
        self.oldest = 0

    def issue(self) -> None:
        if self.master.room:
            record = issued(self.master.next_sequence, min_version=self.master.min_version())
            self.master.issued(record, 0.0)
            self.log.append(record)
            self.held.append(record)
            self.open.add(record.sequence)

    def sample(self) -> None:
        startable = [record for record in self.held if record.min_version <= self.engine]
        if startable:
            self.held.remove(startable[0])
            self.sampled[startable[0].sequence] = self.engine

    def drop(self) -> None:
        """Collect drops the newest sampled group (all rewards equal)."""
        waiting = sorted(self.sampled.keys() & self.open)
        if waiting:
            self.open.discard(waiting[-1])
            self.tell(closure(waiting[-1], "dropped"))

    def draw(self) -> None:
        """A full step in issue order, or nothing."""
        due = sorted(self.open)[: self.limits.groups_per_step]
        if len(due) < self.limits.groups_per_step or not all(sequence in self.sampled for sequence in due):
            return
        self.tell(drawn(self.step, self.version, *due))
        for sequence in due:
            self.oldest = max(self.oldest, self.version - self.sampled[sequence])
            self.open.discard(sequence)
        self.step += 1
        if self.step % self.limits.steps_per_version == 0:
            self.version += 1

    def reload(self) -> None:
        self.engine = self.version

    def tell(self, record: Closure | Drawn) -> None:
        self.unread.append(record)
        self.log.append(record)

    def read(self) -> None:
        if self.unread:
            record = self.unread.popleft()
            _ = self.master.drawn(record) if isinstance(record, Drawn) else self.master.closed(record)


ACTIONS = ("issue", "sample", "drop", "draw", "reload", "read")
LIMITS = st.builds(
    AdmissionLimits,
    groups_per_step=st.integers(1, 3),
    max_staleness=st.integers(0, 3),
    steps_per_version=st.integers(1, 3),
    first_version=st.integers(0, 1),
)


ONE_BY_ONE = AdmissionLimits(groups_per_step=1, max_staleness=0, steps_per_version=1)


@settings(max_examples=250, deadline=None)
@given(limits=LIMITS, actions=st.lists(st.sampled_from((*ACTIONS, "issue", "sample", "draw", "read")), max_size=250))
@example(limits=ONE_BY_ONE, actions=["issue", "sample", "draw", "read", "issue", "sample", "draw"])
def test_a_group_drawn_in_issue_order_is_never_older_than_the_bound(
    limits: AdmissionLimits, actions: list[str]
) -> None:
    world = World(limits)
    for action in actions:
        getattr(world, action)()
        assert len(world.master.outstanding) <= limits.max_outstanding
    assert world.oldest <= limits.max_staleness


@settings(max_examples=40, deadline=None)
@given(limits=LIMITS, actions=st.lists(st.sampled_from(ACTIONS), max_size=150), turns=st.integers(1, 40))
def test_whatever_happened_before_the_loop_goes_on(limits: AdmissionLimits, actions: list[str], turns: int) -> None:
    world = World(limits)
    for action in actions:
        getattr(world, action)()
    before = world.step
    for _ in range(turns * 60):
        for action in ("read", "issue", "reload", "sample", "draw"):
            getattr(world, action)()
    assert world.step >= before + turns


@settings(max_examples=100, deadline=None)
@given(limits=LIMITS, actions=st.lists(st.sampled_from(ACTIONS), max_size=250))
def test_a_restart_recounts_what_the_live_master_knew(limits: AdmissionLimits, actions: list[str]) -> None:
    world = World(limits)
    for action in actions:
        getattr(world, action)()
    while world.unread:
        world.read()
    again = Admission(limits)
    for record in world.log:
        if isinstance(record, Issued):
            again.issued(record, 0.0)
    for record in world.log:
        if isinstance(record, Closure):
            again.closed(record)
        elif isinstance(record, Drawn):
            again.drawn(record)
    assert again.outstanding == world.master.outstanding
    assert again.next_sequence == world.master.next_sequence
    assert again.min_version() == world.master.min_version()


def test_a_group_whose_end_is_read_before_its_issue_is_not_outstanding_and_its_number_is_taken() -> None:
    early = admission()
    early.closed(closure(0, "dropped"))
    early.closed(closure(1, "buffered"))
    early.drawn(drawn(0, 0, 1))
    early.closed(closure(2, "buffered"))
    for sequence in range(4):
        early.issued(issued(sequence), 0.0)
        early.issued(issued(sequence), 0.0)
    assert {name: item.buffered for name, item in early.outstanding.items()} == {"task.2": True, "task.3": False}
    assert early.next_sequence == 4
