"""A bucket that may no longer be written to: the trainer ends in one line, the others go on with what they can read."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.policies.fetch import PolicyFetcher
from infra.roles.role import first_error
from infra.store.memory import MemoryStore
from infra.store.s3 import open_s3
from infra.store.store import Store
from schemas.errors import StoreError
from tests import minio
from tests.actors.gateway.gateway_rig import RunningGateway, engine, says, serving
from tests.actors.gateway.test_gateway_reload import announce, bigram, loaded
from tests.actors.rig import until
from tests.infra.platform_server import Platform, platform
from tests.infra.test_store_s3 import identity, limited
from tests.minio import MinioServer
from tests.trainer.memory_run import filled_log, published, train
from trainer.batch.batch import PackedBatch
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.learner import StepStats
from trainer.learners.scripted import ScriptedLearner

pytestmark = pytest.mark.full

CONFIG = TrainerConfig(lanes={"usual": LaneConfig()}, checkpoint_every=3, max_steps=6)
READ, EVERY = ("GetObject", "ListBucket"), ("GetObject", "PutObject", "ListBucket", "DeleteObject")


@contextmanager
def roles_bucket(server: MinioServer, folder: Path, prefix: str) -> Iterator[tuple[Store, Platform]]:
    """A store whose rights are those that the platform gives; at first all of them."""
    server.store("roles")
    with platform(lambda: limited(server, EVERY)) as here:
        here.lasts_s = 0.0  # every request asks for new keys
        yield (
            open_s3(
                "roles",
                prefix,
                {
                    **identity(folder, here),
                    "HEADRACE_S3_ENDPOINT": server.endpoint,
                    "AWS_REGION": minio.REGION,
                },
            ),
            here,
        )


def test_where_a_bucket_turns_read_only_the_trainer_ends_in_one_line_and_goes_on_once_it_may_write(
    minio_server: MinioServer, tmp_path: Path
) -> None:
    async def main() -> None:
        with roles_bucket(minio_server, tmp_path, "trainer") as (store, here):

            class Shutting(ScriptedLearner):
                """Its fourth step is the last for which the bucket takes anything."""

                steps = 0

                def step(self, batch: PackedBatch, **how: object) -> StepStats:  # type: ignore[override]
                    self.steps += 1
                    if self.steps == 4:
                        here.mint = lambda: limited(minio_server, READ)
                    return super().step(batch, **how)  # type: ignore[arg-type]

            log = await filled_log(store)
            with pytest.raises(ExceptionGroup) as failed:
                await train(log, store, Shutting(), CONFIG)
            said = first_error(failed.value)
            assert isinstance(said, StoreError) and "AccessDenied" in str(said) and "\n" not in str(said)
            assert not any(secret in str(said) for secret in store._keys.secrets)
            events = await published(log)
            served = PolicyFetcher(store, "main").fetch(events[-1])
            assert served.version == events[-1].version >= 2, "explorers read on"
            here.mint = lambda: limited(minio_server, EVERY)
            again, whole, alone = ScriptedLearner(), ScriptedLearner(), MemoryStore()
            await train(log, store, again, CONFIG)
            await train(await filled_log(alone), alone, whole, CONFIG)
            assert again.tensors() == whole.tensors()
            assert [event.version for event in await published(log)] == [*range(7)]

    asyncio.run(main())


def test_a_gateway_of_a_read_only_bucket_serves_new_versions_and_keeps_what_needs_a_new_key_until_it_may_write(
    minio_server: MinioServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(served: RunningGateway, key: str, user: str) -> str:
        async with served.http(key) as http:
            said = await http.post("/v1/completions", json={"model": "main", "prompt": "Hi", "user": user})
        assert said.status_code == 200
        return str(said.json()["id"]).removeprefix("hr-")

    async def main() -> None:
        with (
            roles_bucket(minio_server, tmp_path, "gateway") as (store, here),
            roles_bucket(minio_server, tmp_path, "gateway") as (trainers, _),
        ):
            async with serving(tmp_path, engine(says("Hello.")), store=store, keys_reload_s=0.2) as served:
                key = served.key()
                await served.keys_read()
                before = await ask(served, key, "ann")
                await served.recorded(1)
                here.mint = lambda: limited(minio_server, READ)
                await announce(served, 3, bigram(3), store=trainers)
                await loaded(served, 3)
                meanwhile = [await ask(served, key, "ann"), await ask(served, key, "ben")]
                await until(lambda: served.count("spooled") > 0, seconds=120)
                await until(lambda: "keys_held" in caplog.text, seconds=120)
                here.mint = lambda: limited(minio_server, EVERY)
                assert {item.id for item in await served.recorded(3)} == {before, *meanwhile}
                assert served.count("shed") == 0
        said = [record.getMessage() for record in caplog.records if "keys_held" in record.getMessage()]
        assert "AccessDenied" in said[0] and "\n" not in said[0]

    asyncio.run(main())
