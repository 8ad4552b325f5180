"""The learner of one process: what a step is worth however it is cut, references, precision, pairs, teachers, and learning."""

import itertools

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_samples import make_item, pair, random_items, tiny_model

from infra.model.model import load_model
from infra.policies.tensors import from_torch, to_numpy, to_torch
from infra.store.memory import MemoryStore
from schemas import BadFrame, Block, Span, decode, encode
from schemas.wire.teacher import SECTION, teacher_logprobs, with_teacher_logprobs
from trainer.batch.batch import PackedBatch, TrainItem, pack
from trainer.batch.split import split
from trainer.config import LOSSES, LaneConfig, TrainerConfig
from trainer.learners.lanes import microbatch_loss, step_context
from trainer.learners.learner import take_snapshot
from trainer.learners.torch import TorchLearner
from trainer.losses.loss import open_objectives
from trainer.state import index_hash, whole_hash


def opened(
    model: str, loss: str = "grpo", options: dict | None = None, *, kl=0.0, entropy=0.0, **settings
) -> TorchLearner:
    usual = LaneConfig(loss=loss, weight=0.9, options=options or {}, kl=kl, entropy=entropy)
    lanes = {"human": usual} if loss == "dpo" else {"usual": usual, "expert": LaneConfig(loss="sft", weight=0.1)}
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


@pytest.mark.parametrize("tied", [True, False])
def test_in_bfloat16_no_microbatch_makes_a_gradient_as_large_as_the_vocabulary(tmp_path, tied):
    learner = opened(tiny_model(tmp_path, "llama", tie_word_embeddings=tied), dtype="bfloat16")
    weights = {value.data_ptr() for value in learner.model.trained.values()}
    size = learner.model.module.get_output_embeddings().weight.shape
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (size, torch.bfloat16):
                made.extend([] if found.is_sparse or found.data_ptr() in weights else [func])
            return found

    with Watch():
        learner.step(pack(near_uniform(0), max_tokens=16), learning_rate=1e-5, seed=0)
    assert not made


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
    learner = opened(model, kl=1.0)
    # k3 has its minimum where π_θ is the reference: no gradient there, some after a step away from it.
    assert learner.step(batch, learning_rate=1e-4, seed=0).grad_norm < 1e-6
    learner.step(other, learning_rate=1e-3, seed=1)
    restored = opened(model, kl=1.0)
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


def test_staleness_decay_is_a_weight_on_stale_tokens(model):
    items = near_uniform(0, versions=(5, 3))
    weighted = [
        TrainItem(
            each.experience,
            msgspec.structs.replace(each.item, weight=0.25 if each.experience.min_version == 3 else 1.0),
        )
        for each in items
    ]
    learners = opened(model, staleness_decay=0.5), opened(model)
    for learner, weighed in zip(learners, (items, weighted), strict=True):
        learner.step(pack(weighed, max_tokens=1000, version=5), learning_rate=1e-3, seed=0)
    decayed, plain = (learner.tensors() for learner in learners)
    assert all(decayed[name].data == tensor.data for name, tensor in plain.items())


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


LAYOUT = {
    "usual": LaneConfig(loss="gspo", weight=0.7, kl=0.3, entropy=0.2),  # means over sequences and over tokens
    "expert": LaneConfig(loss="sft", weight=0.3),
}
Slopes = dict[tuple[int, int], tuple[float, float]]


def layout_loss(
    items: list[TrainItem], batch: PackedBatch, parts: int, ranks: int, order: list[int]
) -> tuple[float, Slopes]:
    """Loss and the slopes of (log π, entropy) of each token, named by item and place; order: of the packed items."""
    objectives = open_objectives(LAYOUT)
    loss, slopes = 0.0, {}
    dealt = split(batch, parts, seed=1)
    for index, part in enumerate(dealt):
        context = step_context(objectives, batch, len(dealt), index, staleness_decay=1.0, bounds={})
        for rows in (micro for rank in split(part, ranks) for micro in rank.microbatches):
            begin = np.flatnonzero(np.append(True, rows.sequence_N[1:] != rows.sequence_N[:-1]))
            place_N = np.arange(len(rows.target_N)) - np.repeat(begin, np.diff(np.append(begin, len(rows.target_N))))
            names = [(order[s], int(place)) for s, place in zip(rows.sequence_N, place_N, strict=True)]
            numbers = np.array([np.random.default_rng(name).normal(size=3) for name in names]).T
            logprob, reference, entropy = (
                torch.tensor(column) for column in numbers * [[-0.3], [-0.3], [1]] - [[1], [1], [0]]
            )
            logprob.requires_grad_(), entropy.requires_grad_()
            value, _ = microbatch_loss(context, rows, logprob, reference_N=reference, entropy_N=entropy)
            value.backward()
            loss += float(value.detach()) / len(dealt)
            own = [
                torch.zeros(len(names)) if each.grad is None else each.grad / len(dealt) for each in (logprob, entropy)
            ]
            slopes |= {name: (float(a), float(b)) for name, a, b in zip(names, *own, strict=True)}
    return loss, slopes


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 9),
    max_tokens=st.integers(1, 200),
    parts=st.integers(1, 7),
    ranks=st.integers(1, 3),
    random=st.randoms(use_true_random=False),
)
def test_packing_order_minibatches_and_ranks_never_change_loss_or_gradient(seed, max_tokens, parts, ranks, random):
    items = random_items(seed, groups=3, size=4)
    order = list(range(len(items)))
    whole = pack(items, max_tokens=10_000, version=6)
    loss, slopes = layout_loss(items, whole, 1, 1, order)
    for (item, _), (slope, entropy) in slopes.items():
        if (lane := items[item].item.lane) == "expert":
            assert slope == pytest.approx(-0.3 / whole.lane_tokens[lane])
        else:
            assert entropy == pytest.approx(-0.7 * 0.2 / whole.lane_tokens[lane])
    random.shuffle(order)
    cut = pack([items[i] for i in order], max_tokens=max_tokens, version=6)
    other, others = layout_loss(items, cut, parts, ranks, order)
    assert other == pytest.approx(loss, rel=1e-6) and others.keys() == slopes.keys()
    assert np.array([others[name] for name in slopes]) == pytest.approx(np.array(list(slopes.values())), rel=1e-5)


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"distill", "dpo", "ppo"}))
def test_every_loss_takes_both_terms_and_without_them_a_step_keeps_its_bits(model, loss):
    items = [item for item in random_items(1, groups=2, size=3) if item.item.lane == "usual"]
    batch = pack(items, max_tokens=60, version=5)

    def stepped(**terms: float):
        learner = opened(model, loss, **terms, reference_decay=0.5)
        learner.step(batch, learning_rate=1e-3, seed=0)
        return learner.step(batch, learning_rate=1e-9, seed=1)

    plain, zero, both = stepped(), stepped(kl=0.0, entropy=0.0), stepped(kl=0.4, entropy=0.1)
    assert (plain.loss, plain.grad_norm, plain.values) == (zero.loss, zero.grad_norm, zero.values)
    assert not {"usual/kl_reference", "usual/entropy_exact"} & plain.values.keys()
    assert both.values["usual/entropy_exact"] == pytest.approx(np.log(128), abs=0.1)
    assert both.values["usual/kl_reference"] > 0


def test_learning_from_pairs_widens_the_margin_and_any_cut_gives_one_step(model):
    items = [each for p in range(6) for each in pair([30 + p, 2], [60 + p, 2, 2], f"p-{p}.0")]
    learners = [opened(model, "dpo"), opened(model, "dpo")]
    first = [
        learner.step(pack(items, max_tokens=size), learning_rate=1e-3, seed=0)
        for learner, size in zip(learners, (10_000, 6), strict=True)
    ]
    assert first[0].loss == pytest.approx(0.9 * np.log(2)), "before the first step every margin is 0"
    assert first[1].loss == pytest.approx(first[0].loss) and first[1].grad_norm == pytest.approx(first[0].grad_norm)
    for step in range(1, 8):
        stats = learners[0].step(pack(items, max_tokens=10_000), learning_rate=1e-3, seed=step)
    assert stats.loss < 0.5


def answers(seed: int, *, teacher: float | None = None) -> list[TrainItem]:
    """Answers near the untrained policy's; teacher: its logprob of every token."""
    random = np.random.default_rng(seed)
    found = []
    for i in range(12):
        item = make_item(
            [1, 10 + i % 3, 20, *random.integers(30, 40, 2)], [Span(3, 5, 0)], group=f"t-{i % 3}.0", episode=i,
            advantage=float(random.normal()), logprobs=-np.log(128) + random.normal(0, 0.5, 2),
        )  # fmt: skip
        if teacher is not None:
            item = TrainItem(with_teacher_logprobs(item.experience, [teacher, teacher]), item.item)
        found.append(item)
    return found


def test_a_moving_reference_moves_also_where_its_steps_are_below_the_policys_precision(model):
    learner = opened(model, kl=0.1, reference_decay=0.999, dtype="bfloat16")
    before = to_numpy(learner.save()["reference/lm_head.weight"])
    learner.step(pack(answers(0), max_tokens=1000), learning_rate=1e-3, seed=0)
    moved = to_numpy(learner.save()["reference/lm_head.weight"]) != before
    assert moved.mean() > 0.5


@pytest.mark.parametrize("decay", [0.75, 1.0, 0.0])
def test_the_reference_follows_the_policy_as_slowly_as_asked(model, decay):
    learner = opened(model, kl=0.1, reference_decay=decay)
    name, expected = "lm_head.weight", None
    for step in range(3):
        before = to_numpy(learner.save()[f"reference/{name}"])
        learner.step(pack(answers(step), max_tokens=1000), learning_rate=1e-3, seed=step)
        expected = decay * before + (1 - decay) * to_numpy(learner.tensors()[name])
        assert to_numpy(learner.save()[f"reference/{name}"]) == pytest.approx(expected, abs=1e-7)
    start = to_numpy(opened(model, "grpo").tensors()[name])
    assert (np.abs(expected - start).max() == 0) == (decay == 1.0)


@pytest.mark.parametrize("loss", ["m2po", "distill"])
def test_the_bound_and_the_baseline_of_a_loss_are_those_of_the_whole_step_however_it_is_cut(model, loss):
    items = [*answers(0, teacher=-2.0)[:6], *answers(0, teacher=-9.0)[6:]]
    whole, *cuts = [
        opened(model, loss).step(pack(items, max_tokens=size), learning_rate=1e-3, seed=0) for size in (1000, 12, 5)
    ]
    assert loss == "distill" or 0 < whole.values["usual/clip_positive"] < 1
    for each in cuts:
        assert (each.loss, each.grad_norm) == pytest.approx((whole.loss, whole.grad_norm), rel=1e-5)
        assert each.values["usual/clip_positive"] == whole.values["usual/clip_positive"]


def test_distillation_makes_likely_what_the_teacher_gives_and_unlikely_what_it_does_not(model):
    # Answers of one prompt are liked; a teacher that gives less than the policy to all of them likes these more than the rest.
    for liked, other in ((-0.1, -12.0), (-9.0, -19.0)):
        learner = opened(model, "distill")
        taught = [*answers(0, teacher=liked)[::3], *answers(0, teacher=other)[1::3]]
        probes = tuple(tuple(each.experience.tokens.tolist()) for each in taught)
        before = learner.probe(probes).logprobs
        for step in range(3):
            learner.step(pack(taught, max_tokens=1000), learning_rate=1e-4, seed=step)
        moved = [a[-1] - b[-1] for a, b in zip(learner.probe(probes).logprobs, before, strict=True)]
        assert sum(moved[:4]) > 0 > sum(moved[4:])
    with pytest.raises(ValueError, match="without a teacher"):
        learner.step(pack(answers(0), max_tokens=1000), learning_rate=1e-3, seed=0)


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
