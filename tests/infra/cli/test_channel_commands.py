"""What customers are served is moved by hand, checked, and told as a table, through a real broker."""

import json
from pathlib import Path

import pytest

from schemas import PolicyEvent, topics
from tests.infra.cli.test_commands_on_a_broker import call, config, printed, publish

pytestmark = pytest.mark.slow
__all__ = ["config"]  # a fixture


def test_the_stable_channel_is_moved_by_hand_and_every_move_is_told(kafka: str, app_name: str, config: Path) -> None:
    versions = [
        (topics.POLICIES, PolicyEvent(event="published", policy="main", version=version, manifest="m"))
        for version in (3, 5)
    ]
    publish(kafka, app_name, versions)  # type: ignore[arg-type]
    assert "nothing was promoted yet" in printed(config, "channel")
    result = call(config, "promote", "4")
    assert result.exit_code == 2 and "version 4: never published; the newest is 5" in result.stderr
    assert "nothing was promoted yet → version 5" in printed(config, "promote", "5", "--why", "looked at it")
    assert "version 5 → version 3 (pinned)" in printed(config, "pin", "3")
    assert "version 3 (pinned) → version 5" in printed(config, "unpin")
    result = call(config, "rollback", "5")
    assert result.exit_code == 2 and "below the stable version 5" in result.stderr
    assert "version 5 → version 3" in printed(config, "rollback", "3", "--why", "refuses too often")
    assert "learning is paused" in printed(config, "pause", "--why", "odd feedback")
    assert "odd feedback" in printed(config, "status")
    assert "learning goes on" in printed(config, "resume")
    table = printed(config, "channel")
    assert [
        word in table
        for word in ("promoted", "pinned", "unpinned", "rolled back", "refuses too often", "pause", "odd feedback")
    ] == [True] * 7
    told = json.loads(printed(config, "channel", "--json"))
    assert (told["stable"], told["pinned"]) == (3, False)
    assert [one["event"] for one in told["decisions"]] == [
        "promoted", "pinned", "pinned", "rolled_back", "pause", "continue"
    ]  # fmt: skip
