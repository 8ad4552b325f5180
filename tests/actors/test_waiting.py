"""What may start under which version."""

import pytest

from actors.rollout.scheduler import Waiting, issued_of
from schemas import Issued, Message, Task


def task(group: str, *, attempt: int = 0, sequence: int = 0, min_version: int = 0, pinned: int | None = None) -> Task:
    return Task(
        id="t",
        messages=(Message(role="user", content="?"),),
        issued=Issued(
            group=group,
            attempt=attempt,
            num_episodes=2,
            max_tokens=4,
            sequence=sequence,
            min_version=min_version,
            suite="" if pinned is None else "dev",
            version=-1 if pinned is None else pinned,
        ),
    )


def group(found: Task | None) -> str | None:
    return None if found is None else issued_of(found).group


def test_a_group_waits_for_its_version() -> None:
    waiting = Waiting()
    waiting.add(task("a", min_version=2))
    assert waiting.rollout(1) is None
    assert group(waiting.rollout(2)) == "a"
    assert len(waiting) == 0


def test_groups_start_in_issue_order() -> None:
    waiting = Waiting()
    for name, sequence in (("c", 3), ("a", 1), ("b", 2)):
        waiting.add(task(name, sequence=sequence))
    assert [group(waiting.rollout(0)) for _ in range(3)] == ["a", "b", "c"]


def test_an_eval_starts_only_under_exactly_its_version() -> None:
    waiting = Waiting()
    waiting.add(task("eval-dev-3.0", pinned=3))
    assert waiting.eval(2) is None
    assert waiting.versions() == {3}
    assert group(waiting.eval(3)) == "eval-dev-3.0"
    assert waiting.eval(3) is None


def test_evals_of_passed_versions_are_given_up() -> None:
    waiting = Waiting()
    waiting.add(task("eval-dev-3.0", pinned=3))
    waiting.add(task("eval-dev-5.0", pinned=5))
    assert [group(passed) for passed in waiting.passed(4)] == ["eval-dev-3.0"]
    assert waiting.versions() == {5}
    assert len(waiting) == 1


def test_the_same_attempt_is_taken_once_even_after_it_ran() -> None:
    waiting = Waiting()
    assert waiting.add(task("a"))
    assert waiting.rollout(0) is not None
    assert not waiting.add(task("a"))
    assert waiting.add(task("a", attempt=1))


def test_of_two_attempts_that_wait_only_the_newer_starts() -> None:
    waiting = Waiting()
    waiting.add(task("a"))
    waiting.add(task("a", attempt=1))
    first = waiting.rollout(0)
    assert first is not None and issued_of(first).attempt == 1
    assert waiting.rollout(0) is None


def test_a_task_that_was_not_issued_is_refused() -> None:
    with pytest.raises(ValueError, match="issued"):
        issued_of(Task(id="t", messages=(Message(role="user", content="?"),)))
