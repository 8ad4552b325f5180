"""Records of an imagined run, folded into a ledger as `audit` folds those of a real one."""

from collections.abc import Mapping, Sequence

from infra.ledger.account import Account, Ledger
from infra.log.bus import Record
from infra.log.log import LogMessage
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
)
from schemas.fields import Outcome

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
