"""What proves a load in bfloat16: honest versions pass, and an engine that holds or computes something else is refused."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.engines.checks import ProbeGate
from actors.engines.torch import TorchEngine
from infra.policies.policy import Policy, Probe
from schemas.errors import PolicyRefused
from tests.actors.engines.honest_reloads import as_engine, as_trainer, build, planted, probes, reload
from tests.contracts.test_learner import batch, opened
from tests.contracts.weight_bugs import BUGS, exhibits
from tests.infra.tiny_families import build_family

pytestmark = pytest.mark.slow  # importing transformers alone takes seconds
EXPERTS = "model.layers.1.mlp.experts.down_proj"
TEXT = (1, *range(20, 60))
MATRIX = "model.layers.1.self_attn.o_proj.weight"


def swapped(experts: torch.Tensor) -> torch.Tensor:
    return experts[[1, 0, *range(2, len(experts))]].clone()


def test_honest_versions_are_not_refused_under_varied_batch_shapes() -> None:
    seen, refused, floor, _ = reload(build(3, 64), 8, random.Random(0))
    assert refused == [] and floor is not None
    assert max(item.largest for item in seen) > 0.02, "the two readings are not the same arithmetic"


def test_logprobs_alone_tell_a_stale_layer_and_two_swapped_experts() -> None:
    rng = random.Random(0)
    model, other = build(2, 64, experts=8), build(2, 64, experts=8, seed=1)
    _, refused, floor, pool = reload(model, 5, rng)
    assert refused == []
    gate, sequences = ProbeGate("bfloat16"), probes(pool, rng)
    gate._floor = floor
    probe = Probe(tuple(map(tuple, sequences)), tuple(map(tuple, as_trainer(model, sequences))))
    policy = Policy(version=7, tensors={}, probe=probe)
    gate.check(policy, as_engine(model, sequences, rng))
    at, stale = (item.model.layers[1].mlp.experts.down_proj for item in (model, other))
    for fault in (swapped(at), stale.detach()):
        with planted(at, fault):
            scores = as_engine(model, sequences, rng)
        with pytest.raises(PolicyRefused, match="does not compute what the trainer published"):
            gate.check(policy, scores)


@pytest.mark.parametrize(
    ("name", "fault"),
    [(MATRIX, lambda value: value * 1.01), (EXPERTS, swapped), (MATRIX, lambda value: value.roll(1))],
    ids=["a matrix x 1.01", "two swapped experts", "a stale layer"],
)
async def test_an_engine_that_holds_anything_else_after_a_load_is_refused_and_goes_on_with_what_it_served(
    tmp_path: Path, name: str, fault: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    folder = str(build_family(tmp_path / "model", "qwen3_moe"))
    learner = opened(folder, dtype="bfloat16")

    def version(number: int) -> Policy:
        probe = learner.probe(((1, *range(20, 40)), (1, *range(60, 30, -3))))
        return Policy(version=number, tensors=learner.tensors(), probe=probe)

    engine = TorchEngine(model=folder, dtype="bfloat16")
    await engine.start()
    try:
        await engine.load(version(1))
        before = await engine.score_tokens(TEXT)
        live = dict(engine._model.named_parameters())[name]
        with torch.no_grad():
            live.copy_(fault(live))
        assert await engine.score_tokens(TEXT) != before
        with pytest.raises(PolicyRefused, match="policy 2: after the load the engine holds other values"):
            await engine.load(version(2))  # the same weights, so that nothing of them is written again
        assert engine.version == 1 and await engine.score_tokens(TEXT) == before
        learner.step(batch(0), learning_rate=1e-4, seed=0)
        report = await engine.load(version(3))
        assert engine.version == 3 and report.probe_abs_max < 0.5
    finally:
        await engine.close()


@pytest.mark.parametrize(
    "room", [pytest.param(room, marks=pytest.mark.full if room != "torch" else ()) for room in BUGS]
)
def test_each_public_weight_sync_bug_is_refused_by_its_keeper_and_costs_no_request(tmp_path: Path, room: str) -> None:
    for shown in exhibits(room, tmp_path / "model"):
        assert (shown.keeper, shown.lost) == (shown.bug.keeper, 0), f"{shown.bug.name}: {shown.said}"
        assert shown.apart is None or shown.apart > 0.01, f"{shown.bug.name} does no harm: what does it show?"
