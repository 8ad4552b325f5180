"""The worker of one stage, as `headrace process` runs it, for the benchmark of hops.

python -m infra.cli.bench.records.hop_worker BOOTSTRAP STAGE APP FOLDER
"""

import asyncio
import sys
from pathlib import Path
from typing import cast

from infra.cli.bench.peers.plain import StageName
from streams.config import ScoreConfig, StreamsConfig

CONFIG = StreamsConfig(score=(ScoreConfig(name="exact", use="streams.scores.exact:exact"),))


async def run(bootstrap: str, stage: StageName, app: str, folder: Path) -> None:
    """One stage of an app, for ever."""
    from infra.log.access import PLAINTEXT
    from infra.log.kafka import KafkaBus
    from infra.log.log import Log
    from infra.observe.metrics import Metrics
    from infra.roles.role import Role, instance_of
    from infra.settings.config import Floor
    from infra.store.directory import DirectoryStore
    from streams.app import run_worker
    from streams.stages.hosted import BrokerLogin

    bus = KafkaBus(bootstrap)
    await bus.start()
    store = DirectoryStore(folder / "store")
    role = Role(
        floor=Floor(app=app, folder=folder),
        log=Log(bus, app, store=store),
        store=store,
        metrics=Metrics("process"),
        stop=asyncio.Event(),
        instance=instance_of("process"),
    )
    await run_worker(role, CONFIG, BrokerLogin(bootstrap, PLAINTEXT), stages=(stage,))


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], cast(StageName, sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
