"""The LoRA benchmark runs; its numbers are for `headrace bench lora`."""

import pytest

from infra.cli.bench.learner.lora import run


@pytest.mark.full
def test_an_adapter_is_published_after_real_steps() -> None:
    found = run(vocabulary=2000, hidden=64, layers=2, steps=2)
    rank, hidden = 16, 64
    linear = 3 * (hidden + 64) + (64 + hidden) + 3 * (hidden + 3 * hidden)
    assert 0 < found["adapter_version_mb"] * 1e6 - 2 * 2 * rank * linear < 10_000, "and its header"
    assert found["attention_share"] < found["share"] < found["share_of_parameters"]
    assert found["checkpoint_mb"] * 1e6 == pytest.approx(12 * 2 * rank * linear, rel=0.01)
