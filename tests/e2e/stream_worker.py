"""A stream worker as a process, for tests that kill it.

python -m tests.e2e.stream_worker BOOTSTRAP APP FOLDER [DEADLINE_S [STATE]]     STATE: its own disk, by default below FOLDER
"""

import asyncio
import logging
import signal
import sys
from pathlib import Path

from infra.log.access import kafka_access
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.settings.config import Floor, Kafka
from infra.store.directory import DirectoryStore
from schemas.errors import HeadraceError
from streams.config import CollectConfig, FilterConfig, ScoreConfig, StreamsConfig, Switch, VerifyConfig
from streams.hosted import BrokerLogin
from streams.worker import run_worker
from tests.role import role_of


def worker_config() -> StreamsConfig:
    """What the tests run: exact scores, answers under two tokens dropped, equal groups kept."""
    return StreamsConfig(
        score=(ScoreConfig(name="exact", use="streams.scores.exact:exact"),),
        verify=VerifyConfig(filter=FilterConfig(min_tokens=2)),
        collect=CollectConfig(deadline_s=3600, difficulty=Switch(on=False), snapshot_s=1.0),
    )


async def work(bootstrap: str, app: str, folder: Path, deadline_s: float, state: Path | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    floor = Floor(app=app, kafka=Kafka(bootstrap_servers=bootstrap, deadline_s=deadline_s), folder=folder)
    store, bus = DirectoryStore(folder / "store"), KafkaBus(bootstrap, deadline_s=deadline_s)
    log = Log(bus, app, store=store)
    try:
        await bus.start()
        await log.require_topics()
        role = role_of("process", floor, log, store, stop=stop)
        await run_worker(role, worker_config(), BrokerLogin(bootstrap, kafka_access(floor)), state_folder=state)
    finally:
        await bus.close()


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(name)s %(message)s")
    try:
        bootstrap, app, folder, *more = sys.argv[1:]
        state = Path(more[1]) if len(more) > 1 else None
        asyncio.run(work(bootstrap, app, Path(folder), float(more[0]) if more else 20.0, state))
    except HeadraceError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
