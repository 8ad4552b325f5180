"""Records of an imagined run, folded into a ledger as `audit` folds those of a real one."""

from collections.abc import Mapping, Sequence

import msgspec

from infra.ledger.account import Account, Ledger
from infra.log.bus import Record
from infra.log.log import Log, LogMessage
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from infra.store.seal import sealed
from schemas import (
    Batch,
    BatchItem,
    Block,
    Closure,
    Control,
    DeadLetter,
    DropMarker,
    Lane,
    Span,
    encode,
    ids,
    make_experience,
    topics,
)
from schemas.fields import Outcome
from tests.names import secret_store, subject_name
from tests.trainer.memory_run import block as run_block
from tests.trainer.memory_run import filled_log

RUN = "r"


def message(topic: str, record: Control | Block, offset: int = 0) -> LogMessage:
    return LogMessage(Record(topic, 0, offset, 0, b"", encode(record)), value=record)


def block(
    group: str, episodes: Sequence[int] = (0, 1), *, attempt: int = 0, lane: Lane = "usual", **header: object
) -> Block:
    members = [
        make_experience(
            tokens=[1, 2, 3], logprobs=[-0.5], messages=(), spans=(Span(2, 3, 1),), lane=lane, attempt=attempt,
            id=ids.experience_id(group, attempt, episode), group=group, episode=episode, group_size=4, **header,
        )
        for episode in episodes
    ]  # fmt: skip
    return Block(tuple(members))


def batch(step: int, *names: str, use: int = 0, lane: Lane = "usual", token: int = 1, revision: int = 0) -> Batch:
    items = tuple(
        BatchItem(id=name, partition=0, offset=7, index=0, lane=lane, use=use, revision=revision) for name in names
    )
    return Batch(run=RUN, token=token, step=step, version=step, items=items)


def stub(group: str, episode: int, reason: str) -> DropMarker:
    return DropMarker(
        id=ids.experience_id(group, 0, episode), group=group, episode=episode, group_size=4, reason=reason
    )


def closure(group: str, outcome: Outcome, *, attempt: int = 0, reason: str = "", **drops: int) -> Closure:
    return Closure(
        group=group, outcome=outcome, attempt=attempt, reason=reason,
        drops={name.replace("_", " "): count for name, count in drops.items()},
    )  # fmt: skip


def dead_letter(record: Block, reason: str) -> DeadLetter:
    return DeadLetter(topic="experiences", partition=0, offset=0, stage="verify", reason=reason, value=encode(record))


def account(topics: Mapping[str, Sequence[Control | Block]], *, buffer_begins: int = 0) -> Account:
    ledger = Ledger(RUN, buffer_begins)
    for topic, records in topics.items():
        for offset, record in enumerate(records):
            ledger.fold(topic, message(topic, record, offset))
    return ledger.account()


TENANT, USER = "acme", "ann@example.org"
ANN = subject_name(TENANT, USER)


def of_ann(log: Log, sequence: int) -> Block:
    assert log.keys is not None
    plain = run_block(sequence)
    subject = tuple(msgspec.structs.replace(one, subject=ANN) for one in plain.experiences)
    return sealed(Block(subject), log.keys, ANN)


async def log_with_ann(at: tuple[int, ...] = (6, 7)) -> tuple[Log, MemoryStore]:
    """The log of a run whose groups at these issue numbers are a named user's."""
    store = secret_store()
    plain = await filled_log(store)
    log = Log(MemoryBus(), "t", store=store)
    await log.create_topics(partitions=2, keep_ms=-1)
    async for message in plain.scan(topics.BUFFER):
        assert isinstance(message.value, Block)
        sequence = message.value.experiences[0].sequence
        await log.publish(topics.BUFFER, of_ann(log, sequence) if sequence in at else message.value)
    return log, store
