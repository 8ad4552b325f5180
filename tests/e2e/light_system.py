"""All roles as processes around a broker, as light as they get: a model of one layer, the torch engine, short answers.

What runs a role is a checkout of its own, so that releases can be mixed. Users ask at the gateways as through a balancer: one
that accepts no connection is passed over for the next, and nothing else is tried again.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec

from actors.gateway.access.keys import create_key
from infra.cli.demo.char_model import Size, build_char_model
from infra.cli.settings import load_settings
from infra.cli.up import child_environment
from infra.ledger.audit import audit
from infra.local.address import choose_address
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.store.directory import DirectoryStore
from schemas import PolicyEvent, Progress, topics
from tests.e2e.crash_ledger import Fates, LiveLedger
from tests.e2e.crash_loop import NOT_YET

REPOSITORY = Path(__file__).parents[2]
WORKS_S = 240.0
ASK_S = 30.0
BODY = {"model": "main", "messages": [{"role": "user", "content": "37+45="}], "max_tokens": 6}
SETTINGS = """
app = "{app}"
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
options = {{ max_sequences = 32 }}
[explore]
episodes_in_flight = 16
report_s = 0.5
[master]
num_episodes = 2
max_tokens = 6
report_s = 0.5
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
name = "exact"
use = "streams.scores.exact:exact"
[reward]
blend = {{ exact = 1.0, user = 1.0 }}
[collect]
deadline_s = 60.0
[trainer]
learning_rate = 1e-5
checkpoint_every = 5
tensorboard = ""
version_every = "3s"
[trainer.lanes]
usual = {{ loss = "dppo", optional = true }}
live = {{ loss = "dppo", least = 8, optional = true }}
"""


def prepare(folder: Path, bootstrap: str, *, app: str) -> str:
    """Settings, model and tasks; returns a key of a user's."""
    (folder / "headrace.toml").write_text(SETTINGS.format(bootstrap=bootstrap, app=app))
    build_char_model(folder / "model", seed=3, size=Size(hidden=32, layers=1))
    rows = ({"id": f"add-{a}-{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(40) for b in range(40))
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = DirectoryStore(folder / "store")
    return create_key(store, tenant="acme", scopes=("serve", "feedback"), train="yes", rpm=0, tpm=0)[1]


class Fleet:
    """The processes of one folder. Also a context manager: leaving it kills what is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[bytes]] = []
        self._environment = os.environ | child_environment(load_settings(folder / "headrace.toml"))

    def start(self, tree: Path, *arguments: str) -> "subprocess.Popen[bytes]":
        """A role, by the code of a checkout."""
        with (self.folder / f"{arguments[0]}.log").open("ab") as output:
            process = subprocess.Popen(
                self._command(*arguments), cwd=tree, env=self._of(tree), stdout=output, stderr=output
            )
        self.running.append(process)
        return process

    def call(self, tree: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """A command, to its end."""
        return subprocess.run(
            self._command(*arguments), cwd=tree, env=self._of(tree), capture_output=True, text=True, timeout=WORKS_S
        )

    async def stop(self, process: "subprocess.Popen[bytes]") -> int:
        """As an operator does it; returns the exit code. Raises TimeoutExpired."""
        self.running.remove(process)
        process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(process.wait, 60)

    async def kill(self, process: "subprocess.Popen[bytes]") -> None:
        """As a crash does it."""
        self.running.remove(process)
        process.kill()
        await asyncio.to_thread(process.wait)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            process.kill()
            process.wait()

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "infra.cli.main", *arguments, "-c", str(self.folder / "headrace.toml")]

    def _of(self, tree: Path) -> dict[str, str]:
        return {**self._environment, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'infra' / 'sdk'}"}


class Users(msgspec.Struct):
    """Who asks, and what they were told. gateways: addresses, the first that accepts is asked."""

    key: str
    gateways: list[str] = []
    held: set[str] = set()
    failed: list[str] = []
    asked: int = 0
    gone: bool = False

    async def come(self, per_s: float) -> None:
        """Ask, and say of every other answer what it was worth, until they are gone; all that was begun has ended then."""
        async with asyncio.TaskGroup() as group:
            while not self.gone:
                group.create_task(self._visit())
                await asyncio.sleep(1.0 / per_s)

    async def _visit(self) -> None:
        self.asked += 1
        answer = await self._post("/v1/chat/completions", BODY, 200)
        if answer is None:
            return
        self.held.add(answer["id"].removeprefix("hr-"))
        if self.asked % 2:
            await self._post("/v1/feedback", {"answer_id": answer["id"], "value": self.asked % 4 / 2}, 202)

    async def _post(self, path: str, body: object, expected: int) -> "dict[str, str] | None":
        headers = {"authorization": f"Bearer {self.key}"}
        said = "no gateway accepts"
        for gateway in tuple(self.gateways):
            async with httpx.AsyncClient(base_url=gateway, headers=headers, timeout=ASK_S, trust_env=False) as http:
                try:
                    response = await http.post(path, json=body)
                except httpx.ConnectError:  # it takes no more: the next one's turn
                    continue
                except httpx.HTTPError as error:
                    said = repr(error)
                    break
            if response.status_code == expected:
                answer: dict[str, str] = response.json()
                return answer
            said = f"{response.status_code} {response.text[:200]}"
            break
        self.failed.append(f"{path}: {said}")
        return None


class LightSystem:
    """The roles, the users and the ledgers of one folder, in one event loop."""

    def __init__(self, folder: Path, log: Log, fleet: Fleet, users: Users) -> None:
        self.log, self.fleet, self.users = log, fleet, users
        self.ledger = LiveLedger(log, folder / "acknowledged.txt")
        self._states: dict[str, str] = {}  # by instance, such as train/host-3/417
        self._urls: dict[int, str] = {}

    async def follow(self) -> None:
        """What the roles say of themselves, until cancelled."""
        async for message in self.log.tail(topics.PROGRESS, "beginning"):
            if isinstance(message.value, Progress):
                self._states[message.value.instance] = message.value.state

    async def learned(self, versions: int) -> None:
        """Until so many more versions are out."""
        reader = await self.log.assigned(topics.POLICIES, "end")
        try:
            async with asyncio.timeout(WORKS_S):
                while versions > 0:
                    events = [message.value for message in await self.log.read(reader, timeout_s=0.5)]
                    versions -= sum(isinstance(one, PolicyEvent) and one.event == "published" for one in events)
        finally:
            await reader.close()

    async def start(self, tree: Path, role: str) -> "subprocess.Popen[bytes]":
        """A role; returns once it works. A gateway gets a port of its own, and the users learn of it."""
        more: Sequence[str] = ()
        url = ""
        if role == "serve":
            address = choose_address().bootstrap
            url, more = f"http://{address}", ("--set", f"gateway.listen={address}")
        process = self.fleet.start(tree, role, *more)
        async with asyncio.timeout(WORKS_S):
            while not await self._works(process, url):
                assert process.poll() is None, (self.fleet.folder / f"{role}.log").read_text()[-3000:]
                await asyncio.sleep(0.1)
        if url:
            self._urls[process.pid] = url
            self.users.gateways.append(url)
        return process

    async def stop(self, process: "subprocess.Popen[bytes]") -> int:
        """End a role; a gateway goes on for what it has begun, and balancers pass it over."""
        code = await self.fleet.stop(process)
        if url := self._urls.pop(process.pid, ""):
            self.users.gateways.remove(url)
        return code

    async def kill(self, process: "subprocess.Popen[bytes]") -> None:
        """As a crash ends a role."""
        if url := self._urls.pop(process.pid, ""):
            self.users.gateways.remove(url)
        await self.fleet.kill(process)

    async def stop_all(self) -> None:
        """End everything: who writes first, then who reads it."""
        self.ledger.finish()
        while self.fleet.running:
            await self.stop(self.fleet.running[-1])

    async def _works(self, process: "subprocess.Popen[bytes]", url: str) -> bool:
        if not url:
            own = f"/{process.pid}"
            return any(name.endswith(own) and state not in NOT_YET for name, state in self._states.items())
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            try:
                return (await http.get("/healthz")).status_code == 200
            except httpx.TransportError:
                return False

    async def judged(self) -> dict[str, object]:
        """Once every role has ended: what became of what the users hold, and of all that was stored."""
        account = await audit(self.log, self.log.app)
        fates = await Fates.read(self.log, max_staleness=2)
        pending = set(account.pending_ids)
        return {
            "asked": self.users.asked,
            "failed": self.users.failed,
            "answers_lost": len(self.users.held - fates.published),
            "lost": len(fates.lost(self.ledger.acknowledged, pending)),
            "trained_twice": len(fates.trained_twice()),
            "pending": account.pending,
            "trained": account.trained,
            "steps": fates.steps,
            "audit_clean": account.is_clean,
        }


@asynccontextmanager
async def opened(folder: Path, bootstrap: str, app: str, fleet: Fleet, users: Users) -> AsyncIterator[LightSystem]:
    """The system around a log, its ledger kept up to date for the length of the block."""
    bus = KafkaBus(bootstrap)
    await bus.start()
    system = LightSystem(folder, Log(bus, app, store=DirectoryStore(folder / "store")), fleet, users)
    following = [asyncio.create_task(system.follow()), asyncio.create_task(system.ledger.follow())]
    try:
        yield system
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await bus.close()
