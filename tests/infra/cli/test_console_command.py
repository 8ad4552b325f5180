"""`headrace console` and its part of `headrace up`: where it listens, when its link is printed, and how it ends."""

import asyncio
import io
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from rich.console import Console as Screen

from infra.cli.connect import connected
from infra.cli.options import SettingsFile
from infra.cli.run.up import console_child, index_child, say_when
from infra.cli.settings import Settings, load_settings
from infra.ledger.archive import writing
from infra.ledger.bundle import Bundle
from infra.local.http_server import bound
from infra.log.log import Log
from infra.store.store import Store
from schemas import Block, DropMarker, topics
from schemas.errors import ConfigError
from tests.infra.cli.console_rig import BROKER_TOML, browser, console, form_token, live, page_text

SIGNALS = (signal.SIGINT, signal.SIGTERM)
MOMENTS = 20
HANGS_S = 120.0


def archive_in(folder: Path) -> Path:
    file = folder / "run.archive"
    with writing(file) as archive:
        archive.finish(Bundle(app="t", settings={"app": "t", "policy": {"model": "x/y"}}))
    return file


# Without the command's idle time, which a busy machine has none of.
PROGRAM = """
import asyncio, pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # as `main` does: a shell may have it ignored
print("began", file=sys.stderr, flush=True)
from infra.cli.console.serve import run_console
from infra.cli.options import SettingsFile
sys.exit(asyncio.run(run_console(SettingsFile(pathlib.Path(sys.argv[1])), "127.0.0.1:0")))
"""


def started(file: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PROGRAM, str(file)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.slow
def test_a_console_ends_whenever_in_its_start_a_signal_comes(tmp_path: Path) -> None:
    file = archive_in(tmp_path)
    began_s = time.monotonic()
    with started(file) as console:
        assert console.stderr is not None
        link = next(line.split()[1] for line in console.stderr if line.startswith("console http"))
        assert httpx.get(link, follow_redirects=True, timeout=60).status_code == 200
        start_s = time.monotonic() - began_s
        console.send_signal(signal.SIGINT)
        console.communicate(timeout=HANGS_S)
    assert console.returncode == 0
    for moment in range(MOMENTS):
        number = SIGNALS[moment % 2]
        with started(file) as console:
            assert console.stderr is not None and console.stderr.readline() == "began\n"
            time.sleep(1.1 * start_s * moment / MOMENTS)
            console.send_signal(number)
            try:
                _, said = console.communicate(timeout=HANGS_S)
            finally:
                console.kill()
        # By the signal itself where it came before there was anything to end.
        assert console.returncode in (0, 130, -number), f"moment {moment}: {console.returncode}: {said}"


def test_a_port_that_is_taken_is_said_with_the_setting_that_names_another() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf'console.listen: cannot listen on "{address}"'):
            bound(address, "console.listen")


async def test_up_prints_the_link_once_the_console_listens_and_not_before(tmp_path: Path) -> None:
    out = io.StringIO()
    ready = tmp_path / "console.ready"
    saying = asyncio.create_task(say_when(ready, "console http://127.0.0.1:8400/enter?link=a", Screen(file=out)))
    await asyncio.sleep(0.05)
    assert not out.getvalue()
    ready.touch()
    async with asyncio.timeout(30):
        await saying
    assert "link=a" in out.getvalue()


def test_up_starts_the_console_and_its_link_is_no_argument(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('app = "t"\n[console]\nup = false\n')
    settings = load_settings(file)
    child = console_child(settings, SettingsFile(file, ["a.b=1"]), "a-secret")
    assert child.argv[3:] == ("console", "--config", str(file), "--set", "a.b=1")
    assert "a-secret" not in child.argv and child.env["HEADRACE_CONSOLE_LINK"] == "a-secret"
    assert not settings.console.up
    file.write_text('app = "t"\n')
    assert load_settings(file).console.up
    assert index_child(settings, SettingsFile(file)).argv[3:] == ("trace", "--config", str(file), "--keep-up")


@asynccontextmanager
async def recorded(settings: Settings, store: Store) -> AsyncIterator[Log]:
    """Two answers, one dropped by a rule that is gone."""
    async with connected(settings, create=True) as log:
        await log.create_topics(partitions=1, keep_ms=-1)
        kept, short = live(0, "where is it", "here"), live(1, "and now", "no")
        for answer in (kept, short):
            await log.publish(topics.EXPERIENCES, Block((answer,)))
        await log.publish(topics.VERIFIED, Block((kept,)))
        marker = DropMarker(
            id=short.id,
            group=short.group,
            episode=0,
            group_size=1,
            reason="too short",
            stage="verify",
            processor="mine@1",
        )
        await log.publish(topics.VERIFIED, marker)
        yield log


@pytest.mark.slow
def test_other_rules_are_compared_with_what_is_on_record_and_nothing_is_written(kafka: str) -> None:
    toml = BROKER_TOML.format(app=uuid4().hex[:12], kafka=kafka)
    with console(toml, recorded) as here, browser(here, "operate") as client:
        form = {"token": form_token(client, "/data"), "stage": "verify", "from": "beginning"}
        page = page_text(client.post("/actions/reprocess", data=form, timeout=120))
        assert "Stage verify once more" in page and "Not as recorded." in page
        assert "no longer dropped too short 1" in page and "too short kept" in page
        assert "and now" in client.get("/answers?fate=too+short").text, "what is on record stays"
