"""The benchmark of `trace` asks real questions: each answer it asks about was published and trained once."""

from infra.cli.bench.looking.trace import run


def test_every_question_of_the_benchmark_is_answered() -> None:
    figures = run(experiences=2048)
    assert figures["experiences"] == 2048 and figures["answer_ms_p99"] > 0 and figures["index_mb"] > 0
