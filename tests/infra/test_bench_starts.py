"""The benchmark of starts runs masters and readers over logs it makes."""

from infra.cli.bench.growth.starts import run


def test_the_benchmark_starts_every_role_over_each_log() -> None:
    figures = run(counts=(2000,))
    assert {name.removeprefix("2000_") for name in figures} == {
        "reports_master_as_before", "reports_master_without", "reports_master_snapshot", "reports_trainer",
        "reports_explorer_gateway", "reports_status", "reports_audit", "groups_master_without", "groups_master_snapshot",
    }  # fmt: skip
    assert all(value > 0 for value in figures.values())
