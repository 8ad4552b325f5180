"""A bucket that may no longer be written to: the trainer ends in one line, what it published is served, the next goes on."""

import asyncio
from pathlib import Path

import pytest

from infra.cli.bench import minio
from infra.cli.bench.minio import MinioServer
from infra.policies.fetch import PolicyFetcher
from infra.roles.role import first_error
from infra.store.memory import MemoryStore
from infra.store.s3 import open_s3
from schemas.errors import StoreError
from tests.infra.platform_server import platform
from tests.infra.test_store_s3_keys import identity, limited
from tests.trainer.memory_run import filled_log, published, train
from trainer.batch.batch import PackedBatch
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.learner import StepStats
from trainer.learners.scripted import ScriptedLearner

pytestmark = pytest.mark.slow

CONFIG = TrainerConfig(lanes={"usual": LaneConfig()}, checkpoint_every=3, max_steps=6)
READ, EVERY = ("GetObject", "ListBucket"), ("GetObject", "PutObject", "ListBucket", "DeleteObject")


def test_where_a_bucket_turns_read_only_the_trainer_ends_in_one_line_and_goes_on_once_it_may_write(
    minio_server: MinioServer, tmp_path: Path
) -> None:
    minio_server.store("roles")

    async def main() -> None:
        with platform(lambda: limited(minio_server, EVERY)) as here:
            here.lasts_s = 0.0  # every request asks for new keys
            store = open_s3(
                "roles",
                "read-only",
                {
                    **identity(tmp_path, here),
                    "HEADRACE_S3_ENDPOINT": minio_server.endpoint,
                    "AWS_REGION": minio.REGION,
                },
            )

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
