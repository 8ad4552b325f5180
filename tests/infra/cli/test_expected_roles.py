"""Roles that should run and do not are alarms, whatever their predecessors last said."""

from typing import Any

from infra.cli.expected import Expect, missing, wanted_of

GONE_S = 15.0
ALL = wanted_of(Expect(), serves=False)


def heard(role: str, instance: str, *, age_s: float = 1.0, state: str = "running", reason: str = "") -> dict[str, Any]:
    return {"role": role, "instance": instance, "age_s": age_s, "state": state, "reason": reason}


ALIVE = [heard("master", "master/vm/1"), heard("explore", "explore-0/2"), heard("process", "process-0/3")]


def test_a_trainer_that_stopped_and_was_not_started_again_is_an_alarm() -> None:
    stopped = heard("train", "train/vm/4608", age_s=753.0, state="stopped")
    assert missing(ALL, [*ALIVE, stopped], GONE_S) == ["no train runs: train/vm/4608 stopped 753 s ago"]


def test_a_role_that_failed_says_why() -> None:
    failed = heard("train", "train/vm/9", age_s=20.0, state="failed", reason="checkpoint of step 4 does not fit")
    assert missing(ALL, [*ALIVE, failed], GONE_S) == [
        "no train runs: train/vm/9 ended 20 s ago: checkpoint of step 4 does not fit"
    ]


def test_a_role_that_never_came_up_is_an_alarm() -> None:
    train = heard("train", "train/vm/9")
    (line,) = missing(wanted_of(Expect(), serves=True), [*ALIVE, train], GONE_S)
    assert line == "no serve runs: none has ever spoken; see its log"


def test_one_of_two_explorers_is_missing_until_it_is_back_in_its_place() -> None:
    silent = heard("explore", "explore-1/7", age_s=60.0)
    roles = [*ALIVE, heard("train", "train/vm/9"), silent]
    assert missing(ALL, roles, GONE_S) == ["1 of 2 explore run: explore-1/7 was last heard of 60 s ago"]
    assert missing(ALL, [*roles, heard("explore", "explore-1/8")], GONE_S) == []


def test_the_file_may_say_how_many_there_should_be() -> None:
    wanted = wanted_of(Expect(explore=3), serves=False)
    (line,) = missing(wanted, [*ALIVE, heard("train", "train/vm/9")], GONE_S)
    assert line.startswith("1 of 3 explore run")


def test_a_run_that_came_to_its_end_misses_nobody() -> None:
    over = [heard(one["role"], one["instance"], age_s=900.0, state="stopped") for one in ALIVE[1:]]
    done = heard("master", "master/vm/1", age_s=900.0, state="done")
    assert missing(ALL, [done, *over], GONE_S) == []
    assert len(missing(ALL, over, GONE_S)) == 4, "what was stopped by hand is not running"
