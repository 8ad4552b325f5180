"""Public bugs of weight synchronisation, planted one by one: `tests.contracts.weight_bugs` has them."""

from pathlib import Path

import pytest

from tests.contracts.weight_bugs import BUGS, exhibits


@pytest.mark.parametrize(
    "room", [pytest.param(room, marks=pytest.mark.slow if room == "torch" else pytest.mark.full) for room in BUGS]
)
def test_each_bug_is_refused_by_its_keeper_and_costs_no_request(tmp_path: Path, room: str) -> None:
    for shown in exhibits(room, tmp_path / "model"):
        assert (shown.keeper, shown.lost) == (shown.bug.keeper, 0), f"{shown.bug.name}: {shown.said}"
        assert shown.apart is None or shown.apart > 0.01, f"{shown.bug.name} does no harm: what does it show?"
