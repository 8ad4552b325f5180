"""The benchmark of reprocess compares everything and finds nothing different; its figures are for `headrace bench`."""

from infra.cli.bench.records.reprocess import run


def test_a_benchmarked_reprocessing_finds_what_is_recorded() -> None:
    figures = run(experiences=320)
    assert figures["verify_compared"] == 320 and figures["collect_compared"] > 300
    assert figures["verify_different"] == figures["collect_different"] == 0
