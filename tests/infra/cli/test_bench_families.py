"""Every family from the learner through publication to the torch engine."""

import re
from pathlib import Path

import pytest

from infra.cli.bench.learner.families import Family, examined
from infra.cli.bench.learner.tiny_models import FAMILIES, build_tiny_model
from infra.cli.bench.tables import families_table

REFUSED = {
    "cohere": r"\(cohere\).*its head is not supported",
    "qwen2.5-vl": "'qwen2_5_vl'.*expected one of llava, internvl; there is no code for pictures of any size.*M-RoPE",
    "qwen3-vl": "'qwen3_vl'.*expected one of llava, internvl; there is no code for pictures of any size.*M-RoPE.*DeepStack",
}


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - REFUSED.keys()))
def test_every_family_is_trained_published_and_served_with_one_set_of_logprobs(tmp_path: Path, name: str) -> None:
    found = examined(name, build_tiny_model(tmp_path / name, name))
    assert found.works, found
    assert found.reading


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_work_is_refused_by_name_with_the_reason(tmp_path: Path, name: str) -> None:
    found = examined(name, build_tiny_model(tmp_path / name, name))
    assert not found.works and not found.reading
    assert re.search(REFUSED[name], found.refused)


def test_the_table_has_a_row_for_each_family() -> None:
    table = families_table([Family(name="one", reading="dense"), Family(name="other", refused="no head")])
    assert table.row_count == 2
