"""Half-hour episodes: what is trained of them, and how long the trainer waits, by the code that decides in simulated time.

Groups of 16, of which 32 make a step of 120 s; episodes are lognormal with a median of 6 minutes and σ = 1, so that the
slowest of a group takes 34 minutes in the median; a version is with the engines 60 s after its step. η = 8 throughout.
"""

import math
from random import Random

import pytest

from actors.config import MasterConfig
from infra.settings.config import Pacing
from tests.episode_world import Case, World, WorldOutcome

GROUPS = 32


def outcome(pacing: Pacing, *, steps: int = 60) -> WorldOutcome:
    return World(Case(pacing=pacing, master=MasterConfig(num_episodes=16), steps=steps)).run()


@pytest.mark.full
def test_with_settings_for_them_3_percent_of_tokens_are_lost_at_most_and_the_trainer_waits_for_20_percent_at_most() -> (
    None
):
    """Lost is what is dropped and what is masked together."""
    pacing = Pacing(
        groups_per_step=GROUPS, max_staleness=8, steps_per_version=6, groups_in_flight=18 * GROUPS, straggler_s=0.01
    )
    found = outcome(pacing, steps=80)
    assert found.share(found.dropped + found.masked) <= 0.03
    assert found.idle <= 0.20


@pytest.mark.full
def test_a_version_every_step_drops_no_group_and_more_in_flight_keep_the_trainer_at_work() -> None:
    within = outcome(Pacing(groups_per_step=GROUPS, max_staleness=8), steps=40)
    assert within.dropped == 0, "27 percent, when a group was as old as its oldest token"
    beyond = outcome(
        Pacing(groups_per_step=GROUPS, max_staleness=8, groups_in_flight=20 * GROUPS, straggler_s=0.01), steps=40
    )
    assert beyond.share(beyond.dropped) <= 0.03 and beyond.idle <= 0.20 < within.idle
    assert beyond.share(beyond.masked) > within.share(within.masked), (
        "which costs the tokens that get too old meanwhile"
    )


def test_no_schedule_trains_all_tokens_where_episodes_last_longer_than_the_bound() -> None:
    """Even of episodes that are drawn the moment they end: versions of 2 minutes at η = 8 are 16, and episodes last longer.

    So a bound in versions has to be as long as the episodes are: steps_per_version, or max_staleness, in proportion.
    """
    random = Random(1)
    lengths_s = [360.0 * math.exp(random.gauss(0.0, 1.0)) for _ in range(100_000)]

    def too_old(version_s: float) -> float:
        return sum(max(0.0, one - 8 * version_s) for one in lengths_s) / sum(lengths_s)

    assert too_old(150.0) == pytest.approx(0.19, abs=0.02), "a step every 150 s is a trainer that waits for 20 percent"
    assert too_old(6 * 150.0) < 0.01
