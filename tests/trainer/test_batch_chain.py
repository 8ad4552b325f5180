"""The batch chain: what it may change, what it must journal, and that a killed trainer repeats it without running it."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from infra.chain.insert import ProcessorConfig
from infra.chain.processor import Drop, processor
from infra.store.directory import DirectoryStore
from schemas import Batch, Experience, Span, decode, encode
from tests.role import role_of
from tests.trainer.memory_run import CONFIG, FLOOR, KillingBus, ends, filled_log, journal
from tests.trainer.trainer_samples import make_item
from trainer.batch.assemble import ALONE, apply_chain, build_batch
from trainer.batch.batch import TrainItem
from trainer.learners.scripted import ScriptedLearner
from trainer.processors import with_weight
from trainer.train import run_trainer

HERE = "tests.trainer.test_batch_chain"


def chain(*names: str, **options: object):
    return build_batch([ProcessorConfig(use=f"{HERE}:{name}", stage="batch", options=options) for name in names])


@processor(version=1, inline=True)
def halve(experience: Experience) -> Experience:
    assert experience.advantage is not None
    return msgspec.structs.replace(experience, advantage=experience.advantage / 2)


@processor(version=1)
def drop_first(batch: tuple[Experience, ...]) -> tuple[Experience | Drop, ...]:
    return (Drop("first of its batch"), *(with_weight(each, 2.0) for each in batch[1:]))


@processor(version=1, inline=True)
def drop_usual(experience: Experience) -> Experience | Drop:
    return Drop("unwanted") if experience.lane == "usual" else experience


def items(num: int = 4, lane: str = "usual", **header: object) -> list[TrainItem]:
    found = []
    for i in range(num):
        ratio = lane == "usual"
        item = make_item(
            [1, 2, 3, *[4] * i], [Span(2, 3 + i, 0, 1.0, ratio)], group=f"{lane}-{i}.0", lane=lane, advantage=i - 1.0,
            **header,
        )  # fmt: skip
        found.append(TrainItem(msgspec.structs.replace(item.experience, advantage=i - 1.0), item.item))
    return found


def applied(steps, given: list[TrainItem], *, alone: bool = True) -> tuple[Batch, list[TrainItem]]:
    batch = Batch(run="r", token=1, step=7, version=3, items=tuple(each.item for each in given), drops={"stale": 2})
    record, kept = asyncio.run(apply_chain(steps, batch, given, alone=alone))
    read = decode(encode(record))
    assert read == record, "what the chain decided is in the journal"
    assert record.items == tuple(each.item for each in kept)
    return record, kept


def test_normalized_advantages_have_mean_0_and_variance_1_over_the_whole_batch():
    given = items(5)
    steps = build_batch([ProcessorConfig(use="trainer.processors:normalize_advantages", stage="batch")])
    record, kept = applied(steps, given)
    values = np.array([item.advantage for item in record.items])
    # (-1, 0, 1, 2, 3): mean 1, variance 2
    assert values == pytest.approx(np.array([-2, -1, 0, 1, 2]) / np.sqrt(2))
    assert [each.experience.advantage for each in kept] == [-1.0, 0.0, 1.0, 2.0, 3.0], "the log says what it said"


def test_drops_and_weights_are_written_down_with_their_reasons():
    record, kept = applied(chain("halve", "drop_first"), items())
    assert [each.id for each in record.dropped] == ["usual-0.0.0-0-0"]
    assert record.dropped_because == ("first of its batch",)
    assert record.drops == {"stale": 2, "first of its batch": 1}
    assert [(item.advantage, item.weight) for item in record.items] == [(0.0, 2.0), (0.5, 2.0), (1.0, 2.0)]
    assert len(kept) == 3


def test_a_weight_in_the_log_is_nobodys_and_a_pair_goes_whole():
    marked = [
        msgspec.structs.replace(item, experience=msgspec.structs.replace(item.experience, weight=50.0))
        for item in items(2, meta={"batch.weight": 50.0})
    ]
    record, _ = applied(chain("halve"), marked)
    assert [item.weight for item in record.items] == [1.0, 1.0]
    sides = [
        make_item([1, 2, 3 + i], [Span(2, 3, -1, 1.0, False)], group="p.0", episode=i, lane="human", kind=side)
        for i, side in enumerate(("chosen", "rejected"))
    ]
    record, kept = applied(chain("drop_first"), sides)
    assert not kept and record.dropped_because == ("first of its batch", "half a pair")
    with pytest.raises(ValueError, match="weight: got"):
        with_weight(sides[0].experience, -1.0)


def test_what_rides_along_is_not_trained_alone():
    given = [*items(2), *items(2, "expert")]
    record, kept = applied(chain("drop_usual"), given, alone=False)
    assert not kept and record.dropped_because == ("unwanted", "unwanted", ALONE, ALONE)
    _, kept = applied(chain("drop_usual"), given)
    assert [each.item.lane for each in kept] == ["expert", "expert"]


async def train(log, store, steps, learner: ScriptedLearner) -> None:
    await run_trainer(role_of("train", FLOOR, log, store), CONFIG, learner, seed=3, chain=steps)


@pytest.mark.parametrize("kill_at", [23, 30, 36, 45])
async def test_a_killed_trainer_repeats_the_journal_without_running_the_chain(tmp_path: Path, kill_at: int) -> None:
    store, learner = DirectoryStore(tmp_path / "whole"), ScriptedLearner()
    log = await filled_log(store)
    await train(log, store, chain("halve", "drop_first"), learner)
    records = await journal(log)
    store, again, bus = DirectoryStore(tmp_path / "killed"), ScriptedLearner(), KillingBus()
    log = await filled_log(store)
    bus.__dict__.update({**log.bus.__dict__, "sends": 0, "kill_at": kill_at})
    log.bus = bus
    assert not await ends(train(log, store, chain("halve", "drop_first"), ScriptedLearner()))
    await train(log, store, chain("halve", "drop_first"), again)
    records_again = await journal(log)
    assert again.tensors() == learner.tensors()
    batches = [record for record in records if isinstance(record, Batch) and record.phase == "train"]
    assert all(len(batch.dropped) == 1 and batch.dropped_because == ("first of its batch",) for batch in batches)
    content = {record.step: (record.items, record.dropped) for record in records if isinstance(record, Batch)}
    assert content == {
        record.step: (record.items, record.dropped) for record in records_again if isinstance(record, Batch)
    }
