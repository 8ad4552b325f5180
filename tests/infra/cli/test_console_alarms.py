"""Alarms of the flow page: by name, what they are about, since when and how often, and where it says what to do."""

import asyncio
from pathlib import Path
from typing import Any

from infra.cli.console.alarms import MAX_SHOWN, ShownAlarm, alarms_of, kind_of, noted, value_words
from infra.cli.times import clock
from infra.log.log import Log
from infra.log.memory import MemoryBus, wall_ms
from infra.store.memory import MemoryStore
from schemas import Progress, topics
from tests.infra.cli.console_rig import looking
from tests.infra.cli.test_console_pages import text_of
from tests.infra.cli.test_status_command import START_MS, progress, state_of

CHI2 = "alarms{alarm=live/chi2}"


def shown(state: dict[str, Any], **seen: float) -> list[ShownAlarm]:
    return alarms_of(state, seen)


def test_a_value_of_a_step_is_said_by_name_and_lane_since_when_and_how_often() -> None:
    counts = ((0, 2.0), (100, 2.0), (200, 3.0), (260, 5.0), (300, 6.0), (320, 6.0))
    (found,) = shown(state_of(*[(at, progress("train", **{CHI2: count})) for at, count in counts], now_s=321))
    assert found.name == "A value of a step is unhealthy" and found.page == "runbook#a-value-of-a-step-is-unhealthy"
    assert found.about == "chi2 of lane live (estimate of χ²(π‖μ)), at train/1"
    assert (found.since_ms, found.times, found.lately) == (START_MS + 200_000, 4.0, 1.0)


def test_a_process_that_counts_anew_under_its_name_is_no_error() -> None:
    counts = ((0, 9.0), (70, 0.0), (80, 1.0))
    (found,) = shown(state_of(*[(at, progress("train", **{CHI2: count})) for at, count in counts], now_s=81))
    assert (found.since_ms, found.times) == (START_MS + 80_000, 1.0)


def test_labels_of_other_counters_are_words_too_and_a_counter_without_any_names_its_process() -> None:
    counters = {"feedback_polls_failed{reason=timeout,source=crm}": 1.0, "rollbacks": 2.0}
    state = state_of((0, progress("process")), (10, progress("process", **counters)), now_s=11)
    assert [(one.name, one.about) for one in shown(state)] == [
        ("A feedback system does not answer", "reason timeout, source crm, at process/1"),
        ("The trainer went back", "at process/1"),
    ]
    assert value_words("reward_collapse") == "reward collapse" and value_words("live/odd") == "odd of lane live"


def test_what_goes_on_is_seen_since_it_was_first_there_and_is_forgotten_when_it_ends() -> None:
    line, other = "verified: 12,000 records wait, expected at most 10,000", "serve/1 has been silent for 90 s"
    seen = noted({}, [line, other], 100.0)
    seen = noted(seen, [line.replace("12,000", "15,000")], 130.0)
    assert seen == {kind_of(line): 100.0}
    (found,) = alarms_of({"roles": [], "alarms": [line]}, seen)
    assert found == ShownAlarm(
        "A stage falls behind", line, "runbook#a-stage-falls-behind", since_ms=100_000.0, is_looked=True
    )
    assert noted(seen, [], 140.0) == {}


def test_the_flow_page_says_every_alarm_so_and_of_many_how_many_more_there_are(tmp_path: Path) -> None:
    ago_ms = [50_000]

    async def main() -> None:
        log = Log(MemoryBus(lambda: wall_ms() - ago_ms[0]), "t", store=MemoryStore())
        await log.create_topics(partitions=1, keep_ms=-1)
        said = tuple(
            f"a plugin says {at}" for at in "abcdefghijklmnopqrstuvwxyz" + "abcdefghijklmnopqrstuvwxyz".upper()
        )
        for count in (0.0, 3.0):
            report = Progress(role="train", instance="train/1", state="learning", counters={CHI2: count}, alarms=said)
            grown = await log.publish(topics.REPORTS, report)
            ago_ms[0] -= 40_000
        async with looking(tmp_path, log) as (client, _):
            text = text_of(await client.get("/"))
            since = clock(grown.timestamp_ms)
            assert (
                "A value of a step is unhealthy : chi2 of lane live (estimate of χ²(π‖μ)), at train/1;"
                f" 3 times since {since} , 3 in the last minute what to do"
            ) in text
            assert "A role does not run : no master runs: none has ever spoken; see its log; seen here since" in text
            assert "train/1: a plugin says a; seen here since" in text
            num_alarms = len(said) + 4  # three roles that do not run
            assert f"{num_alarms} alarms" in text and f"and {num_alarms - MAX_SHOWN} more" in text

    asyncio.run(main())
