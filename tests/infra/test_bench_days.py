"""What roles read at their start, after one day and after thirty, by counts of records."""

from functools import cache

import pytest

from infra.cli.bench.growth.days import run
from infra.policies.beginning import LOOK
from trainer.loop.publication import SUMMARIZE_EVERY


@cache
def figures() -> dict[str, float]:
    return run(answers=40, versions=600)


@pytest.mark.parametrize("role", ["master", "trainer", "engine"])
def test_a_start_after_thirty_days_reads_no_more_than_half_again_that_of_day_one(role: str) -> None:
    assert figures()[f"day_30_{role}_records"] <= 1.5 * figures()[f"day_1_{role}_records"]


def test_a_trainer_reads_what_was_said_of_versions_as_often_as_an_engine_does() -> None:
    for day in (1, 30):
        of_policies = figures()[f"day_{day}_trainer_of_policies"]
        assert of_policies == figures()[f"day_{day}_trainer_records"] == figures()[f"day_{day}_engine_of_policies"]
        assert 0 < of_policies <= LOOK + 1 + SUMMARIZE_EVERY + 4
