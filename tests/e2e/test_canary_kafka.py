"""A stable and a canary `headrace serve` on a real broker: people's words end two trials, and a kill costs no answer."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from string import Template
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
from typer.testing import CliRunner

from actors.engines.scripted import TENSOR
from actors.gateway.access.keys import create_key
from actors.gateway.http.canary import position_in_trial
from infra.cli.demo.char_model import build_char_model
from infra.cli.main import app
from infra.cli.run.up import child_environment
from infra.cli.settings import load_settings
from infra.local.broker import choose_address
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor, from_numpy, save_tensors
from infra.store.directory import DirectoryStore
from infra.store.seal import SECRET
from schemas import PolicyEvent
from schemas.fields import Channel
from schemas.ids import keyed_session
from schemas.topics import POLICIES

pytestmark = pytest.mark.full

SHARE = 0.5
APP_SECRET = b"known here, so that sessions can be drawn"
TENANT = "acme"
ASK: Any = [{"role": "user", "content": "37+45="}]
Likes = Callable[[int], bool]


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A role for the length of a block, in the environment `up` gives it, ended with SIGTERM."""
    command = [sys.executable, "-m", "infra.cli.main", *arguments, "-c", str(folder / "headrace.toml")]
    environment = os.environ | child_environment(load_settings(folder / "headrace.toml"))
    with (folder / f"{arguments[0]}.log").open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def table_of(version: int) -> dict[str, Tensor]:
    """Weights of a version: a bigram table over the demo's characters."""
    return {TENSOR: from_numpy(np.random.default_rng(version).normal(size=(128, 128)).astype(np.float32))}


class Visit(msgspec.Struct, frozen=True):
    """One session of one customer: the versions that answered its two turns."""

    session: str
    versions: tuple[int, int]


class TwoGateways(msgspec.Struct, frozen=True):
    """Two gateways, and the log behind them."""

    log: Log
    store: DirectoryStore
    client: openai.AsyncOpenAI
    stable: str
    canary: str

    async def move(self, version: int, channel: Channel) -> None:
        """Promote a version like `headrace promote`."""
        move = PolicyEvent(event="promoted", policy="main", version=version, channel=channel, owner="ann")
        await self.log.publish(POLICIES, move)

    async def serve(self, url: str, version: int) -> None:
        """Until a gateway serves it."""
        async with asyncio.timeout(60), httpx.AsyncClient(trust_env=False) as http:
            while True:
                if (await http.get(f"{url}/healthz")).json()["version"] == version:
                    return
                await asyncio.sleep(0.05)

    async def decision(self, version: int, owner: str = "canary") -> PolicyEvent | None:
        """The end of the trial of a version, or of its watch; None while it goes on."""
        events = [message.value async for message in self.log.scan(POLICIES)]
        own = [event for event in events if isinstance(event, PolicyEvent) and event.version == version]
        return next((event for event in own if event.owner == owner), None)


@asynccontextmanager
async def site_of(
    folder: Path, app: str, bootstrap: str, urls: tuple[str, str], key: str
) -> AsyncIterator[TwoGateways]:
    bus = KafkaBus(bootstrap)
    await bus.start()
    client = openai.AsyncOpenAI(api_key=key, base_url=f"{urls[0]}/v1", max_retries=0, timeout=60)
    store = DirectoryStore(folder / "store")
    try:
        yield TwoGateways(Log(bus, app, store=store), store, client, *urls)
    finally:
        await client.close()
        await bus.close()


async def topics_of(bootstrap: str, app: str) -> None:
    bus = KafkaBus(bootstrap)
    await bus.start()
    await Log(bus, app).create_topics(partitions=2, keep_ms=3_600_000)
    await bus.close()


async def published(site: TwoGateways, version: int) -> None:
    """Publish a version like a trainer: an anchor in the store, an event in the log."""
    event = await asyncio.to_thread(
        publish,
        site.store,
        NewVersion(policy="main", token=0, version=version, parent=version - 1, step=version),
        table_of(version),
        previous=None,
        probe=None,
    )
    await site.log.publish(POLICIES, event)


def inside(session: str, trial: int) -> bool:
    return position_in_trial(keyed_session(APP_SECRET, TENANT, session, "yes"), trial, APP_SECRET) < SHARE


def drawn(name: str, count: int, trial: int) -> list[str]:
    """Names of so many sessions that a trial takes in."""
    named = (f"{name}{number}" for number in range(100 * count))
    return [session for session in named if inside(session, trial)][:count]


async def ask(site: TwoGateways, session: str) -> tuple[str, int]:
    """Id of an answer and the version that gave it; raises whatever a client would see."""
    header = {"x-session-id": session}
    done = await site.client.chat.completions.create(model="m", messages=ASK, extra_headers=header)
    assert done.choices[0].finish_reason in ("stop", "length") and done.system_fingerprint is not None
    return done.id, int(done.system_fingerprint.removeprefix("v"))


async def streamed(site: TwoGateways, session: str) -> int:
    """The version that streamed a whole answer."""
    header = {"x-session-id": session}
    stream = await site.client.chat.completions.create(model="m", messages=ASK, extra_headers=header, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    return int(str(chunks[0].system_fingerprint).removeprefix("v"))


async def visit(site: TwoGateways, session: str, likes: Likes) -> Visit:
    """A customer of two turns, who says what the first was worth."""
    answer, version = await ask(site, session)
    said = {"answer_id": answer, "value": likes(version), "rater": session}
    await site.client.post("/feedback", cast_to=object, body=said)
    return Visit(session, (version, await streamed(site, session)))


async def tried(
    site: TwoGateways, version: int, likes: Likes, owner: str = "canary"
) -> tuple[PolicyEvent, Sequence[Visit]]:
    """Customers come until the trial, or the watch, has ended; all that came before it had."""
    visits: list[Visit] = []
    async with asyncio.timeout(120):
        while True:
            came = [f"{owner}{version}-{len(visits) + number}" for number in range(16)]
            found = await asyncio.gather(*(visit(site, session, likes) for session in came))
            if (decision := await site.decision(version, owner)) is not None:
                return decision, visits
            visits += found


async def reached(site: TwoGateways, version: int) -> None:
    """Until the stable gateway, which asks every second, has found its canary."""
    (session,) = drawn("first", 1, version)
    async with asyncio.timeout(60):
        while True:
            if (await ask(site, session))[1] == version:
                return


def check_share(visits: Sequence[Visit], *, stable: int, trial: int) -> None:
    """Nobody outside the share met the trial; inside it did, but where the canary was slow to say that it is there."""
    assert {item.versions for item in visits if not inside(item.session, trial)} == {(stable, stable)}
    assert (trial, trial) in {entry.versions for entry in visits if inside(entry.session, trial)}


async def check_trials(site: TwoGateways) -> None:
    """A version that users like better becomes the stable version; one they like less is taken back."""
    for version in (1, 2, 3):
        await published(site, version)
    await site.move(1, "stable")
    await site.serve(site.stable, 1)

    await site.move(2, "canary")
    await site.serve(site.canary, 2)
    await reached(site, 2)
    passed, visits = await tried(site, 2, likes=lambda version: version == 2)
    assert (passed.event, passed.channel) == ("promoted", "stable")
    assert (passed.stats["rated down"], passed.stats["stable/rated down"]) == (0.0, 1.0)
    assert passed.reason.startswith("not worse: rated down 0 of ")
    check_share(visits, stable=1, trial=2)
    await site.serve(site.stable, 2)
    await site.serve(site.canary, 1)
    ended, visits = await tried(site, 2, lambda version: version == 2, owner="watch")
    assert ended.channel == "canary" and ended.reason.startswith("not worse: rated down 0 of ")
    check_share(visits, stable=2, trial=1)
    await site.serve(site.canary, 2)

    await site.move(3, "canary")
    await site.serve(site.canary, 3)
    held, visits = await tried(site, 3, likes=lambda version: version == 2)
    assert (held.event, held.channel) == ("held", "stable")
    assert held.stats["rated down"] == 1.0 and held.stats["rated down/worse"] >= 1.0
    check_share(visits, stable=2, trial=3)
    await site.serve(site.canary, 2)


async def check_kill(site: TwoGateways, canary: "subprocess.Popen[bytes]") -> None:
    """A canary killed while it answers: whoever it had answered nothing yet is answered by the stable gateway."""
    await published(site, 4)
    await site.move(4, "canary")
    await site.serve(site.canary, 4)
    await reached(site, 4)
    sessions = drawn("kill", 16, 4)
    answered = asyncio.Event()

    async def until_stable(session: str) -> int:
        """Ask again and again; the version of the first answer that is not the canary's."""
        while (version := (await ask(site, session))[1]) == 4:
            answered.set()
        return version

    async with asyncio.timeout(60):
        asking = [asyncio.create_task(until_stable(session)) for session in sessions for _ in range(4)]
        await answered.wait()
        canary.kill()  # twelve tokens an answer: the others' are being sampled
        assert {await item for item in asking} == {2}, "the stable version answers for it"
    assert {await streamed(site, session) for session in sessions} == {2}, "the share is the stable gateway's now"


def test_a_trial_through_kafka_is_decided_by_what_people_say_and_a_killed_canary_costs_no_answer(
    kafka: str, app_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_char_model(tmp_path / "model", seed=0)
    (tmp_path / "model" / "model.safetensors").write_bytes(save_tensors(table_of(0)))
    ports = choose_address().port, choose_address().port
    template = Template(Path(__file__).with_name("canary.toml").read_text())
    settings = template.substitute(app=app_name, bootstrap=kafka, port=ports[0], canary=ports[1], share=SHARE)
    (tmp_path / "headrace.toml").write_text(settings)
    store = DirectoryStore(tmp_path / "store")
    store.put(SECRET, APP_SECRET)
    key = create_key(store, tenant=TENANT, scopes=("serve", "feedback"), train="yes", rpm=0, tpm=0)[1]
    asyncio.run(topics_of(kafka, app_name))
    urls = f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"

    async def check(canary: "subprocess.Popen[bytes]") -> None:
        async with site_of(tmp_path, app_name, kafka, urls, key) as site:
            await until_up(tmp_path, urls)
            await check_trials(site)
            await check_kill(site, canary)

    with ExitStack() as stack:
        for role in ("process", "master"):
            stack.enter_context(running(tmp_path, role))
        canary = stack.enter_context(running(tmp_path, "serve", "--channel", "canary"))
        stack.enter_context(running(tmp_path, "serve"))
        asyncio.run(check(canary))
    told = json.loads(CliRunner().invoke(app, ["channel", "--json", "-c", str(tmp_path / "headrace.toml")]).stdout)
    assert (told["stable"], told["trial"]) == (2, 4)
    by_people = [(item["event"], item["version"]) for item in told["decisions"] if item["by"] == "canary"]
    assert by_people == [("promoted", 2), ("held", 3)]
    assert all("rated down/worse" in entry["numbers"] for entry in told["decisions"] if entry["by"] == "canary")


async def until_up(folder: Path, urls: Sequence[str]) -> None:
    """Until both gateways answer."""
    async with asyncio.timeout(120), httpx.AsyncClient(trust_env=False) as http:
        for url in urls:
            while True:
                with suppress(httpx.TransportError):
                    if (await http.get(f"{url}/healthz")).status_code == 200:
                        break
                await asyncio.sleep(0.1)
