"""The learner of one process: packing against a plain forward, minibatches, references, precision, and learning."""

import itertools

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_samples import make_item, random_items

from infra.cli.demo.char_model import build_char_model
from infra.model.model import load_model
from infra.policies.tensors import from_torch, to_numpy, to_torch
from infra.store.memory import MemoryStore
from schemas import BadFrame, Block, Span, decode, encode
from schemas.errors import ConfigError
from schemas.wire.teacher import SECTION, teacher_logprobs, with_teacher_logprobs
from trainer.batch.batch import LANES, PackedBatch, TrainItem, pack
from trainer.batch.split import split
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.forward import PackedModel
from trainer.learners.lanes import microbatch_loss, step_context
from trainer.learners.learner import take_snapshot
from trainer.learners.torch import TorchLearner
from trainer.losses.loss import Objective, open_objectives
from trainer.state import index_hash, whole_hash


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    torch.set_num_threads(1)
    return str(build_char_model(tmp_path_factory.mktemp("model") / "char", seed=3))


def opened(model: str, loss: str = "grpo", options: dict | None = None, **settings) -> TorchLearner:
    usual = LaneConfig(loss=loss, weight=0.9, options=options or {})
    lanes = {"usual": usual, "expert": LaneConfig(loss="sft", weight=0.1)}
    return TorchLearner(model, TrainerConfig(lanes=lanes, threads=1, **settings), device="cpu")


def plain_logprobs(module: torch.nn.Module, each: TrainItem) -> torch.Tensor:
    """Logprobs of the sampled tokens of one sequence by transformers alone."""
    ids = torch.tensor(each.experience.tokens.astype(np.int64))
    logits = module(input_ids=ids[None], use_cache=False).logits[0]
    found = [
        torch.log_softmax(logits[at - 1] / span.temperature, -1)[ids[at]]
        for span in each.experience.spans
        for at in range(span.start, span.stop)
    ]
    return torch.stack(found)


@pytest.mark.parametrize(("max_tokens", "max_logits"), [(64, 2**26), (10_000, 2**26), (10_000, 2000)])
def test_packed_logprobs_and_gradients_equal_those_of_each_sequence_alone(model, max_tokens, max_logits):
    items = random_items(seed=max_tokens)
    packed = PackedModel(model, dtype="float32", device="cpu", max_logits=max_logits)
    found = [[] for _ in items]
    for rows in pack(items, max_tokens=max_tokens).microbatches:
        logprob_N = packed.logprobs(rows)
        (logprob_N.sum() / 100).backward()
        for s, value in zip(rows.sequence_N.tolist(), logprob_N.tolist(), strict=True):
            found[s].append(value)
    plain = load_model(model)
    for item, logprobs in zip(items, found, strict=True):
        expected = plain_logprobs(plain, item)
        (expected.sum() / 100).backward()
        assert np.abs(np.array(logprobs) - expected.detach().numpy()).max() < 2e-6
    for (name, value), (_, other) in zip(packed.module.named_parameters(), plain.named_parameters(), strict=True):
        assert (value.grad - other.grad).abs().max() < 1e-6 * max(1, other.grad.abs().max()), name


def test_sampled_logprobs_of_the_same_policy_show_no_mismatch(model):
    plain = load_model(model)
    items = []
    for item in random_items(seed=1, groups=2):
        logprobs = plain_logprobs(plain, item).detach().numpy() * (item.item.lane == "usual")
        items.append(TrainItem(item.experience.with_bulk(logprobs=np.minimum(logprobs, 0)), item.item))
    batch = pack(items, max_tokens=1000, version=3)
    values = opened(model).step(batch, learning_rate=1e-5, seed=0).values
    assert values["usual/mismatch_tokens"] > 0
    assert values["usual/mismatch_abs_max"] < 1e-5
    assert values["usual/ess"] == pytest.approx(1.0)
    assert values["usual/staleness_max"] == 3.0
    ahead = pack(items, max_tokens=1000, version=3, exact=False)
    assert opened(model).step(ahead, learning_rate=1e-5, seed=0).values["usual/mismatch_tokens"] == 0


def test_a_token_sampled_with_older_keys_and_values_is_weighed_by_what_sampled_it_and_compares_no_engine(model):
    plain, items, apart = load_model(model), [], 0.3
    for item in random_items(seed=1, groups=2):
        spans = tuple(
            msgspec.structs.replace(span, version=3, kv=2 if span.ratio else -1) for span in item.experience.spans
        )
        sampled = np.minimum(plain_logprobs(plain, item).detach().numpy() - apart, 0) * (item.item.lane == "usual")
        items.append(TrainItem(item.experience.with_bulk(logprobs=sampled, spans=spans), item.item))
    batch = pack(items, max_tokens=1000, version=3)
    values = opened(model).step(batch, learning_rate=1e-5, seed=0).values
    assert values["usual/staleness_max"] == 0 and values["usual/mismatch_tokens"] == 0
    assert values["usual/weight_mean"] == pytest.approx(np.exp(apart), rel=1e-4)


def test_a_model_whose_head_the_packing_would_change_is_refused(model, tmp_path):
    from transformers import CohereConfig, CohereForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    CohereForCausalLM(CohereConfig(vocab_size=64, logit_scale=0.1, **shape)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="its head is not supported"):
        PackedModel(str(tmp_path), dtype="float32", device="cpu")


def test_gradients_of_many_microbatches_in_bfloat16_are_summed_in_float32(model):
    items = [each for seed in range(8) for each in near_uniform(seed)][:64]
    batch = pack([TrainItem(item.experience, item.item) for item in items], max_tokens=1)
    assert len(batch.microbatches) == 64
    learner = opened(model, dtype="bfloat16", gradient_clip=1e9)

    def gradient(microbatches) -> torch.Tensor:
        """From the first moment; nothing moves at this learning rate."""
        learner.begin_phase("train")
        learner.step(msgspec.structs.replace(batch, microbatches=microbatches), learning_rate=1e-30, seed=0)
        state = learner.save()
        return torch.cat(
            [to_torch(state[name]).flatten() for name in sorted(state) if name.startswith("adam/exp_avg/")]
        )

    parts = [gradient((rows,)) for rows in batch.microbatches]
    exact = sum(part.double() for part in parts)
    rounded = torch.zeros_like(parts[0], dtype=torch.bfloat16)
    for part in parts:
        rounded += part.bfloat16()
    assert (rounded.double() - exact).norm() > 5e-3 * exact.norm(), "this batch would show a sum in bfloat16"
    assert (gradient(batch.microbatches).double() - exact).norm() < 1e-3 * exact.norm()


def near_uniform(seed: int, *, advantage: float | None = None, versions: tuple[int, ...] = (0,)) -> list[TrainItem]:
    """Groups whose behaviour is near the untrained policy."""
    random = np.random.default_rng(seed)
    return [
        make_item(
            [1, 10 + g, 20, *random.integers(10, 20, 3)],
            [Span(3, 6, versions[g % len(versions)])],
            group=f"t-{g}.0",
            episode=episode,
            advantage=float(random.normal()) if advantage is None else advantage,
            logprobs=-np.log(128) + random.normal(0, 0.3, 3),
        )
        for g, episode in itertools.product(range(8), range(4))
    ]


@pytest.mark.parametrize("proximal", ["recompute", "log-linear"])
def test_the_clip_of_the_decoupled_loss_acts_from_the_second_minibatch_on(model, proximal):
    batch = pack(near_uniform(0), max_tokens=64)
    options = {"minibatches": 4, "proximal": proximal}
    still = opened(model, "decoupled", options).step(batch, learning_rate=1e-9, seed=0).values
    if proximal == "recompute":
        assert still["usual/clip_positive"] == still["usual/clip_negative"] == 0
    moved = opened(model, "decoupled", options).step(batch, learning_rate=1e-2, seed=0).values
    clipped = [values["usual/clip_positive"] + values["usual/clip_negative"] for values in (still, moved)]
    assert clipped[1] > clipped[0]


def test_the_reference_is_the_policy_at_the_start_of_its_phase_and_is_saved(model):
    batch = pack(near_uniform(0, advantage=0.0), max_tokens=1000)
    other = pack(near_uniform(1), max_tokens=1000)
    learner = opened(model, "grpo", {"kl": 1.0})
    # k3 has its minimum where π_θ is the reference: no gradient there, some after a step away from it.
    assert learner.step(batch, learning_rate=1e-4, seed=0).grad_norm < 1e-6
    learner.step(other, learning_rate=1e-3, seed=1)
    restored = opened(model, "grpo", {"kl": 1.0})
    restored.restore(learner.save())
    away = learner.step(batch, learning_rate=1e-9, seed=2).grad_norm
    assert away > 1e-3
    assert restored.step(batch, learning_rate=1e-9, seed=2).grad_norm == away
    learner.begin_phase("train")
    assert learner.step(batch, learning_rate=1e-9, seed=3).grad_norm < 1e-6


def test_a_checkpoint_on_the_cpu_takes_no_copy_of_the_state_and_no_later_step_reaches_it(model):
    learner, batch = opened(model, dtype="bfloat16"), pack(near_uniform(1, advantage=1.0), max_tokens=1000)
    learner.step(batch, learning_rate=1e-3, seed=0)
    store, before, held = MemoryStore(), learner.save(), learner.held()
    assert held is not None and whole_hash(held) == whole_hash(before)
    taken = take_snapshot(learner, store, "checkpoint")
    learner.step(batch, learning_rate=1e-3, seed=1)
    assert index_hash(taken.write()) == whole_hash(before) != whole_hash(held), "held is the state itself"


def test_learning_rate_follows_the_effective_sample_size_when_asked(model):
    batch = pack(near_uniform(0), max_tokens=1000)
    scaled = opened(model, scale_by_ess=True)
    share = scaled.step(batch, learning_rate=1e-3, seed=0).values["usual/ess"]
    assert share < 0.99
    plain = opened(model)
    plain.step(batch, learning_rate=1e-3 * share**0.5, seed=0)
    for name, tensor in plain.tensors().items():
        assert np.allclose(to_numpy(tensor), to_numpy(scaled.tensors()[name]), atol=1e-7)


def test_staleness_decay_is_a_weight_on_stale_tokens(model):
    items = near_uniform(0, versions=(5, 3))
    decayed = opened(model, staleness_decay=0.5)
    decayed.step(pack(items, max_tokens=1000, version=5), learning_rate=1e-3, seed=0)
    weighted = [
        make_item(
            item.experience.tokens,
            item.experience.spans,
            group=item.experience.group,
            episode=item.experience.episode,
            advantage=item.item.advantage,
            logprobs=item.experience.logprobs,
            weight=0.25 if item.experience.min_version == 3 else 1.0,
        )
        for item in items
    ]
    plain = opened(model)
    plain.step(pack(weighted, max_tokens=1000, version=5), learning_rate=1e-3, seed=0)
    assert all(decayed.tensors()[name].data == tensor.data for name, tensor in plain.tensors().items())


def test_bfloat16_publishes_what_it_computes_with_and_keeps_what_rounding_would_lose(model):
    learner = opened(model, dtype="bfloat16")
    start = learner.tensors()
    assert {tensor.dtype for tensor in start.values()} == {"BF16"}
    batch = pack(near_uniform(0), max_tokens=1000)
    for step in range(3):
        assert learner.step(batch, learning_rate=1e-7, seed=step).finite
    saved = learner.save()
    name = "lm_head.weight"
    published, master = learner.tensors()[name], saved[f"model/{name}"]
    assert from_torch(to_torch(master).bfloat16()).data == published.data
    assert (to_numpy(published) == to_numpy(start[name])).mean() > 0.99  # such steps are far below an ulp
    assert (to_numpy(master) == to_numpy(start[name])).mean() < 0.5
    other = opened(model, dtype="bfloat16")
    other.restore(saved)
    for each in (learner, other):
        each.step(batch, learning_rate=1e-3, seed=9)
    assert all(other.tensors()[name].data == tensor.data for name, tensor in learner.tensors().items())


@pytest.mark.parametrize("loss", ["grpo", "dppo", "decoupled", "tis"])
def test_reinforcement_makes_the_rewarded_token_likely(model, loss):
    learner = opened(model, loss)
    random = np.random.default_rng(0)
    prompt, good = (1, 20), 30
    for step in range(25):
        logprobs = np.array([learner.probe(((*prompt, token),)).logprobs[0][-1] for token in (good, 31)])
        p = np.exp(logprobs[0])
        answers = [good if random.random() < max(p, 0.3) else 31 for _ in range(16)]
        items = [
            make_item(
                [*prompt, answer],
                [Span(2, 3, step)],
                episode=episode,
                group=f"bandit.{step}",
                advantage=1.5 if answer == good else -0.5,
                logprobs=logprobs[[0 if answer == good else 1]],
            )
            for episode, answer in enumerate(answers)
        ]
        learner.step(pack(items, max_tokens=1000, version=step), learning_rate=5e-3, seed=step)
    before, after = 1 / 128, np.exp(learner.probe(((*prompt, good),)).logprobs[0][-1])
    assert after > 20 * before
    assert learner.probe(((*prompt, 31),)).logprobs[0][-1] < np.log(1 / 128)


SOME = ("usual", "expert", "live")
CONFIGS = {
    "usual": LaneConfig(loss="reinforce", weight=0.7),
    "expert": LaneConfig(loss="sft", weight=0.3),
    "live": LaneConfig(loss="topr", weight=0.2),  # a mean over sequences
}


def items(lanes: list[tuple[int, int, int]]) -> list[TrainItem]:
    """One sequence for each (lane, group, sampled tokens), with advantage 1; a group has one lane."""
    return [
        make_item(
            [1, 3 + group, *range(20, 20 + num)],
            [Span(2, 2 + num, 0)],
            group=f"{SOME[lane]}-{group}.0",
            episode=episode,
            lane=SOME[lane],
            logprobs=np.zeros(num),
        )
        for episode, (lane, group, num) in enumerate(lanes)
    ]


def token_weights(
    objectives: dict[str, Objective], batch: PackedBatch, parts: int, ranks: int
) -> dict[str, list[float]]:
    """What each token's log π weighs in the sum over minibatches and ranks, by lane; π = μ, so ratios are 1."""
    found: dict[str, list[float]] = {}
    dealt = split(batch, parts, seed=3)
    for part in dealt:
        context = step_context(objectives, batch, len(dealt), 0, staleness_decay=1.0, bounds={})
        for rank in split(part, ranks):
            for rows in rank.microbatches:
                logprob_N = torch.zeros(len(rows.target_N), dtype=torch.float64, requires_grad=True)
                loss, _ = microbatch_loss(context, rows, logprob_N)
                loss.backward()
                for lane, slope in zip(rows.lane_N, logprob_N.grad.tolist(), strict=True):
                    found.setdefault(LANES[lane], []).append(-slope)
    return {lane: [weight / len(dealt) for weight in weights] for lane, weights in found.items()}


@settings(max_examples=80, deadline=None)
@given(
    lanes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=14),
    max_tokens=st.integers(1, 60),
    parts=st.integers(1, 7),
    ranks=st.integers(1, 3),
)
def test_each_token_weighs_as_in_one_step_whichever_minibatch_and_rank_it_falls_into(lanes, max_tokens, parts, ranks):
    objectives = open_objectives(CONFIGS)
    batch = pack(items(lanes), max_tokens=max_tokens)
    found = token_weights(objectives, batch, parts, ranks)
    for lane, weights in found.items():
        count = batch.lane_sequences[lane] if lane == "live" else batch.lane_tokens[lane]
        assert len(weights) == batch.lane_tokens[lane]
        assert weights == pytest.approx([CONFIGS[lane].weight / count] * len(weights))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    return str(build_char_model(tmp_path_factory.mktemp("model") / "char", seed=3))


def opened_small(small: str, loss: str, options: dict | None = None, **settings) -> TorchLearner:
    lanes = {"usual": LaneConfig(loss=loss, options=options or {})}
    return TorchLearner(small, TrainerConfig(lanes=lanes, threads=1, **settings), device="cpu")


def answers(seed: int, *, teacher: float | None = None) -> list[TrainItem]:
    """Answers near the untrained policy's; teacher: its logprob of every token."""
    random = np.random.default_rng(seed)
    found = []
    for i in range(12):
        item = make_item(
            [1, 10 + i % 3, 20, *random.integers(30, 40, 2)],
            [Span(3, 5, 0)],
            group=f"t-{i % 3}.0",
            episode=i,
            advantage=float(random.normal()),
            logprobs=-np.log(128) + random.normal(0, 0.5, 2),
        )
        if teacher is not None:
            item = TrainItem(with_teacher_logprobs(item.experience, [teacher, teacher]), item.item)
        found.append(item)
    return found


def test_a_moving_reference_moves_also_where_its_steps_are_below_the_policys_precision(small):
    learner = opened_small(small, "grpo", {"kl": 0.1}, reference_decay=0.999, dtype="bfloat16")
    before = to_numpy(learner.save()["reference/lm_head.weight"])
    learner.step(pack(answers(0), max_tokens=1000), learning_rate=1e-3, seed=0)
    moved = to_numpy(learner.save()["reference/lm_head.weight"]) != before
    assert moved.mean() > 0.5


@pytest.mark.parametrize("decay", [0.75, 1.0, 0.0])
def test_the_reference_follows_the_policy_as_slowly_as_asked(small, decay):
    learner = opened_small(small, "grpo", {"kl": 0.1}, reference_decay=decay)
    name, expected = "lm_head.weight", None
    for step in range(3):
        before = to_numpy(learner.save()[f"reference/{name}"])
        learner.step(pack(answers(step), max_tokens=1000), learning_rate=1e-3, seed=step)
        expected = decay * before + (1 - decay) * to_numpy(learner.tensors()[name])
        assert to_numpy(learner.save()[f"reference/{name}"]) == pytest.approx(expected, abs=1e-7)
    start = to_numpy(opened_small(small, "grpo").tensors()[name])
    assert (np.abs(expected - start).max() == 0) == (decay == 1.0)


def test_the_bound_of_m2po_is_that_of_the_whole_step_however_it_is_cut(small):
    cuts = [
        opened_small(small, "m2po").step(pack(answers(0), max_tokens=size), learning_rate=1e-3, seed=0)
        for size in (1000, 12, 5)
    ]
    assert 0 < cuts[0].values["usual/clip_positive"] < 1
    for each in cuts[1:]:
        assert each.loss == pytest.approx(cuts[0].loss, rel=1e-5)
        assert each.grad_norm == pytest.approx(cuts[0].grad_norm, rel=1e-5)
        assert each.values["usual/clip_positive"] == cuts[0].values["usual/clip_positive"]


def test_distillation_makes_likely_what_the_teacher_gives_and_unlikely_what_it_does_not(small):
    # Answers of one prompt are liked; a teacher that gives less than the policy to all of them likes these more than the rest.
    for liked, other in ((-0.1, -12.0), (-9.0, -19.0)):
        learner = opened_small(small, "distill")
        taught = [*answers(0, teacher=liked)[::3], *answers(0, teacher=other)[1::3]]
        probes = tuple(tuple(each.experience.tokens.tolist()) for each in taught)
        before = learner.probe(probes).logprobs
        for step in range(3):
            learner.step(pack(taught, max_tokens=1000), learning_rate=1e-4, seed=step)
        moved = [a[-1] - b[-1] for a, b in zip(learner.probe(probes).logprobs, before, strict=True)]
        assert sum(moved[:4]) > 0 > sum(moved[4:])


def test_the_baseline_of_distillation_is_that_of_the_whole_step_however_it_is_cut(small):
    taught = [*answers(0, teacher=-2.0)[:6], *answers(0, teacher=-9.0)[6:]]
    cuts = [
        opened_small(small, "distill").step(pack(taught, max_tokens=size), learning_rate=1e-3, seed=0)
        for size in (1000, 12, 5)
    ]
    for each in cuts[1:]:
        assert each.loss == pytest.approx(cuts[0].loss, rel=1e-5)
        assert each.grad_norm == pytest.approx(cuts[0].grad_norm, rel=1e-5)


def test_distillation_refuses_answers_without_a_teacher(small):
    with pytest.raises(ValueError, match="without a teacher"):
        opened_small(small, "distill").step(pack(answers(0), max_tokens=1000), learning_rate=1e-3, seed=0)


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
