"""A log of any length that is not held in memory: records are made when they are read, the same ones each time.

Every experience lies in `experiences`, `verified` and `buffer`, has a closure and was trained once: one step to 64 of them, one
version to 16 steps. Four turns are one session. Only reading is there.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infra.log.bus import Partition, Record
from infra.log.memory import MemoryBus
from schemas import (
    Batch,
    BatchItem,
    Block,
    Closure,
    Message,
    PolicyEvent,
    Span,
    encode,
    kafka_headers,
    make_experience,
    topics,
)
from schemas.ids import experience_id, partition_key, request_group, spelled
from schemas.topics import topic_name

APP = "bench"
PARTITIONS = 4
STEP_ITEMS = 64
STEPS_PER_VERSION = 16
TURNS = 4
FIRST = 10**9  # so that all numbers are of one length, and one frame becomes another by exchanging the name in it

Make = Callable[[int], tuple[bytes, bytes, tuple[tuple[str, bytes], ...]]]
"""Key, frame and headers of the record of a number."""


class MadeRecords:
    """Of one partition; slices alone can be asked for. made_cpu_s: what making them took so far."""

    beginning = 0

    def __init__(self, at: Partition, stride: int, end: int, make: Make) -> None:
        self.at, self.stride, self.end, self.make = at, stride, end, make
        self.made_cpu_s = 0.0

    @property
    def records(self) -> "MadeRecords":
        """They are their own sequence, as `MemoryBus` has them."""
        return self

    def __getitem__(self, asked: slice) -> list[Record]:
        began_s = time.process_time()
        topic, index = self.at.topic, self.at.index
        found = [
            Record(topic, index, offset, FIRST + offset, key, frame, headers)
            for offset in range(*asked.indices(self.end))
            for key, frame, headers in (self.make(offset * self.stride + index),)
        ]
        self.made_cpu_s += time.process_time() - began_s
        return found


class MadeBus(MemoryBus):
    """The log of so many experiences; whole multiples of STEP_ITEMS x STEPS_PER_VERSION are all trained."""

    def __init__(self, experiences: int) -> None:
        super().__init__()
        makes: Mapping[topics.Topic, tuple[int, Make]] = {
            **dict.fromkeys((topics.EXPERIENCES, topics.VERIFIED, topics.BUFFER), (experiences, _made_block())),
            topics.PROGRESS: (experiences, _made_closure()),
            topics.BATCHES: (experiences // STEP_ITEMS, _made_batch),
            topics.POLICIES: (experiences // STEP_ITEMS // STEPS_PER_VERSION, _made_version),
        }
        self._made: dict[str, list[MadeRecords]] = {}
        for topic in topics.ALL:
            name, parts = topic_name(APP, topic), topic.partitions or PARTITIONS
            count, make = makes.get(topic, (0, _made_version))
            self._made[name] = [
                MadeRecords(Partition(name, index), parts, (count - index + parts - 1) // parts, make)
                for index in range(parts)
            ]

    @property
    def made_cpu_s(self) -> float:
        """What making records took so far."""
        return sum(one.made_cpu_s for parts in self._made.values() for one in parts)

    def log(self, partition: Partition) -> Any:
        """See MemoryBus."""
        return self._made[partition.topic][partition.index]

    async def partitions(self, topic: str) -> tuple[int, ...]:
        """See Bus."""
        return tuple(range(len(self._made[topic])))

    async def beginning_offsets(self, topic: str) -> dict[Partition, int]:
        """See Bus."""
        return {one.at: 0 for one in self._made[topic]}

    async def end_offsets(self, topic: str) -> dict[Partition, int]:
        """See Bus."""
        return {one.at: one.end for one in self._made[topic]}


def group_name(number: int) -> str:
    """The group of an experience."""
    session = spelled(hashlib.sha256(b"%d" % (number // TURNS)).hexdigest())
    return request_group(session, 7, FIRST + number)


def name_of(number: int) -> str:
    """Its id."""
    return experience_id(group_name(number), 0, 0)


def _exchanging(record: Block | Closure, group: str) -> Make:
    """Makes the record with other groups instead of `group`."""
    frame, headers, own = encode(record), kafka_headers(record), group.encode()

    def make(number: int) -> tuple[bytes, bytes, tuple[tuple[str, bytes], ...]]:
        name = group_name(number)
        other = name.encode()
        exchanged = tuple((key, value.replace(own, other)) for key, value in headers)
        return partition_key(name).encode(), frame.replace(own, other), exchanged

    return make


def _made_block() -> Make:
    group = group_name(0)
    one = make_experience(
        id=name_of(0),
        group=group,
        episode=0,
        group_size=1,
        lane="live",
        spans=(Span(start=6, stop=11, version=1),),
        tokens=list(range(11)),
        logprobs=[-0.5] * 5,
        messages=(Message(role="user", content="37+45="), Message(role="assistant", content="82")),
    )
    return _exchanging(Block((one,)), group)


def _made_closure() -> Make:
    return _exchanging(Closure(group=group_name(0), outcome="buffered", experiences=1), group_name(0))


def _made_batch(step: int) -> tuple[bytes, bytes, tuple[tuple[str, bytes], ...]]:
    numbers: Sequence[int] = range(step * STEP_ITEMS, (step + 1) * STEP_ITEMS)
    items = tuple(BatchItem(id=name_of(one), partition=0, offset=one, index=0, lane="live") for one in numbers)
    record = Batch(run=APP, token=0, step=step, version=step // STEPS_PER_VERSION, items=items)
    return b"", encode(record), kafka_headers(record)


def _made_version(version: int) -> tuple[bytes, bytes, tuple[tuple[str, bytes], ...]]:
    step = version * STEPS_PER_VERSION
    record = PolicyEvent(event="published", policy="main", version=version, parent=version - 1, step=step)
    return b"", encode(record), kafka_headers(record)
