"""The contract of `trainer.learners.learner.Learner`, held by the learner of one process."""

import msgspec
import numpy as np
import pytest

from infra.policies.tensors import Tensor
from schemas import Lane, Span
from tests.trainer.trainer_samples import make_item
from trainer.batch.batch import PackedBatch, TrainItem, pack
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.learner import Learner
from trainer.learners.torch import TorchLearner

LANES: dict[Lane, LaneConfig] = {
    "usual": LaneConfig(loss="grpo", weight=0.9),
    "expert": LaneConfig(loss="sft", weight=0.1),
}
DECOUPLED: dict[Lane, LaneConfig] = LANES | {"usual": LaneConfig(loss="decoupled", weight=0.9)}


def opened(model: str, lanes=LANES, **settings) -> Learner:
    return TorchLearner(model, TrainerConfig(lanes=lanes, threads=1, **settings))


def items(seed: int, *, groups: int = 4, size: int = 4, advantage: float | None = None) -> list[TrainItem]:
    """Groups of answers with behaviour logprobs near a uniform policy's, and two demonstrations."""
    random = np.random.default_rng(seed)
    found = []
    for g in range(groups + 2):
        lane: Lane = "usual" if g < groups else "expert"
        prompt = [1, *random.integers(10, 30, 5).tolist()]
        for episode in range(size if lane == "usual" else 1):
            answer = random.integers(10, 20, random.integers(2, 5)).tolist()
            num = len(answer)
            found.append(
                make_item(
                    [*prompt, *answer],
                    [Span(len(prompt), len(prompt) + num, 0, 1.0, lane == "usual")],
                    group=f"{lane}-{g}.0",
                    episode=episode,
                    lane=lane,
                    logprobs=-np.log(128) + random.normal(0, 0.1, num) if lane == "usual" else np.zeros(num),
                    advantage=float(random.normal()) if advantage is None else advantage,
                )
            )
    return found


def batch(seed: int, *, max_tokens: int = 10_000, **settings) -> PackedBatch:
    return pack(items(seed, **settings), max_tokens=max_tokens)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(bytes(one[name].data) == bytes(other[name].data) for name in one)


@pytest.mark.parametrize("lanes", [LANES, DECOUPLED], ids=["one step", "minibatches"])
def test_a_step_changes_the_policy_and_reports_its_health(model, lanes):
    learner = opened(model, lanes)
    before = learner.tensors()
    stats = learner.step(batch(0), learning_rate=1e-3, seed=0)
    assert stats.finite and stats.grad_norm > 0
    assert not same(learner.tensors(), before)
    assert stats.values["usual/tokens"] + stats.values["expert/tokens"] == batch(0).num_tokens
    assert 0 < stats.values["usual/ess"] <= 1


@pytest.mark.parametrize("lanes", [LANES, DECOUPLED], ids=["one step", "minibatches"])
@pytest.mark.parametrize("steps_before", [1, 0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing_and_says_so(model, lanes, steps_before, bad):
    learner, twin = opened(model, lanes), opened(model, lanes)
    for step in range(steps_before):
        learner.step(batch(step), learning_rate=1e-3, seed=step)
        twin.step(batch(step), learning_rate=1e-3, seed=step)
    before = learner.save()
    poisoned = items(7)
    last = poisoned[12]  # of the last usual group: with minibatches, some steps may have been taken before it
    poisoned[12] = TrainItem(last.experience, msgspec.structs.replace(last.item, advantage=bad))
    stats = learner.step(pack(poisoned, max_tokens=10), learning_rate=1e-3, seed=7)
    assert not stats.finite
    assert same(learner.save(), before)
    learner.step(batch(9), learning_rate=1e-3, seed=9)
    twin.step(batch(9), learning_rate=1e-3, seed=9)
    assert same(learner.save(), twin.save())


@pytest.mark.parametrize("lanes", [LANES, DECOUPLED], ids=["one step", "minibatches"])
@pytest.mark.parametrize("steps_before", [2, 0])
def test_restore_continues_to_the_same_bits(model, lanes, steps_before):
    learner = opened(model, lanes)
    learner.begin_phase("warmup")
    for step in range(steps_before):
        learner.step(batch(step), learning_rate=1e-3, seed=step)
    saved = learner.save()
    other = opened(model, lanes)
    other.step(batch(50), learning_rate=1e-2, seed=1)  # `restore` replaces this step
    other.restore(saved)
    for step in range(10, 13):
        learner.step(batch(step), learning_rate=1e-3, seed=step)
        other.step(batch(step), learning_rate=1e-3, seed=step)
    assert same(learner.save(), other.save())
    assert same(learner.tensors(), other.tensors())


def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(model):
    learner = opened(model)
    learner.step(batch(0), learning_rate=1e-3, seed=0)
    before = learner.save()
    name = next(name for name in before if name.endswith("lm_head.weight"))
    cut = Tensor("F32", (1,), b"\x00" * 4)
    for bad in ({k: v for k, v in before.items() if k != name}, before | {name: cut}):
        with pytest.raises(ValueError, match=r"lm_head\.weight"):
            learner.restore(bad)
    with pytest.raises(ValueError, match="extra"):
        learner.restore(before | {"model/extra": cut})
    assert same(learner.save(), before)


def test_the_probe_is_the_policy_in_tensors(model, tmp_path):
    """The probe's logprobs come out of a plain transformers forward of `tensors()`."""
    import torch

    from infra.model.model import load_into, load_model

    learner = opened(model)
    learner.step(batch(0), learning_rate=1e-3, seed=0)
    sequences = ((1, 22, 30, 41), (1, 5))
    probe = learner.probe(sequences)
    assert probe.sequences == sequences
    plain = load_model(model)
    load_into(plain, learner.tensors())
    for tokens, logprobs in zip(sequences, probe.logprobs, strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([tokens])).logits[0, :-1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_warmup_weighs_every_lane_one_and_a_new_phase_forgets_the_optimizer(model):
    experts = pack([item for item in items(0) if item.item.lane == "expert"], max_tokens=1000)
    norms = {}
    for phase in ("train", "warmup"):
        learner = opened(model)
        learner.begin_phase(phase)
        norms[phase] = learner.step(experts, learning_rate=1e-3, seed=0).grad_norm
        learner.begin_phase("train")
        assert not any("exp_avg" in name for name in learner.save())
    assert norms["warmup"] == pytest.approx(10 * norms["train"], rel=1e-4)


def test_a_step_at_a_rate_of_zero_is_taken_and_moves_nothing(model):
    learner = opened(model)
    before = learner.tensors()
    assert learner.step(batch(0), learning_rate=0.0, seed=0).finite
    assert same(learner.tensors(), before)


def test_log_distances_are_those_of_the_recorded_logprobs(model):
    learner = opened(model)
    some = items(0)[:6]
    sums = learner.log_distances(pack(some, max_tokens=30))
    for item, total in zip(some, sums, strict=True):
        probe = learner.probe((tuple(item.experience.tokens.tolist()),)).logprobs[0]
        expected, at = 0.0, 0
        for span in item.experience.spans:
            for place in range(span.start, span.stop):
                if span.ratio:
                    expected += abs(probe[place - 1] - float(item.experience.logprobs[at]))
                at += 1
        assert all(span.temperature == 1.0 for span in item.experience.spans)
        assert total == pytest.approx(expected, abs=1e-4)


def test_greedy_accuracy_counts_sequences_whose_every_token_is_the_argmax(model):
    learner = opened(model)
    one = items(0)[0]
    only = pack([one], max_tokens=100)
    assert learner.greedy_accuracy(pack(items(0), max_tokens=30)) < 0.5
    learner.begin_phase("warmup")
    supervised = TrainItem(one.experience, msgspec.structs.replace(one.item, lane="expert"))
    for step in range(20):
        learner.step(pack([supervised], max_tokens=100), learning_rate=3e-3, seed=step)
    assert learner.greedy_accuracy(only) == 1.0


def test_misuse_is_refused_before_anything_changes(model):
    learner = opened(model, {"usual": LANES["usual"]})
    before = learner.save()
    with pytest.raises(ValueError, match="no sampled tokens"):
        learner.step(pack([], max_tokens=10), learning_rate=1e-3, seed=0)
    with pytest.raises(ValueError, match="lane expert"):
        learner.step(batch(0), learning_rate=1e-3, seed=0)
    with pytest.raises(ValueError, match="learning_rate"):
        learner.step(batch(0), learning_rate=float("nan"), seed=0)
    learner = opened(model, LANES | {"expert": LaneConfig(loss="dppo")})
    with pytest.raises(ValueError, match="ratio=False"):
        learner.step(batch(0), learning_rate=1e-3, seed=0)
    assert same(learner.save(), before)
