"""The bound, and that a restart recounts what the live master knew."""

from collections import deque

from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.master.admission import Admission, AdmissionLimits, OutstandingGroup
from schemas import Closure, Drawn, Issued


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


def test_no_more_than_the_staleness_budget_is_outstanding() -> None:
    state = admission(groups=2, staleness=2, steps=3)
    assert state.room == (2 * 3 + 1) * 2
    for sequence in range(state.room):
        state.issued(issued(sequence), 0.0)
    assert state.room == 0


def test_a_buffered_group_stays_outstanding_until_it_is_drawn() -> None:
    state = admission()
    state.issued(issued(0), 0.0)
    assert not state.closed(closure(0, "buffered"))
    assert len(state.outstanding) == 1
    assert state.drawn(drawn(0, 0, 0)) == 1
    assert not state.outstanding


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


def test_the_same_issue_read_twice_changes_nothing_and_a_newer_attempt_waits_anew() -> None:
    state = admission()
    state.issued(issued(0, attempt=1), 1.0)
    state.issued(issued(0, attempt=1), 5.0)
    assert state.outstanding["task.0"] == OutstandingGroup(0, 1, 1.0)
    state.issued(issued(0, attempt=0), 6.0)
    assert state.outstanding["task.0"] == OutstandingGroup(0, 1, 1.0)
    state.issued(issued(0, attempt=2), 7.0)
    assert state.outstanding["task.0"] == OutstandingGroup(0, 2, 7.0)


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
