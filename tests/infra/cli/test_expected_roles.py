"""Roles that should run and do not are alarms, whatever their predecessors last said."""

import os
import socket

from infra.cli.look.expected import Heard, missing, process_of, wanted_of
from infra.cli.settings import Expect
from infra.roles.role import instance_of

NOW_S = 1_763_715_600.0
GONE_S = 15.0
ALL = wanted_of(Expect(), serves=False)
SERVED = wanted_of(Expect(), serves=True)
VM = socket.gethostname()


def named(role: str, pid: int, host: str = VM, epoch: str = "") -> str:
    """As `instance_of` names a process, and a gateway itself."""
    assert instance_of(role) == f"{role}/{VM}/{os.getpid()}"
    return f"{role}/{host}/{pid}" + (f"/{epoch}" if epoch else "")


def heard(
    instance: str, *, ago_s: float = 1.0, began_s: float = 7200.0, state: str = "running", reason: str = ""
) -> Heard:
    role = instance.split("/")[0]
    return Heard(role, instance, state, NOW_S - max(began_s, ago_s), NOW_S - ago_s, reason)


def said(*roles: Heard, wanted: dict[str, int] = ALL) -> list[str]:
    return missing(wanted, roles, NOW_S, GONE_S)


OTHERS = (heard(named("master", 1)), heard(named("process", 3)), heard(named("train", 4)))
ALIVE = (heard(named("master", 1)), heard(named("process", 3)), heard(named("explore", 11)))


def test_a_trainer_that_stopped_and_was_not_started_again_is_an_alarm() -> None:
    stopped = heard(named("train", 4608), ago_s=753.0, state="stopped")
    assert said(*ALIVE, stopped) == [f"no train runs: train/{VM}/4608 stopped 753 s ago"]


def test_a_role_that_failed_says_why() -> None:
    failed = heard(named("train", 9), ago_s=20.0, state="failed", reason="checkpoint of step 4 does not fit")
    assert said(*ALIVE, failed) == [f"no train runs: train/{VM}/9 ended 20 s ago: checkpoint of step 4 does not fit"]


def test_a_role_that_never_came_up_is_an_alarm() -> None:
    (line,) = said(*ALIVE, heard(named("train", 9)), wanted=SERVED)
    assert line == "no serve runs: none has ever spoken; see its log"


def test_one_of_two_explorers_of_a_machine_is_missing_until_one_is_started_in_its_place() -> None:
    roles = (*OTHERS, heard(named("explore", 11)), heard(named("explore", 12), ago_s=60.0))
    assert said(*roles) == [f"1 of 2 explore run: explore/{VM}/12 was last heard of 60 s ago"]
    assert said(*roles, heard(named("explore", 13), began_s=30.0)) == []
    elsewhere = heard(named("explore", 11, "pod-2"), began_s=30.0)
    assert said(*roles, elsewhere) == [], "on whatever machine"


def test_who_was_there_before_takes_no_place() -> None:
    here = heard(named("explore", 11, "pod-2"), began_s=600.0)
    (line,) = said(*OTHERS, here, heard(named("explore", 12), ago_s=60.0))
    assert line.startswith("1 of 2 explore run")


def test_one_process_takes_the_place_of_one() -> None:
    lost = [heard(named("explore", 20 + at), ago_s=60.0 + at) for at in range(3)]
    (line,) = said(*OTHERS, heard(named("explore", 11), began_s=10.0), *lost)
    assert line.startswith("1 of 3 explore run: ")


def test_what_crashes_again_and_again_is_missing_once() -> None:
    crashes = [
        heard(named("explore", 20 + at), ago_s=100.0 - at, began_s=100.5 - at, state="failed", reason="no such model")
        for at in range(0, 60, 2)
    ]
    (line,) = said(*OTHERS, heard(named("explore", 11)), *crashes)
    assert line == f"1 of 2 explore run: explore/{VM}/78 ended 42 s ago: no such model"


def test_a_gateway_that_was_killed_and_started_again_misses_nobody() -> None:
    killed = heard(named("serve", 5, epoch="0badcafe"), ago_s=60.0)
    again = heard(named("serve", 6, epoch="9f00a1b2"), began_s=40.0)
    roles = (*OTHERS, heard(named("explore", 11)))
    assert said(*roles, killed, again, wanted=SERVED) == []
    in_a_container = heard(named("serve", 5, epoch="9f00a1b2"), began_s=40.0)
    assert process_of(killed.instance) == process_of(in_a_container.instance)
    assert said(*roles, killed, in_a_container, wanted=SERVED) == []


def test_why_a_gateway_ended_is_told_though_its_last_word_lacks_its_start() -> None:
    failed = heard(named("serve", 5), ago_s=3.0, state="failed", reason="the engine is gone")
    roles = (*OTHERS, heard(named("explore", 11)), heard(named("serve", 5, epoch="0badcafe"), ago_s=4.0))
    assert said(*roles, failed, wanted=SERVED) == [f"no serve runs: serve/{VM}/5 ended 3 s ago: the engine is gone"]


def test_what_was_stopped_in_order_is_not_missing_where_another_took_over() -> None:
    old = heard(named("explore", 11, "pod-1"), ago_s=30.0, state="stopped")
    new = heard(named("explore", 11, "pod-2"), began_s=120.0)
    assert said(*OTHERS, old, new) == [], "they ran side by side, then the old one was stopped"
    (line,) = said(*OTHERS, old)
    assert line == "no explore runs: explore/pod-1/11 stopped 30 s ago"


def test_who_died_over_an_hour_ago_is_not_missed() -> None:
    roles = (*OTHERS, heard(named("explore", 11)))
    assert said(*roles, heard(named("explore", 12), ago_s=3590.0))
    assert said(*roles, heard(named("explore", 12), ago_s=3610.0)) == []


def test_the_file_may_say_how_many_there_should_be() -> None:
    wanted = wanted_of(Expect(explore=3), serves=False)
    (line,) = said(*OTHERS, heard(named("explore", 11)), wanted=wanted)
    assert line.startswith("1 of 3 explore run")
    lost = heard(named("explore", 12), ago_s=60.0)
    wanted = wanted_of(Expect(explore=1), serves=False)
    assert said(*OTHERS, heard(named("explore", 11)), lost, wanted=wanted) == [], "the file comes first"


def test_a_run_that_came_to_its_end_misses_nobody() -> None:
    over = [heard(one.instance, ago_s=900.0, state="stopped") for one in ALIVE[1:]]
    done = heard(named("master", 1), ago_s=900.0, state="done")
    assert said(done, *over) == []
    assert len(said(*over)) == 4, "what was stopped by hand is not running"
