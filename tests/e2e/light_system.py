"""All roles as processes around a broker, as light as they get: a model of one layer, the torch engine, short answers.

What runs a role is a checkout of its own, so that releases can be mixed. Its words and its exit code are kept; what it
started ends with it, and it ends with this process.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import msgspec

from actors.gateway.access.keys import create_key
from infra.cli.demo.char_model import Size, build_char_model
from infra.cli.run.up import child_environment
from infra.cli.settings import load_settings
from infra.ledger.account import audit
from infra.local.process import Watched, start_watched
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.store.directory import DirectoryStore
from schemas import Block, PolicyEvent, Progress, topics
from schemas.topics import Topic
from tests.actors.rig import until
from tests.e2e.crash_ledger import Fates, LiveLedger
from tests.e2e.users import UserCrowd

REPOSITORY = Path(__file__).parents[2]
STARTS_S = 120.0
WAITS_S = 120.0
STOPS_S = 60.0
# Two answers of an untrained model differ in whether they are odd, so there is something to learn. An episode waits for its
# world a while, as real ones do, so that a few of them at a time leave the cores to others.
PLUGIN = '''
import asyncio
from headrace import Experience, score

@score(version=1, inline=True)
def odd(experience: Experience) -> float:
    """1 where the characters add up to an odd number."""
    return float(sum(map(ord, experience.response)) % 2)

async def unhurried(task, session):
    """Wait, and ask once."""
    await asyncio.sleep(1.0)
    await session.reply(task.messages)
    return ()
'''
SETTINGS = """
app = "{app}"
plugins = ["plugins"]
[kafka]
bootstrap_servers = "{bootstrap}"
partitions = 2
[policy]
model = "model"
[pacing]
groups_per_step = 8
reissue_s = 10.0
[engine]
use = "actors.engines.torch:TorchEngine"
options = {{ max_sequences = 32, threads = 1, dtype = "{dtype}" }}
[explore]
workflow = "light:unhurried"
episodes_in_flight = 8
[master]
num_episodes = 2
max_tokens = 6
[gateway]
listen = "127.0.0.1:0"
train_on = "consented"
[gateway.limits]
max_tokens = 6
[[feedback]]
name = "user"
use = "streams.sources.received:rating"
from = {{ webhook = "/v1/feedback" }}
window = "3s"
[[score]]
name = "odd"
use = "light:odd"
[reward]
blend = {{ odd = 1.0, user = 1.0 }}
[collect]
deadline_s = 60.0
[trainer]
learning_rate = 1e-6
checkpoint_every = 10
dtype = "{dtype}"
tensorboard = ""
[trainer.lanes]
usual = {{ loss = "dppo" }}
live = {{ loss = "dppo", optional = true }}
"""


def prepare(folder: Path, bootstrap: str, *, app: str, dtype: str) -> str:
    """Settings, plugin, model and tasks; returns a key of a user's. dtype: of the weights that are published."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "headrace.toml").write_text(SETTINGS.format(bootstrap=bootstrap, app=app, dtype=dtype))
    (folder / "plugins").mkdir()
    (folder / "plugins" / "light.py").write_text(PLUGIN)
    build_char_model(folder / "model", seed=3, size=Size(hidden=32, layers=1))
    rows = ({"id": f"add-{a}-{b}", "prompt": f"{a}+{b}="} for a in range(40) for b in range(40))
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = DirectoryStore(folder / "store")
    return create_key(store, tenant="acme", scopes=("serve", "feedback"), train="yes", rpm=0, tpm=0)[1]


class Running(msgspec.Struct, eq=False):
    """A role that was started. log: what it says, of it alone. pid: of the role itself, url: of a gateway, once it works."""

    role: str
    watched: Watched
    log: Path
    pid: int = 0
    url: str = ""

    def said(self, pattern: str) -> str:
        """What the group of a pattern holds in its log, "" where that is not there yet."""
        found = re.search(pattern, self.log.read_text(errors="replace"), re.MULTILINE)
        return found[1] if found else ""


class Fleet:
    """The processes of one folder. Also a context manager: leaving it kills what is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "headrace.toml"
        self.running: list[Running] = []
        self._started: Counter[str] = Counter()
        self._environment = child_environment(load_settings(self.config))

    def start(self, tree: Path, role: str) -> Running:
        """A role, by the code of a checkout."""
        self._started[role] += 1
        log = self.folder / "logs" / f"{role}-{self._started[role]}.log"
        watched = start_watched(_command(role, config=self.config), log=log, env=self._of(tree), cwd=tree)
        self.running.append(Running(role, watched, log))
        return self.running[-1]

    def call(self, tree: Path, *arguments: str, config: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """A command, to its end. config: other settings."""
        return subprocess.run(
            _command(*arguments, config=config or self.config),
            cwd=tree,
            env={**os.environ, **self._of(tree)},
            capture_output=True,
            text=True,
            timeout=STARTS_S,
        )

    async def stop(self, one: Running) -> int:
        """As an operator does it; returns the exit code. Raises TimeoutExpired."""
        one.watched.process.terminate()
        code = await asyncio.to_thread(one.watched.process.wait, STOPS_S)
        self._end(one)
        return code

    async def kill(self, one: Running) -> None:
        """As a crash does it."""
        await asyncio.to_thread(self._end, one)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for item in tuple(self.running):
            self._end(item)

    def _end(self, one: Running) -> None:
        self.running.remove(one)
        one.watched.kill_group()
        one.watched.process.wait()
        one.watched.release()

    def _of(self, tree: Path) -> dict[str, str]:
        return {**self._environment, "PYTHONPATH": f"{tree}:{tree / 'infra' / 'sdk'}"}


def _command(*arguments: str, config: Path) -> list[str]:
    return [sys.executable, "-m", "infra.cli.main", *arguments, "-c", str(config)]


class LightSystem:
    """The roles, the users and the ledgers of one folder, in one event loop. published: versions, in the log's order."""

    def __init__(self, log: Log, fleet: Fleet, users: UserCrowd) -> None:
        self.log, self.fleet, self.users = log, fleet, users
        self.ledger = LiveLedger(log, fleet.folder / "acknowledged.txt")
        self.published: list[int] = []
        self.reading: asyncio.Task[None] | None = None  # of the ledger
        self._reports: dict[str, Progress] = {}  # the newest by instance, such as train/host-3/417

    async def follow(self, topic: Topic) -> None:
        """What the roles say of themselves, until cancelled; a release of before says it in `progress`."""
        async for message in self.log.tail(topic, "beginning"):
            if isinstance(message.value, Progress):
                self._reports["/".join(message.value.instance.split("/")[:3])] = message.value

    async def follow_versions(self) -> None:
        """What the trainer publishes, until cancelled."""
        async for message in self.log.tail(topics.POLICIES, "beginning"):
            if isinstance(message.value, PolicyEvent) and message.value.event == "published":
                self.published.append(message.value.version)

    async def start(self, tree: Path, role: str) -> Running:
        """A role; returns once it works. Users learn of a gateway."""
        one = self.fleet.start(tree, role)

        def works() -> bool:
            code = one.watched.process.poll()
            assert code is None, f"{role} ended with {code}: {one.log.read_text()[-3000:]}"
            one.pid = one.pid or int(one.said(r"started role=\S+ pid=(\d+)") or 0)
            if role == "serve":
                one.url = one.said(r"^serving (http://\S+)/v1$")
                return bool(one.url)
            report = self._report_of(one)
            return report is not None and report.life == "working"

        await until(works, seconds=STARTS_S)
        if one.url:
            self.users.gateways.append(one.url)
        return one

    async def stop(self, one: Running) -> int:
        """End a role. A gateway is taken out of the balancer first, and has accepted then who was sent to it before."""
        if one.url:
            self.users.gateways.remove(one.url)
            await self.users.look(one.url)
        return await self.fleet.stop(one)

    async def kill(self, one: Running) -> None:
        """As a crash ends a role; the balancer sees it at once."""
        if one.url:
            self.users.gateways.remove(one.url)
        await self.fleet.kill(one)

    async def stop_all(self) -> dict[str, int]:
        """End everything; exit codes by role where they are not 0. All that was written has been read then."""
        ending = tuple(self.fleet.running)
        codes = await asyncio.gather(*(self.stop(item) for item in ending))
        self.ledger.finish()
        assert self.reading is not None
        await self.reading
        return {one.role: code for one, code in zip(ending, codes, strict=True) if code}

    async def learned(self, more: int) -> int:
        """Until so many more versions are out; the newest."""
        wanted = len(self.published) + more
        await until(lambda: len(self.published) >= wanted, seconds=WAITS_S)
        return self.published[-1]

    async def taken(self, version: int) -> None:
        """Until all engines that run hold this version or a newer one."""
        engines = [item for item in self.fleet.running if item.role in ("explore", "serve")]

        def hold() -> bool:
            reports = [self._report_of(engine) for engine in engines]
            return all(report is not None and report.version >= version for report in reports)

        await until(hold, seconds=WAITS_S)

    def _report_of(self, one: Running) -> Progress | None:
        ending = f"/{one.pid}"
        return next((report for name, report in self._reports.items() if name.endswith(ending)), None)

    async def judged(self) -> dict[str, object]:
        """Once every role has ended and the ledger is complete: what became of what users hold, and of all that was stored."""
        account = await audit(self.log, self.log.app)
        fates = await Fates.read(self.log, max_staleness=2)
        stored = Counter([name async for name in self._answers()])
        return {
            "asked": self.users.asked,
            "failed": self.users.failed,
            "cut_off": self.users.cut_off,
            "answers_lost": len(self.users.held - stored.keys()),
            "answers_stored_twice": sum(stored[name] > 1 for name in self.users.held),
            "acknowledged": len(self.ledger.acknowledged),
            "lost": len(fates.lost(self.ledger.acknowledged, set(account.pending_ids))),
            "trained_twice": len(fates.trained_twice()),
            "pending": account.pending,
            "trained": account.trained,
            "steps": fates.steps,
            "versions": len(self.published),
            "audit_clean": account.is_clean,
        }

    async def _answers(self) -> AsyncIterator[str]:
        async for message in self.log.read_all(topics.EXPERIENCES):
            if isinstance(message.value, Block):
                for experience in message.value.experiences:
                    yield experience.id


@asynccontextmanager
async def opened(bootstrap: str, app: str, fleet: Fleet, key: str) -> AsyncIterator[LightSystem]:
    """The system around a log; its ledger is kept up to date until `stop_all`, its reports until the end of the block."""
    bus = KafkaBus(bootstrap)
    await bus.start()
    try:
        async with UserCrowd(key) as users, asyncio.TaskGroup() as group:
            system = LightSystem(Log(bus, app, store=DirectoryStore(fleet.folder / "store")), fleet, users)
            system.reading = group.create_task(system.ledger.follow())
            said = (system.follow(topics.REPORTS), system.follow(topics.PROGRESS), system.follow_versions())
            following = [group.create_task(item) for item in said]
            yield system
            for task in following:
                task.cancel()
    finally:
        await bus.close()
