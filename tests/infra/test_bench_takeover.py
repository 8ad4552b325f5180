"""The benchmark of taking a partition over: what it measures is what a worker does."""

from infra.cli.bench.records.takeover import TakeoverPlan, run


def test_a_small_partition_is_taken_over_from_the_store_and_from_the_log() -> None:
    said: list[str] = []
    figures = run(TakeoverPlan(waiting=30, closed=20), said.append)
    assert said == ["70 records are in the log"]
    assert (figures["waiting"], figures["closed"]) == (30, 20)
    assert min(figures[f"{name}_{what}"] for name in ("taken_over", "rebuilt") for what in ("s", "join_ms")) > 0
    assert figures["store_mb"] > 0
