"""The learner's step beside a plain padded one on transformers: the same model, batch, AdamW and tokens of a microbatch.

The two take turns in one run. Before anything is timed, losses and gradients of a first step must agree. Rates are of the
tokens that a step trains on and of the arithmetic that it needs, so that work which need not be done counts as none: see
`infra.model.flops`.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from infra.cli.bench.common.peak import peak_bytes, wait_for_card
from infra.cli.bench.learner.plain_step import PlainStep
from infra.model.flops import TokenCost, peak_tflops, token_cost
from infra.model.size import model_size
from infra.settings.config import Use
from schemas import BatchItem, Span, make_experience
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from trainer.batch.batch import TrainItem
    from trainer.config import TrainerConfig

VOCABULARY = 16_384
RATE = 1e-6
NEAR = {"float32": (1e-5, 1e-3), "bfloat16": (1e-2, 0.2)}  # how far losses, and gradients by their norm, may be apart
NOISE = 0.05  # nats between the policy that sampled and the one that is trained


class BatchShape(msgspec.Struct, frozen=True):
    """A batch.

    name: in the table. answers: how many. prompt, sampled: tokens of each. shared: all answer one prompt, else each its
    own.

    Example: BatchShape("16 answers of 256 to one prompt of 512", answers=16, prompt=512, sampled=256, shared=True)
    """

    name: str
    answers: int
    prompt: int
    sampled: int
    shared: bool


SHAPES = (
    BatchShape("16 answers of 256 to one prompt of 512", 16, 512, 256, True),
    BatchShape("8 lone answers of 256, prompts of 512", 8, 512, 256, False),
    BatchShape("one row of 4,096", 1, 512, 3584, False),
)


class LearnerBenchPlan(msgspec.Struct, frozen=True):
    """What is measured.

    model: a folder, "" for a random Qwen3. hidden, layers: of that one. dtype, peak: "" and 0 for what the device
    suggests; peak in TFLOP/s. max_tokens: of a microbatch. checkpointing: activations are computed again in the
    backward. repeat: steps timed of each.

    Example: LearnerBenchPlan(hidden=2048, layers=16, dtype="bfloat16")
    """

    model: str = ""
    hidden: int = 384
    layers: int = 7
    dtype: str = ""
    max_tokens: int = 16_384
    checkpointing: bool = False
    peak: float = 0.0
    repeat: int = 5


class Timed(msgspec.Struct, frozen=True):
    """Of the steps of one peer on one shape.

    cpu_s_min, cpu_s_median, wall_s_min, wall_s_median: of a step. tokens_per_s, tflops: by the median of wall time;
    tokens are sampled ones. mfu: None where the device's peak is not known. peak_mib: above weights and optimizer.
    """

    cpu_s_min: float
    cpu_s_median: float
    wall_s_min: float
    wall_s_median: float
    tokens_per_s: float
    tflops: float
    mfu: float | None
    peak_mib: float


class ShapeComparison(msgspec.Struct, frozen=True):
    """One shape.

    shape: its name. positions: of the batch as packed. loss_apart, gradient_apart: of the first step. headrace, plain:
    how long each took. faster: how many times headrace's step is as fast as the plain one: the median of each turn's
    ratio of CPU seconds on a CPU, of wall seconds on a GPU.
    """

    shape: str
    positions: int
    loss_apart: float
    gradient_apart: float
    headrace: Timed
    plain: Timed
    faster: float


class BenchMachine(msgspec.Struct, frozen=True):
    """Where it ran. device: its name. parameters_m: millions of the model. dtype: of its weights. peak_tflops: of the
    device, 0 where not known.
    """

    device: str
    parameters_m: float
    dtype: str
    peak_tflops: float


def run(
    plan: LearnerBenchPlan, say: Callable[[str], object] = print, shapes: Sequence[BatchShape] = SHAPES
) -> tuple[BenchMachine, list[ShapeComparison]]:
    """Where it ran, and each shape. Raises RuntimeError if the two differ, ConfigError for a folder without a model."""
    import torch

    gpu = torch.cuda.is_available()
    card = torch.cuda.get_device_name() if gpu else "cpu"
    plan = msgspec.structs.replace(plan, dtype=plan.dtype or ("bfloat16" if gpu else "float32"))
    if plan.dtype not in NEAR:
        raise ConfigError(f"--dtype: got {plan.dtype!r}, expected {' or '.join(NEAR)}")
    peak = plan.peak or (peak_tflops(card) if plan.dtype == "bfloat16" else 0.0)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-learner-") as folder:
        model = plan.model or _random_model(Path(folder) / "model", plan)
        cost, size = token_cost(model), model_size(model)
        found = []
        for shape in shapes:
            say(shape.name)
            found.append(Peers(model, plan, device="cuda" if gpu else "cpu").compared(shape, cost, peak))
    return BenchMachine(card, size.trained / 1e6, plan.dtype, peak), found


class Peers:
    """A learner and a plain step, on weights of their own."""

    def __init__(self, model: str, plan: LearnerBenchPlan, *, device: str) -> None:
        from trainer.learners.torch import TorchLearner

        self._plan = plan
        self._device = device
        self._config = _config(plan)
        self._learner: TorchLearner = TorchLearner(model, self._config, device=device)
        self._plain = PlainStep(model, self._config, device=device)

    def compared(self, shape: BatchShape, cost: TokenCost, peak: float) -> ShapeComparison:
        """Both on one shape."""
        from trainer.batch.batch import pack

        items = self._items(shape)
        (whole,) = pack(items, max_tokens=10**9).microbatches
        pairs = int((whole.positions_BT + 1).sum())
        needed = cost.step(whole.tokens_BT.size, pairs, len(whole.target_N))
        steps: tuple[Callable[[], object], ...] = (lambda: self._ours(items), lambda: self._plain.step(items, RATE))
        loss, gradient = self._agree(items)
        taken = [[_seconds(step, self._device) for step in steps] for _ in range(self._plan.repeat)]
        peaks = [peak_bytes(step, self._device) for step in steps]
        timed = [
            _timed([turn[peer] for turn in taken], len(whole.target_N), needed, peak, peaks[peer]) for peer in (0, 1)
        ]
        clock = 0 if self._device == "cpu" else 1
        faster = statistics.median(plain[clock] / ours[clock] for ours, plain in taken)
        return ShapeComparison(shape.name, whole.tokens_BT.size, loss, gradient, timed[0], timed[1], faster)

    def _ours(self, items: Sequence["TrainItem"]) -> float:
        """Packed, forward, backward and update, as the trainer does it."""
        from trainer.batch.batch import pack

        batch = pack(items, max_tokens=self._config.max_tokens_per_microbatch)
        return self._learner.step(batch, learning_rate=RATE, seed=0).loss

    def _agree(self, items: Sequence["TrainItem"]) -> tuple[float, float]:
        """How far losses and gradients of a first step are apart. Raises RuntimeError where it is too far."""
        from infra.policies.tensors import to_torch

        mine, other = self._ours(items), self._plain.step(items, RATE)
        state = self._learner.save()
        square = apart = 0.0
        for name, value in self._plain.first_moments().items():
            expected = value.float().cpu()
            square += float(expected.square().sum())
            apart += float((to_torch(state[f"adam/exp_avg/{name}"]) - expected).square().sum())
        return require_near(abs(mine - other), (apart / square) ** 0.5, self._plan.dtype)

    def _items(self, shape: BatchShape) -> list["TrainItem"]:
        """Random answers, as if sampled by a policy near this one."""
        random = np.random.default_rng(shape.answers)
        size = self._plain.module.config.get_text_config().vocab_size
        prompts = [random.integers(3, size, shape.prompt).tolist() for _ in range(1 if shape.shared else shape.answers)]
        tokens = [
            [*prompts[index % len(prompts)], *random.integers(3, size, shape.sampled).tolist()]
            for index in range(shape.answers)
        ]
        advantages = random.normal(size=shape.answers)
        blank = [_item(shape, index, one, advantages[index]) for index, one in enumerate(tokens)]
        logprobs = self._plain.logprobs(blank)
        return [
            _item(shape, index, one, advantages[index], logprobs[index] + random.normal(0, NOISE, shape.sampled))
            for index, one in enumerate(tokens)
        ]


def require_near(loss: float, gradient: float, dtype: str) -> tuple[float, float]:
    """Both as they are. Raises RuntimeError where the two steps are not the same work."""
    near = NEAR[dtype]
    if not (loss <= near[0] and gradient <= near[1]):
        raise RuntimeError(
            f"the steps differ: loss by {loss:.3g}, gradient by {gradient:.3g}, expected at most {near[0]:g} and {near[1]:g}"
        )
    return loss, gradient


def _item(
    shape: BatchShape, index: int, tokens: Sequence[int], advantage: float, logprobs: np.ndarray | None = None
) -> "TrainItem":
    from trainer.batch.batch import TrainItem

    group = f"bench-{0 if shape.shared else index}.0"
    experience = make_experience(
        id=f"{group}.0-{index}-0",
        group=group,
        episode=index,
        group_size=shape.answers,
        tokens=tokens,
        logprobs=np.zeros(shape.sampled) if logprobs is None else np.minimum(logprobs, 0.0),
        messages=(),
        spans=(Span(shape.prompt, shape.prompt + shape.sampled, 0),),
    )
    item = BatchItem(id=experience.id, partition=0, offset=0, index=index, lane="usual", advantage=float(advantage))
    return TrainItem(experience, item)


def _config(plan: LearnerBenchPlan) -> "TrainerConfig":
    from trainer.config import LaneConfig, TrainerConfig

    return TrainerConfig(
        lanes={"usual": LaneConfig(loss="grpo")},
        dtype=plan.dtype,  # type: ignore[arg-type]
        max_tokens_per_microbatch=plan.max_tokens,
        activation_checkpointing=plan.checkpointing,
        learner=Use(use="trainer.learners.torch:TorchLearner"),
    )


def _seconds(step: Callable[[], object], device: str) -> tuple[float, float]:
    """Of the CPU and of the clock."""
    wait_for_card(device)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    step()
    wait_for_card(device)
    return time.process_time() - cpu_s, time.perf_counter() - wall_s


def _timed(
    seconds: Sequence[tuple[float, float]], sampled: int, needed: float, peak: float, peak_of_step: int
) -> Timed:
    cpu_s, wall_s = zip(*seconds, strict=True)
    median_s = statistics.median(wall_s)
    tflops = needed / median_s / 1e12
    return Timed(
        cpu_s_min=min(cpu_s),
        cpu_s_median=statistics.median(cpu_s),
        wall_s_min=min(wall_s),
        wall_s_median=median_s,
        tokens_per_s=sampled / median_s,
        tflops=tflops,
        mfu=tflops / peak if peak else None,
        peak_mib=peak_of_step / 2**20,
    )


def _random_model(folder: Path, plan: LearnerBenchPlan) -> str:
    """A Qwen3 of 26 million parameters at the usual size."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from infra.model.model import no_progress_bars

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=plan.hidden,
        intermediate_size=3 * plan.hidden,
        num_hidden_layers=plan.layers,
        num_attention_heads=max(4, plan.hidden // 128),
        num_key_value_heads=4,
        head_dim=min(128, plan.hidden // 4),
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(), no_progress_bars():
        torch.manual_seed(7)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)
