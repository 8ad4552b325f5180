"""Routing replay: the learner sends tokens where the engine sent them, and its routers learn from it."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from trainer_samples import make_item, random_items, random_routing, with_experts

from actors.config import MasterConfig
from actors.engines.torch import TorchEngine
from actors.master.plan import rollout
from actors.rollout.session import Session
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.model.model import load_model
from infra.model.routers import Routers
from infra.observe.metrics import Metrics
from infra.settings.config import Floor, Pacing, Use
from infra.store.memory import MemoryStore
from schemas import Block, Experience, Message, Score, Span, Task, topics
from schemas.wire.block import split_blocks
from schemas.wire.routing import routing
from tests.actors.rig import EXPLORE, TopicArrivals, explorer, running, task, until
from tests.infra.tiny_families import build_family
from tests.role import role_of
from trainer.batch.batch import PackedBatch, TrainItem, pack
from trainer.batch.split import for_ranks, split
from trainer.batch.tree import recorded
from trainer.config import LaneConfig, LoraConfig, TrainerConfig
from trainer.journal.checkpoint import Position
from trainer.learners.forward import PackedModel
from trainer.learners.torch import TorchLearner
from trainer.loop.report import TrainerReport
from trainer.loop.state import Learning
from trainer.replay.replay import find_start, replay
from trainer.state import whole_hash
from trainer.train import run_trainer

LANES = {"usual": LaneConfig(loss="grpo", weight=0.9), "expert": LaneConfig(loss="sft", weight=0.1)}
UNPACKED = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
# Read under a dense mask, under one, in blocks of queries, and sequence by sequence.
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_5_moe_text")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory) -> str:
    sizes = {"head_dim": 8, **(UNPACKED if request.param == "qwen3_5_moe_text" else {})}
    if request.param == "gpt_oss":
        sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return str(build_family(tmp_path_factory.mktemp("model") / request.param, request.param, **sizes))


class ForcedRouter(torch.nn.Module):
    """A router as its family writes it, with the experts of each token said beforehand; shares no code with the learner."""

    def __init__(self, own: torch.nn.Module) -> None:
        super().__init__()
        self.own = own
        self.experts_Tk = torch.empty(0)

    def forward(self, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_TE = torch.nn.functional.linear(hidden_TD, self.own.weight, getattr(self.own, "bias", None))
        chosen_Tk = logits_TE.gather(1, self.experts_Tk)
        return logits_TE, torch.softmax(chosen_Tk, -1), self.experts_Tk


def forced(folder: str) -> tuple[torch.nn.Module, list[ForcedRouter]]:
    plain = load_model(folder)
    routers = []
    for module in list(plain.modules()):
        for name in ("gate", "router"):
            if type(getattr(module, name, None)).__name__.endswith("Router"):
                setattr(module, name, ForcedRouter(getattr(module, name)))
                routers.append(getattr(module, name))
    return plain, routers


def own_routing(folder: str, items: list[TrainItem]) -> list[np.ndarray]:
    """What the model's routers choose for each sequence alone, [num_tokens - 1, L, k]."""
    plain = load_model(folder)
    routers, found = Routers(plain), []
    for item in items:
        with torch.no_grad(), routers.recorded() as taken:
            plain(input_ids=ids_of(item)[:, :-1], use_cache=False)
        found.append(torch.stack(taken, 1).numpy())
    return found


def ids_of(item: TrainItem) -> torch.Tensor:
    return torch.from_numpy(item.experience.tokens.astype(np.int64))[None]


def usual(seed: int) -> list[TrainItem]:
    return [item for item in random_items(seed, groups=2, size=4) if item.item.lane == "usual"]


def learner(folder: str, routing: str, **settings) -> TorchLearner:
    return TorchLearner(folder, TrainerConfig(lanes=LANES, threads=1, routing=routing, **settings), device="cpu")


def saved(each: TorchLearner) -> dict[str, bytes]:
    return {name: bytes(value.data) for name, value in each.save().items()}


def packed(items: list[TrainItem], **settings) -> PackedBatch:
    return pack(items, **{"max_tokens": 100, "version": 5, "replay": True, **settings})


@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}], ids=["", "checkpointing"])
def test_replaying_the_learners_own_routing_changes_no_bit(model, settings):
    items = random_items(1, groups=2, size=4)
    routed = with_experts(items, own_routing(model, items))
    own, replaying = learner(model, "own", **settings), learner(model, "replay", **settings)
    first = own.step(packed(items, replay=False), learning_rate=1e-3, seed=0)
    second = replaying.step(packed(routed), learning_rate=1e-3, seed=0)
    assert saved(own) == saved(replaying) and first.loss == second.loss
    told = {name: value for name, value in second.values.items() if "routing" in name}
    assert told == {
        "usual/routing_replayed": 1.0, "usual/routing_without": 0.0, "usual/routing_differs": 0.0,
        "usual/routing_differs_layers": 0.0, "expert/routing_replayed": 0.0, "expert/routing_without": 3.0,
    }  # fmt: skip
    assert {name: value for name, value in second.values.items() if "routing" not in name} == first.values
    # And without anything recorded it is "own" too.
    own.step(packed(items, replay=False), learning_rate=1e-3, seed=1)
    replaying.step(packed(items), learning_rate=1e-3, seed=1)
    assert saved(own) == saved(replaying)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_logprobs_and_gradients_are_those_of_a_plain_forward_through_the_recorded_experts(model, checkpointing):
    items = usual(3)
    experts = random_routing(items)
    reader = PackedModel(model, dtype="float32", device="cpu", activation_checkpointing=checkpointing, replay=True)
    plain, routers = forced(model)
    assert len(routers) == 2
    for rows in packed(with_experts(items, experts)).microbatches:
        logprob_N = reader.logprobs(rows)
        assert (reader.rerouted(rows) > 0).mean() > 0.5, "the draw is another than the routers' own"
        (logprob_N.sum() / 100).backward()
        for s in set(rows.sequence_N.tolist()):
            expected = forced_logprobs(plain, routers, items[s], experts[s])
            (expected.sum() / 100).backward()
            assert (logprob_N[torch.from_numpy(rows.sequence_N == s)] - expected).abs().max() < 1e-5
    others = {name.replace(".own.", "."): value for name, value in plain.named_parameters()}
    for name, value in reader.module.named_parameters():
        other = others[name].grad
        assert (value.grad - other).abs().max() <= 1e-5 * max(1.0, float(other.abs().max())), name
    for name, value in reader.module.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            assert value.grad.abs().max() > 1e-4, name


def forced_logprobs(
    plain: torch.nn.Module, routers: list[ForcedRouter], item: TrainItem, experts_TLk: np.ndarray
) -> torch.Tensor:
    """Log-probabilities of the sampled tokens by a plain forward of the sequence, under their temperatures."""
    for layer, router in enumerate(routers):
        router.experts_Tk = torch.from_numpy(experts_TLk[:, layer])
    ids = ids_of(item)
    logits_TV = plain(input_ids=ids[:, :-1], use_cache=False).logits[0].float()
    found = []
    for span in item.experience.spans:
        at = torch.arange(span.start, span.stop)
        logprob_LV = torch.log_softmax(logits_TV[at - 1] / span.temperature, -1)
        found.append(logprob_LV.gather(1, ids[0, at][:, None])[:, 0])
    return torch.cat(found)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> str:
    return str(build_family(tmp_path_factory.mktemp("model") / "qwen", "qwen3_moe", head_dim=8))


def test_tokens_without_a_record_go_where_their_router_sends_them(qwen):
    items = usual(4)
    drawn = random_routing(items)
    known = [np.random.default_rng([9, *item.experience.tokens[:1].tolist()]).random(99) < 0.5 for item in items]
    mixed = [np.where(which[: len(d)][:, None, None], d, -1) for which, d in zip(known, drawn, strict=True)]
    reader = PackedModel(qwen, dtype="float32", device="cpu", replay=True)
    plain, routers = forced(qwen)
    replayed = 0
    for rows in packed(with_experts(items, mixed)).microbatches:
        logprob_N = reader.logprobs(rows).detach()
        replayed += int((reader.rerouted(rows) >= 0).sum())
        for s in set(rows.sequence_N.tolist()):
            expected = half_forced_logprobs(plain, routers, items[s], mixed[s])
            assert (logprob_N[torch.from_numpy(rows.sequence_N == s)] - expected).abs().max() < 1e-5
    at = [
        np.concatenate([np.arange(span.start - 1, span.stop - 1) for span in item.experience.spans]) for item in items
    ]
    assert replayed == sum(int(which[where].sum()) for which, where in zip(known, at, strict=True))


def half_forced_logprobs(plain, routers, item, experts_TLk) -> torch.Tensor:
    """Layer after layer: where nothing is recorded, the layer's own choice under what the layers before it were given."""
    asked = experts_TLk.copy()
    for layer, router in enumerate(routers):
        for at, other in enumerate(routers):
            other.experts_Tk = torch.from_numpy(np.where(asked[:, at] < 0, [0, 1], asked[:, at]))
        seen = []
        handle = router.register_forward_hook(lambda _, given, found, into=seen: into.append(found[0]))
        with torch.no_grad():
            plain(input_ids=ids_of(item)[:, :-1], use_cache=False)
        handle.remove()
        chosen = seen[0].topk(2, -1).indices.numpy()
        asked[:, layer] = np.where(asked[:, layer] < 0, chosen, asked[:, layer])
    with torch.no_grad():
        return forced_logprobs(plain, routers, item, asked)


@pytest.mark.parametrize("parts", [2, 3])
def test_rows_keep_their_experts_wherever_they_are_dealt(qwen, parts):
    items = usual(5)
    batch = packed(with_experts(items, random_routing(items)), max_tokens=40)
    reader = PackedModel(qwen, dtype="float32", device="cpu", replay=True)
    expected = by_sequence(reader, batch.microbatches)
    dealt = [rows for part in split(batch, parts, seed=0) for rows in part.microbatches]
    wide = packed(with_experts(items, random_routing(items)), max_tokens=90)
    ranked = [each for rank in for_ranks(wide, parts) for each in rank]
    for each in (dealt, ranked):
        found = by_sequence(reader, each)
        assert found.keys() == expected.keys()
        for s, values in found.items():
            assert values == pytest.approx(expected[s], abs=1e-5)


def by_sequence(reader, microbatches) -> dict[int, list[float]]:
    found = {}
    for rows in microbatches:
        with torch.no_grad():
            logprob_N = reader.logprobs(rows).numpy()
        for s in set(rows.sequence_N.tolist()):
            found[s] = logprob_N[rows.sequence_N == s].tolist()
    return found


def test_a_shared_prefix_has_the_routing_of_the_first_sequence_and_what_it_has_none_for_none():
    tokens = [[5, 6, 7, 8, 9], [5, 6, 7, 4, 3]]  # laid out in the order of their tokens: the second comes first
    items = [make_item(token, [Span(3, 5, 0)], episode=at) for at, token in enumerate(tokens)]
    first, second = np.full((4, 1, 1), 1), np.array([2, -1, 2, 2])[:, None, None]
    (rows,) = packed(with_experts(items, [first, second])).microbatches
    assert rows.tokens_BT.tolist() == [[5, 6, 7, 4, 8]]
    assert rows.experts_BTLk[0, :, 0, 0].tolist() == [2, -1, 2, 2, 1]


def test_what_was_recorded_of_another_model_is_counted_and_the_tokens_are_routed_anew(qwen):
    items = usual(6)
    expected = learner(qwen, "own").step(packed(items, replay=False), learning_rate=1e-3, seed=0)
    three_layers = random_routing(items, layers=3)
    out_of_range = [item + 4 for item in random_routing(items)]
    for experts in (three_layers, out_of_range):
        found = learner(qwen, "replay").step(packed(with_experts(items, experts)), learning_rate=1e-3, seed=0)
        assert found.values["usual/routing_without"] == len(items) and found.values["usual/routing_replayed"] == 0.0
        assert found.loss == expected.loss
    mixed = with_experts(items, random_routing(items)[:-1] + three_layers[-1:])
    assert [other is None for other in recorded([each.experience for each in mixed])] == [False] * (len(items) - 1) + [
        True
    ]


def test_the_reference_of_an_adapter_routes_by_itself(qwen):
    items = usual(8)
    lanes = {"usual": LaneConfig(loss="grpo", kl=0.1)}
    config = TrainerConfig(lanes=lanes, threads=1, routing="replay", lora=LoraConfig(rank=2, targets=("q_proj",)))
    found = []
    for experts in (own_routing(qwen, items), random_routing(items)):
        each = TorchLearner(qwen, config, device="cpu")
        stats = each.step(packed(with_experts(items, experts)), learning_rate=1e-3, seed=0)
        assert stats.values["usual/routing_replayed"] == 1.0
        found.append(stats.values["usual/kl_reference"])
    assert found[0] == 0.0 < found[1], "an untrained adapter is the base, which is routed otherwise"


FLOOR = Floor(app="t", pacing=Pacing(groups_per_step=2, max_staleness=9, straggler_s=0.01))
MASTER = MasterConfig(num_episodes=3, max_tokens=6)
CONFIG = TrainerConfig(
    lanes={"usual": LaneConfig(loss="grpo")}, learning_rate=1e-3, checkpoint_every=1, max_steps=2, tensorboard="",
    routing="replay",
)  # fmt: skip
GROUPS = 4


@pytest.fixture(scope="module")
def model_routing_on_the_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return build_family(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", head_dim=8)


async def two_turns(task: Task, session: Session) -> tuple[Score, ...]:
    reply = await session.reply(task.messages)
    await session.reply((*task.messages, reply, Message(role="user", content="?")))
    return ()


async def explored(
    log: Log, model_routing_on_the_log: Path, store: MemoryStore, max_routing_bytes: int
) -> list[Experience]:
    """What an explorer publishes of a few groups, the engine recording."""
    engine = TorchEngine(model=str(model_routing_on_the_log), seed=1, routing=True)
    config = replace(EXPLORE, workflows={"two": Use(use=f"{__name__}:two_turns")}, max_routing_bytes=max_routing_bytes)
    heard = TopicArrivals(log, topics.EXPERIENCES)
    async with running(explorer(log, store, engine, config), asyncio.create_task(heard.listen())):
        for number in range(GROUPS):
            each = task(f"add-{number}", workflow="two")
            await log.publish(topics.TASKS, rollout(each, MASTER, round=0, attempt=0, sequence=number, min_version=0))
        await until(lambda: sum(experience.last for experience in heard.experiences) == GROUPS * MASTER.num_episodes)
    return heard.experiences


async def run(
    model_routing_on_the_log: Path, *, max_routing_bytes: int = 10_000
) -> tuple[Log, MemoryStore, TorchLearner, Metrics]:
    """Explorer and trainer, one after the other; what lies between them is a group's reward."""
    store = MemoryStore()
    log = Log(MemoryBus(), "t", store=store)
    await log.create_topics(partitions=2, keep_ms=-1)
    groups: dict[str, list[Experience]] = {}
    for each in await explored(log, model_routing_on_the_log, store, max_routing_bytes):
        groups.setdefault(each.group, []).append(replace(each, reward=1.0, advantage=each.episode - 1.0))
    for members in sorted(groups.values(), key=lambda members: members[0].sequence):
        (block,) = split_blocks(sorted(members, key=lambda each: each.id))
        await log.publish(topics.BUFFER, block)
    learner, metrics = TorchLearner(str(model_routing_on_the_log), CONFIG, device="cpu"), Metrics("train")
    await run_trainer(role_of("train", FLOOR, log, store, metrics=metrics), CONFIG, learner, seed=3)
    return log, store, learner, metrics


async def test_what_the_engine_used_is_what_the_learner_uses_and_a_replay_gives_the_same_bits(
    model_routing_on_the_log: Path,
) -> None:
    log, store, learner, metrics = await run(model_routing_on_the_log)
    blocks = [message.value async for message in log.read_all(topics.BUFFER)]
    members = [experience for block in blocks if isinstance(block, Block) for experience in block.experiences]
    plain = load_model(str(model_routing_on_the_log))
    routers = Routers(plain)
    for each in members:
        with torch.no_grad(), routers.recorded() as taken:
            plain(input_ids=torch.tensor([each.tokens.tolist()]), use_cache=False)
        expected = torch.stack(taken, 1).numpy()
        assert (routing(each)[:-1] == expected[:-1]).all() and (routing(each)[-1] == -1).all()

    told = {name.removeprefix("usual/"): value for name, value in metrics.gauges().items() if name.startswith("usual/")}
    assert told["routing_replayed"] == 1.0 and told["routing_without"] == 0.0
    assert 0 <= told["routing_differs_layers"] <= told["routing_differs"] < 1

    other = TorchLearner(str(model_routing_on_the_log), CONFIG, device="cpu")
    report = TrainerReport(Metrics("replay"))
    learning = Learning(floor=FLOOR, config=CONFIG, learner=other, report=report, position=Position())
    start = await find_start(log, store, "t", from_step=-1, to_step=None)
    compared = [compared async for compared in replay(learning, "t", log, store, start)]
    assert compared and all(each.equal and not each.fault for each in compared)
    assert whole_hash(other.save()) == whole_hash(learner.save())
