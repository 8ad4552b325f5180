"""What a release leaves behind, part by part: how it is written into a folder, and how it is read as plain values.

`write` makes the bytes with the code of today; only `write_release` calls it. `read` gives what today's code makes of the
bytes of any release; it gets a copy of the folder, since some files are changed by being opened.
"""

import asyncio
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np

from actors.gateway.access.keys import KeyBook, create_key
from actors.gateway.recording.outbox import Spooled
from actors.gateway.recording.spool import Spool
from infra.chain.processor import Memory
from infra.cli.repeat.source import unpacked
from infra.cli.settings import load_settings
from infra.log.blobs import deposit, is_claim, read_claim
from infra.policies.adapter import Adapter
from infra.policies.chain import read_manifest
from infra.policies.fetch import PolicyFetcher
from infra.policies.policy import Probe
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor
from infra.store.directory import DirectoryStore
from infra.store.seal import Keys, open_text, seal_text, sealed
from schemas import Block, Control, PolicyEvent, Span, decode, encode, make_experience, topics
from schemas.ids import experience_id, subject_of
from schemas.parts import Score
from schemas.records import Image, Message
from streams.collect.credit import FeedbackRules
from streams.collect.fold import fold
from streams.collect.pending import PendingFile
from streams.collect.rules import Rules
from tests.infra.cli.test_replay_command import exported
from tests.schemas.record_samples import example_of
from tests.streams.collect.collecting import FakePartition, answer, block, said, scored, stub
from tests.upgrade.plain import plain
from trainer.buffer.uses import Known, Uses, use_key
from trainer.health.guard import GuardState
from trainer.journal import checkpoint

KINDS: tuple[type[Any], ...] = get_args(Control)
RUN = "demo"
ANN = subject_of("acme", "ann@example.org")
SESSION_ANSWER = "hr-mddrffqvmjcncqrrjhvnrntq.7-3.0-0-0"
SETTINGS = Path(__file__).parent / "settings.toml"


class UpgradePart(NamedTuple):
    """One kind of thing that lies somewhere when a release is replaced by the next."""

    write: Callable[[Path], None]
    read: Callable[[Path], Any]


def member(group: str, episode: int, **fields: Any) -> Any:
    image = Image(sha256="9f" * 32, size=312)
    return make_experience(
        id=experience_id(group, 0, episode),
        group=group,
        episode=episode,
        group_size=2,
        spans=(Span(start=2, stop=4, version=3), Span(start=5, stop=6, version=4)),
        scores=(Score("exact", 1.0),),
        tokens=[7, 8, 9, 10 + episode, 11, 12],
        logprobs=[-0.5, -0.25, -0.125],
        messages=(Message("user", "37+45=", images=(image,)), Message("assistant", f"8{episode}")),
        meta={"level": "easy", "digits": 2},
        **fields,
    )


def write_records(folder: Path) -> None:
    """A frame of every kind of record, blocks open and sealed, a claim, and the store that sealed and claimed ones need."""
    folder.mkdir()
    store = DirectoryStore(folder / "store")
    keys = Keys(store)
    both = Block((member("q.0", 0), member("q.0", 1)))
    of_ann = Block((member("q.1", 0, subject=ANN), member("q.1", 1, subject=ANN)))
    frames = {kind.__name__: encode(example_of(kind)) for kind in KINDS}
    frames |= {"Block": encode(both), "Block-sealed": encode(sealed(of_ann, keys, ANN), keys.find)}
    frames["claim"] = deposit(store, frames["Block"], day=20_000)
    for name, frame in frames.items():
        (folder / f"{name}.hex").write_text(frame.hex() + "\n")
    (folder / "sealed-text").write_text(seal_text("my sister's name is Wilhelmina", keys, SESSION_ANSWER))


def read_records(folder: Path) -> Any:
    store = DirectoryStore(folder / "store")
    keys = Keys(store)
    found = {"sealed-text": open_text((folder / "sealed-text").read_text(), keys, SESSION_ANSWER)}
    for path in sorted(folder.glob("*.hex")):
        frame = bytes.fromhex(path.read_text())
        found[path.stem] = plain(decode(store.get(read_claim(frame).key) if is_claim(frame) else frame, keys.find))
    return found


def tensors(seed: int, changed: int = 0) -> dict[str, Tensor]:
    values = np.random.default_rng(seed).normal(0, 1, 120).astype("<f4")
    values[:changed] += 0.5
    return {"model/w": Tensor("F32", (3, 40), values.tobytes()), "model/b": Tensor("F32", (2,), values[-2:].tobytes())}


def write_checkpoint(folder: Path) -> None:
    uses = Uses()
    uses.put(use_key("q.0", 0, "usual"), Known(2, 40))
    position = checkpoint.Position(
        step=6, version=5, first_train_step=2, warmed_up=True, buffer_next=43, journal_next=12, journal_token=17,
        progress_next=9, guard=GuardState(skips=1, norms=(0.5, 0.25)), settled=4,
    )  # fmt: skip
    made = checkpoint.Checkpoint(position=position, learner=tensors(1), uses=uses, references=(38, 41))
    checkpoint.save(DirectoryStore(folder), RUN, made, token=17, made_with={"torch": "2.13.0"}, time_ms=1763715600000)


def read_checkpoint(folder: Path) -> Any:
    store = DirectoryStore(folder)
    (manifest,) = checkpoint.manifests(store, RUN)
    found = checkpoint.load(store, RUN, manifest.place)
    return plain(
        {
            "manifest": manifest,
            "position": found.position,
            "learner": found.learner,
            "references": found.references,
            "uses": dict(found.uses),
        }
    )


def write_policy(folder: Path) -> None:
    """A version as an anchor, the next as a difference to it, and one of another policy as an adapter; their events."""
    store = DirectoryStore(folder)
    probe = Probe(sequences=((1, 2, 3),), logprobs=((-0.5, -0.25),))
    first, second = tensors(1), tensors(1, changed=1)
    adapter = Adapter(rank=2, alpha=4, targets=("q_proj", "v_proj"), base="9f" * 32)
    new = NewVersion(policy="main", token=17, version=0, parent=-1, step=0)
    next_one = msgspec.structs.replace(new, version=1, parent=0, step=1)
    adapted = msgspec.structs.replace(new, policy="adapted", adapter=adapter)
    events = [
        publish(store, new, first, previous=None, probe=probe),
        publish(store, next_one, second, previous=first, probe=probe),
        publish(store, adapted, first, previous=None, probe=None),
    ]
    assert not events[1].stats["anchor"], "a difference"
    (folder / "events.json").write_bytes(msgspec.json.encode(events))


def read_policy(folder: Path) -> Any:
    events = msgspec.json.decode((folder / "events.json").read_bytes(), type=list[PolicyEvent])
    store, found = DirectoryStore(folder), []
    fetchers = {name: PolicyFetcher(store, name) for name in ("main", "adapted")}
    for event in events:
        policy = fetchers[event.policy].fetch(event)
        fetchers[event.policy].confirm(policy)
        manifest, _ = read_manifest(store, event.manifest, event.manifest_sha256)
        found.append({"event": event, "tensors": dict(policy.tensors), "probe": policy.probe, "manifest": manifest})
    return plain(found)


def write_collect(folder: Path) -> None:
    """The file of a partition with an open group, one that waits for feedback, and closed ones."""
    csat = FeedbackRules(window_ms=400_000, default=0.5, late="amend")
    rules = Rules(deadline_ms=1_000_000, keep_ms=10_000_000_000, sources={"csat": csat, "audit": csat})
    arrivals = FakePartition().extend(
        [
            block(answer("t.0", 0)),
            block(answer("u.0", 0), answer("u.0", 1)),
            stub("v.0", 0),
            block(answer("live.0", 0, size=1, lane="live")),
            said("live.0.0-0-0", 0.75, rater="ann"),
        ]
    )

    async def main() -> None:
        pending = PendingFile(folder / "collect-0.sqlite")
        state = pending.load({"first@1": Memory(8)})
        state.memories["first@1"].set("said before", 3)
        for arrival in arrivals.arrivals:
            await fold(state, arrival, rules, scored)
        await pending.save(state, rules.keep_ms)
        pending.close()

    asyncio.run(main())


def read_collect(folder: Path) -> Any:
    pending = PendingFile(folder / "collect-0.sqlite")
    try:
        state = pending.load({"first@1": Memory(8)})
        pending.look_up(state, ["u.0"])
        return plain(
            {
                "next_offset": state.next_offset,
                "last_ms": state.last_ms,
                "groups": state.groups,
                "block": state.frames.get(0),
                "remembered": state.memories["first@1"].get("said before"),
                "due_ms": state.next_due_ms(),
                "damaged": [path.name for path in folder.glob("*.damaged")],
            }
        )
    finally:
        pending.close()


def write_gateway(folder: Path) -> None:
    """Spooled records, the version served last, a key, and one that is revoked."""
    spool = Spool(folder / "spool", max_bytes=1_000_000)
    spool.append([msgspec.msgpack.encode(Spooled(topics.EXPERIENCES.name, encode(Block((member("q.0", 0),)))))])
    (folder / "policy.json").write_bytes(msgspec.json.encode(example_of(PolicyEvent)))
    store = DirectoryStore(folder / "store")
    _, text = create_key(store, tenant="acme", scopes=("serve", "feedback"), train="yes", rpm=60, tpm=0)
    (folder / "presented").write_text(text)


def read_gateway(folder: Path) -> Any:
    oldest = Spool(folder / "spool", max_bytes=1_000_000).oldest()
    assert oldest is not None
    spooled = [msgspec.msgpack.decode(payload, type=Spooled) for payload in oldest[1]]
    book = KeyBook()
    book.refresh(DirectoryStore(folder / "store"))
    return plain(
        {
            "spooled": [(one.topic, decode(one.frame)) for one in spooled],
            "policy": msgspec.json.decode((folder / "policy.json").read_bytes(), type=PolicyEvent),
            "key": book.find((folder / "presented").read_text(), now_s=0.0),
        }
    )


def write_archive(folder: Path) -> None:
    """`headrace export` of a run of a few steps."""
    folder.mkdir()
    exported(folder)


def read_archive(folder: Path) -> Any:
    source = unpacked(folder / "run.headrace", folder / "out")

    async def records() -> dict[str, Any]:
        found = {
            topic.name: [(one.offset, plain(one.value)) async for one in source.log.read_all(topic)]
            for topic in (topics.BATCHES, topics.BUFFER)
        }
        # Of each the ends: records of every kind have a picture of their own.
        return {name: {"count": len(all_), "ends": plain([*all_[:3], *all_[-1:]])} for name, all_ in found.items()}

    (manifest,) = checkpoint.manifests(source.store, source.run)
    found = checkpoint.load(source.store, source.run, manifest.place)
    return {"run": source.run, "learner": plain(found.learner), "records": asyncio.run(records())}


def write_settings(folder: Path) -> None:
    folder.mkdir()
    (folder / "headrace.toml").write_bytes(SETTINGS.read_bytes())


def read_settings(folder: Path) -> Any:
    """What the settings say of each key that the file sets: a default that it does not set may change."""
    settings = msgspec.to_builtins(load_settings(folder / "headrace.toml"), enc_hook=str)
    return said_of(tomllib.loads((folder / "headrace.toml").read_text()), settings)


def said_of(keys: Any, settings: Any) -> Any:
    if isinstance(keys, dict) and isinstance(settings, dict):
        return {name: said_of(one, settings[name]) for name, one in keys.items()}
    if isinstance(keys, list) and isinstance(settings, list | tuple):
        return [said_of(*two) for two in zip(keys, settings, strict=True)]
    return settings


PARTS = {
    "records": UpgradePart(write_records, read_records),
    "checkpoint": UpgradePart(write_checkpoint, read_checkpoint),
    "policy": UpgradePart(write_policy, read_policy),
    "collect": UpgradePart(write_collect, read_collect),
    "gateway": UpgradePart(write_gateway, read_gateway),
    "archive": UpgradePart(write_archive, read_archive),
    "settings": UpgradePart(write_settings, read_settings),
}
