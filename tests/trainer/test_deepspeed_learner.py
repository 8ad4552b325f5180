"""ZeRO on several ranks is the same learner as one process."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from trainer_samples import CRITIC, random_items, rewarded, tiny_model

from infra.cli.demo.char_model import Size, build_char_model
from infra.policies.tensors import to_numpy
from infra.store.directory import DirectoryStore
from schemas.errors import ConfigError
from tests.infra.tiny_families import build_family
from trainer.batch.batch import pack
from trainer.buffer.buffer import Uses
from trainer.config import LaneConfig, TrainerConfig
from trainer.journal.checkpoint import Checkpoint, Position, load_newest, save
from trainer.learners.engines import engine_settings
from trainer.learners.ranks import RankGroup, run_ranks
from trainer.learners.shards import Shards, Source
from trainer.learners.torch import TorchLearner
from trainer.state import whole_hash

HERE = Path(__file__).parent


def environment() -> dict[str, str]:
    return os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
    }


@pytest.fixture(scope="module")
def ranks() -> Iterator["subprocess.Popen[str]"]:
    """A process that has DeepSpeed imported and forks ranks; see deepspeed_ranks.py."""
    pytest.importorskip("deepspeed")
    with subprocess.Popen(
        [sys.executable, str(HERE / "deepspeed_ranks.py"), "serve"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        yield child


@pytest.fixture
def agree(ranks, model, tmp_path) -> Callable[..., None]:
    """Check on so many ranks, and say what they said where it failed."""

    def check(stage: int, *what: str, num_ranks: int = 2, folder: str = model) -> None:
        said = tmp_path / f"said-{stage}-{num_ranks}"
        ranks.stdin.write(json.dumps([str(said), num_ranks, folder, stage, *what]) + "\n")
        ranks.stdin.flush()
        failed = ranks.stdout.readline().strip()
        text = said.read_text(errors="replace")
        assert failed == "0" and f"stage {stage} agrees" in text, text[-4000:]

    return check


@pytest.mark.parametrize(
    "stage",
    [pytest.param(3, marks=pytest.mark.slow), *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1, 2))],
)
def test_two_ranks_of_zero_take_the_steps_of_one_process(agree, stage):
    agree(stage, "steps")


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_publish_experts_under_the_names_that_one_process_gives_them(agree, tmp_path, stage):
    agree(stage, "steps", folder=str(build_family(tmp_path / "experts", "qwen3_moe")))


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "dtype"), [("gemma2", ""), ("llava", ""), ("tied", " bfloat16"), ("gpt-oss", " bfloat16")]
)
def test_a_model_that_begins_in_shards_is_the_one_that_one_process_opens(agree, tmp_path, family, dtype):
    kind, settings = ("qwen3", {"tie_word_embeddings": True}) if family == "tied" else (family, {})
    agree(3, f"opens{dtype}", folder=tiny_model(tmp_path, kind, **settings))


@pytest.mark.full
def test_no_rank_keeps_what_a_probe_gathered(agree, tmp_path):
    agree(3, "probed", folder=str(build_char_model(tmp_path / "wide", seed=1, size=Size(hidden=512, layers=2))))


@pytest.mark.full
@pytest.mark.parametrize("family", ["cohere", "qwen3.5", "damaged"])
def test_a_model_that_cannot_be_opened_is_refused_by_every_rank(agree, tmp_path, family):
    folder = tiny_model(tmp_path, "qwen3" if family == "damaged" else family)
    if family == "damaged":
        (Path(folder) / "model.safetensors").write_bytes(b"not safetensors")
    agree(3, "refusal", folder=folder)


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "what"), [(0, "lora"), (2, "lora bfloat16"), (2, "lora reference"), (3, "lora reference")]
)
def test_ranks_train_an_adapter_alone_as_one_process_does(agree, stage, what):
    agree(stage, what)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 3])
def test_losses_and_gradients_of_very_unequal_lengths_are_those_of_one_rank(agree, stage):
    agree(stage, "unequal")


@pytest.mark.full
def test_ranks_that_torchrun_starts_agree_as_well_and_compile_nothing(model, tmp_path):
    pytest.importorskip("deepspeed")
    own = environment() | {"TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": "no-compiler"}
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    command = [*launcher, str(HERE / "deepspeed_ranks.py"), model, "2", "unequal"]
    run = subprocess.run(command, env=own, capture_output=True, text=True, timeout=400, check=False)
    assert run.returncode == 0 and "stage 2 agrees" in run.stdout, run.stderr[-4000:]
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "stage"), [("proximal", 2), ("bound", 3), ("reference", 3), ("penalty", 3), ("bfloat16", 2)]
)
def test_what_losses_want_comes_out_as_in_one_process(agree, what, stage):
    agree(stage, what)


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "offload", "num_ranks"), [(2, [], 1), (2, ["offload"], 2), (3, [], 2), (3, ["offload"], 2)]
)
def test_gradients_of_many_microbatches_in_bfloat16_are_summed_in_float32(agree, stage, offload, num_ranks):
    agree(stage, "sums", *offload, num_ranks=num_ranks)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "num_ranks"), [(0, 2), (2, 1), (2, 2), (3, 2)])
def test_a_critic_of_ranks_is_that_of_one_process(agree, stage, num_ranks):
    agree(stage, "critic", num_ranks=num_ranks)


GROUPS = ((3, 3), (2, 2), (1, 2), (0, 3), (2, 3), (3, 2), (1, 1))  # stage, ranks


@pytest.mark.full
@pytest.mark.parametrize(("what", "groups"), [("shards", GROUPS), ("shards critic", ((3, 2), (2, 1), (0, 3), (3, 1)))])
def test_any_number_of_ranks_and_any_stage_restores_what_any_other_wrote(agree, model, tmp_path, what, groups):
    """Each group reads the state of the one before with an equal hash, steps, and writes its own pieces for the next."""
    lanes = {"usual": LaneConfig(loss="grpo", kl=0.1), "expert": LaneConfig(loss="sft", weight=0.1)}
    is_critic = what == "shards critic"
    config, items = (CRITIC, rewarded) if is_critic else (TrainerConfig(lanes=lanes, threads=1), random_items)
    alone = TorchLearner(model, config, device="cpu")
    alone.step(pack(items(0), max_tokens=40, version=5), learning_rate=1e-4, seed=0)
    store = DirectoryStore(tmp_path / "store")
    save(store, "r", Checkpoint(Position(step=0), alone.save(), Uses(), ()))
    for stage, num_ranks in groups:
        agree(stage, what, str(tmp_path / "store"), num_ranks=num_ranks)
    for step in range(1, len(groups) + 1):
        alone.step(pack(items(step), max_tokens=40, version=5), learning_rate=1e-4, seed=step)
    found = load_newest(store, "r")
    assert found is not None and found.position.step == len(groups)
    other = TorchLearner(model, config, device="cpu")
    other.restore(found.learner)
    assert whole_hash(other.save()) == whole_hash(found.learner)
    mine, theirs = alone.save(), other.save()
    assert max(np.abs(to_numpy(mine[name]) - to_numpy(theirs[name])).max() for name in mine) < 2e-4


def test_a_weight_that_never_had_a_gradient_is_restored_without_moments():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    named = [(name, torch.nn.Parameter(torch.ones(1))) for name in ("text", "tower")]
    optimizer = torch.optim.AdamW([value for _, value in named])
    shards = Shards(None, SimpleNamespace(optimizer=optimizer), named, [], stage=0)
    dist.destroy_process_group()
    for state in optimizer.state.values():
        state["exp_avg"].fill_(9.0)
    saved = ["model/text", "model/tower", *(f"adam/{key}/text" for key in ("exp_avg", "exp_avg_sq", "step"))]
    assert set(shards.layout(saved)) == set(saved)
    shards.load(saved, lambda name: Source(lambda start, stop: memoryview(np.float32([3.0])).cast("B"), "F32"))
    assert [state["exp_avg"].item() for state in optimizer.state.values()] == [3.0, 0.0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "stage"),
    [*(("refused", stage) for stage in range(4)), *(("refused minibatch", stage) for stage in (0, 2, 3))],
)
def test_a_gradient_above_the_limit_changes_nothing_on_any_rank(agree, what, stage):
    agree(stage, what)
    if what == "refused" and stage > 1:
        agree(stage, what, "offload")


@pytest.mark.full
def test_idle_ranks_outlive_a_silence_longer_than_their_timeout(agree):
    agree(2, "silence")


@pytest.mark.full
def test_a_group_whose_rank_hangs_ends_and_the_next_group_goes_on(model, tmp_path):
    pytest.importorskip("deepspeed")
    argv = (sys.executable, str(HERE / "deepspeed_ranks.py"), model, "2", "hang", str(tmp_path))
    group = RankGroup(argv=argv, num_ranks=2, log=tmp_path, env=environment(), stop_s=5.0)
    first, code = (asyncio.run(run_ranks(group, asyncio.Event())) for _ in range(2))
    said = (tmp_path / "train-rank-0.log").read_text(errors="replace")
    assert first and code == 0 and (tmp_path / "hung").exists(), said[-4000:]
    assert "ranks do not answer" in said and "stage 2 agrees" in said
    assert "the answer of all ranks to a heartbeat did not end within 4 s" in said


def test_a_stage_that_does_not_go_with_the_settings_is_refused():
    for stage, offload, dtype, message in (
        (4, False, "float32", "stage: got 4"),
        (0, True, "float32", "stage: got 0 with offload"),
        (0, False, "bfloat16", "stage: got 0 with bfloat16"),
        (1, False, "bfloat16", "stage: got 1 with bfloat16, expected 2 or 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine_settings(TrainerConfig(dtype=dtype), stage, offload)
