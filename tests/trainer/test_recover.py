"""A lost log: the trainer does not begin, `headrace recover` begins a new journal, and what was before never comes back."""

import asyncio
import io
import math
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from infra.cli.main import app
from infra.cli.repeat.recover import recover_log
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.settings.config import Floor
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas import Batch, topics
from schemas.errors import ConfigError
from tests.infra.chat_models import STYLES, build_chat_model
from tests.trainer.memory_run import CONFIG, FLOOR, STEPS, Killed, ends, filled_log, journal, published, train
from trainer.journal.checkpoint import load_newest, places
from trainer.journal.recover import highest
from trainer.learners.scripted import ScriptedLearner

MORE = msgspec.structs.replace(CONFIG, max_steps=2 * STEPS)


async def told(log: Log, store: Store, floor: Floor = FLOOR, *, agreed: bool = True) -> tuple[int, str]:
    page = io.StringIO()
    code = await recover_log(log, store, floor, Console(file=page, soft_wrap=True, markup=False), agreed=agreed)
    return code, page.getvalue()


async def test_a_trainer_whose_log_lost_its_data_ends_before_it_takes_a_lease() -> None:
    store = MemoryStore()
    await train(await filled_log(store), store, ScriptedLearner())
    lost = await filled_log(store)
    with pytest.raises(ConfigError, match="headrace recover"):
        await train(lost, store, ScriptedLearner())
    assert await journal(lost) == [] and await published(lost) == []


async def test_after_recovery_the_run_goes_on_from_its_checkpoint_with_versions_above_all_of_before() -> None:
    store, first = MemoryStore(), ScriptedLearner()
    old = await filled_log(store)
    await train(old, store, first)
    before = load_newest(store, "t")
    assert before is not None
    token, version = highest(store, "t", "main")
    log = await filled_log(store)
    code, page = await told(log, store)
    assert code == 0 and f"after step {before.position.step}" in page and "Lost with the old log" in page
    made = load_newest(store, "t")
    assert made is not None and [place.token for place in places(store, "t")] == [made.position.journal_token]
    assert {name: bytes(item.data) for name, item in made.learner.items()} == {
        name: bytes(item.data) for name, item in before.learner.items()
    }
    assert made.position.journal_token > token and made.position.version == version + 1
    await train(log, store, ScriptedLearner(), MORE)
    steps = [entry.step for entry in await journal(log) if isinstance(entry, Batch)]
    assert steps == list(range(before.position.step + 1, before.position.step + 1 + STEPS))
    versions = [event.version for event in await published(log)]
    assert versions == list(range(version + 1, version + 1 + len(versions))) and len(versions) > STEPS / 2
    assert (await told(log, store))[1].startswith("The log and the store belong together")


class WritesLeft:
    """Number of writes that a process makes before it dies."""

    def __init__(self) -> None:
        self.left = math.inf

    def spend(self) -> None:
        if not self.left:
            raise Killed
        self.left -= 1


class MortalBus(MemoryBus):
    """Dies before a send."""

    def __init__(self, life: WritesLeft) -> None:
        super().__init__()
        self.life = life

    async def send(self, *args, **kwargs):
        self.life.spend()
        return await super().send(*args, **kwargs)


class MortalStore(MemoryStore):
    """Dies before a put or a removal."""

    def __init__(self, life: WritesLeft) -> None:
        super().__init__()
        self.life = life

    def put(self, key: str, data: bytes) -> None:
        self.life.spend()
        super().put(key, data)

    def delete(self, key: str) -> None:
        self.life.spend()
        super().delete(key)


@pytest.mark.full
async def test_a_recovery_that_is_killed_before_any_of_its_writes_is_made_again() -> None:
    async def is_killed_at(writes: int) -> bool:
        life = WritesLeft()
        store = MortalStore(life)
        await train(await filled_log(store), store, ScriptedLearner())
        before = load_newest(store, "t")
        log = await filled_log(store, MortalBus(life))
        life.left = writes
        is_killed = not await ends(told(log, store))
        life.left = math.inf
        assert (await told(log, store))[0] == 0
        assert len(places(store, "t")) == 1, "a checkpoint of before is left"
        await train(log, store, ScriptedLearner(), MORE)
        after = load_newest(store, "t")
        assert before is not None and after is not None and after.position.step == before.position.step + STEPS
        return is_killed

    deaths = 0
    while await is_killed_at(deaths):
        deaths += 1
    assert deaths > 7, "4 sends, a checkpoint, removals, the claim"


async def test_nothing_is_changed_before_it_is_agreed_to_nor_in_a_log_with_steps_of_its_own() -> None:
    store, other = MemoryStore(), MemoryStore()
    await train(await filled_log(store), store, ScriptedLearner())
    lost, before = await filled_log(store), dict(store_bytes(store))
    assert (await told(lost, store, agreed=False))[0] == 1
    assert await journal(lost) == [] and dict(store_bytes(store)) == before
    running = await filled_log(other)
    await train(running, other, ScriptedLearner())
    with pytest.raises(ConfigError, match=r"has steps of its own .* nothing was changed"):
        await told(running, store)
    assert dict(store_bytes(store)) == before


async def test_a_lost_store_is_told_with_what_can_be_done() -> None:
    log = await filled_log(store := MemoryStore())
    await train(log, store, ScriptedLearner())
    code, page = await told(log, MemoryStore())
    assert code == 1 and "With a backup" in page and "which is not in" in page
    with pytest.raises(ConfigError, match="which is not in"):
        await train(log, MemoryStore(), ScriptedLearner())


def store_bytes(store: Store) -> list[tuple[str, bytes]]:
    return [(key, store.get(key)) for key in store.keys("")]


@pytest.mark.full
def test_a_lost_log_is_refused_by_every_role_and_recovered_on_a_real_broker(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    file, store = tmp_path / "headrace.toml", DirectoryStore(tmp_path / "store")
    file.write_text(
        f'app = "{app_name}"\n[kafka]\nbootstrap_servers = "{kafka}"\npartitions = 2\n[policy]\nmodel = "model"\n[gateway]\n'
    )
    build_chat_model(tmp_path / "model", STYLES["chatml"])
    floor = msgspec.structs.replace(FLOOR, app=app_name)

    def call(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, [*arguments, "-c", str(file)], env={"COLUMNS": "160", "TERM": "dumb"})
        return result.exit_code, result.output

    async def before() -> None:
        log = Log(MemoryBus(), app_name, store=store)
        await log.create_topics(partitions=2, keep_ms=-1)
        for message in [each async for each in (await filled_log(store)).scan(topics.BUFFER)]:
            assert message.value is not None
            await log.publish(topics.BUFFER, message.value)
        await train(log, store, ScriptedLearner(), floor=floor)

    async def after() -> list[int]:
        bus = KafkaBus(kafka, deadline_s=30)
        await bus.start()
        try:
            log = Log(bus, app_name, store=store)
            for message in [each async for each in (await filled_log(store)).scan(topics.BUFFER)]:
                assert message.value is not None
                await log.publish(topics.BUFFER, message.value)
            await train(log, store, ScriptedLearner(), MORE, floor=floor)
            return [event.version for event in await published(log)]
        finally:
            await bus.close()

    asyncio.run(before())
    version = highest(store, app_name, "main")[1]
    assert "topics created" in call("check", "--create")[1]
    for role in ("master", "explore", "process", "serve"):
        code, page = call(role)
        assert code == 2 and f'the log of app "{app_name}" is empty' in page and "headrace recover" in page, (
            role,
            page,
        )
    assert call("recover")[0] == 1
    code, page = call("recover", "--yes")
    assert code == 0 and f"publishes version {version + 1}" in page, page
    assert call("recover") == (0, "The log and the store belong together: there is nothing to recover.\n")
    assert asyncio.run(after())[0] == version + 1
