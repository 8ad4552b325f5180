"""What roles read at their start, after one day and after thirty, by counts of records."""

from functools import cache

from infra.cli.bench.days import run


@cache
def figures() -> dict[str, float]:
    return run(answers=40, versions=20)


def test_a_masters_start_after_thirty_days_reads_no_more_than_half_again_that_of_day_one() -> None:
    assert figures()["day_30_master_records"] <= 1.5 * figures()["day_1_master_records"]


def test_what_a_trainer_and_an_engine_read_at_their_start_is_what_was_said_of_versions_and_nothing_else() -> None:
    for day in (1, 30):
        for role, times in (("trainer", 2), ("engine", 1)):
            of_policies = figures()[f"day_{day}_{role}_of_policies"]
            assert of_policies == figures()[f"day_{day}_{role}_records"]
            assert of_policies == times * (2 * 20 * day + 1 + 2), "a lease of each master, and two words a version"
