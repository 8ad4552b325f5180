"""Around the stages: folders nobody shares, movement told from standing still, settings turned into rules."""

import logging
from pathlib import Path

from infra.roles.claimed import ClaimedFolder
from infra.settings.config import Floor, Keep, decode
from streams.config import StreamsConfig
from streams.worker import Movement, QuietRepeats, rules_of


def test_two_workers_of_one_machine_have_different_folders(tmp_path: Path) -> None:
    first, second = ClaimedFolder(tmp_path), ClaimedFolder(tmp_path)
    assert [first.path.name, second.path.name] == ["worker-0", "worker-1"]
    first.release()
    third = ClaimedFolder(tmp_path)
    assert third.path.name == "worker-0"
    second.release()
    third.release()


def test_a_partition_is_stuck_only_while_it_lags_and_nothing_moves() -> None:
    movement = Movement()
    assert movement.stuck_for_s("verified", 0, lag=5, committed=1, mark=0, now_s=100) == 0
    assert movement.stuck_for_s("verified", 0, lag=5, committed=1, mark=0, now_s=130) == 30
    assert movement.stuck_for_s("verified", 0, lag=5, committed=1, mark=7, now_s=140) == 0
    assert movement.stuck_for_s("verified", 0, lag=5, committed=2, mark=7, now_s=150) == 0
    assert movement.stuck_for_s("verified", 0, lag=0, committed=2, mark=7, now_s=180) == 0
    assert movement.stuck_for_s("verified", 0, lag=1, committed=2, mark=7, now_s=190) == 10


def test_a_partition_that_comes_back_starts_its_time_anew() -> None:
    movement = Movement()
    movement.stuck_for_s("verified", 0, lag=5, committed=1, mark=0, now_s=100)
    movement.keep(set())
    assert movement.stuck_for_s("verified", 0, lag=5, committed=1, mark=0, now_s=900) == 0


def test_feedback_tables_become_the_rules_of_collect() -> None:
    table = {
        "feedback": [
            {"name": "csat", "use": "support:csat", "from": {"topic": "zendesk"}, "window": "2h", "default": 0.5},
            {"name": "edit", "use": "support:edit", "from": {"topic": "edits"}, "late": "retrain"},
        ],
        "collect": {"deadline_s": 60},
    }
    rules = rules_of(Floor(app="bot", keep=Keep(replay="2d")), decode(table, StreamsConfig, "bot.toml"))
    assert (rules.deadline_ms, rules.keep_ms) == (60_000, 172_800_000)
    assert (rules.sources["csat"].window_ms, rules.sources["csat"].default) == (7_200_000, 0.5)
    assert (rules.sources["edit"].default, rules.sources["edit"].late) == (None, "retrain")


def test_a_repeated_message_is_logged_once_in_a_while() -> None:
    quiet = QuietRepeats()
    record = logging.LogRecord("aiokafka", logging.ERROR, "", 0, "Unable connect to node with id %s", (1,), None)
    other = logging.LogRecord("aiokafka", logging.ERROR, "", 0, "Unable to update metadata from %s", ([1],), None)
    assert [quiet.filter(record), quiet.filter(record), quiet.filter(other)] == [True, False, True]
