"""The bench of a watched console: what it makes of pieces, and people who find every page."""

import pytest

from infra.cli.bench.looking.console_load import RunInterval, Watching, figures_of, rate_of
from infra.cli.bench.looking.looking import PageViews, look
from tests.infra.cli.console_rig import LINK, console


def test_a_pair_is_compared_with_itself_whatever_the_run_drifts() -> None:
    pieces = [
        RunInterval(is_watched, 10_000 * at, 10_000 * at + 10_000)
        for at, is_watched in enumerate((False, True, True, False))
    ]
    gaps_ms = (500, 1000, 2000, 1000)  # the second pair does half as much, and is as much slower
    steps = [piece.begin_ms + step for piece, gap in zip(pieces, gaps_ms, strict=True) for step in range(0, 9999, gap)]
    seen = PageViews(took_ms=[1.0, 2.0, 9.0], failed={"503": 2})
    watching = Watching(calm_s=10.0, calm_cpu_s=1.0, busy_s=20.0, busy_cpu_s=4.0, seen=seen)
    found = figures_of(pieces, steps, watching, 10)
    assert (found["steps_per_s_alone"], found["steps_per_s_looked_at"]) == (1.5, 0.75)
    assert found["slower_share"] == pytest.approx(0.5) and found["slower_share_error"] == pytest.approx(0.0)
    assert (found["pages_seen"], found["pages_failed"], found["pages_failed_503"]) == (3.0, 2.0, 2.0)
    assert (found["console_cpu_share_calm"], found["console_cpu_share_looked_at"]) == (0.1, 0.2)


def test_a_piece_without_steps_is_no_figure() -> None:
    with pytest.raises(ValueError, match="got 1 steps in a piece, expected 3 or more"):
        rate_of([100, 5000], RunInterval(False, 0, 1000))


@pytest.mark.full
def test_people_walk_every_page_and_find_it() -> None:
    with console() as here:
        seen = look(here.url, LINK, 3, 4.0, hurry=40.0)
    assert not seen.failed
    assert len(seen.took_ms) > 20
