"""What the console says of versions begins at a summary: an old one is looked up when somebody opens it."""

import asyncio
from pathlib import Path

from infra.cli.console.keeping import IndexState
from infra.cli.console.reading import Reading
from infra.cli.govern.words import RECENT
from infra.cli.settings import load_settings
from tests.infra.cli.console_rig import TOML
from tests.infra.cli.test_channel_history import long_log
from tests.starts import CountingBus

LONG = RECENT + 1000
WAIT_S = 60.0


def test_the_console_reads_what_is_recent_of_a_long_log_and_looks_an_old_version_up(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text(TOML)

    async def main() -> None:
        log = await long_log(CountingBus(), LONG)
        reading = Reading(load_settings(tmp_path / "headrace.toml"), log, tmp_path, IndexState(), asyncio.Event())
        history = await reading.history()
        assert not history.is_whole and history.stable.version == 7
        assert history.events[-1][1].event == "promoted" and len(history.events) < LONG
        new = await reading.history_of(LONG - 1, WAIT_S)
        assert new is history
        old = await reading.history_of(7, WAIT_S)
        assert [one.event for _, one in old.events if one.version == 7] == ["published", "promoted"]
        await reading.close()

    asyncio.run(main())
