"""Sealed sections: unreadable without their key, carried unopened, and gone for good with it."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest

from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from infra.store.seal import FRESH_S, Keys, key_place, sealed
from schemas import BadFrame, Block, Experience, Message, Span, decode, encode, make_experience, topics
from schemas.errors import Sealed, StoreError
from schemas.ids import experience_id
from tests.names import subject_name

ANN = subject_name("acme", "ann@example.org")
BOB = subject_name("acme", "bob@example.org")
SAID = "my sister's name is Wilhelmina"


def answer(group: str = "q.0", episode: int = 0) -> Experience:
    return make_experience(
        id=experience_id(group, 0, episode), group=group, episode=episode, group_size=2, subject=ANN,
        spans=(Span(start=2, stop=4, version=3),), tokens=[7, 8, 9, 10 + episode], logprobs=[-0.5, -0.25],
        messages=(Message(role="user", content=SAID), Message(role="assistant", content="a fine name")),
    )  # fmt: skip


def of_ann(keys: Keys, group: str = "q.0") -> Block:
    return sealed(Block((answer(group), answer(group, 1))), keys, ANN)


def opened(frame: bytes, keys: Keys) -> Block:
    block = decode(frame, keys.find)
    assert isinstance(block, Block)
    return block


class AwayStore(MemoryStore):
    """A store that takes nothing and gives nothing while it is away."""

    def __init__(self, away: bool = False) -> None:
        super().__init__()
        self.away = away

    def put(self, key: str, data: bytes) -> None:
        self._check()
        super().put(key, data)

    def get(self, key: str) -> bytes:
        self._check()
        return super().get(key)

    def keys(self, prefix: str) -> Iterator[str]:
        self._check()
        return super().keys(prefix)

    def _check(self) -> None:
        if self.away:
            raise StoreError("the store is away")


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_what_was_sealed_is_not_readable_in_the_topic_nor_without_its_key() -> None:
    log = Log(MemoryBus(), "t", store=MemoryStore())
    assert log.keys is not None
    await log.create_topics(partitions=1, keep_ms=-1)
    key = log.keys.of(ANN)
    plain = Block((msgspec.structs.replace(answer(), key_id=key.key_id),))
    await log.publish(topics.EXPERIENCES, plain)
    (message,) = [one async for one in log.scan(topics.EXPERIENCES)]
    tokens = answer().tokens.tobytes()
    for data in (message.record.value, *(value for _, value in message.record.headers)):
        assert SAID.encode() not in data and tokens not in data
    shut = decode(message.record.value)
    assert isinstance(shut, Block) and shut.experiences[0].subject == ANN, "the header is as readable as ever"
    for read in ("tokens", "logprobs", "messages"):
        with pytest.raises(Sealed, match="looks for no keys"):
            getattr(shut.experiences[0], read)
    assert isinstance(message.value, Block) and message.value == plain, "who holds the key reads it as if it were plain"


async def test_a_block_that_names_a_key_is_never_written_where_there_are_none() -> None:
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    block = Block((msgspec.structs.replace(answer(), key_id=f"{ANN}-{'0' * 16}"),))
    with pytest.raises(ValueError, match="no store to hold keys"):
        await log.publish(topics.EXPERIENCES, block)


def test_an_edit_of_the_header_carries_sealed_sections_unopened() -> None:
    keys = Keys(MemoryStore())
    came = decode(encode(of_ann(keys)))
    assert isinstance(came, Block)
    edited = Block(tuple(msgspec.structs.replace(one, reward=1.0) for one in came.experiences))
    frame = encode(edited)
    assert frame[-64:] == encode(came)[-64:]
    back = opened(frame, keys)
    assert [one.reward for one in back.experiences] == [1.0, 1.0] and back.experiences[0].response == "a fine name"


def test_what_is_made_from_a_sealed_block_is_sealed_under_the_same_key() -> None:
    keys = Keys(MemoryStore())
    one = opened(encode(of_ann(keys)), keys).experiences[1]
    made = msgspec.structs.replace(one.with_bulk(logprobs=[0.0, 0.0]), id="s.0.0-0-0", group="s.0")
    frame = encode(Block((made,)), keys.find)
    assert opened(frame, keys).experiences[0].tokens.tolist() == [7, 8, 9, 11]
    keys.destroy(ANN)
    assert opened(frame, keys).experiences[0].lost == "forgotten"


def test_a_member_taken_out_of_a_sealed_block_is_sealed_again() -> None:
    keys = Keys(MemoryStore())
    first, other = (opened(encode(of_ann(keys, group)), keys).experiences[0] for group in ("q.0", "q.0"))
    frame = encode(Block((first, msgspec.structs.replace(other, id="q.0.1-0-0", attempt=1))))
    assert SAID.encode() not in frame
    with pytest.raises(Sealed):
        assert decode(frame).experiences[0].tokens  # type: ignore[union-attr]
    assert [one.messages[0].content for one in opened(frame, keys).experiences] == [SAID, SAID]


@pytest.mark.parametrize("key_id", ["", f"{BOB}-{'0' * 16}"])
def test_sealed_sections_never_leave_unsealed_or_under_another_key(key_id: str) -> None:
    keys = Keys(MemoryStore())
    one = opened(encode(of_ann(keys)), keys).experiences[0]
    with pytest.raises(ValueError, match="key_id"):
        encode(Block((msgspec.structs.replace(one, key_id=key_id),)))


def test_nothing_of_a_forgotten_user_can_be_opened_again() -> None:
    store = MemoryStore()
    keys = Keys(store)
    frame, other = encode(of_ann(keys)), encode(sealed(Block((answer(),)), keys, BOB))
    destroyed = keys.destroy(ANN)
    assert len(destroyed) == 1 and not store.get(key_place(destroyed[0]))
    for reader in (keys, Keys(store)):
        member = opened(frame, reader).experiences[0]
        assert member.lost == "forgotten" and member.group == "q.0"
        with pytest.raises(Sealed, match="forgotten"):
            member.check_bulk()
        assert opened(other, reader).experiences[0].response == "a fine name", "others are untouched"
    again = encode(of_ann(keys))
    assert opened(again, keys).experiences[0].response == "a fine name", "who comes back has a new key"
    assert opened(frame, keys).experiences[0].lost == "forgotten", "and what was forgotten stays so"
    assert len(keys.destroy(ANN)) == 2, "and all keys they ever had go together"


def test_another_process_learns_of_a_forgotten_user_in_time() -> None:
    store, clock = MemoryStore(), Clock()
    reader = Keys(store, clock)
    frame = encode(of_ann(Keys(store)))
    assert not opened(frame, reader).experiences[0].lost
    Keys(store).destroy(ANN)
    clock.now_s += FRESH_S
    assert opened(frame, reader).experiences[0].lost == "forgotten"


def test_while_the_store_is_away_known_keys_hold() -> None:
    clock, store = Clock(), AwayStore()
    keys = Keys(store, clock)
    frame = encode(of_ann(keys))
    store.away, clock.now_s = True, 3600.0
    assert opened(frame, keys).experiences[0].response == "a fine name"
    with pytest.raises(StoreError):
        opened(frame, Keys(store))


@pytest.mark.parametrize("at", [-1, -40])
def test_an_altered_sealed_section_is_a_bad_frame_and_nothing_else(at: int) -> None:
    keys = Keys(MemoryStore())
    frame = bytearray(encode(of_ann(keys)))
    frame[at] ^= 1
    with pytest.raises(BadFrame, match="not sealed under"):
        opened(bytes(frame), keys).validate()


def test_a_key_in_a_folder_is_its_owners_alone(tmp_path) -> None:  # type: ignore[no-untyped-def]
    key = Keys(DirectoryStore(tmp_path)).of(ANN)
    assert (tmp_path / key_place(key.key_id)).stat().st_mode & 0o077 == 0
