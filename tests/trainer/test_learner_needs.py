"""What losses want of the learner: a moving reference, a teacher, a bound over the whole step, memory saved."""

import numpy as np
import pytest
from trainer_samples import make_item, random_items

from infra.cli.demo.char_model import build_char_model
from infra.policies.tensors import to_numpy
from schemas import BadFrame, Block, Span, decode, encode
from schemas.wire.teacher import SECTION, teacher_logprobs, with_teacher_logprobs
from trainer.batch.batch import TrainItem, pack
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.torch import TorchLearner


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(build_char_model(tmp_path_factory.mktemp("model") / "char", seed=3))


def opened(model: str, loss: str, options: dict | None = None, **settings) -> TorchLearner:
    lanes = {"usual": LaneConfig(loss=loss, options=options or {})}
    return TorchLearner(model, TrainerConfig(lanes=lanes, threads=1, **settings), device="cpu")


def answers(seed: int, *, teacher: float | None = None) -> list[TrainItem]:
    """Answers near the untrained policy's; teacher: its logprob of every token."""
    random = np.random.default_rng(seed)
    found = []
    for i in range(12):
        one = make_item(
            [1, 10 + i % 3, 20, *random.integers(30, 40, 2)],
            [Span(3, 5, 0)],
            group=f"t-{i % 3}.0",
            episode=i,
            advantage=float(random.normal()),
            logprobs=-np.log(128) + random.normal(0, 0.5, 2),
        )
        if teacher is not None:
            one = TrainItem(with_teacher_logprobs(one.experience, [teacher, teacher]), one.item)
        found.append(one)
    return found


def test_a_moving_reference_moves_also_where_its_steps_are_below_the_policys_precision(model):
    learner = opened(model, "grpo", {"kl": 0.1}, reference_decay=0.999, dtype="bfloat16")
    before = to_numpy(learner.save()["reference/lm_head.weight"])
    learner.step(pack(answers(0), max_tokens=1000), learning_rate=1e-3, seed=0)
    moved = to_numpy(learner.save()["reference/lm_head.weight"]) != before
    assert moved.mean() > 0.5


@pytest.mark.parametrize("decay", [0.75, 1.0, 0.0])
def test_the_reference_follows_the_policy_as_slowly_as_asked(model, decay):
    learner = opened(model, "grpo", {"kl": 0.1}, reference_decay=decay)
    name, expected = "lm_head.weight", None
    for step in range(3):
        before = to_numpy(learner.save()[f"reference/{name}"])
        learner.step(pack(answers(step), max_tokens=1000), learning_rate=1e-3, seed=step)
        expected = decay * before + (1 - decay) * to_numpy(learner.tensors()[name])
        assert to_numpy(learner.save()[f"reference/{name}"]) == pytest.approx(expected, abs=1e-7)
    start = to_numpy(opened(model, "grpo").tensors()[name])
    assert (np.abs(expected - start).max() == 0) == (decay == 1.0)


def test_the_bound_of_m2po_is_that_of_the_whole_step_however_it_is_cut(model):
    cuts = [
        opened(model, "m2po").step(pack(answers(0), max_tokens=size), learning_rate=1e-3, seed=0)
        for size in (1000, 12, 5)
    ]
    assert 0 < cuts[0].values["usual/clip_positive"] < 1
    for one in cuts[1:]:
        assert one.loss == pytest.approx(cuts[0].loss, rel=1e-5)
        assert one.grad_norm == pytest.approx(cuts[0].grad_norm, rel=1e-5)
        assert one.values["usual/clip_positive"] == cuts[0].values["usual/clip_positive"]


def test_distillation_makes_likely_what_the_teacher_gives_and_unlikely_what_it_does_not(model):
    for teacher, sign in ((-0.1, 1), (-12.0, -1)):
        learner = opened(model, "distill")
        probes = tuple(tuple(one.experience.tokens.tolist()) for one in answers(0))
        before = learner.probe(probes).logprobs
        for step in range(3):
            learner.step(pack(answers(0, teacher=teacher), max_tokens=1000), learning_rate=1e-4, seed=step)
        after = learner.probe(probes).logprobs
        assert sign * sum(a[-1] - b[-1] for a, b in zip(after, before, strict=True)) > 0
    with pytest.raises(ValueError, match="without a teacher"):
        opened(model, "distill").step(pack(answers(0), max_tokens=1000), learning_rate=1e-3, seed=0)


def test_teacher_logprobs_travel_as_a_section_of_their_own():
    taught, plain = answers(0, teacher=-1.5)[0].experience, answers(0)[1].experience
    read = decode(encode(Block((taught,))))
    assert isinstance(read, Block)
    found = teacher_logprobs(read.experiences[0])
    assert found is not None and found.tolist() == [-1.5, -1.5]
    assert teacher_logprobs(plain) is None
    assert teacher_logprobs(taught.with_bulk(tokens=[1, 2, 3, 4, 5])) is None, "other tokens were never judged"
    with pytest.raises(ValueError, match="expected 2"):
        with_teacher_logprobs(plain, [-1.0])
    with pytest.raises(ValueError, match="at most 0"):
        with_teacher_logprobs(plain, [-1.0, 0.5])
    broken = plain.with_bulk()
    broken.held().extras = {SECTION: (4, b"\0" * 12)}
    with pytest.raises(BadFrame, match="teacher_logprobs: got 12 bytes"):
        teacher_logprobs(broken)


def test_checkpointed_activations_give_the_same_step(model):
    batch = pack(random_items(0), max_tokens=200, version=5)
    plain, saving = opened_lanes(model), opened_lanes(model, activation_checkpointing=True)
    assert saving.model.module.is_gradient_checkpointing
    for one in (plain, saving):
        assert one.step(batch, learning_rate=1e-3, seed=0).finite
    for name, tensor in plain.tensors().items():
        assert np.abs(to_numpy(tensor) - to_numpy(saving.tensors()[name])).max() < 1e-6, name


def opened_lanes(model: str, **settings) -> TorchLearner:
    lanes = {"usual": LaneConfig(weight=0.9), "expert": LaneConfig(loss="sft", weight=0.1)}
    return TorchLearner(model, TrainerConfig(lanes=lanes, threads=1, **settings), device="cpu")
