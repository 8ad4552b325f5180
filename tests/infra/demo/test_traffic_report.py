"""What the traffic demo tells: the stable channel's accuracy, what users saw, and what failed for them."""

from pathlib import Path

import msgspec

from infra.cli.demo.demo import children, write_settings
from infra.cli.demo.screen import traffic_rows
from infra.cli.demo.settings import DemoOptions
from infra.cli.demo.traffic import USERS_FILE, users_child
from infra.cli.demo.traffic_report import WINDOW, draw_traffic, read_seen, traffic_values, windows
from infra.cli.demo.users import Seen
from infra.cli.demo.watch import Watch
from infra.cli.settings import load_settings
from schemas import EvalResult, PolicyEvent, Progress
from tests.infra.demo.test_demo_watch import START_S, watch_of

OPTIONS = {"task": "traffic", "engine": "torch"}


def result(version: int, correct: int) -> EvalResult:
    return EvalResult(policy="main", version=version, suite="held-out", num_tasks=10, num_correct=correct)


def move(event: str, version: int) -> PolicyEvent:
    return PolicyEvent(event=event, policy="main", version=version, channel="stable")  # type: ignore[arg-type]


def watched() -> Watch:
    return watch_of(
        (1, result(1, 3)), (2, move("promoted", 1)), (3, result(16, 2)), (4, move("held", 16)), (5, result(32, 8)),
        (6, move("promoted", 32)), (7, move("rolled_back", 1)), (8, move("promoted", 32)),
    )  # fmt: skip


def seen(folder: Path, count: int) -> Path:
    """Users' notes, the last of them first: wrong answers of version 1, right ones of version 32, one failure."""
    notes = [Seen(at_s=START_S + n, version=32 if n > count // 2 else 1, right=n > count // 2) for n in range(count)]
    notes.append(Seen(at_s=START_S + count, failed=1, error="Timeout: no"))
    path = folder / USERS_FILE
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in reversed(notes)))
    return path


def test_the_stable_channel_is_told_by_its_moves_and_a_held_version_moves_nothing(tmp_path: Path) -> None:
    found = traffic_values(watched(), seen(tmp_path, 1200), "held-out")
    assert found["stable"] == [[2.0, 1, 0.3], [6.0, 32, 0.8], [7.0, 1, 0.3], [8.0, 32, 0.8]]
    assert (found["stable_first"], found["stable_last"], found["held"]) == (0.3, 0.8, 1)


def test_what_failed_for_a_user_is_what_is_reported_as_failed(tmp_path: Path) -> None:
    found = traffic_values(watched(), seen(tmp_path, 1200), "held-out")
    assert (found["requests_failed"], found["errors_seen"], found["answers"]) == (1, ["Timeout: no"], 1200)
    assert (found["users_right_first"], found["users_right_last"]) == (0.0, 1.0)
    rows = traffic_rows(found)
    assert rows["what users saw"] == "0.0% → 100.0% right, of 1,200 answers"
    assert traffic_values(watch_of(), tmp_path / "none", "held-out")["users_right_last"] is None


def test_what_was_trained_is_as_old_as_it_was_on_average_over_the_run(tmp_path: Path) -> None:
    reports = [Progress(role="train", instance="train/1", gauges={"live/staleness_mean": age}) for age in (10.0, 30.0)]
    found = traffic_values(watch_of(*enumerate(reports)), tmp_path / "none", "held-out")
    assert found["live_staleness_mean"] == 20.0


def test_users_notes_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    points = windows([one for one in read_seen(seen(tmp_path, 2 * WINDOW)) if one.version >= 0], START_S)
    assert [at_s for at_s, _ in points] == [WINDOW - 1.0, 2 * WINDOW - 1.0]


def test_the_picture_can_be_drawn_of_any_run(tmp_path: Path) -> None:
    for number, watch in enumerate((watched(), watch_of())):
        if number == 0:
            seen(tmp_path, 600)
        values = {"measure": "held-out accuracy"}
        draw_traffic(watch, values, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 10_000


def test_nothing_but_the_warm_up_is_given_and_explorers_answer_evals_alone(tmp_path: Path) -> None:
    found = load_settings(write_settings(DemoOptions(directory=tmp_path, **OPTIONS)))  # type: ignore[arg-type]
    lanes = found.trainer.lanes
    assert {name: lane.weight for name, lane in lanes.items()} == {"live": 1.0, "expert": 0.0}
    assert found.master.split not in ("train", *(one.suite for one in found.master.evals))
    assert found.gateway is not None and found.gateway.channel == "stable" and found.reward.require == ("user",)
    assert "exact" not in found.reward.blend, "nobody knows the right answer in production"


def test_the_users_key_is_in_their_environment_and_in_no_argument(tmp_path: Path) -> None:
    config = write_settings(DemoOptions(directory=tmp_path, **OPTIONS))  # type: ignore[arg-type]
    settings = load_settings(config, ("gateway.listen=127.0.0.1:9000",))
    child = users_child(settings, 1.0)
    key = child.env["HEADRACE_KEY"]
    assert key.startswith("hr-") and not any(key in argument for argument in child.argv)
    assert "http://127.0.0.1:9000/v1" in child.argv
    assert "serve" in {one.name for one in children(settings, config)}
