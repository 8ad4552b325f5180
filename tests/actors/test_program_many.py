"""Hundreds of episodes of a program at once, each with a client and connections of its own."""

import resource

import pytest

from infra.cli.bench.serving.episodes import run

EPISODES = 200


@pytest.mark.full
def test_episodes_at_once_are_each_recorded_as_their_own_also_where_few_descriptors_are_allowed_at_first() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        figures = run(EPISODES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert figures["descriptors_per_episode"] * EPISODES > 256, "more than were allowed"
    assert (figures["failed"], figures["not_their_own"], figures["sequences_per_episode"]) == (0, 0, 1)
