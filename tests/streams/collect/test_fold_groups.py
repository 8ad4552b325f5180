"""collect, group by group: what completes one, what closes one, and that it happens once."""

from streams.collect.rules import Rules
from streams.collect.state import State
from tests.streams.collect.collecting import (
    DEADLINE_MS,
    RULES,
    FakePartition,
    answer,
    block,
    buffered,
    decisions,
    drops,
    folded,
    stub,
    tick,
)


def closures(inbox: FakePartition, rules: Rules = RULES) -> list[tuple[str, int, str, str]]:
    return [
        (decision.closure.group, decision.closure.attempt, decision.closure.outcome, decision.closure.reason)
        for decision in decisions(folded(inbox, rules))
    ]


def test_a_group_is_buffered_when_its_last_episode_arrives() -> None:
    inbox = FakePartition().extend([block(answer("t.0", 1)), block(answer("t.0", 0))])
    results = folded(inbox)
    assert not results[0].decisions
    assert buffered(results) == {("t.0", 0): [("t.0.0-0-0", 0.0), ("t.0.0-1-0", 1.0)]}
    assert decisions(results)[0].closure.mean_reward == 0.5


def test_dropped_member_still_completes_its_group() -> None:
    inbox = FakePartition().extend([block(answer("t.0", 0)), stub("t.0", 1)])
    results = folded(inbox)
    assert buffered(results) == {("t.0", 0): [("t.0.0-0-0", 0.0)]}
    closure = decisions(results)[0].closure
    assert (closure.outcome, closure.drops, closure.experiences) == ("buffered", {"too short": 1}, 1)
    assert drops(results) == {"too short": 1}


def test_a_group_of_stubs_closes_as_dropped_with_their_reason() -> None:
    inbox = FakePartition().extend([stub("t.0", 0), stub("t.0", 1)])
    assert closures(inbox) == [("t.0", 0, "dropped", "too short")]


def test_an_episode_is_done_only_with_all_its_parts() -> None:
    parts = [answer("t.0", 0, size=1, part=part, last=part == 2) for part in range(3)]
    inbox = FakePartition().extend([block(parts[2]), block(parts[0])])
    assert not decisions(folded(inbox))
    inbox.append(block(parts[1]))
    assert [name for name, _ in buffered(folded(inbox))[("t.0", 0)]] == ["t.0.0-0-0", "t.0.0-0-1", "t.0.0-0-2"]


def test_redelivered_records_change_nothing() -> None:
    records = [block(answer("t.0", 0)), block(answer("t.0", 0)), stub("t.0", 0), block(answer("t.0", 1))]
    results = folded(FakePartition().extend([*records, *records]))
    assert len(decisions(results)) == 1
    assert not drops(results)


def test_deadline_fires_only_when_a_record_reaches_it() -> None:
    inbox = FakePartition().extend([block(answer("t.0", 0))])
    state = State()
    assert not decisions(folded(inbox, state=state))
    assert state.next_due_ms() == inbox.time_ms + DEADLINE_MS
    inbox.append(tick(), after_ms=DEADLINE_MS - 1)
    assert not decisions(folded(inbox, state=state))
    inbox.append(tick(), after_ms=1)
    results = folded(inbox, state=state)
    assert buffered(results) == {("t.0", 0): [("t.0.0-0-0", 0.0)]}
    assert decisions(results)[0].closure.reason == "deadline"
    assert decisions(results)[0].closure.drops == {"missing at deadline": 1}


def test_deadline_fires_before_the_record_that_reaches_it() -> None:
    inbox = FakePartition().extend([block(answer("t.0", 0))])
    inbox.append(block(answer("t.0", 1)), after_ms=DEADLINE_MS)
    results = folded(inbox)
    assert buffered(results) == {("t.0", 0): [("t.0.0-0-0", 0.0)]}
    assert drops(results) == {"missing at deadline": 1, "late": 1}


def test_a_straggler_is_counted_once_however_often_it_comes() -> None:
    inbox = FakePartition().extend([block(answer("t.0", 0))])
    inbox.append(tick(), after_ms=DEADLINE_MS)
    inbox.extend([block(answer("t.0", 1)), block(answer("t.0", 1))])
    assert drops(folded(inbox))["late"] == 1


def test_an_unfinished_episode_is_left_out_at_the_deadline() -> None:
    inbox = FakePartition().extend([block(answer("t.0", 0)), block(answer("t.0", 1, part=0, last=False))])
    inbox.append(tick(), after_ms=DEADLINE_MS)
    assert buffered(folded(inbox)) == {("t.0", 0): [("t.0.0-0-0", 0.0)]}


def test_duplicate_ticks_are_harmless() -> None:
    inbox = FakePartition().extend([tick(), block(answer("t.0", 0)), tick()])
    inbox.append(tick(), after_ms=DEADLINE_MS)
    inbox.extend([tick(), tick()])
    assert closures(inbox) == [("t.0", 0, "buffered", "deadline")]


def test_the_first_attempt_that_completes_wins() -> None:
    inbox = FakePartition().extend(
        [
            block(answer("t.0", 0)),
            block(answer("t.0", 0, attempt=1), answer("t.0", 1, attempt=1)),
            block(answer("t.0", 1)),
            block(answer("t.0", 0, attempt=2)),
            block(answer("t.0", 1, attempt=2)),
        ]
    )
    assert closures(inbox) == [
        ("t.0", 0, "superseded", ""),
        ("t.0", 1, "buffered", ""),
        ("t.0", 2, "superseded", ""),
    ]
    assert [name for name, _ in buffered(folded(inbox))[("t.0", 0)]] == ["t.0.1-0-0", "t.0.1-1-0"]


def test_a_deadline_closes_the_attempt_that_came_furthest() -> None:
    inbox = FakePartition().extend(
        [
            block(answer("t.0", 0, size=3)),
            block(answer("t.0", 0, attempt=1, size=3), answer("t.0", 1, attempt=1, size=3)),
        ]
    )
    inbox.append(tick(), after_ms=DEADLINE_MS)
    assert closures(inbox) == [("t.0", 0, "superseded", ""), ("t.0", 1, "buffered", "deadline")]


def test_demonstrations_go_on_untouched_when_they_are_all_there() -> None:
    shown = [answer("d.0", episode, lane="expert") for episode in range(2)]
    inbox = FakePartition().extend([block(shown[0])])
    assert not decisions(folded(inbox))
    inbox.append(block(shown[1]))
    assert buffered(folded(inbox)) == {("d.0", 0): [("d.0.0-0-0", None), ("d.0.0-1-0", None)]}


def test_an_episode_beyond_its_group_is_counted_and_ignored() -> None:
    results = folded(FakePartition().extend([block(answer("t.0", 5, size=2))]))
    assert drops(results) == {"episode beyond its group": 1}


def test_closed_groups_are_forgotten_after_keep() -> None:
    rules = Rules(deadline_ms=DEADLINE_MS, keep_ms=5_000)
    state = State()
    inbox = FakePartition().extend([block(answer("t.0", 0), answer("t.0", 1))])
    inbox.append(tick(), after_ms=5_001)
    folded(inbox, rules, state)
    assert not state.groups
