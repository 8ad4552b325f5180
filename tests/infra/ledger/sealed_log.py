"""The log of a run in which some answers are a named user's."""

import msgspec

from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from infra.store.seal import sealed
from schemas import Block, topics
from tests.names import secret_store, subject_name
from tests.trainer.memory_run import block, filled_log

TENANT, USER = "acme", "ann@example.org"
ANN = subject_name(TENANT, USER)


def of_ann(log: Log, sequence: int) -> Block:
    assert log.keys is not None
    plain = block(sequence)
    subject = tuple(msgspec.structs.replace(one, subject=ANN) for one in plain.experiences)
    return sealed(Block(subject), log.keys, ANN)


async def log_with_ann(at: tuple[int, ...] = (6, 7)) -> tuple[Log, MemoryStore]:
    """The log of a run whose groups at these issue numbers are a named user's."""
    store = secret_store()
    plain = await filled_log(store)
    log = Log(MemoryBus(), "t", store=store)
    await log.create_topics(partitions=2, keep_ms=-1)
    async for message in plain.read_all(topics.BUFFER):
        assert isinstance(message.value, Block)
        sequence = message.value.experiences[0].sequence
        await log.publish(topics.BUFFER, of_ann(log, sequence) if sequence in at else message.value)
    return log, store
