"""Running `headrace demo` as a person would, and reading its log afterwards without headrace's own bookkeeping."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.local.broker import EmbeddedKafka
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from schemas import Batch, Block, topics

LIMIT_S = 400.0


def run_demo(
    folder: Path, *arguments: str, meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None
) -> dict[str, Any]:
    """Run the demo's toy to its end and return its report, which is all it prints; `meanwhile` is called while it runs."""
    argv = ["demo", "--task", "add", "--json", "--dir", str(folder), *arguments]
    printed, said = (folder.parent / f"{folder.name}.{end}" for end in ("out", "err"))
    with printed.open("wb") as output, said.open("wb") as errors:
        process = subprocess.Popen([sys.executable, "-m", "infra.cli.main", *argv], stdout=output, stderr=errors)
        try:
            if meanwhile is not None:
                meanwhile(process)
            code = process.wait(timeout=LIMIT_S)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
    assert code == 0, said.read_text()[-2000:] + last_words(folder)
    report: dict[str, Any] = json.loads(printed.read_text())
    return report


def last_words(folder: Path) -> str:
    """The ends of all role logs, for a failed run."""
    return "".join(
        f"\n== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in sorted(folder.glob("logs/*.log"))
    )


def role_pid(folder: Path, role: str) -> int | None:
    """Process id of a role of the demo in `folder`, found as `ps` would."""
    wanted = f"infra.cli.main {role} --config {folder}" if role != "kafka" else f"kafka.Kafka {folder}"
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if wanted in words and "parent_watch" not in words:
                return int(entry.name)
    return None


def wait_for(condition: Callable[[], bool], what: str, deadline_s: float = 180.0) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {deadline_s} s"
        time.sleep(0.1)


class OwnLedger:
    """What a reader that knows nothing of the audit sees in the log: acknowledged ids, and how often each was trained."""

    def __init__(self, folder: Path) -> None:
        self.acknowledged: set[str] = set()
        self.trained: Counter[tuple[str, int, int]] = Counter()
        self.stale_tokens = 0
        with EmbeddedKafka(folder / "kafka") as broker:
            asyncio.run(self._read(broker.bootstrap))

    async def _read(self, bootstrap: str) -> None:
        bus = KafkaBus(bootstrap)
        await bus.start()
        log = Log(bus, "demo")
        try:
            for topic in (topics.EXPERIENCES, topics.EXPERTS):
                async for message in log.read_all(topic):
                    assert isinstance(message.value, Block)
                    self.acknowledged |= {
                        experience.id for experience in message.value.experiences if not experience.suite
                    }
            async for message in log.read_all(topics.BATCHES):
                if isinstance(message.value, Batch):
                    for item in message.value.items:
                        self.trained[item.id, item.revision, item.use] += 1
                        self.stale_tokens += item.lane == "usual" and message.value.version - item.min_version > 2
        finally:
            await bus.close()
