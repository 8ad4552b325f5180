"""What the demo says where nothing is drawn, and at its end."""

import asyncio
import io
from pathlib import Path

from rich.console import Console

from infra.cli.demo.report import DemoReport
from infra.cli.demo.screen import DemoScreen, progress_line
from infra.cli.demo.settings import DemoOptions
from infra.cli.demo.watch import Watch
from infra.cli.main import app
from infra.cli.settings import Settings
from schemas import Progress


def test_a_demo_without_a_terminal_says_every_few_seconds_how_far_it_is(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    watch = Watch(started_s=0.0, phase="warming up")
    watch.reports["train/1"] = Progress(
        role="train", instance="train/1", counters={"steps": 12.0, "experiences_trained": 3000.0}
    )
    watch.accuracy["held-out"] = {0: 0.0, 8: 0.284}

    async def main() -> None:
        with DemoScreen(
            console, watch, Settings(app="demo", folder=tmp_path), DemoOptions(directory=tmp_path), tell_s=0.01
        ):
            while told() < 2:  # noqa: ASYNC110 (the screen prints, and tells nobody)
                await asyncio.sleep(0.01)

    def told() -> int:
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().count(
            "warming up: 12 steps, 3,000 experiences trained, no version yet; held-out 28.4% at v8"
        )

    asyncio.run(asyncio.wait_for(main(), 30))
    assert "s  warming up" in progress_line(watch)


VALUES = {
    "measure": "held-out accuracy", "accuracy_start": 0.0, "accuracy_after_sft": 0.284, "accuracy_final": 0.956,
    "wall_s": 217.0, "startup_s": 53.0, "steps": 143, "warmup_steps": 275, "policy_versions": 145,
    "experiences_published": 80_188, "experiences_trained": 75_184, "dropped": {"all rewards equal": 4704}, "pending": 0,
    "staleness_mean": 1.5, "staleness_p95": 2, "staleness_max": 2, "mismatch_abs_max": 1e-5, "reload_pause_ms_p50": 85.0,
    "reload_pause_ms_p95": 179.0, "reload_kv": "keep", "publish_to_serving_ms_p95": 581.0, "requests_failed": 0,
    "rollout_tokens_per_s": 2733.0, "explorer_idle_share": 0.09, "trainer_idle_share": 0.28, "peak_rss_mb": {"kafka": 350.0},
}  # fmt: skip


def test_a_demo_ends_by_naming_the_console_with_a_command_that_there_is(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=400)
    settings = Settings(app="demo", folder=tmp_path)
    DemoScreen(console, Watch(started_s=0.0), settings, DemoOptions(directory=tmp_path)).print_result(
        DemoReport(VALUES)
    )
    assert isinstance(console.file, io.StringIO)
    *_, named, why = console.file.getvalue().strip().splitlines()
    assert named.strip() == f"headrace console -c {tmp_path / 'headrace.toml'}" and "in the browser" in why
    assert "console" in [one.callback.__name__ for one in app.registered_commands if one.callback is not None]
