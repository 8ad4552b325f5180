"""Measures the first start of a console on an old log: what its pages take while the index is being built beside them.

The log holds no memory: its records are made when they are read (`made_log`). The index is built as a console over a broker
builds it, by a process of its own in idle time:

    python -m infra.cli.bench.looking.console_first STATE EXPERIENCES      until its input ends
"""

import asyncio
import http.client
import re
import subprocess
import sys
import time
from pathlib import Path

from infra.cli.bench.common.made_log import APP, MadeBus
from infra.cli.console.keeping import keep
from infra.cli.settings import Settings
from infra.local.idle_time import take_idle_time
from infra.log.log import Log
from infra.store.memory import MemoryStore

LINK = "bench"
LOOKS = 20  # at each page
PAUSE_S = 1.0  # between two rounds
PAGES = ("/?fragment=1", "/answers", "/learning", "/data", "/versions", "/answers/hr-add-1.1.0-0-0")
IN_WORDS = re.compile(r"being built: ([\d,]+) of ([\d,]+) records")


def first_start(folder: Path, experiences: int, looks: int = LOOKS) -> dict[str, float]:
    """Seconds to the first page, and of all pages while the index was built the median and the longest; MB of the process."""
    folder.mkdir()
    began_s = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "infra.cli.bench.looking.console", str(folder), str(experiences)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        client = http.client.HTTPConnection("127.0.0.1", int(child.stdout.readline()), timeout=120)
        figures = {"old_log_started_s": time.perf_counter() - began_s} | asked(client, looks)
        status = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii")
        return figures | {"old_log_memory_mb": int(status.partition("VmHWM:")[2].split()[0]) / 1024}
    finally:
        child.terminate()
        child.wait(timeout=60)


def asked(client: http.client.HTTPConnection, looks: int) -> dict[str, float]:
    """The first page and all others, again and again. old_log_records_read: when the last of them was asked for."""
    client.request("GET", f"/enter?link={LINK}")
    answer = client.getresponse()
    answer.read()
    cookie = str(answer.headers["set-cookie"]).partition(";")[0]

    def get(path: str) -> tuple[float, str]:
        asked_s = time.perf_counter()
        client.request("GET", path, headers={"cookie": cookie})
        text = client.getresponse().read().decode("utf-8", "replace")
        return time.perf_counter() - asked_s, text

    figures = {"old_log_first_page_s": get("/")[0]}
    took: list[float] = []
    read = held = 0.0
    for look in range(looks):
        time.sleep(PAUSE_S if look else 0.0)
        for path in PAGES:
            took_s, page = get(path)
            took.append(took_s)
            if found := IN_WORDS.search(page):
                read, held = (float(number.replace(",", "")) for number in found.groups())
    took.sort()
    return figures | {
        "old_log_page_s_p50": took[len(took) // 2], "old_log_page_s_p95": took[len(took) * 95 // 100],
        "old_log_page_s_max": took[-1], "old_log_records": held, "old_log_records_read": read,
    }  # fmt: skip


def keeper(state: Path, experiences: int) -> tuple[str, ...]:
    """What starts the process that builds the index."""
    return (sys.executable, "-m", "infra.cli.bench.looking.console_first", str(state), str(experiences))


def main(state: Path, experiences: int) -> None:
    """That process."""
    take_idle_time()
    settings = Settings(app=APP, folder=state.parent)
    asyncio.run(keep(state, settings, Log(MadeBus(experiences), APP, store=MemoryStore())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
