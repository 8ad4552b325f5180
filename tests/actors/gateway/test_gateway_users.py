"""Owners of turns, and named users' answers while the object store is away."""

from pathlib import Path

import pytest

from actors.gateway.recording.held import MAX_HELD, HeldKeys
from infra.ledger.forget import complete, destroy
from infra.ledger.index import LogIndex
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from infra.store.seal import Keys, sealed
from schemas import Block, decode, encode
from schemas.errors import StoreError
from schemas.ids import keyed_subject
from schemas.topics import EXPERIENCES
from tests.actors.gateway.gateway_rig import RunningGateway, engine, says, serving
from tests.actors.rig import until
from tests.infra.test_seal import SAID, AwayStore, answer

ANN = "ann@example.org"
SUBJECT = keyed_subject(b"secret", "acme", ANN)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def turns(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]


async def ask(served: RunningGateway, key: str, *contents: str, session: str = "", user: str = "") -> None:
    headers = {"x-session-id": session} if session else {}
    body = {"model": "m", "messages": turns(*contents), **({"user": user} if user else {})}
    async with served.http(key) as http:
        assert (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200


async def test_a_turn_that_names_nobody_is_forgotten_with_the_user_of_its_session_whichever_gateway_served_it(
    tmp_path: Path,
) -> None:
    bus, store = MemoryBus(), MemoryStore()
    async with serving(tmp_path / "a", engine(says("FINE")), bus=bus, store=store) as first:
        key = await first.new_key()
        await ask(first, key, "I am WILHELMINA", session="chat", user=ANN)
        await ask(first, key, "I am WILHELMINA", "FINE", "and now?", session="chat")
        await ask(first, key, "I am BOB", session="other", user="bob")
        await first.recorded(3)
    async with serving(tmp_path / "b", engine(says("FINE")), bus=bus, store=store, topics=False) as second:
        await second.keys_read()
        await ask(second, key, "I am WILHELMINA", "FINE", "and here?", session="chat")
        await ask(second, key, "NOBODY'S", session="third")
        found = await second.recorded(5)
        assert [bool(one.key_id) for one in found].count(False) == 1
        raw = b"".join([m.record.value async for m in second.log.scan(EXPERIENCES)])
        assert b"WILHELMINA" not in raw
        keys = Keys(store)
        key_ids = destroy(keys, "acme", ANN)
        index = LogIndex(tmp_path / "trace.sqlite", run="t", policy="main")
        report = await complete(second.log, index, keys, "9f", key_ids)
        index.close()
        assert (len(key_ids), report.groups, report.texts) == (1, 3, 1)
        blocks = [m.value async for m in Log(bus, "test", store=store).scan(EXPERIENCES)]
        members = [one for block in blocks if isinstance(block, Block) for one in block.experiences]
        assert sorted(one.lost for one in members) == ["", "", "forgotten", "forgotten", "forgotten"]
        assert {one.messages[0].content for one in members if not one.lost} == {"I am BOB", "NOBODY'S"}


async def test_while_the_store_is_away_answers_of_named_users_wait_sealed_and_are_readable_when_it_is_back(
    tmp_path: Path,
) -> None:
    store = AwayStore()
    async with serving(tmp_path, engine(says("SALTED")), store=store) as served:
        key = await served.new_key()
        store.away = True
        for user in (ANN, "bob", ANN):
            await ask(served, key, "PEPPERED", user=user)
        await until(lambda: served.count("spooled") == 3)
        assert not await served.experiences() and not served.count("not_recorded")
        files = files_in(tmp_path)
        held = [path for path in files if path.parent.name == "keys"]
        assert len(held) == 2 and all(path.stat().st_mode & 0o077 == 0 for path in held)
        assert not [path for path in files if b"SALTED" in path.read_bytes() or b"PEPPERED" in path.read_bytes()]
    async with serving(tmp_path, store=store, bus=served.bus, topics=False) as again:
        assert not await again.experiences(), "a restart sends nothing that nobody could open"
        store.away = False
        found = await again.recorded(3)
        assert [one.response for one in found] == ["SALTED"] * 3 and len({one.key_id for one in found}) == 2
        assert not [path for path in files_in(tmp_path) if path.parent.name == "keys"], (
            "the store has them, so they are nowhere else"
        )


def test_who_was_forgotten_meanwhile_stays_so(tmp_path: Path) -> None:
    store = AwayStore()
    earlier = encode(sealed(Block((answer(),)), Keys(store), SUBJECT))
    keys = HeldKeys(store, tmp_path / "keys")
    store.away = True
    frames = [encode(sealed(Block((answer(),)), keys, subject)) for subject in (SUBJECT, SUBJECT[1:], SUBJECT[::-1])]
    with pytest.raises(StoreError):
        keys.deposit()
    assert keys.num_held == 3 and SAID.encode() not in frames[0]
    store.away = False
    assert [len(Keys(store).destroy(subject)) for subject in (SUBJECT, SUBJECT[1:])] == [1, 0], "the key of one is held"
    keys.deposit()
    assert keys.num_held == 0
    lost = [decode(frame, Keys(store).find).experiences[0].lost for frame in (earlier, *frames)]  # type: ignore[union-attr]
    assert lost == ["forgotten", "forgotten", "forgotten", ""]


def test_keys_that_wait_are_bounded_and_one_that_was_cut_short_is_not_used(tmp_path: Path) -> None:
    store = AwayStore()
    store.away = True
    keys = HeldKeys(store, tmp_path)
    keys._held = {f"{number}": keys.of(SUBJECT) for number in range(MAX_HELD)}
    with pytest.raises(StoreError, match=f"{MAX_HELD} keys wait"):
        keys.of(SUBJECT)
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"cut")
    assert HeldKeys(store, tmp_path).num_held == 0 and not list(tmp_path.iterdir())
