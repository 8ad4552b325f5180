"""What the demo says where nothing is drawn, and at its end."""

import asyncio
import io
from pathlib import Path

from rich.console import Console

from infra.cli.demo.screen import DemoScreen, progress_line
from infra.cli.demo.settings import DemoOptions
from infra.cli.demo.watch import Watch
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
            "warming up: 12 steps, 3,000 experiences trained, v-1; held-out 28.4% at v8"
        )

    asyncio.run(asyncio.wait_for(main(), 30))
    assert "s  warming up" in progress_line(watch)
